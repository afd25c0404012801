"""Attention of a block of columns over K/V rows in blocks of keys that begin at fixed positions (R11, R18).

As `attention.py`, but which keys are summed together, and in what order, follows from a query's position alone: the
results do not depend on how a text is cut into chunks (`aligned.py`). Blocks of keys are joined in ascending order.
"""

from __future__ import annotations

import numpy as np

from frink_numba.host.attention import Visibility
from frink_numba.host.scratch import Scratch

_KEYS = 256  # of a block, a multiple of the width of a block of columns
_FLOAT32 = np.dtype(np.float32)
_NONE = np.float32(-np.inf)


def attend_aligned(
    q: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    first: int,
    start: int,
    rule: Visibility,
    out: np.ndarray,
    scratch: Scratch,
) -> None:
    """The value sums of queries at positions start .. start+n-1, `start` a multiple of n.

    `q` and `out` are float32 [n_heads, head_dim, n]. `keys` and `values` [rows, n_kv_heads, head_dim], float32 or
    float16, hold the positions from `first` on, up to the last query that is no padding.
    """
    n_heads, head_dim, n = q.shape
    n_kv_heads = keys.shape[1]
    group = n_heads // n_kv_heads
    columns, array = group * n, scratch.array
    queries = array("queries", n_kv_heads, head_dim, group, n)
    scale = rule.scale / rule.softcap if rule.softcap else rule.scale
    np.multiply(q.reshape(n_kv_heads, group, head_dim, n).transpose(0, 2, 1, 3), scale, out=queries)
    queries = queries.reshape(n_kv_heads, head_dim, columns)
    peak, total = array("peak", n_kv_heads, 1, columns), array("total", n_kv_heads, 1, columns)
    sums, part = array("value sums", n_kv_heads, head_dim, columns), array("value part", n_kv_heads, head_dim, columns)
    peak.fill(_NONE)
    total.fill(0)
    sums.fill(0)
    scores = array("scores", n_kv_heads, _KEYS, columns)
    positions = np.arange(start, start + n)
    low = max(0, start + 1 - rule.window) // _KEYS if rule.window else 0
    for begin in range(low * _KEYS, start + n, _KEYS):
        np.matmul(_block("keys", keys, begin - first, scratch).transpose(1, 0, 2), queries, out=scores)
        if rule.softcap:
            np.tanh(scores, out=scores)
            np.multiply(scores, rule.softcap, out=scores)
        _hide(scores.reshape(n_kv_heads, _KEYS, group, n), begin, positions, rule.window)
        new_peak = np.maximum.reduce(scores, axis=1, keepdims=True)
        np.maximum(new_peak, peak, out=new_peak)
        base = np.where(new_peak == _NONE, np.float32(0), new_peak)  # a query that has seen no key yet
        np.subtract(scores, base, out=scores)
        np.exp(scores, out=scores)
        _shrink(np.exp(peak - base), total, sums)
        np.add(total, np.add.reduce(scores, axis=1, keepdims=True), out=total)
        np.matmul(_block("values", values, begin - first, scratch).transpose(1, 2, 0), scores, out=part)
        np.add(sums, part, out=sums)
        peak[...] = new_peak
    if rule.sinks is not None:
        sinks = np.repeat(rule.sinks.reshape(n_kv_heads, 1, group), n, axis=2)
        base = np.maximum(peak, sinks)
        _shrink(np.exp(peak - base), total, sums)
        total += np.exp(sinks - base)
    np.divide(sums, total, out=sums)
    by_head = sums.reshape(n_kv_heads, head_dim, group, n).transpose(0, 2, 1, 3)
    out.reshape(n_kv_heads, group, head_dim, n)[...] = by_head


def _hide(scores: np.ndarray, begin: int, positions: np.ndarray, window: int) -> None:
    """Minus infinity where a query at `positions` does not see a key at begin .. of scores [.., keys, group, n]."""
    end = begin + scores.shape[1]
    if end - 1 <= positions[0] and not (window and begin <= positions[-1] - window):
        return
    key = np.arange(begin, end)[:, None]
    hidden = key > positions
    if window:
        hidden |= key <= positions - window
    np.copyto(scores, _NONE, where=hidden[None, :, None, :])


def _shrink(factor: np.ndarray, total: np.ndarray, sums: np.ndarray) -> None:
    np.multiply(total, factor, out=total)
    np.multiply(sums, factor, out=sums)


def _block(name: str, rows: np.ndarray, first: int, scratch: Scratch) -> np.ndarray:
    """_KEYS rows from row `first` on, float32; zeros where there are none, which nobody sees."""
    last = first + _KEYS
    if first >= 0 and last <= rows.shape[0] and rows.dtype == _FLOAT32 and rows.flags.c_contiguous:
        return rows[first:last]
    block = scratch.array(name, _KEYS, *rows.shape[1:])
    a = max(first, 0)
    b = max(a, min(last, rows.shape[0]))  # with a window, all of them may be gone
    block[: a - first] = 0
    block[a - first : b - first] = rows[a:b]
    block[b - first :] = 0
    return block
