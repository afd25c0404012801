"""The KV cache: all layers or none, growth, truncation, stores (R9, R10, R12; faults 3, 4, 8)."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from frink_numba.errors import CacheError
from frink_numba.host import layer_kv as module
from frink_numba.host.kv_cache import KVCache
from tests.host.cache_rows import draw, layers, same, snapshot


def test_rows_come_back_in_the_order_of_positions() -> None:
    cache = KVCache(layers(0, 0, 0), 1000)
    pushed = [draw(cache, n, n) for n in (1, 3, 63, 64, 200)]
    for rows in pushed:
        cache.push(rows)
    assert cache.positions == 331
    assert len(cache) == 3
    for index, layer in enumerate(cache):
        assert layer is cache[index]
        assert (layer.positions, layer.rows) == (331, 331)
        for part, kept in enumerate(layer.prefix()):
            np.testing.assert_array_equal(kept, np.concatenate([rows[index][part] for rows in pushed]))


def test_capacity_doubles_up_to_the_context() -> None:
    cache = KVCache(layers(0), 300)
    row_bytes = 2 * 4 * 4
    sizes = []
    for _ in range(300):
        cache.push(draw(cache, 1))
        sizes.append(cache.nbytes // row_bytes)
    assert sorted(set(sizes)) == [64, 128, 256, 300]
    with pytest.raises(CacheError, match="1 positions after 300 exceed the context of 300"):
        cache.push(draw(cache, 1))


def test_a_blank_cache_is_like_the_one_it_is_of() -> None:
    """Same layers, length, dtype and source of memory, which is asked for nothing until there are rows."""
    asked = []
    cache = KVCache(layers(0, 3), 40, dtype=np.float16, allocate=lambda n: asked.append(n) or np.empty(n, np.uint8))
    rows = draw(cache, 5)
    cache.push(rows)
    before, blank = sum(asked), cache.blank()
    assert (blank.layers is cache.layers, blank.context_length, blank.dtype) == (True, 40, np.float16)
    assert (blank.positions, blank.nbytes, sum(asked)) == (0, 0, before)
    blank.push(rows)
    assert sum(asked) == 2 * before
    assert (cache.positions, blank.positions) == (5, 5)


def test_prefix_is_a_read_only_view() -> None:
    cache = KVCache(layers(0), 10)
    cache.push(draw(cache, 2))
    k, v = cache[0].prefix()
    assert np.shares_memory(k, cache[0].prefix()[0])
    for part in (k, v):
        with pytest.raises(ValueError, match="read-only"):
            part[0] = 1


def test_what_is_written_to_the_tail_counts_after_a_push() -> None:
    """A backend may write rows in place: the push then copies them onto themselves."""
    cache = KVCache(layers(0, 0), 100)
    cache.push(draw(cache, 2))
    rows = draw(cache, 3, 1)
    tails = [layer.tail(3) for layer in cache]
    for tail, source in zip(tails, rows, strict=True):
        for part in (0, 1):
            tail[part][...] = source[part]
    assert cache.positions == 2
    assert [layer.prefix()[0].shape[0] for layer in cache] == [2, 2]
    cache.push(tails)
    for layer, source in zip(cache, rows, strict=True):
        for kept, part in zip(layer.prefix(), source, strict=True):
            np.testing.assert_array_equal(kept[2:], part)


def test_a_tail_is_copied_once_it_is_not_the_tail_any_more() -> None:
    """A tail given out before the rows moved: pushed later, its rows land where the tail is now."""
    cache = KVCache(layers(0), 100)
    cache.push(draw(cache, 10))
    tail = cache[0].tail(2)
    source = draw(cache, 2, 1)[0]
    for part in (0, 1):
        tail[part][...] = source[part]
    cache.truncate(3)
    cache.push([tail])
    assert cache.positions == 5
    for part in (0, 1):
        np.testing.assert_array_equal(cache[0].prefix()[part][3:], source[part])
    tail = cache[0].tail(2)
    for part in (0, 1):
        tail[part][...] = source[part]
    cache[0].reserve(90)  # moves to a larger buffer
    cache.push([tail])
    for part in (0, 1):
        np.testing.assert_array_equal(cache[0].prefix()[part][5:], source[part])


def test_a_tail_left_unpushed_is_forgotten() -> None:
    """Fault 3: the counts have one owner, so a tail that nobody pushed does not shift the next rows."""
    cache = KVCache(layers(0), 100)
    first = draw(cache, 4, 1)
    cache.push(first)
    for part in cache[0].tail(5):
        part.fill(np.nan)
    second = draw(cache, 4, 2)
    cache.push(second)
    np.testing.assert_array_equal(cache[0].prefix()[0], np.concatenate([first[0][0], second[0][0]]))


@pytest.mark.parametrize("wrong", ["layers", "batch", "heads", "width", "value width", "dtype", "order"])
def test_a_push_that_does_not_fit_changes_nothing(wrong: str) -> None:
    cache = KVCache(layers(0, 0, 0), 100)
    cache.push(draw(cache, 4))
    before = snapshot(cache)
    rows = draw(cache, 3, 1)
    k, v = rows[2]
    match wrong:
        case "layers":
            rows = rows[:2]
        case "batch":
            rows[2] = (k[:2], v[:2])
        case "heads":
            rows[2] = (k[:, :2], v[:, :2])
        case "width":
            rows[2] = (k[..., :3], v)
        case "value width":
            rows[2] = (k, v[..., :3])
        case "dtype":
            rows[2] = (k.astype(np.float64), v)
        case "order":
            rows = rows[::-1]
    with pytest.raises(CacheError, match=r"layer [02]: .*(\[|float64)|rows of 2 layers do not fit a cache of 3"):
        cache.push(rows)
    assert same(before, snapshot(cache))
    cache.push(draw(cache, 3, 1))
    assert cache.positions == 7


def test_layers_that_grow_together_share_a_block() -> None:
    """K and V of one layer after the other at equal distances: a device copies the new rows of all at once."""
    blocks: list[np.ndarray] = []

    def allocate(nbytes: int) -> np.ndarray:
        blocks.append(np.empty(nbytes, np.uint8))
        return blocks[-1]

    alike = layers(0)[:1] * 3
    cache, clean = (KVCache(alike, 1000, allocate=given) for given in (allocate, None))
    for each in (cache, clean):
        each.push(draw(each, 5))
        each.reserve(200)
        each.push(draw(each, 100, 1))
    assert same(snapshot(cache), snapshot(clean))
    assert len([block for block in blocks if block.nbytes]) == 2
    leases = [layer.lend(7) for layer in cache]
    places = [rows.ctypes.data for lease in leases for rows in (lease.k, lease.v)]
    assert len(set(np.diff(places))) == 1
    assert places[0] < blocks[-1].ctypes.data + blocks[-1].nbytes


def test_a_lease_tells_of_its_push() -> None:
    """Only the very rows that were lent, where they were lent, count as pushed."""
    cache = KVCache(layers(0, 0, 0), 1000)
    cache.push(draw(cache, 5))
    leases = [layer.lend(2) for layer in cache]
    for lease, (k, v) in zip(leases, draw(cache, 2, 1), strict=True):
        lease.k[:], lease.v[:] = k, v
    assert not any(lease.pushed for lease in leases)
    cache.push([(lease.k, lease.v) for lease in leases])
    assert all(lease.pushed and lease.first == 5 for lease in leases)
    void = [layer.lend(2) for layer in cache]
    cache.push(draw(cache, 2, 2))
    assert not any(lease.pushed for lease in void)
    late = [layer.lend(2) for layer in cache]
    cache.truncate(3)
    cache.push([(lease.k, lease.v) for lease in late])
    assert not any(lease.pushed for lease in late)


def test_how_many_rows_a_change_left() -> None:
    """What a mirror may keep: the rows before the earliest truncation since; nothing after an eviction."""
    cache = KVCache(layers(0, 0, 4), 1000)
    cache.push(draw(cache, 50))
    whole, windowed = cache[0], cache[2]
    version = whole.version
    assert whole.unchanged_since(version) == 50
    cache.truncate(30)
    cache.push(draw(cache, 20, 1))
    cache.truncate(40)
    cache.push(draw(cache, 20, 2))
    assert whole.unchanged_since(version) == 30
    assert whole.unchanged_since(version + 1) == 40
    assert whole.unchanged_since(whole.version) == 60
    version = windowed.version
    cache.evict()
    assert windowed.unchanged_since(version) == 0
    assert whole.unchanged_since(whole.version) == 60


@pytest.mark.parametrize("fails_at", range(1, 6))
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_out_of_memory_leaves_every_layer_as_it_was(
    fails_at: int, dtype: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault 4: memory runs out at the k-th buffer, of layers that grow alone or of all; a retry equals a clean run."""
    description = layers(0, 0, 0)
    cache, clean = KVCache(description, 1000, dtype=dtype), KVCache(description, 1000, dtype=dtype)
    for each in (cache, clean):
        each.push(draw(each, 60))
    before = snapshot(cache)
    real, calls = np.empty, 0

    def failing(*arguments: object, **named: object) -> np.ndarray:
        nonlocal calls
        calls += 1
        if calls == fails_at:
            raise MemoryError
        return real(*arguments, **named)  # type: ignore[call-overload, no-any-return]

    rows = draw(cache, 40, 1)

    def grow() -> None:
        cache[0].lend(40)
        cache[1].lend(40)
        cache.push(rows)  # the third layer

    with monkeypatch.context() as patch:
        patch.setattr(module.np, "empty", failing)
        with pytest.raises(MemoryError):
            grow()
    assert calls == fails_at
    assert same(before, snapshot(cache))
    cache.push(rows)
    clean.push(rows)
    assert same(snapshot(clean), snapshot(cache))


