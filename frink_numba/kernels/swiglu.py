"""SwiGLU: out = silu(gate) * up, with silu(g) = g / (1 + exp(-g))."""

from __future__ import annotations

import math
from typing import Any

from numba import cuda
from numba.cuda import types

from frink_numba.kernels.checks import require, require_rank
from frink_numba.kernels.jit import kernel
from frink_numba.kernels.vector_memory import load4, store4

_THREADS = 256
_f32 = types.float32


@cuda.jit(device=True)
def _silu_times(gate, up):
    small = _f32(math.exp(-abs(gate)))  # at most 1: exp(-gate) would overflow for a gate below -88
    return gate * ((_f32(1.0) if gate >= _f32(0.0) else small) / (_f32(1.0) + small)) * up


@kernel(_THREADS)
def _swiglu(gate, up, out):
    """out = silu(gate) * up, contiguous float32 [rows, n]; four elements a thread, blocks of 256."""
    first = (cuda.blockIdx.x * _THREADS + cuda.threadIdx.x) * 4
    rows, n = gate.shape
    count = rows * n
    if first + 4 <= count:
        g = load4(gate, first)
        u = load4(up, first)
        store4(
            out,
            first,
            (
                _silu_times(g[0], u[0]),
                _silu_times(g[1], u[1]),
                _silu_times(g[2], u[2]),
                _silu_times(g[3], u[3]),
            ),
        )
    else:
        for i in range(first, count):
            out[i // n, i % n] = _silu_times(gate[i // n, i % n], up[i // n, i % n])


def swiglu(gate: Any, up: Any, out: Any, stream: Any = 0) -> None:
    """out [rows, n] = silu(gate) * up, float32 on the device; out may be gate or up. ShapeError on disagreement."""
    shape = require_rank("swiglu", "gate", gate, 2)
    require("swiglu", "gate", gate, shape)
    require("swiglu", "up", up, shape)
    require("swiglu", "out", out, shape)
    quads = -(-shape[0] * shape[1] // 4)
    if quads == 0:
        return
    _swiglu[-(-quads // _THREADS), _THREADS, stream](gate, up, out)
