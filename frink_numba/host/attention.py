"""Causal grouped-query attention of columns over K/V rows, in blocks of queries and keys (R11, R18).

The scores of a block are [keys, queries of a group of heads], so K and V are never repeated, one product serves the
group, and maximum and sum run along contiguous queries. Memory grows with the block: blocks of keys are joined by the
running maximum and sum of the online softmax (Milakov and Gimelshein, 2018). Blocks that the causal rule or the window
hides entirely are never touched.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from frink_numba.host.scratch import Scratch

_FLOAT32 = np.dtype(np.float32)  # compared with at every pass, where a type would have to be looked up
_COLUMNS = 384  # queries times heads of a group in a block
_LEAST_QUERIES = 16
_LEAST_KEYS = 512  # at least as many as queries in a block, so that a query's own key lies in its first block
_ONE_QUERY_KEYS = (
    256  # keys of one query's product: some BLAS have a quick way for small ones (AVX-512: 4 times at 512)
)
_SCORES = 1 << 18  # elements of a block of scores, unless the least keys ask for more: 1 MiB stays in the cache


@dataclass(frozen=True, slots=True)
class Visibility:
    """Which keys a query sees, and how scores are bent: key j is visible to query i iff 0 <= i - j < window."""

    scale: float
    window: int = 0  # 0: no lower limit
    softcap: float = 0.0  # 0: none
    sinks: np.ndarray | None = None  # float32 [n_heads]


def attend(
    q: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    first: int,
    start: int,
    rule: Visibility,
    out: np.ndarray,
    scratch: Scratch,
) -> None:
    """The value sums of queries at positions start .. start+n-1.

    `q` and `out` are float32 [n_heads, head_dim, n], C-contiguous; `q` is spoiled. `keys` and `values` [rows,
    n_kv_heads, head_dim], float32 or float16, hold the positions first .. start+n-1. Head h reads K/V head
    h // (n_heads / n_kv_heads).
    """
    n_heads, head_dim, n = q.shape
    n_kv_heads = keys.shape[1]
    group = n_heads // n_kv_heads
    if n == 1 and keys.dtype == _FLOAT32:
        if rule.window:
            low = max(0, start + 1 - rule.window - first)
            keys, values = keys[low:], values[low:]
        shape = (n_kv_heads, group, head_dim)
        _attend_one(q.reshape(shape), keys, values, rule, out.reshape(shape), scratch)
        return
    step = min(n, max(_LEAST_QUERIES, _COLUMNS // group))
    for kv_head in range(n_kv_heads):
        heads = slice(kv_head * group, (kv_head + 1) * group)
        block = _Block(keys[:, kv_head], values[:, kv_head], first, rule, heads, scratch)
        for a in range(0, n, step):
            b = min(a + step, n)
            block.attend(q[heads, :, a:b], start + a, out[heads, :, a:b])


def _attend_one(
    q: np.ndarray, keys: np.ndarray, values: np.ndarray, rule: Visibility, out: np.ndarray, scratch: Scratch
) -> None:
    """One query [n_kv_heads, group, head_dim] that sees all of `keys`: as few calls as can be."""
    n_kv_heads, group, _ = q.shape
    scores = scratch.array("scores", n_kv_heads, group, keys.shape[0])
    np.multiply(q, rule.scale / rule.softcap if rule.softcap else rule.scale, out=q)
    if keys.shape[0] <= _ONE_QUERY_KEYS:
        np.matmul(q, keys.transpose(1, 2, 0), out=scores)
    else:
        _one_query_scores(q, keys, scores)
    if rule.softcap:
        np.tanh(scores, out=scores)
        np.multiply(scores, rule.softcap, out=scores)
    peak = np.maximum.reduce(scores, axis=2, keepdims=True)
    if rule.sinks is not None:
        sinks = rule.sinks.reshape(n_kv_heads, group, 1)
        np.maximum(peak, sinks, out=peak)
    np.subtract(scores, peak, out=scores)
    np.exp(scores, out=scores)
    total = np.add.reduce(scores, axis=2, keepdims=True)
    if rule.sinks is not None:
        total += np.exp(sinks - peak)
    np.matmul(scores, values.transpose(1, 0, 2), out=out)
    np.divide(out, total, out=out)


def _one_query_scores(q: np.ndarray, keys: np.ndarray, scores: np.ndarray) -> None:
    """scores[h] = q[h] keys[:, h]^T, in as many equal pieces as there are, and a rest."""
    n_kv_heads, group, head_dim = q.shape
    pieces, rest = divmod(keys.shape[0], _ONE_QUERY_KEYS)
    even = pieces * _ONE_QUERY_KEYS
    if rest:
        np.matmul(q, keys[even:].transpose(1, 2, 0), out=scores[:, :, even:])
    if pieces:
        by_piece = keys[:even].reshape(pieces, _ONE_QUERY_KEYS, n_kv_heads, head_dim).transpose(2, 0, 3, 1)
        out = scores[:, :, :even].reshape(n_kv_heads, group, pieces, _ONE_QUERY_KEYS).transpose(0, 2, 1, 3)
        np.matmul(q[:, None], by_piece, out=out)


class _Block:
    """One K/V head's rows and the heads of its group, for block after block of queries."""

    def __init__(
        self, keys: np.ndarray, values: np.ndarray, first: int, rule: Visibility, heads: slice, scratch: Scratch
    ) -> None:
        self.keys, self.values, self.first, self.rule, self.scratch = keys, values, first, rule, scratch
        self.sinks = None if rule.sinks is None else rule.sinks[heads]

    def attend(self, q: np.ndarray, start: int, out: np.ndarray) -> None:
        """Value sums of the queries `q` [group, head_dim, n] at positions start .. start+n-1 into `out`, its like."""
        group, head_dim, n = q.shape
        rule, array = self.rule, self.scratch.array
        queries = array("queries", head_dim, group, n)
        scale = rule.scale / rule.softcap if rule.softcap else rule.scale
        np.multiply(q.transpose(1, 0, 2), scale, out=queries)
        queries = queries.reshape(head_dim, group * n)

        columns = group * n
        peak, total = array("peak", columns), array("total", columns)
        sums, part = array("value sums", head_dim, columns), array("value part", head_dim, columns)
        high = start + n - self.first  # rows below it are visible to the last query
        low = max(0, start - rule.window + 1 - self.first) if rule.window else 0
        step = max(_LEAST_KEYS, _SCORES // columns)
        # From the last key down: the first block holds every query's own key, so no maximum is ever -inf.
        for b in range(high, low, -step):
            a = max(low, b - step)
            scores = self._scores(queries, a, b, start, n)
            values = self._rows("values", self.values, a, b)
            if b == high:
                np.maximum.reduce(scores, axis=0, out=peak)
                np.subtract(scores, peak, out=scores)
                np.exp(scores, out=scores)
                np.add.reduce(scores, axis=0, out=total)
                np.matmul(values.T, scores, out=sums)
                continue
            new_peak = np.maximum.reduce(scores, axis=0)
            np.maximum(new_peak, peak, out=new_peak)
            np.subtract(scores, new_peak, out=scores)
            np.exp(scores, out=scores)
            self._shrink(peak, new_peak, total, sums)
            total += np.add.reduce(scores, axis=0)
            np.matmul(values.T, scores, out=part)
            np.add(sums, part, out=sums)
        if self.sinks is not None:
            sinks = np.repeat(self.sinks, n)
            self._shrink(peak, np.maximum(peak, sinks), total, sums)
            total += np.exp(sinks - peak)
        np.divide(sums.reshape(head_dim, group, n).transpose(1, 0, 2), total.reshape(group, 1, n), out=out)

    def _scores(self, queries: np.ndarray, a: int, b: int, start: int, n: int) -> np.ndarray:
        """Scores [b - a, group * n] of rows a .. b-1, hidden ones at -inf."""
        rule, columns = self.rule, queries.shape[1]
        scores = self.scratch.array("scores", b - a, columns)
        np.matmul(self._rows("keys", self.keys, a, b), queries, out=scores)
        if rule.softcap:
            np.tanh(scores, out=scores)
            np.multiply(scores, rule.softcap, out=scores)
        by_head = scores.reshape(b - a, columns // n, n)
        positions = np.arange(start, start + n)
        # Only the rows at either edge are hidden from some of the queries and visible to others.
        above = max(a, start + 1 - self.first)
        if above < b:
            hidden = np.arange(above, b)[:, None] + self.first > positions
            np.copyto(by_head[above - a :], -np.inf, where=hidden[:, None, :])
        if rule.window:
            below = min(b, start + n - rule.window - self.first)
            if a < below:
                hidden = np.arange(a, below)[:, None] + (self.first + rule.window) <= positions
                np.copyto(by_head[: below - a], -np.inf, where=hidden[:, None, :])
        return scores

    def _rows(self, name: str, rows: np.ndarray, a: int, b: int) -> np.ndarray:
        """Rows a .. b-1 as float32: a view, or a converted copy."""
        if rows.dtype == _FLOAT32:
            return rows[a:b]
        converted = self.scratch.array(name, b - a, rows.shape[1])
        converted[...] = rows[a:b]
        return converted

    @staticmethod
    def _shrink(peak: np.ndarray, new_peak: np.ndarray, total: np.ndarray, sums: np.ndarray) -> None:
        """Bring sums taken under `peak` to `new_peak`, which takes its place."""
        factor = np.exp(peak - new_peak)
        np.multiply(total, factor, out=total)
        np.multiply(sums, factor, out=sums)
        peak[...] = new_peak
