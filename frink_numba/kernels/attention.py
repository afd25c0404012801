"""Causal attention of grouped queries over a prefix and the batch's own keys, in one pass over the keys (R11, R18).

The softmax is online: a running maximum and sum a row, and a value sum that is rescaled when the maximum grows, so that
memory does not grow with the number of keys. A block owns 64 query rows of one K/V head: rows run over the positions and,
within a position, over the query heads that share the K/V head. Blocks of 64 keys that no row may see are not read.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from frink_numba.errors import ShapeError
from frink_numba.kernels.checks import require, require_rank
from frink_numba.kernels.jit import kernel
from frink_numba.kernels.register_tile import (
    RegisterTile,
    make_accumulate,
    make_accumulate_rows,
    make_row,
    make_scale_rows,
    make_store_row,
    make_zeros,
)
from frink_numba.kernels.vector_memory import (
    granule_of,
    make_load_run,
    make_load_panel,
    make_store_column,
    make_store_panel,
    store4,
)
from frink_numba.kernels.warp import max_8, sum_8

MAX_HEAD_DIM = 256
_ROWS = _KEYS = 64  # query rows and keys of a block's step
_THREADS = 128  # 16 x 8, each with 4 rows and 8 keys of the scores
_DEPTH = 16  # channels of Q and K in a slice
_SLICE = _DEPTH * _ROWS
_SLICES = 4 * _SLICE
_WEIGHTS_STRIDE = _KEYS + 4  # the rows of the weights start in different banks
_WEIGHTS = _ROWS * _WEIGHTS_STRIDE
# Widths of the value sum that kernels are compiled for, and the blocks that registers are kept for on a multiprocessor.
_WIDTHS = {32: 4, 64: 4, 96: 3, 128: 3, 192: 2, 256: 2}
_f32, _int64 = types.float32, types.int64
_NONE = _f32(-math.inf)


@cuda.jit(device=True)
def _score(product, key, first, last, scale, softcap):
    """The scaled and capped score of one key, or minus infinity where the row does not see it."""
    score = product * scale
    if softcap > _f32(0.0):
        score = softcap * _f32(math.tanh(score / softcap))
    return score if first <= key <= last else _NONE


@cuda.jit(device=True)
def _row_scores(products, key, first, last, scale, softcap):
    """Scores of a row's two quads of keys, `key` .. `key + 3` and 32 further on."""
    return (
        _score(products[0], key, first, last, scale, softcap),
        _score(products[1], key + 1, first, last, scale, softcap),
        _score(products[2], key + 2, first, last, scale, softcap),
        _score(products[3], key + 3, first, last, scale, softcap),
        _score(products[4], key + 32, first, last, scale, softcap),
        _score(products[5], key + 33, first, last, scale, softcap),
        _score(products[6], key + 34, first, last, scale, softcap),
        _score(products[7], key + 35, first, last, scale, softcap),
    )


@cuda.jit(device=True)
def _greatest(s):
    return max(max(max(s[0], s[1]), max(s[2], s[3])), max(max(s[4], s[5]), max(s[6], s[7])))


@cuda.jit(device=True)
def _weigh(scores, base, weights, at):
    """Store exp(score - base) of a row's eight keys, and give their sum."""
    a = _f32(math.exp(scores[0] - base)), _f32(math.exp(scores[1] - base))
    b = _f32(math.exp(scores[2] - base)), _f32(math.exp(scores[3] - base))
    c = _f32(math.exp(scores[4] - base)), _f32(math.exp(scores[5] - base))
    d = _f32(math.exp(scores[6] - base)), _f32(math.exp(scores[7] - base))
    store4(weights, at, (a[0], a[1], b[0], b[1]))
    store4(weights, at + 32, (c[0], c[1], d[0], d[1]))
    return ((a[0] + a[1]) + (b[0] + b[1])) + ((c[0] + c[1]) + (d[0] + d[1]))


@cuda.jit(device=True)
def _base(maximum):
    """What is subtracted from a row's scores: its maximum, or 0 while it has seen no key."""
    return maximum if maximum > _NONE else _f32(0.0)


@cuda.jit(device=True)
def _first_visible(position, window):
    return max(0, position - window + 1) if window > 0 else 0


