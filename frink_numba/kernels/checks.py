"""What launchers check before any device work (R20): one error for any disagreement, with the values that disagree."""

from __future__ import annotations

from typing import Any

import numpy as np

from frink_numba.errors import ShapeError


def require(op: str, name: str, array: Any, shape: tuple[int, ...], dtype: type = np.float32) -> None:
    """ShapeError unless `array` is a C-contiguous device array of this shape and dtype."""
    if tuple(array.shape) != shape or array.dtype != dtype or not array.is_c_contiguous():
        order = "" if array.is_c_contiguous() else " with gaps between its rows"
        raise ShapeError(
            f"{op}: {name} must be contiguous {np.dtype(dtype)} {list(shape)}, "
            f"got {array.dtype} {list(array.shape)}{order}"
        )


def require_rank(op: str, name: str, array: Any, rank: int) -> tuple[int, ...]:
    """The shape of `array`; ShapeError unless it has `rank` dimensions."""
    if len(array.shape) != rank:
        raise ShapeError(f"{op}: {name} must have {rank} dimensions, got {list(array.shape)}")
    return tuple(array.shape)
