"""Bias of a projection: x += bias, row by row."""

from __future__ import annotations

from typing import Any

from numba import cuda

from frink_numba.kernels.checks import require, require_rank
from frink_numba.kernels.jit import kernel

_THREADS = 256
_MAX_GRID_Y = 65535


@kernel(_THREADS)
def _add_bias(x, bias):
    """x [rows, n] += bias [n], float32; a thread a column, blocks of 256, the grid's second axis over rows."""
    col = cuda.blockIdx.x * _THREADS + cuda.threadIdx.x
    if col < x.shape[1]:
        for row in range(cuda.blockIdx.y, x.shape[0], cuda.gridDim.y):
            x[row, col] += bias[col]


def add_bias(x: Any, bias: Any, stream: Any = 0) -> None:
    """x [rows, n] += bias [n], in place, float32 on the device. ShapeError on disagreement."""
    rows, n = require_rank("add_bias", "x", x, 2)
    require("add_bias", "x", x, (rows, n))
    require("add_bias", "bias", bias, (n,))
    if rows == 0:
        return
    _add_bias[(-(-n // _THREADS), min(rows, _MAX_GRID_Y)), _THREADS, stream](x, bias)
