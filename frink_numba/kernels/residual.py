"""Residual connection: x += y."""

from __future__ import annotations

from typing import Any

from numba import cuda

from frink_numba.kernels.checks import require, require_rank
from frink_numba.kernels.jit import kernel
from frink_numba.kernels.vector_memory import load4, store4

_THREADS = 256


@kernel(_THREADS)
def _residual_add(x, y):
    """x += y over all elements of two contiguous float32 arrays [rows, n]; four elements a thread, blocks of 256."""
    first = (cuda.blockIdx.x * _THREADS + cuda.threadIdx.x) * 4
    rows, n = x.shape
    count = rows * n
    if first + 4 <= count:
        a = load4(x, first)
        b = load4(y, first)
        store4(x, first, (a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]))
    else:
        for i in range(first, count):
            x[i // n, i % n] += y[i // n, i % n]


def residual_add(x: Any, y: Any, stream: Any = 0) -> None:
    """x [rows, n] += y [rows, n], in place, float32 on the device. ShapeError on disagreement."""
    shape = require_rank("residual_add", "x", x, 2)
    require("residual_add", "x", x, shape)
    require("residual_add", "y", y, shape)
    quads = -(-shape[0] * shape[1] // 4)
    if quads == 0:
        return
    _residual_add[-(-quads // _THREADS), _THREADS, stream](x, y)
