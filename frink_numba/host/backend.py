"""The `host` backend: every layer, on any machine, in NumPy (design, section 1)."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from frink_numba.backend import Decline, LayerCache, Run, Serve, Step
from frink_numba.errors import ShapeError
from frink_numba.host.aligned import WIDTH, aligned, padded
from frink_numba.host.body import attention, feed_forward
from frink_numba.host.classify import decline_reason
from frink_numba.host.group import MOST_ROWS, pieces, run_group
from frink_numba.host.layer_kv import LayerKV
from frink_numba.host.prepare import PreparedLayer, prepare
from frink_numba.host.rope import RopeTable, rope_table
from frink_numba.host.scratch import Scratch
from frink_numba.host.thin_products import FEW
from frink_numba.host.weights import WeightStore
from frink_numba.host.workspace import workspace
from frink_numba.layer import Layer

_FLOAT32 = np.dtype(np.float32)
_SERVE = Serve()
# How far logits may be from those of steps of other sizes, to their norm: more than ten times what is measured.
ROUNDING = 1e-6
_BLOCK = 512  # tokens that go through a layer at once: bounds the work arrays, whatever the batch
_SCRATCH_BYTES = 256 << 20  # larger work arrays are not kept between runs


class HostBackend:
    """Serves runs of layers; several threads may run at once, each on caches of its own."""

    name = "host"

    def __init__(self, layers: Sequence[Layer], store: WeightStore | None = None) -> None:
        """`store` keeps the float32 weights and stays its owner's to close; without one the backend makes its own."""
        self._owns_store = store is None
        self._store = WeightStore() if store is None else store
        self._declines = [decline_reason(layer) for layer in layers]
        ids: dict[Hashable, int] = {}
        self._layers = [
            None if reason else prepare(layer, number, ids)
            for number, (layer, reason) in enumerate(zip(layers, self._declines, strict=True))
        ]
        self._idle: list[Scratch] = []
        self._lock = threading.Lock()

    @property
    def invariant(self) -> bool:
        """Whether a token's results, to the bit, do not depend on its step (FRINK_INVARIANT)."""
        return self._store.invariant

    def few_rows(self, step: Step) -> tuple[int, float]:
        """See `Backend`: as many as products take at a time, float32 sums in other orders than those of one row.

        Rows of a float16 cache may then be another float16 number, whose distance no such bound covers.
        """
        if self.invariant:
            return WIDTH - step.start_pos % WIDTH, 0.0
        halves = any(cache.prefix()[0].dtype != np.float32 for cache in step.caches[:1])
        return (1, 0.0) if halves else (FEW, ROUNDING)

    def can_serve(self, l: int, step: Step) -> Serve | Decline:  # noqa: E741
        """Serve, or the reason that the layer, the batch or its cache gives."""
        reason = self._reason(l, step)
        return _SERVE if reason is None else Decline(reason)

    def run(self, l: int, length: int, step: Step) -> Run:  # noqa: E741
        """Run layers l .. l+length-1.

        The K/V rows lie behind the last row of a `LayerKV` of float32 and are overwritten by the next run on it: push
        or copy them before. CacheError, ShapeError and MemoryError leave the step and the counts of its caches as they
        were.
        """
        layers = self._checked(l, length, step)
        scratch = self._take_scratch()
        try:
            # Infinities and NaNs travel to the output, where they show; exp(-x) may overflow on its way to 1/(1+inf).
            with np.errstate(over="ignore", invalid="ignore", divide="ignore", under="ignore"):
                return _run(layers, l, step, self._store, scratch)
        finally:
            self._give_scratch(scratch)

    def serves_group(self, steps: Sequence[Step]) -> Serve | None:
        """Serve when all layers are dense and can run all steps, whose products then share each weight."""
        if self.invariant or sum(step.batch for step in steps) > MOST_ROWS or len(steps) < 2:
            return None
        if any(layer is None or layer.mixture is not None for layer in self._layers):
            return None
        for step in steps:
            if step.keep and not isinstance(step.caches[0], LayerKV):
                return None
            if any(self._reason(l, step) is not None for l in range(len(self._layers))):  # noqa: E741
                return None
        return _SERVE

    def run_group(self, steps: Sequence[Step]) -> list[Run]:
        """Run all layers of steps that `serves_group` serves; rows and errors as in `run`."""
        scratch = self._take_scratch()
        try:
            with np.errstate(over="ignore", invalid="ignore", divide="ignore", under="ignore"):
                layers = [layer for layer in self._layers if layer is not None]
                return [run for part in pieces(steps) for run in run_group(layers, part, self._store, scratch)]
        finally:
            self._give_scratch(scratch)

    def close(self) -> None:
        """Let go of work arrays, and of the weights when the store is the backend's own."""
        with self._lock:
            self._idle.clear()
        if self._owns_store:
            self._store.close()

    def _reason(self, l: int, step: Step) -> str | None:  # noqa: E741
        layer = self._layers[l]
        if layer is None:
            return self._declines[l]
        if step.batch < 1:
            return "an empty batch"
        return _cache_reason(step.caches[l], layer, step.start_pos)

    def _checked(self, l: int, length: int, step: Step) -> list[PreparedLayer]:  # noqa: E741
        for layer in range(l, l + length):
            reason = self._reason(layer, step)
            if reason is not None:
                raise ShapeError(f"the host cannot run layer {layer}: {reason}")
        layers = [layer for layer in self._layers[l : l + length] if layer is not None]
        hidden = step.hidden
        want = (step.batch, layers[0].shape.hidden)
        if hidden is None or hidden.shape != want or hidden.dtype != np.float32:
            got = "none" if hidden is None else f"{hidden.dtype} {list(hidden.shape)}"
            raise ShapeError(f"layer {l} needs a hidden batch float32 {list(want)}, got {got}")
        for other in layers:
            if other.shape.hidden != want[1]:
                raise ShapeError(f"layer {other.number} is {other.shape.hidden} wide, layer {l} {want[1]}")
        return layers

    def _take_scratch(self) -> Scratch:
        with self._lock:
            return self._idle.pop() if self._idle else Scratch()

    def _give_scratch(self, scratch: Scratch) -> None:
        if scratch.nbytes <= _SCRATCH_BYTES:
            with self._lock:
                self._idle.append(scratch)


