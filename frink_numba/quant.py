"""GGUF's tensor types: one table row per kind, and a quantized matrix as a view of the mapped file.

Source: the type table of the `gguf` package (GGML_QUANT_SIZES); tests hold the two equal. It is repeated here because
importing that package takes longer than opening a model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from frink_numba.errors import ShapeError


@dataclass(frozen=True, slots=True)
class QuantKind:
    """A tensor type: `block` consecutive elements of a row are stored in `block_bytes` bytes."""

    name: str
    ggml_id: int
    block: int
    block_bytes: int

    def row_bytes(self, cols: int) -> int:
        """Bytes of a row of `cols` elements; ShapeError when `cols` is not a multiple of the block."""
        if cols % self.block:
            raise ShapeError(f"{self.name}: a row of {cols} elements is not a multiple of the block of {self.block}")
        return cols // self.block * self.block_bytes

    def __str__(self) -> str:
        return self.name


_ROWS = (
    # name, ggml id, block, bytes
    ("F32", 0, 1, 4),
    ("F16", 1, 1, 2),
    ("Q4_0", 2, 32, 18),
    ("Q4_1", 3, 32, 20),
    ("Q5_0", 6, 32, 22),
    ("Q5_1", 7, 32, 24),
    ("Q8_0", 8, 32, 34),
    ("Q8_1", 9, 32, 40),
    ("Q2_K", 10, 256, 84),
    ("Q3_K", 11, 256, 110),
    ("Q4_K", 12, 256, 144),
    ("Q5_K", 13, 256, 176),
    ("Q6_K", 14, 256, 210),
    ("Q8_K", 15, 256, 292),
    ("IQ2_XXS", 16, 256, 66),
    ("IQ2_XS", 17, 256, 74),
    ("IQ3_XXS", 18, 256, 98),
    ("IQ1_S", 19, 256, 50),
    ("IQ4_NL", 20, 32, 18),
    ("IQ3_S", 21, 256, 110),
    ("IQ2_S", 22, 256, 82),
    ("IQ4_XS", 23, 256, 136),
    ("I8", 24, 1, 1),
    ("I16", 25, 1, 2),
    ("I32", 26, 1, 4),
    ("I64", 27, 1, 8),
    ("F64", 28, 1, 8),
    ("IQ1_M", 29, 256, 56),
    ("BF16", 30, 1, 2),
    ("TQ1_0", 34, 256, 54),
    ("TQ2_0", 35, 256, 66),
    ("MXFP4", 39, 32, 17),
    ("NVFP4", 40, 64, 36),
    ("Q1_0", 41, 128, 18),
)

KINDS: dict[str, QuantKind] = {row[0]: QuantKind(*row) for row in _ROWS}
KINDS_BY_ID: dict[int, QuantKind] = {kind.ggml_id: kind for kind in KINDS.values()}


@dataclass(frozen=True, slots=True, eq=False)
class QuantMatrix:
    """A weight matrix W [rows, cols], y = W x, in its file's own bytes: never expanded, never copied.

    `data` is uint8 [rows, kind.row_bytes(cols)], C-contiguous, usually a read-only view of the mapped file.
    """

    kind: QuantKind
    data: np.ndarray
    rows: int
    cols: int

    def __post_init__(self) -> None:
        want = (self.rows, self.kind.row_bytes(self.cols))
        if self.data.dtype != np.uint8 or self.data.shape != want or not self.data.flags.c_contiguous:
            raise ShapeError(
                f"a {self.kind} matrix of {self.rows} x {self.cols} needs contiguous uint8 {list(want)}, "
                f"got {self.data.dtype} {list(self.data.shape)}"
            )

    @property
    def nbytes(self) -> int:
        return int(self.data.nbytes)

    def part(self, first: int, last: int) -> QuantMatrix:
        """Rows `first` .. `last`-1 as a matrix over the same bytes; ShapeError outside the matrix."""
        if not 0 <= first <= last <= self.rows:
            raise ShapeError(f"rows {first} to {last} of a matrix of {self.rows} rows")
        return QuantMatrix(self.kind, self.data[first:last], last - first, self.cols)

    @classmethod
    def from_float32(cls, weights: np.ndarray) -> QuantMatrix:
        """Wrap float32 `weights` [rows, cols] as kind F32, without a copy when they are contiguous."""
        w = np.ascontiguousarray(weights, dtype=np.float32)
        if w.ndim != 2:
            raise ShapeError(f"a weight matrix has two dimensions, got {list(w.shape)}")
        return cls(KINDS["F32"], w.view(np.uint8), w.shape[0], w.shape[1])
