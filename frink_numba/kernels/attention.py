"""Causal attention of grouped queries over a prefix and the batch's own keys, in one pass over the keys (R11, R18).

The softmax is online: a running maximum and sum a row, and a value sum that is rescaled when the maximum grows, so that
memory does not grow with the number of keys. A block owns 64 query rows of one K/V head: rows run over the positions
and, within a position, over the query heads of the K/V head. Blocks of 64 keys that no row may see are not read.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from frink_numba.errors import ShapeError
from frink_numba.kernels.checks import require, require_rank
from frink_numba.kernels.integer import quotient
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
    make_load_panel,
    make_load_run,
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
_SLICES, _MIDDLE, _QUAD = 2 * _SLICE, _SLICE // 2, 4 * _ROWS  # two slices; half a slice; four channels of a slice
_WEIGHTS_STRIDE = _KEYS + 4  # the rows of the weights start in different banks
_WEIGHTS = _ROWS * _WEIGHTS_STRIDE
_NO_WINDOW = 1 << 30
# Widths of the value sum that kernels are compiled for: the blocks that registers are kept for on a multiprocessor, and
# the keys in a slice of V (a whole number of quads for every thread).
_WIDTHS = {32: (4, 16), 64: (3, 8), 96: (3, 16), 128: (3, 8), 192: (2, 8), 256: (2, 4)}
_f32, _i32 = types.float32, types.int32
_NONE = _f32(-math.inf)


@cuda.jit(device=True)
def _plain(score, softcap):
    return score


@cuda.jit(device=True)
def _capped(score, softcap):
    return softcap * _f32(math.tanh(score / softcap))


def _make_row_scores(cap: Any) -> Any:
    """A device function: the scaled and capped scores of a row's two quads of keys, `key` on and 32 further.

    Minus infinity where the row does not see the key: it sees the `window` keys up to `last`.
    """

    @cuda.jit(device=True)
    def score(product, key, last, window, scale, softcap):
        return cap(product * scale, softcap) if last - window < key <= last else _NONE

    @cuda.jit(device=True)
    def row_scores(products, key, last, window, scale, softcap):
        return (
            score(products[0], _i32(key), last, window, scale, softcap),
            score(products[1], _i32(key + 1), last, window, scale, softcap),
            score(products[2], _i32(key + 2), last, window, scale, softcap),
            score(products[3], _i32(key + 3), last, window, scale, softcap),
            score(products[4], _i32(key + 32), last, window, scale, softcap),
            score(products[5], _i32(key + 33), last, window, scale, softcap),
            score(products[6], _i32(key + 34), last, window, scale, softcap),
            score(products[7], _i32(key + 35), last, window, scale, softcap),
        )

    return row_scores


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
def _row_start(row, group, heads, kv_head, d):
    """The flat place of a block's row: position row // group, the K/V head's query head number row % group."""
    position = quotient(row, group)
    return _i32((position * heads + kv_head * group + row - position * group) * d)


@cache
def attention_kernel(width: int, granule: int, capped: bool) -> Any:
    """The kernel for heads of at most `width` channels, with rows guarded by `granule` (see `granule_of`).

    Arguments: q [n, heads, d], k and v [total, kv_heads, d], out [n, heads, d], start_pos, scale, window, softcap.
    Grid: blocks of 64 rows of n * heads / kv_heads, K/V heads. 128 threads. Shared memory 45 KB at most.
    """
    blocks, panel = _WIDTHS[width]
    if capped or granule == 1:
        blocks = max(1, blocks - 1)  # the hyperbolic tangent, or guarding every element, needs registers too
    scores_tile = RegisterTile(4, 8, _ROWS, 32)
    values_tile = RegisterTile(4, width // 8, _ROWS, 32)
    scores0, scores1, scores2, scores3 = (make_row(scores_tile, i) for i in range(4))
    values0, values1, values2, values3 = (make_row(values_tile, i) for i in range(4))
    zero_scores, zero_values = make_zeros(scores_tile), make_zeros(values_tile)
    multiply = make_accumulate(scores_tile, _DEPTH // 2, _ROWS, _KEYS)
    add_values = make_accumulate_rows(values_tile, panel, _WEIGHTS_STRIDE, width)
    rescale = make_scale_rows(values_tile)
    store_row = make_store_row(values_tile)
    row_scores = _make_row_scores(_capped if capped else _plain)
    load_quad, store_quad = make_load_run(4, granule), make_store_column(4, _ROWS)
    load_panel = make_load_panel(panel, width, _THREADS, granule)
    store_panel = make_store_panel(panel, width, _THREADS)
    panel_size = panel * width
    panels_size = 2 * panel_size

    @kernel(_THREADS, blocks)
    def causal_attention_rows(q, k, v, out, start_pos, scale, window, softcap):
        # Two slices each of Q, K and V: while one is used, the next is on its way, across the steps too.
        q_slices = cuda.shared.array(_SLICES, _f32)
        k_slices = cuda.shared.array(_SLICES, _f32)
        v_panels = cuda.shared.array(panels_size, _f32)
        weights = cuda.shared.array(_WEIGHTS, _f32)
        # 32-bit integers throughout: numba would widen them, and registers are scarce.
        thread, kv_head = _i32(cuda.threadIdx.x), _i32(cuda.blockIdx.y)
        heads, d, kv_heads = _i32(q.shape[1]), _i32(q.shape[2]), _i32(k.shape[1])
        group = quotient(heads, kv_heads)
        last_row, last_total = _i32(q.shape[0] * group - 1), _i32(k.shape[0] - 1)
        # The last rows see the most keys: their blocks start first.
        first_row = _i32((cuda.gridDim.x - 1 - cuda.blockIdx.x) * _ROWS)
        lane_row, lane_channel = _i32(thread % _ROWS), _i32(thread // _ROWS * 8)
        q_row = _i32(min(first_row + lane_row, last_row))
        q_start = _row_start(q_row, group, heads, kv_head, d)
        kv_stride, kv_start = _i32(kv_heads * d), _i32(kv_head * d)
        column = _i32(lane_channel * _ROWS + lane_row)
        tile_row, tile_key = _i32(thread // 8 * 4), _i32(thread % 8 * 4)
        row = _i32(first_row + tile_row)
        # Rows beyond the end repeat the last one, and are not stored.
        last0 = _i32(start_pos + quotient(min(row, last_row), group))
        last1 = _i32(start_pos + quotient(min(row + 1, last_row), group))
        last2 = _i32(start_pos + quotient(min(row + 2, last_row), group))
        last3 = _i32(start_pos + quotient(min(row + 3, last_row), group))
        key = _i32(max(0, start_pos + quotient(first_row, group) - window + 1) // _KEYS * _KEYS)
        last_key = _i32(start_pos + quotient(min(first_row + _ROWS - 1, last_row), group))

        sums = zero_values()
        m0 = m1 = m2 = m3 = _NONE
        l0 = l1 = l2 = l3 = _f32(0.0)
        k_start = min(key + lane_row, last_total) * kv_stride + kv_start
        store_quad(q_slices, column, load_quad(q, q_start, lane_channel, d))
        store_quad(q_slices, column + _QUAD, load_quad(q, q_start, lane_channel + 4, d))
        store_quad(k_slices, column, load_quad(k, k_start, lane_channel, d))
        store_quad(k_slices, column + _QUAD, load_quad(k, k_start, lane_channel + 4, d))
        store_panel(v_panels, 0, thread, load_panel(v, thread, key, last_total, kv_stride, kv_start, d))
        cuda.syncthreads()
        slice_at, panel_at = _i32(0), _i32(0)
        while key <= last_key:
            products = zero_scores()
            channel = _i32(0)
            while channel < d:
                # What comes next: the step's next channels, or the first ones of the next step, loaded in any case (a
                # condition would move the loads down to where their values are stored).
                channel = _i32(channel + _DEPTH)
                wraps = channel >= d
                next_channel = _i32(lane_channel if wraps else channel + lane_channel)
                k_start = min(key + lane_row + (_KEYS if wraps else 0), last_total) * kv_stride + kv_start
                q_values = load_quad(q, q_start, next_channel, d)
                k_values = load_quad(k, k_start, next_channel, d)
                products = multiply(products, q_slices, k_slices, slice_at + tile_row, slice_at + tile_key)
                column = _i32(column ^ _SLICE)
                store_quad(q_slices, column, q_values)
                store_quad(k_slices, column, k_values)
                q_values = load_quad(q, q_start, next_channel + 4, d)
                k_values = load_quad(k, k_start, next_channel + 4, d)
                slice_at = _i32(slice_at + _MIDDLE)
                products = multiply(products, q_slices, k_slices, slice_at + tile_row, slice_at + tile_key)
                slice_at = _i32((slice_at + _MIDDLE) % _SLICES)
                store_quad(q_slices, column + _QUAD, q_values)
                store_quad(k_slices, column + _QUAD, k_values)
                cuda.syncthreads()

            s0 = row_scores(scores0(products), key + tile_key, last0, window, scale, softcap)
            s1 = row_scores(scores1(products), key + tile_key, last1, window, scale, softcap)
            s2 = row_scores(scores2(products), key + tile_key, last2, window, scale, softcap)
            s3 = row_scores(scores3(products), key + tile_key, last3, window, scale, softcap)
            n0, n1, n2, n3 = max_8((_greatest(s0), _greatest(s1), _greatest(s2), _greatest(s3)))
            n0, n1, n2, n3 = max(m0, n0), max(m1, n1), max(m2, n2), max(m3, n3)
            b0, b1, b2, b3 = _base(n0), _base(n1), _base(n2), _base(n3)
            f0, f1 = _f32(math.exp(m0 - b0)), _f32(math.exp(m1 - b1))
            f2, f3 = _f32(math.exp(m2 - b2)), _f32(math.exp(m3 - b3))
            m0, m1, m2, m3 = n0, n1, n2, n3
            l0, l1, l2, l3 = l0 * f0, l1 * f1, l2 * f2, l3 * f3
            sums = rescale(sums, (f0, f1, f2, f3))
            at = _i32(tile_row * _WEIGHTS_STRIDE + tile_key)
            l0 += _weigh(s0, b0, weights, at)
            l1 += _weigh(s1, b1, weights, at + _WEIGHTS_STRIDE)
            l2 += _weigh(s2, b2, weights, at + 2 * _WEIGHTS_STRIDE)
            l3 += _weigh(s3, b3, weights, at + 3 * _WEIGHTS_STRIDE)
            cuda.syncthreads()

            at = _i32(tile_row * _WEIGHTS_STRIDE)
            end = _i32(key + _KEYS)
            while key < end:
                key = _i32(key + panel)
                v_values = load_panel(v, thread, key, last_total, kv_stride, kv_start, d)
                sums = add_values(sums, weights, v_panels, at, panel_at + tile_key)
                at = _i32(at + panel)
                panel_at = _i32(panel_size - panel_at)
                store_panel(v_panels, panel_at, thread, v_values)
                cuda.syncthreads()

        l0, l1, l2, l3 = sum_8((l0, l1, l2, l3))
        one = _f32(1.0)
        sums = rescale(sums, (one / l0, one / l1, one / l2, one / l3))
        if row <= last_row:
            store_row(out, values0(sums), _row_start(row, group, heads, kv_head, d), tile_key, d)
        if row + 1 <= last_row:
            store_row(out, values1(sums), _row_start(row + 1, group, heads, kv_head, d), tile_key, d)
        if row + 2 <= last_row:
            store_row(out, values2(sums), _row_start(row + 2, group, heads, kv_head, d), tile_key, d)
        if row + 3 <= last_row:
            store_row(out, values3(sums), _row_start(row + 3, group, heads, kv_head, d), tile_key, d)

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
    scale * q k, then softcap * tanh(score / softcap) unless softcap is 0. `out` may be q. d is at most 256, heads a
    multiple of kv_heads. ShapeError on disagreement.
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
    if max(n * heads, (start_pos + n) * kv_heads) * d >= 1 << 31:
        raise ShapeError(
            f"causal_attention: {n} rows of {heads} heads over {start_pos + n} of {kv_heads}, with {d} channels, are "
            "too large for 32-bit places; take fewer rows at a time"
        )
    if n == 0:
        return
    width = next(w for w in _WIDTHS if d <= w)
    run = attention_kernel(width, min(4, granule_of(d, 4)), softcap > 0)
    grid = -(-n * (heads // kv_heads) // _ROWS), kv_heads
    run[grid, _THREADS, stream](
        q, k, v, out, np.int32(start_pos), np.float32(scale), np.int32(window or _NO_WINDOW), np.float32(softcap)
    )
