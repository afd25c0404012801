"""RMS norm of rows: out = x / sqrt(mean(x^2) + eps) * weight."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from frink_numba.kernels.checks import require, require_rank
from frink_numba.kernels.jit import kernel
from frink_numba.kernels.warp import sum_32

_THREADS = 256
_WARPS = _THREADS // 32
_SHORT = 512  # rows up to this length get a warp each, so that heads do not leave most of a block idle
_f32 = types.float32


@kernel(_THREADS)
def _rms_norm_long_rows(x, weight, eps, out):
    """A block of 256 threads a row; x, out [rows, n], weight [n] float32. Shared memory: a float for each warp."""
    partial = cuda.shared.array(_WARPS, _f32)
    row = cuda.blockIdx.x
    n = x.shape[1]
    total = _f32(0.0)
    for i in range(cuda.threadIdx.x, n, _THREADS):
        total += x[row, i] * x[row, i]
    total = sum_32(total)
    if cuda.threadIdx.x % 32 == 0:
        partial[cuda.threadIdx.x // 32] = total
    cuda.syncthreads()
    total = _f32(0.0)
    for warp in range(_WARPS):
        total += partial[warp]
    factor = _f32(1.0) / _f32(math.sqrt(total / _f32(n) + eps))
    for i in range(cuda.threadIdx.x, n, _THREADS):
        out[row, i] = x[row, i] * factor * weight[i]


@kernel(_THREADS)
def _rms_norm_short_rows(x, weight, eps, out):
    """A warp a row, 8 rows a block of 256 threads; x, out [rows, n], weight [n] float32."""
    rows, n = x.shape
    row = cuda.blockIdx.x * _WARPS + cuda.threadIdx.x // 32
    lane = cuda.threadIdx.x % 32
    source = min(row, rows - 1)  # every lane takes part in the sum
    total = _f32(0.0)
    for i in range(lane, n, 32):
        total += x[source, i] * x[source, i]
    factor = _f32(1.0) / _f32(math.sqrt(sum_32(total) / _f32(n) + eps))
    if row < rows:
        for i in range(lane, n, 32):
            out[row, i] = x[row, i] * factor * weight[i]


def rms_norm(x: Any, weight: Any, eps: float, out: Any, stream: Any = 0) -> None:
    """Normalize the rows of x [rows, n] into out [rows, n], which may be x; weight [n]. All float32 on the device.

    A norm of every head is the same, with x and out viewed as [rows * heads, head_dim]. ShapeError on disagreement.
    """
    rows, n = require_rank("rms_norm", "x", x, 2)
    require("rms_norm", "x", x, (rows, n))
    require("rms_norm", "weight", weight, (n,))
    require("rms_norm", "out", out, (rows, n))
    if rows == 0:
        return
    if n <= _SHORT:
        _rms_norm_short_rows[-(-rows // _WARPS), _THREADS, stream](x, weight, np.float32(eps), out)
    else:
        _rms_norm_long_rows[rows, _THREADS, stream](x, weight, np.float32(eps), out)
