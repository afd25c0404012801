"""Tensors of a file by name, each of the shape that it must have.

A GGUF file lists a tensor's dimensions fastest first; shapes here are in NumPy's order, rows first.
"""

from __future__ import annotations

from collections.abc import Set
from itertools import accumulate
from typing import NoReturn

import numpy as np

from frink_numba.errors import GgufError, UnsupportedModelError
from frink_numba.host.dequantize import dequantize
from frink_numba.host.gguf import GgufFile
from frink_numba.quant import QuantMatrix


class TensorReader:
    """GgufError names a tensor that is missing or has another shape; UnsupportedModelError a kind without weights."""

    def __init__(self, gguf: GgufFile) -> None:
        self.gguf = gguf
        self.where = gguf.paths[0]
        self._kinds: set[str] = set()  # those known to hold weights

    def fail(self, name: str, problem: str) -> NoReturn:
        raise GgufError(f"{self.where}: tensor {name!r} {problem}")

    def has(self, name: str) -> bool:
        return name in self.gguf.tensors

    def refuse_unknown(self, known: Set[str], in_layer: Set[str], layers: int, architecture: str) -> None:
        """Refuse every tensor but those `known` and, after "blk.N.", those `in_layer`: nothing would read it."""
        for name in self.gguf.tensors:
            if name in known:
                continue
            block, _, rest = name.partition(".")
            number, _, suffix = rest.partition(".")
            if block == "blk" and suffix in in_layer and number == _canonical(number, layers):
                continue
            raise UnsupportedModelError(
                f"{self.where}: tensor {name[:80]!r} is not known for architecture {architecture!r} with "
                f"{layers} layers, and leaving it out may change the result"
            )

    def matrix(self, name: str, rows: int, cols: int) -> QuantMatrix:
        """[rows, cols]"""
        self._check(name, (rows, cols))
        return self._with_weights(name, self.gguf.matrix(name))

    def parts(self, name: str, rows: tuple[int, ...], cols: int) -> tuple[QuantMatrix, ...]:
        """A matrix [sum of rows, cols] as views of its parts, one under the other."""
        whole = self.matrix(name, sum(rows), cols)
        return tuple(whole.part(last - count, last) for count, last in zip(rows, accumulate(rows), strict=True))

    def stack(self, name: str, count: int, rows: int, cols: int) -> tuple[QuantMatrix, ...]:
        """A tensor [count, rows, cols] as `count` matrices, views of its bytes."""
        self._check(name, (count, rows, cols))
        matrices = self.gguf.matrices(name)
        self._with_weights(name, matrices[0])
        return matrices

    def vector(self, name: str, size: int) -> np.ndarray:
        """float32 [size]"""
        self._check(name, (size,))
        return self.gguf.vector(name)

    def embedding(self, vocab: int | None, hidden: int) -> QuantMatrix:
        """The one matrix whose rows the file may leave unsaid."""
        info = self.gguf.tensors.get("token_embd.weight")
        rows = vocab or (info.shape[0] if info is not None and len(info.shape) == 2 else 1)
        return self.matrix("token_embd.weight", rows, hidden)

    def _check(self, name: str, want: tuple[int, ...]) -> None:
        info = self.gguf.tensors.get(name)
        if info is None:
            self.fail(name, "is missing")
        if tuple(info.shape) != want:
            self.fail(name, f"has shape {list(info.shape)}, but the hyper-parameters ask for {list(want)}")

    def _with_weights(self, name: str, matrix: QuantMatrix) -> QuantMatrix:
        if matrix.kind.name not in self._kinds:
            try:
                dequantize(matrix, 0, 0)
            except UnsupportedModelError as error:
                raise UnsupportedModelError(f"{self.where}: tensor {name!r}: {error}") from None
            self._kinds.add(matrix.kind.name)
        return matrix


def _canonical(number: str, layers: int) -> str | None:
    """`number` as it is written for a layer under `layers`; None for anything else ("01", "+1", a huge one)."""
    if not number.isascii() or not number.isdecimal() or len(number) > 9 or int(number) >= layers:
        return None
    return str(int(number))
