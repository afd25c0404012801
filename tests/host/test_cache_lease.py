"""Room in all layers of a cache at once: what is written there counts with one push, and nothing else does."""

from __future__ import annotations

import ctypes
import gc
import weakref

import numpy as np
import pytest

from frink_numba.errors import CacheError
from frink_numba.host.kv_cache import KVCache
from tests.cuda.steps import rows_of, small_model

LAYERS = [*small_model(0, 2), *small_model(1, 1, kv_heads=1), *small_model(2, 1, window=4)]
CONTEXT = 100


def drawn(n: int, seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(seed)
    shapes = [(n, layer.attention.n_kv_heads, layer.attention.head_dim) for layer in LAYERS]
    return [tuple(rng.normal(size=shape).astype(np.float32) for _ in "kv") for shape in shapes]  # type: ignore[misc]


def write(lease, rows) -> None:
    """As a device does: by the addresses."""
    for (k, v), k_at, v_at in zip(rows, lease.k, lease.v, strict=True):
        ctypes.memmove(int(k_at), k.ctypes.data, k.nbytes)
        ctypes.memmove(int(v_at), v.ctypes.data, v.nbytes)


def plain(*parts: list) -> KVCache:
    cache = KVCache(LAYERS, CONTEXT)
    for rows in parts:
        cache.push(rows)
    return cache


def assert_same(one: KVCache, other: KVCache) -> None:
    assert one.positions == other.positions
    for mine, theirs in zip(rows_of(one), rows_of(other), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_rows_written_by_address_count_with_one_push():
    """R9, R10: before the push nothing counts; growing in between is no harm."""
    cache, parts = KVCache(LAYERS, CONTEXT), [drawn(n, n) for n in (3, 1, 70, 26)]
    for at, rows in enumerate(parts):
        lease = cache.lend(len(rows[0][0]))
        assert lease.lent_by is cache
        write(lease, rows)
        assert_same(cache, plain(*parts[:at]))
        assert lease.pushed == 0
        cache.push(lease)
        assert lease.pushed == lease.size == len(rows[0][0])
    assert_same(cache, plain(*parts))
    with pytest.raises(CacheError, match="exceed the context of 100"):
        cache.lend(1)


def test_it_is_a_sequence_of_the_layers_rows():
    cache, rows = plain(drawn(5)), drawn(2, 1)
    lease = cache.lend(2)
    write(lease, rows)
    assert len(lease) == len(LAYERS)
    for (k, v), (own_k, own_v) in zip(rows, lease, strict=True):
        np.testing.assert_array_equal(k, own_k)
        np.testing.assert_array_equal(v, own_v)
    assert [k.shape for k, _ in lease[1:3]] == [k.shape for k, _ in rows[1:3]]


VOID = {
    "another lease": lambda cache: cache.lend(2),
    "a layer's lease": lambda cache: cache[1].lend(2),
    "a layer's tail": lambda cache: cache[2].tail(1),
    "a push of other rows": lambda cache: cache.push(drawn(2, 7)),
    "a truncation": lambda cache: cache.truncate(4),
}


@pytest.mark.parametrize("what", VOID)
def test_a_void_lease_vouches_for_nothing(what: str):
    """Its rows may still be pushed, as whatever lies there now, but the lease says that they are not its own."""
    cache = plain(drawn(6))
    cache.reserve(10)
    lease = cache.lend(2)
    write(lease, drawn(2, 3))
    VOID[what](cache)
    before = cache.positions
    cache.push(lease)
    assert (cache.positions, lease.pushed) == (before + 2, 0)


def test_a_lease_voids_those_of_the_layers():
    cache = plain(drawn(6))
    single = [layer.lend(2) for layer in cache]
    cache.lend(2)
    cache.push([(lease.k, lease.v) for lease in single])
    assert [lease.pushed for lease in single] == [0] * len(LAYERS)


def test_rows_that_are_staged_count_one_by_one():
    cache = plain(drawn(6))
    lease = cache.lend(3)
    write(lease, drawn(3, 3))
    cache.stage(lease)
    cache.advance(2)
    assert (cache.positions, lease.pushed, cache.staged) == (8, 2, 1)
    cache.truncate(7)
    assert cache.staged == 0


def test_memory_that_was_left_is_not_read():
    cache = plain(drawn(6))
    lease = cache.lend(2)
    cache.push(drawn(80))
    with pytest.raises(CacheError, match="left since"):
        cache.push(lease)
    assert cache.positions == 86


def test_a_cache_with_evicted_rows_lends_layer_by_layer():
    """R12."""
    cache = plain(drawn(9))
    assert cache.evict() > 0
    with pytest.raises(CacheError, match="evicted"):
        cache.lend(1)
    cache.truncate(0)
    assert cache.lend(1).first == 0


def test_versions_tell_what_all_layers_kept():
    cache = plain(drawn(9))
    version = cache.version
    cache.push(drawn(3))
    assert cache.unchanged_since(version) == 12
    cache.truncate(7)
    cache.push(drawn(9, 5))
    assert (cache.version > version, cache.unchanged_since(version)) == (True, 7)
    assert cache.unchanged_since(cache.version) == 16
    cache.evict()
    assert cache.unchanged_since(version) == 0


def test_a_lease_keeps_nothing_alive():
    """No cycle: a cache that is dropped while a lease is out frees its memory at once."""
    gc.disable()
    try:
        cache = plain(drawn(6))
        lease = cache.lend(2)
        held = weakref.ref(cache)
        del cache
        assert held() is None
        assert lease.lent_by is None
        with pytest.raises(CacheError):
            lease[0]
    finally:
        gc.enable()
