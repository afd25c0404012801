"""Quantized matrices to float32, whole, by row range, or by gathered rows; equal bit for bit to the `gguf` package.

Common kinds are expanded by functions of our own (dequantize_blocks.py), the others by the `gguf` package, which is
imported when the first of them is met.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from frink_numba.errors import ShapeError, UnsupportedModelError
from frink_numba.host.dequantize_blocks import BLOCK_FUNCTIONS
from frink_numba.quant import QuantKind, QuantMatrix

# Elements expanded at a time: temporaries of about a megabyte, which stay in the second-level cache.
_ELEMENTS_AT_A_TIME = 1 << 17


def dequantize(
    matrix: QuantMatrix, start: int = 0, stop: int | None = None, out: np.ndarray | None = None
) -> np.ndarray:
    """Rows `start` to `stop` (default: all) of `matrix` as float32 [stop - start, cols].

    `out`, if given, is filled and returned: float32 of that shape, C-contiguous. Temporary memory is about a megabyte,
    whatever the size. Scales that are infinite or not a number give such elements, as they do in the `gguf` package.
    ShapeError: a row range outside the matrix, or an unfit `out`. UnsupportedModelError: a kind that holds no weights
    (Q8_1, Q8_K, integers), or that the installed `gguf` package cannot expand.
    """
    stop = matrix.rows if stop is None else stop
    if not 0 <= start <= stop <= matrix.rows:
        raise ShapeError(f"rows {start} to {stop} of a matrix of {matrix.rows} rows")
    return _expand(matrix.kind, matrix.data[start:stop], matrix.cols, out)


def dequantize_rows(matrix: QuantMatrix, ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """The rows numbered `ids`, in that order and as often as they occur: float32 [len(ids), cols].

    ShapeError: `ids` is not one-dimensional, or holds anything but row numbers. UnsupportedModelError: as above.
    """
    rows = np.asarray(ids)
    if rows.ndim != 1 or (rows.size and rows.dtype.kind not in "iu"):
        raise ShapeError(f"row numbers must be a sequence of integers, got {rows.dtype} {list(rows.shape)}")
    wrong = rows[(rows < 0) | (rows >= matrix.rows)]
    if wrong.size:
        raise ShapeError(f"row {wrong[0]} of a matrix of {matrix.rows} rows")
    return _expand(matrix.kind, matrix.data[rows.astype(np.intp)], matrix.cols, None)


def _expand(kind: QuantKind, data: np.ndarray, cols: int, out: np.ndarray | None) -> np.ndarray:
    shape = (data.shape[0], cols)
    expand_blocks = _block_function(kind)
    if out is None:
        out = np.empty(shape, dtype=np.float32)
    elif out.dtype != np.float32 or out.shape != shape or not out.flags.c_contiguous or not out.flags.writeable:
        raise ShapeError(
            f"out must be writeable contiguous float32 {list(shape)}, got {out.dtype} {list(out.shape)}"
            f"{'' if out.flags.c_contiguous else ', not contiguous'}{'' if out.flags.writeable else ', read-only'}"
        )
    # Rows lie one after the other and hold whole blocks, so that blocks can be taken without regard to rows: neither
    # short rows nor long ones spoil the size of a step.
    blocks = data.reshape(-1, kind.block_bytes)
    elements = out.reshape(-1, kind.block)
    step = max(1, _ELEMENTS_AT_A_TIME // kind.block)
    # The file's bytes decide what is multiplied: infinities there are no fault of this computation.
    with np.errstate(all="ignore"):
        for at in range(0, blocks.shape[0], step):
            expand_blocks(blocks[at : at + step], elements[at : at + step])
    return out


def _block_function(kind: QuantKind) -> Callable[[np.ndarray, np.ndarray], None]:
    own = _FLOAT_FUNCTIONS.get(kind.name) or BLOCK_FUNCTIONS.get(kind.name)
    return own or _gguf_function(kind)


def _gguf_function(kind: QuantKind) -> Callable[[np.ndarray, np.ndarray], None]:
    from gguf import quants
    from gguf.constants import GGMLQuantizationType

    refusal = f"tensors of kind {kind} cannot be expanded to float32"
    try:
        gguf_type = GGMLQuantizationType(kind.ggml_id)
        # Asked with one block of zeros: a kind that the package only names is refused before anything is written.
        quants.dequantize(np.zeros((1, kind.block_bytes), dtype=np.uint8), gguf_type)
    except (ValueError, NotImplementedError):
        raise UnsupportedModelError(f"{refusal}: the installed gguf package has no such function") from None

    def expand(blocks: np.ndarray, out: np.ndarray) -> None:
        # One long row: the package works through rows in groups of 16, which is slow for short ones.
        out.reshape(-1)[...] = quants.dequantize(blocks.reshape(1, -1), gguf_type).reshape(-1)

    return expand


def _f32(blocks: np.ndarray, out: np.ndarray) -> None:
    np.copyto(out, blocks.view("<f4"))


def _f16(blocks: np.ndarray, out: np.ndarray) -> None:
    np.copyto(out, blocks.view("<f2"))


def _bf16(blocks: np.ndarray, out: np.ndarray) -> None:
    # A BF16 number is the upper half of a float32.
    np.left_shift(blocks.view("<u2"), np.uint32(16), out=out.view(np.uint32), dtype=np.uint32)


_FLOAT_FUNCTIONS: dict[str, Callable[[np.ndarray, np.ndarray], None]] = {"F32": _f32, "F16": _f16, "BF16": _bf16}
