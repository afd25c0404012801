"""Products with a model's weights.

A few columns are multiplied straight from the quantized bytes where that is served (thin_products.py). Many go through
float32 copies within a byte budget: least recently used out first, a set beyond the budget in row blocks.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from frink_numba import settings
from frink_numba.errors import ShapeError
from frink_numba.host.dequantize import dequantize
from frink_numba.host.memory import machine_memory
from frink_numba.host.thin_products import FEW, Matrices, ThinSet, thin_set
from frink_numba.quant import QuantMatrix

_BLOCK_BYTES = 16 << 20  # float32 bytes of one row block of a set that is not kept


@dataclass(slots=True)
class _Kept:
    """Stacked weights [sum of rows, cols], and when they were last used."""

    weights: np.ndarray
    last_use: int


class WeightStore:
    """Dequantizes matrices on first use and keeps them while the budget lasts; thread-safe.

    Several matrices of equal cols are stacked row under row (a fused set), so that one product serves them all. A
    matrix is in memory once: asked for alone, it is a slice of the set that holds it. Matrices are told apart by
    identity, and the store holds a reference to those it keeps: `close` it before the file under them is unmapped.
    """

    def __init__(self, budget_bytes: int | None = None, *, invariant: bool | None = None) -> None:
        """`budget_bytes` None: FRINK_HOST_WEIGHTS, else half of the machine's memory.

        `invariant` None: FRINK_INVARIANT; those who compute with the store then give it blocks of `aligned.WIDTH`
        columns only, for which every product of a set goes one way.
        """
        self.invariant: bool = settings.get("FRINK_INVARIANT") if invariant is None else invariant
        if budget_bytes is None:
            budget_bytes = settings.get("FRINK_HOST_WEIGHTS")
        self.budget_bytes = machine_memory() // 2 if budget_bytes is None else budget_bytes
        self._lock = threading.Lock()
        self._sets: dict[Matrices, _Kept] = {}
        self._homes: dict[QuantMatrix, Matrices] = {}  # the set that holds a matrix
        self._thin: dict[Matrices, ThinSet | None] = {}  # None: a set that is not for thin products
        self._used = 0
        self._clock = 0

    @property
    def used_bytes(self) -> int:
        """Bytes of float32 weights kept now, at most `budget_bytes`."""
        return self._used

    def get(self, *matrices: QuantMatrix) -> np.ndarray:
        """float32 [sum of rows, cols], not to be written to.

        A set beyond the whole budget is made anew at each call and not kept: `product` and `matmul` avoid it.
        """
        kept = self._find(matrices)
        return kept if kept is not None else _dequantize_set(matrices)

    def product(self, x: np.ndarray, *matrices: QuantMatrix, out: np.ndarray) -> np.ndarray:
        """out = W x for columns `x` [cols, n], `out` [sum of rows, n], both C-contiguous float32."""
        if x.shape[-1] <= FEW:
            thin = self._thin_set(matrices)
            if thin is not None:
                return thin.product(x, out)
        kept = self._sets.get(matrices)
        if kept is not None:  # as in `_find`, without the call
            self._clock = kept.last_use = self._clock + 1
            return np.dot(kept.weights, x, out)
        weights = self._find(matrices)
        if weights is not None:
            return np.dot(weights, x, out)
        for first, weights in _row_blocks(matrices):
            np.dot(weights, x, out=out[first : first + weights.shape[0]])
        return out

    def matmul(self, x: np.ndarray, *matrices: QuantMatrix, out: np.ndarray | None = None) -> np.ndarray:
        """out = x W^T for rows `x` float32 [n, cols]: float32 [n, sum of rows]."""
        rows = _stacked_rows(matrices)
        if x.ndim != 2 or x.shape[1] != matrices[0].cols:
            raise ShapeError(f"rows of {list(x.shape)} do not fit weights of {rows} x {matrices[0].cols}")
        if out is None:
            out = np.empty((x.shape[0], rows), np.float32)
        if x.shape[0] == 1:
            self.product(np.ascontiguousarray(x[0])[:, None], *matrices, out=out[0, :, None])
            return out
        if x.shape[0] <= FEW and (thin := self._thin_set(matrices)) is not None:
            thin.product(x.T, out.T)
            return out
        kept = self._find(matrices)
        if kept is not None:
            return np.matmul(x, kept.T, out=out)
        for first, weights in _row_blocks(matrices):
            np.matmul(x, weights.T, out=out[:, first : first + weights.shape[0]])
        return out

    def close(self) -> None:
        """Let go of all weights; the store can be used again and starts empty."""
        with self._lock:
            self._sets.clear()
            self._homes.clear()
            self._thin.clear()
            self._used = 0

    def _thin_set(self, matrices: Matrices) -> ThinSet | None:
        try:
            return self._thin[matrices]
        except KeyError:
            with self._lock:
                return self._thin.setdefault(matrices, thin_set(matrices))

    def _find(self, matrices: Matrices) -> np.ndarray | None:
        """The stacked weights, made if they are not kept yet; None when they exceed the whole budget."""
        kept = self._sets.get(matrices)
        if kept is not None:
            # Without the lock, since every product comes by here: a stamp lost to another thread is but a stale order.
            self._clock = kept.last_use = self._clock + 1
            return kept.weights
        with self._lock:
            if matrices in self._sets:  # by another thread, meanwhile
                return self._sets[matrices].weights
            need = 4 * _stacked_rows(matrices) * matrices[0].cols
            found = self._part_of_a_set(matrices)
            if found is None:
                found = _plain(matrices)
            if found is None and need <= self.budget_bytes:
                found = self._keep(matrices, need)
            return found

    def _keep(self, matrices: Matrices, need: int) -> np.ndarray:
        for matrix in matrices:  # never twice in memory
            if matrix in self._homes:
                self._drop(self._homes[matrix])
        while self._used + need > self.budget_bytes:
            self._drop(min(self._sets, key=lambda matrices: self._sets[matrices].last_use))
        stacked = _dequantize_set(matrices)
        stacked.flags.writeable = False
        self._clock += 1
        self._sets[matrices] = _Kept(stacked, self._clock)
        self._homes.update(dict.fromkeys(matrices, matrices))
        self._used += need
        return stacked

    def _part_of_a_set(self, matrices: Matrices) -> np.ndarray | None:
        home = self._homes.get(matrices[0])
        if home is None:
            return None
        at = home.index(matrices[0])
        if home[at : at + len(matrices)] != matrices:
            return None
        kept = self._sets[home]
        self._clock = kept.last_use = self._clock + 1
        first = sum(matrix.rows for matrix in home[:at])
        return kept.weights[first : first + sum(matrix.rows for matrix in matrices)]

    def _drop(self, matrices: Matrices) -> None:
        self._used -= self._sets.pop(matrices).weights.nbytes
        for matrix in matrices:
            self._homes.pop(matrix, None)


def _stacked_rows(matrices: Matrices) -> int:
    """Rows of the stack; ShapeError when the matrices do not stack."""
    if not matrices:
        raise ShapeError("no weights were named")
    if any(matrix.cols != matrices[0].cols for matrix in matrices):
        shapes = ", ".join(f"{matrix.rows} x {matrix.cols}" for matrix in matrices)
        raise ShapeError(f"matrices of different widths cannot be stacked: {shapes}")
    return sum(matrix.rows for matrix in matrices)


def _plain(matrices: Matrices) -> np.ndarray | None:
    """A lone F32 matrix, as a view of its own bytes: it costs no memory."""
    if len(matrices) == 1 and matrices[0].kind.name == "F32":
        view = matrices[0].data.view(np.float32)
        if view.flags.aligned:
            return view
    return None


def _dequantize_set(matrices: Matrices) -> np.ndarray:
    stacked = np.empty((_stacked_rows(matrices), matrices[0].cols), np.float32)
    first = 0
    for matrix in matrices:
        dequantize(matrix, out=stacked[first : first + matrix.rows])
        first += matrix.rows
    return stacked


def _row_blocks(matrices: Matrices) -> Iterator[tuple[int, np.ndarray]]:
    """(first row, weights [some rows, cols]) of a stacked set, in one buffer that the next block overwrites."""
    cols = matrices[0].cols
    step = max(1, min(_BLOCK_BYTES // (4 * cols), _stacked_rows(matrices)))
    buffer = np.empty((step, cols), np.float32)
    first = 0
    for matrix in matrices:
        for start in range(0, matrix.rows, step):
            stop = min(start + step, matrix.rows)
            yield first + start, dequantize(matrix, start, stop, out=buffer[: stop - start])
        first += matrix.rows
