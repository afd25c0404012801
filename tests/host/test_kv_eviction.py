"""Eviction from the KV cache: nothing that a later query sees, all layers or none (fault 6)."""

from __future__ import annotations

import numpy as np
import pytest

from frink_numba.errors import CacheError
from frink_numba.host import layer_kv as module
from frink_numba.host.kv_cache import KVCache
from tests.host.cache_rows import Rows, draw, layers, same, snapshot


def test_eviction_keeps_what_a_later_query_sees() -> None:
    """Fault 6: repeated eviction never changes a row. Window 4: query 10 sees rows 7, 8, 9 and its own."""
    cache = KVCache(layers(0, 4), 1000)
    everything: list[Rows] = []
    for seed, n in enumerate((10, 1, 1, 70, 2, 1)):
        rows = draw(cache, n, seed)
        everything.append(rows)
        cache.push(rows)
        cache.evict()
        assert (cache[0].rows, cache[1].rows) == (cache.positions, 3)
        whole = [np.concatenate([rows[1][part] for rows in everything]) for part in (0, 1)]
        for kept, part in zip(cache[1].prefix(), whole, strict=True):
            np.testing.assert_array_equal(kept, part[-3:])
    assert cache.positions == 85
    assert cache.evict() == 0
    short = KVCache(layers(4), 100)
    short.push(draw(short, 3))
    assert short.evict() == 0
    assert short[0].rows == 3


def test_eviction_frees_memory() -> None:
    cache = KVCache(layers(4), 1000)
    cache.push(draw(cache, 500))
    before = cache.nbytes
    assert cache.evict() == 497
    assert cache.nbytes < before / 100


def test_eviction_is_refused_where_it_would_change_the_answer() -> None:
    """Fault 6: the named refusal."""
    cache = KVCache(layers(0, 0), 100)
    cache.push(draw(cache, 5))
    with pytest.raises(CacheError, match="no layer has a sliding window"):
        cache.evict()
    assert cache[0].rows == 5


def test_truncating_into_evicted_rows_is_refused() -> None:
    cache = KVCache(layers(0, 4), 100)
    cache.push(draw(cache, 10))
    cache.evict()  # keeps rows 7, 8, 9 of layer 1
    before = snapshot(cache)
    for n in (1, 6, 9):  # a query at 9 sees row 6
        with pytest.raises(CacheError, match="layer 1: cannot truncate to"):
            cache.truncate(n)
        assert same(before, snapshot(cache))
    cache.push(draw(cache, 5, 1))
    cache.truncate(10)  # a query at 10 sees rows 7, 8, 9
    assert cache[1].rows == 3
    cache.truncate(0)  # nothing is missed: start over
    assert [(c.positions, c.rows) for c in cache] == [(0, 0)] * 2
    rows = draw(cache, 2, 2)
    cache.push(rows)
    np.testing.assert_array_equal(cache[1].prefix()[0], rows[1][0])


def test_out_of_memory_while_evicting_leaves_every_layer_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KVCache(layers(4, 4), 100)
    cache.push(draw(cache, 20))
    before = snapshot(cache)
    real, calls = np.empty, 0

    def failing(*arguments: object, **named: object) -> np.ndarray:
        nonlocal calls
        calls += 1
        if calls == 3:  # the second layer's K
            raise MemoryError
        return real(*arguments, **named)  # type: ignore[call-overload, no-any-return]

    with monkeypatch.context() as patch:
        patch.setattr(module.np, "empty", failing)
        with pytest.raises(MemoryError):
            cache.evict()
    assert same(before, snapshot(cache))
