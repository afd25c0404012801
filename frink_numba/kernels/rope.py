"""Rotary position embedding: a table of cosines and sines for a step, and the rotation of Q or K (R17)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from frink_numba.errors import ShapeError
from frink_numba.kernels.checks import require, require_rank
from frink_numba.kernels.integer import quotient, remainder
from frink_numba.kernels.jit import kernel
from frink_numba.layer import RopeLayout

_THREADS = 128
_MAX_GRID_Y = 65535
_i32, _f64 = types.int32, types.float64


@kernel(_THREADS)
def _rope_table(inv_freq, magnitude_scale, start_pos, cos, sin):
    """cos, sin float32 [rows, pairs] of (start_pos + row) * inv_freq[pair], times the scale; a thread a pair of a row.

    The angle is float64: float32 is 1e-4 off at position 3000.
    """
    pair = cuda.blockIdx.x * _THREADS + cuda.threadIdx.x
    rows, pairs = cos.shape
    if pair < pairs:
        for row in range(cuda.blockIdx.y, rows, cuda.gridDim.y):
            angle = _f64(start_pos + row) * inv_freq[pair]
            cos[row, pair] = math.cos(angle) * magnitude_scale
            sin[row, pair] = math.sin(angle) * magnitude_scale


@kernel(_THREADS)
def _rope(x, cos, sin, partner, step):
    """Turn x float32 [rows, heads, head_dim] in place, a thread a pair: channels step * i and step * i + partner."""
    rows, heads, _ = x.shape
    pairs = _i32(cos.shape[1])
    index = _i32(cuda.blockIdx.x * _THREADS + cuda.threadIdx.x)
    if index < heads * pairs:
        head, pair = quotient(index, pairs), remainder(index, pairs)
        for row in range(cuda.blockIdx.y, rows, cuda.gridDim.y):
            c, s = cos[row, pair], sin[row, pair]
            a, b = x[row, head, pair * step], x[row, head, pair * step + partner]
            x[row, head, pair * step] = a * c - b * s
            x[row, head, pair * step + partner] = a * s + b * c


def rope_table(inv_freq: Any, magnitude_scale: float, start_pos: int, cos: Any, sin: Any, stream: Any = 0) -> None:
    """Fill cos and sin, float32 [rows, pairs], for the positions start_pos .. start_pos + rows - 1.

    `inv_freq` float64 [pairs] holds the angle of each pair per position, frequency factors divided in already; both
    tables are multiplied by `magnitude_scale`. ShapeError on disagreement.
    """
    rows, pairs = require_rank("rope_table", "cos", cos, 2)
    require("rope_table", "inv_freq", inv_freq, (pairs,), np.float64)
    require("rope_table", "cos", cos, (rows, pairs))
    require("rope_table", "sin", sin, (rows, pairs))
    if rows == 0:
        return
    grid = -(-pairs // _THREADS), min(rows, _MAX_GRID_Y)
    _rope_table[grid, _THREADS, stream](inv_freq, float(magnitude_scale), int(start_pos), cos, sin)


def rope(x: Any, cos: Any, sin: Any, layout: RopeLayout, stream: Any = 0) -> None:
    """Turn the first 2 * pairs channels of each head of x [rows, heads, head_dim] in place; the others stay.

    cos, sin [rows, pairs] come from `rope_table`; all float32 on the device. ShapeError on disagreement.
    """
    rows, heads, head_dim = require_rank("rope", "x", x, 3)
    pairs = require_rank("rope", "cos", cos, 2)[1]
    require("rope", "x", x, (rows, heads, head_dim))
    require("rope", "cos", cos, (rows, pairs))
    require("rope", "sin", sin, (rows, pairs))
    if 2 * pairs > head_dim:
        raise ShapeError(f"rope: a table of {pairs} pairs turns {2 * pairs} channels, a head has {head_dim}")
    if rows == 0:
        return
    partner, step = (1, 2) if layout is RopeLayout.NORM else (pairs, 1)
    grid = -(-heads * pairs // _THREADS), min(rows, _MAX_GRID_Y)
    _rope[grid, _THREADS, stream](x, cos, sin, partner, step)