def _cache_reason(cache: LayerCache, layer: PreparedLayer, start: int) -> str | None:
    """Why `cache` does not fit (R12, R13); rows that no query of the step can see may be missing."""
    shape = layer.shape
    if cache.n_kv_heads != shape.n_kv_heads or cache.key_dim != shape.head_dim or cache.value_dim != shape.head_dim:
        return (
            f"the cache has {cache.n_kv_heads} heads of {cache.key_dim} and {cache.value_dim}, the layer "
            f"{shape.n_kv_heads} of {shape.head_dim}"
        )
    positions = cache.positions
    if positions != start:
        return f"the cache holds {positions} positions, the step starts at {start}"
    evicted = positions - cache.rows
    window = layer.visibility.window
    if evicted and (not window or evicted > start - window + 1):
        return f"the cache lacks {evicted} evicted rows that the step sees"
    return None


def _run(layers: Sequence[PreparedLayer], l: int, step: Step, store: WeightStore, scratch: Scratch) -> Run:  # noqa: E741
    assert step.hidden is not None
    batch, start = step.batch, step.start_pos
    blocks = list(_blocks(step.hidden, start, store.invariant))
    tables: dict[tuple[int, int], RopeTable] = {}
    kv_rows = []
    experts: list[tuple[int, ...]] = []
    for number, layer in enumerate(layers, l):
        keys, values, tail_k, tail_v = _rows_with_tail(step.caches[number], batch)
        before = keys.shape[0] - batch
        first = start - before
        used: set[int] = set()
        for block in blocks:
            x, at, columns = block.x, block.start, block.columns
            work = workspace(layer.shape, layer.shape_id, x.shape[1], scratch)
            table = _table(layer, tables, at, x.shape[1])
            seen = before + block.last
            attention(layer, x, keys[:seen], values[:seen], first, at, table, work, store, scratch, columns)
            used.update(feed_forward(layer, x, work, store, scratch, columns))
        experts.append(tuple(sorted(used)))
        kv_rows.append((_as_float32(tail_k), _as_float32(tail_v)))
    hidden = np.empty((batch, layers[-1].shape.hidden), np.float32)
    for block in blocks:
        x = block.x if block.columns is None else block.x[:, block.columns]
        hidden[block.first : block.last] = x.T
    return Run(hidden, kv_rows, experts)


class _Block(NamedTuple):
    """Rows first .. last-1 of a batch as `columns` of `x` [hidden, n] (None: all), whose first is at `start`."""

    first: int
    last: int
    x: np.ndarray
    start: int
    columns: slice | None


def _blocks(hidden: np.ndarray, start: int, invariant: bool) -> Iterator[_Block]:
    """The batch in blocks; `invariant`: in blocks at fixed positions."""
    batch = len(hidden)
    if invariant:
        for a, b, columns in aligned(start, batch):
            yield _Block(a, b, padded(hidden[a:b], columns), start + a - columns.start, columns)
        return
    for a in range(0, batch, _BLOCK):
        b = min(a + _BLOCK, batch)
        yield _Block(a, b, np.array(hidden[a:b].T, order="C"), start + a, None)


def _table(layer: PreparedLayer, tables: dict[tuple[int, int], RopeTable], start: int, n: int) -> RopeTable | None:
    """The rotation of a block, shared by the step's layers that rotate alike."""
    if layer.rope is None:
        return None
    table = tables.get((layer.rope_id, start))
    if table is None:
        table = tables[layer.rope_id, start] = rope_table(layer.rope, start, n)
    return table


def _rows_with_tail(cache: LayerCache, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """K and V [rows + n, heads, width] and their last n rows: the cache's memory where it has a tail, else a copy."""
    if isinstance(cache, LayerKV):
        return cache.with_tail(n)
    longer = []
    for prefix in cache.prefix():
        rows = np.empty((prefix.shape[0] + n, *prefix.shape[1:]), prefix.dtype)
        rows[: prefix.shape[0]] = prefix
        longer.append(rows)
    k, v = longer
    return k, v, k[k.shape[0] - n :], v[v.shape[0] - n :]


def _as_float32(rows: np.ndarray) -> np.ndarray:
    return rows if rows.dtype == _FLOAT32 else rows.astype(np.float32)
