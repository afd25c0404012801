"""Rows that lie behind a cache's last and do not count yet: counted one by one, or forgotten (R10)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from frink_numba.errors import CacheError
from frink_numba.host.kv_cache import KVCache
from tests.cuda.tensor_stacks import random_rows
from tests.fakes import make_layer

LAYERS = [make_layer() for _ in range(3)]


def rows_of(cache: KVCache) -> list[np.ndarray]:
    return [part.copy() for layer in cache for part in layer.prefix()]


def flat(rows: list) -> list[np.ndarray]:
    return [part for pair in rows for part in pair]


def expect(cache: KVCache, *parts: list) -> None:
    """The cache's rows are these, one after the other."""
    want = [np.concatenate(part) for part in zip(*map(flat, parts), strict=True)]
    for got, other in zip(rows_of(cache), want, strict=True):
        np.testing.assert_array_equal(got, other.astype(got.dtype))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("lent", [False, True])
def test_rows_count_as_far_as_it_is_said(dtype: type, lent: bool) -> None:
    """Whether they were copied there or written in place; a lease tells how many of its rows became the cache's."""
    cache = KVCache(LAYERS, 100, dtype=dtype)
    first, rows = random_rows(LAYERS, 4), random_rows(LAYERS, 6, seed=5)
    cache.push(first)
    lease = None
    if lent:
        lease = cache.lend(6)
        for (k, v), (new_k, new_v) in zip(lease, rows, strict=True):
            k[...], v[...] = new_k, new_v
    cache.stage(rows if lease is None else lease)
    assert (cache.positions, cache.staged) == (4, 6)
    expect(cache, first)
    for counted in range(1, 7):
        cache.advance()
        assert (cache.positions, cache.staged) == (4 + counted, 6 - counted)
        assert lease is None or lease.pushed == counted
        expect(cache, first, [(k[:counted], v[:counted]) for k, v in rows])
    with pytest.raises(CacheError, match="cannot count 1 positions: 0 are staged"):
        cache.advance()


def test_no_more_counts_than_is_staged() -> None:
    cache = KVCache(LAYERS, 100)
    for n in (1, -1):
        with pytest.raises(CacheError, match="0 are staged"):
            cache.advance(n)
    cache.stage(random_rows(LAYERS, 3))
    with pytest.raises(CacheError, match="cannot count 4 positions: 3 are staged"):
        cache.advance(4)
    assert cache.positions == 0
    cache.advance(3)
    assert cache.positions == 3


CHANGES: dict[str, Callable[[KVCache], object]] = {
    "push": lambda cache: cache.push(random_rows(LAYERS, 1, seed=8)),
    "stage": lambda cache: cache.stage(random_rows(LAYERS, 0)),
    "lease": lambda cache: cache.lend(2),
    "lease of a layer": lambda cache: cache[1].lend(2),
    "tail of a layer": lambda cache: cache[2].tail(1),
    "truncation": lambda cache: cache.truncate(3),
    "growth": lambda cache: cache.reserve(90),
}


@pytest.mark.parametrize("name", CHANGES)
def test_any_other_change_forgets_what_does_not_count(name: str) -> None:
    """Fault 3: rows that somebody may have written over never become the cache's."""
    cache = KVCache(LAYERS, 100)
    first, rows = random_rows(LAYERS, 4), random_rows(LAYERS, 6, seed=5)
    cache.push(first)
    cache.stage(rows)
    cache.advance(2)
    at = cache.positions
    CHANGES[name](cache)
    assert cache.staged == 0
    with pytest.raises(CacheError):
        cache.advance()
    kept = min(at, cache.positions)
    expected = [(np.concatenate([k, new_k])[:kept], np.concatenate([v, new_v])[:kept]) for (k, v), (new_k, new_v) in
                zip(first, rows, strict=True)]  # fmt: skip
    for got, want in zip(rows_of(cache), flat(expected), strict=True):
        np.testing.assert_array_equal(got[:kept], want)


def test_an_eviction_forgets_them_too() -> None:
    """Fault 6: the rows that stay are moved, those that do not count are not."""
    windowed = [replace(layer, attention=replace(layer.attention, window=4)) for layer in LAYERS]
    cache = KVCache(windowed, 100)
    cache.push(random_rows(windowed, 20))
    cache.stage(random_rows(windowed, 3))
    assert cache.evict() > 0
    assert cache.staged == 0
    assert cache.positions == 20


def test_what_does_not_fit_is_refused_and_counts_nothing() -> None:
    cache = KVCache(LAYERS, 10)
    cache.push(random_rows(LAYERS, 6))
    cache.stage(random_rows(LAYERS, 3))
    with pytest.raises(CacheError, match="exceed the context"):
        cache.stage(random_rows(LAYERS, 5))
    assert (cache.positions, cache.staged) == (6, 0)