@pytest.mark.parametrize("fails_at", range(6))
def test_a_copy_that_fails_leaves_every_layer_as_it_was(fails_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """R10: whatever stops a push half way, an interrupt included."""
    cache = KVCache(layers(0, 0, 0), 100)
    cache.push(draw(cache, 4))
    before = snapshot(cache)
    real, calls = module.store_rows, 0

    def interrupted(rows: np.ndarray, out: np.ndarray, layer: int) -> None:
        nonlocal calls
        if calls == fails_at:
            raise KeyboardInterrupt
        calls += 1
        real(rows, out, layer)

    with monkeypatch.context() as patch:
        patch.setattr(module, "store_rows", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cache.push(draw(cache, 3, 1))
    assert same(before, snapshot(cache))


def test_float16_rounds_once_and_refuses_what_it_cannot_hold() -> None:
    cache = KVCache(layers(0, 0), 100, dtype=np.float16)
    rows = draw(cache, 3)
    cache.push(rows)
    np.testing.assert_array_equal(cache[1].prefix()[1], rows[1][1].astype(np.float16))
    before = snapshot(cache)
    too_large = draw(cache, 3, 1)
    too_large[1][0][2, 1, 3] = -70000
    with pytest.raises(CacheError, match=r"layer 1: .*70000, beyond float16"):
        cache.push(too_large)
    assert same(before, snapshot(cache))
    assert cache.nbytes == KVCache(layers(0, 0), 100).nbytes + 64 * (2 * 4 + 4 * 4) * 2


def test_stored_float16_rows_can_be_pushed() -> None:
    half = KVCache(layers(0), 10, dtype=np.float16)
    half.push(draw(half, 3))
    for dtype in (np.float16, np.float32):
        other = KVCache(layers(0), 10, dtype=dtype)
        other.push([half[0].prefix()])
        np.testing.assert_array_equal(other[0].prefix()[0], half[0].prefix()[0])


def test_truncate() -> None:
    cache = KVCache(layers(0, 5), 100)
    first = draw(cache, 10)
    cache.push(first)
    cache.truncate(6)
    assert [(c.positions, c.rows) for c in cache] == [(6, 6)] * 2
    second = draw(cache, 2, 1)
    cache.push(second)
    np.testing.assert_array_equal(cache[1].prefix()[1], np.concatenate([first[1][1][:6], second[1][1]]))
    for n in (-1, 9):
        with pytest.raises(CacheError, match=f"8 positions to {n}"):
            cache.truncate(n)
    cache.truncate(0)
    assert cache.positions == cache[0].rows == 0


def test_version_changes_when_a_mirror_would_be_stale() -> None:
    """New rows behind the last can be copied on; after a truncation or an eviction a mirror must be made anew."""
    cache = KVCache(layers(0, 4), 100)
    start = [c.version for c in cache]
    cache.push(draw(cache, 10))
    cache.push(draw(cache, 60))
    cache.truncate(70)
    assert [c.version for c in cache] == start
    cache.evict()
    assert cache[0].version == start[0]
    assert cache[1].version != start[1]
    cache.push(draw(cache, 5))
    before = [c.version for c in cache]
    cache.truncate(70)
    assert all(c.version != old for c, old in zip(cache, before, strict=True))


def test_the_context_bounds_tails_and_pushes() -> None:
    """Fault 8: n + 1 positions are a named error, the cache untouched."""
    cache = KVCache(layers(0), 8)
    cache.push(draw(cache, 8))
    cache.truncate(5)
    assert cache[0].tail(3)[0].shape[0] == 3
    with pytest.raises(CacheError, match="4 positions after 5 exceed the context of 8"):
        cache[0].tail(4)
    with pytest.raises(CacheError, match="4 positions after 5 exceed the context of 8"):
        cache.push(draw(cache, 4))
    assert cache.positions == 5


@pytest.mark.parametrize(
    ("context", "dtype"),
    [
        (0, np.float32),
        (10.5, np.float32),
        (True, np.float32),
        ("8", np.float32),
        (8, np.float64),
        (8, np.int8),
        (8, "foo"),
        (8, object()),
    ],
)
def test_a_cache_that_cannot_be_is_refused(context: int, dtype: type) -> None:
    with pytest.raises(CacheError, match=r"float64|int8|at least 1|'foo'|object"):
        KVCache(layers(0), context, dtype=dtype)


def test_memory_goes_when_the_last_name_goes() -> None:
    """Without waiting for the collector: prompt after prompt in a new cache must not pile up."""
    gc.disable()
    try:
        cache = KVCache(layers(0, 0), 1 << 16)
        cache.push(draw(cache, 1))
        cache[0].tail(1 << 15)
        gone = weakref.ref(cache[0])
        del cache
        assert gone() is None
    finally:
        gc.enable()


def test_it_says_what_it_is() -> None:
    cache = KVCache(layers(0, 0), 100, dtype=np.float16)
    cache.push(draw(cache, 3))
    assert repr(cache) == "<KVCache of 2 layers, 3 of 100 positions, float16>"
    assert [layer.index for layer in cache[:1]] == [0]


@pytest.mark.parametrize("n", [0.5, True, "1", None])
def test_truncate_takes_integers_alone(n):
    """A position that is no integer would spoil the counts of every layer."""
    cache = KVCache([], 8)
    with pytest.raises(CacheError, match="expected an integer"):
        cache.truncate(n)
    assert cache.positions == 0