@lru_cache(maxsize=None)
def attention_kernel(width: int, granule: int) -> Any:
    """The kernel for heads of at most `width` channels, with rows guarded by `granule` (see `granule_of`).

    Arguments: q [n, heads, d], k and v [total, kv_heads, d], out [n, heads, d], start_pos, scale, window, softcap.
    Grid: blocks of 64 rows of n * heads / kv_heads, K/V heads. 128 threads. Shared memory 33 KB.
    """
    panel = 16 if width <= 128 else 8  # keys of V in a slice: two slices fit where those of Q and K were
    scores_tile = RegisterTile(4, 8, _ROWS, 32)
    values_tile = RegisterTile(4, width // 8, _ROWS, 32)
    scores0, scores1, scores2, scores3 = (make_row(scores_tile, i) for i in range(4))
    values0, values1, values2, values3 = (make_row(values_tile, i) for i in range(4))
    zero_scores, zero_values = make_zeros(scores_tile), make_zeros(values_tile)
    multiply = make_accumulate(scores_tile, _DEPTH, _ROWS, _KEYS)
    add_values = make_accumulate_rows(values_tile, panel, _WEIGHTS_STRIDE, width)
    rescale = make_scale_rows(values_tile)
    store_row = make_store_row(values_tile)
    load_octet, store_column = make_load_run(8, granule), make_store_column(8, _ROWS)
    load_panel = make_load_panel(panel, width, _THREADS, granule)
    store_panel = make_store_panel(panel, width, _THREADS)
    panels, panel_size = _KEYS // panel, panel * width

    @kernel(_THREADS, _WIDTHS[width])
    def causal_attention_rows(q, k, v, out, start_pos, scale, window, softcap):
        # Q's two slices, then K's; the slices of V take the same place in the second half of a step.
        slices = cuda.shared.array(_SLICES, _f32)
        weights = cuda.shared.array(_WEIGHTS, _f32)
        thread = cuda.threadIdx.x
        n, heads, d = q.shape
        total, kv_heads, _ = k.shape
        kv_head = cuda.blockIdx.y
        group = heads // kv_heads
        rows = n * group
        # The last rows see the most keys: their blocks start first.
        first_row = (cuda.gridDim.x - 1 - cuda.blockIdx.x) * _ROWS
        lane_row, half = thread % _ROWS, thread // _ROWS
        q_row = min(first_row + lane_row, rows - 1)
        q_start = (q_row // group * heads + kv_head * group + q_row % group) * d
        kv_stride, kv_start = kv_heads * d, kv_head * d
        column = half * 8 * _ROWS + lane_row
        tile_row, tile_key = thread // 8 * 4, thread % 8 * 4
        row = first_row + tile_row
        # Rows beyond the end repeat the last one, and are not stored.
        row0, row1, row2, row3 = (
            min(row, rows - 1),
            min(row + 1, rows - 1),
            min(row + 2, rows - 1),
            min(row + 3, rows - 1),
        )
        last0, last1 = start_pos + row0 // group, start_pos + row1 // group
        last2, last3 = start_pos + row2 // group, start_pos + row3 // group
        visible0, visible1 = _first_visible(last0, window), _first_visible(last1, window)
        visible2, visible3 = _first_visible(last2, window), _first_visible(last3, window)
        key = _first_visible(start_pos + first_row // group, window) // _KEYS * _KEYS
        last_key = start_pos + min(first_row + _ROWS - 1, rows - 1) // group
        channel_slices = (d + _DEPTH - 1) // _DEPTH

        sums = zero_values()
        m0 = m1 = m2 = m3 = _NONE
        l0 = l1 = l2 = l3 = _f32(0.0)
        q_values = load_octet(q, q_start, half * 8, d)
        k_values = load_octet(k, min(key + lane_row, total - 1) * kv_stride + kv_start, half * 8, d)
        while key <= last_key:
            k_start = min(key + lane_row, total - 1) * kv_stride + kv_start
            store_column(slices, column, q_values)
            store_column(slices, 2 * _SLICE + column, k_values)
            cuda.syncthreads()
            products = zero_scores()
            current = 0
            for s in range(1, channel_slices + 1):
                channel = s * _DEPTH + half * 8
                if s < channel_slices:
                    q_values = load_octet(q, q_start, channel, d)
                    k_values = load_octet(k, k_start, channel, d)
                products = multiply(products, slices, slices, current + tile_row, 2 * _SLICE + current + tile_key)
                current = _SLICE - current
                if s < channel_slices:
                    store_column(slices, current + column, q_values)
                    store_column(slices, 2 * _SLICE + current + column, k_values)
                cuda.syncthreads()

            v_values = load_panel(v, thread, key, total - 1, kv_stride, kv_start, d)
            s0 = _row_scores(scores0(products), key + tile_key, visible0, last0, scale, softcap)
            s1 = _row_scores(scores1(products), key + tile_key, visible1, last1, scale, softcap)
            s2 = _row_scores(scores2(products), key + tile_key, visible2, last2, scale, softcap)
            s3 = _row_scores(scores3(products), key + tile_key, visible3, last3, scale, softcap)
            n0, n1, n2, n3 = max_8((_greatest(s0), _greatest(s1), _greatest(s2), _greatest(s3)))
            n0, n1, n2, n3 = max(m0, n0), max(m1, n1), max(m2, n2), max(m3, n3)
            b0, b1, b2, b3 = _base(n0), _base(n1), _base(n2), _base(n3)
            f0, f1 = _f32(math.exp(m0 - b0)), _f32(math.exp(m1 - b1))
            f2, f3 = _f32(math.exp(m2 - b2)), _f32(math.exp(m3 - b3))
            m0, m1, m2, m3 = n0, n1, n2, n3
            at = tile_row * _WEIGHTS_STRIDE + tile_key
            l0 = l0 * f0 + _weigh(s0, b0, weights, at)
            l1 = l1 * f1 + _weigh(s1, b1, weights, at + _WEIGHTS_STRIDE)
            l2 = l2 * f2 + _weigh(s2, b2, weights, at + 2 * _WEIGHTS_STRIDE)
            l3 = l3 * f3 + _weigh(s3, b3, weights, at + 3 * _WEIGHTS_STRIDE)
            sums = rescale(sums, (f0, f1, f2, f3))

            store_panel(slices, 0, thread, v_values)
            cuda.syncthreads()
            current = 0
            for p in range(1, panels + 1):
                if p < panels:
                    v_values = load_panel(v, thread, key + p * panel, total - 1, kv_stride, kv_start, d)
                at = tile_row * _WEIGHTS_STRIDE + (p - 1) * panel
                sums = add_values(sums, weights, slices, at, current + tile_key)
                current = panel_size - current
                if p < panels:
                    store_panel(slices, current, thread, v_values)
                cuda.syncthreads()
            key += _KEYS
            if key <= last_key:
                q_values = load_octet(q, q_start, half * 8, d)
                k_values = load_octet(k, min(key + lane_row, total - 1) * kv_stride + kv_start, half * 8, d)

        l0, l1, l2, l3 = sum_8((l0, l1, l2, l3))
        one = _f32(1.0)
        sums = rescale(sums, (one / l0, one / l1, one / l2, one / l3))
        if row < rows:
            store_row(out, values0(sums), (row0 // group * heads + kv_head * group + row0 % group) * d, tile_key, d)
        if row + 1 < rows:
            store_row(out, values1(sums), (row1 // group * heads + kv_head * group + row1 % group) * d, tile_key, d)
        if row + 2 < rows:
            store_row(out, values2(sums), (row2 // group * heads + kv_head * group + row2 % group) * d, tile_key, d)
        if row + 3 < rows:
            store_row(out, values3(sums), (row3 // group * heads + kv_head * group + row3 % group) * d, tile_key, d)

    return causal_attention_rows


def causal_attention(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    start_pos: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    stream: Any = 0,
) -> None:
    """out [n, heads, d] = attention of q [n, heads, d] over k, v [start_pos + n, kv_heads, d]; float32 on the device.

    Key j is visible to query i iff j <= start_pos + i and (window == 0 or start_pos + i - j < window). Scores are
    scale * q k, then softcap * tanh(score / softcap) unless softcap is 0. `out` may be q. d at most 256, heads a multiple
    of kv_heads. ShapeError on disagreement.
    """
    n, heads, d = require_rank("causal_attention", "q", q, 3)
    kv_heads = require_rank("causal_attention", "k", k, 3)[1]
    require("causal_attention", "q", q, (n, heads, d))
    require("causal_attention", "k", k, (start_pos + n, kv_heads, d))
    require("causal_attention", "v", v, (start_pos + n, kv_heads, d))
    require("causal_attention", "out", out, (n, heads, d))
    if not 0 < d <= MAX_HEAD_DIM:
        raise ShapeError(f"causal_attention: heads of 1 to {MAX_HEAD_DIM} channels are served, got {d}")
    if kv_heads < 1 or heads % kv_heads:
        raise ShapeError(f"causal_attention: {heads} query heads do not share {kv_heads} K/V heads evenly")
    if window < 0 or softcap < 0 or start_pos < 0:
        raise ShapeError(
            f"causal_attention: window {window}, softcap {softcap} and start_pos {start_pos} must not be negative"
        )
    if n == 0:
        return
    width = next(w for w in _WIDTHS if d <= w)
    run = attention_kernel(width, min(4, granule_of(d, 4)))
    grid = -(-n * (heads // kv_heads) // _ROWS), kv_heads
    run[grid, _THREADS, stream](q, k, v, out, int(start_pos), np.float32(scale), int(window), np.float32(softcap))
