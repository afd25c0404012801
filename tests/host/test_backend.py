"""The host backend: what it asks of a step, what it leaves untouched, chunks, threads (R1, R7, R9 to R13, R22)."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from frink_numba.backend import Backend, Decline, Run, Serve, Step
from frink_numba.errors import CacheError, ShapeError
from frink_numba.host import backend as module
from frink_numba.host.backend import HostBackend
from frink_numba.host.kv_cache import KVCache
from frink_numba.host.weights import WeightStore
from frink_numba.layer import Layer, RopeLayout, TokenMixer
from tests import reference
from tests.random_layers import random_layer

HIDDEN = 40


def model(windows: tuple[int, ...] = (0, 5, 0)) -> list[Layer]:
    """Three layers that differ in rotation and window."""
    rng = np.random.default_rng(0)
    layouts = (RopeLayout.NORM, RopeLayout.NEOX, None)
    return [
        random_layer(rng, window=window, layout=layouts[i % 3], bias=True, post_norms=i == 1)
        for i, window in enumerate(windows)
    ]


def tokens(n: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, HIDDEN)).astype(np.float32)


def advance(backend: HostBackend, layers: list[Layer], cache: KVCache, hidden: np.ndarray) -> np.ndarray:
    """One step through all layers, pushed."""
    step = Step(layers, cache, cache.positions, hidden.shape[0], hidden)
    for layer in range(len(layers)):
        assert isinstance(backend.can_serve(layer, step), Serve)
    run = backend.run(0, len(layers), step)
    cache.push(run.kv_rows)
    return run.hidden


def truth(layers: list[Layer], hidden: np.ndarray) -> np.ndarray:
    x = hidden.astype(np.float64)
    for layer in layers:
        x = reference.layer(layer, x)[0]
    return x


def test_it_is_a_backend() -> None:
    backend = HostBackend(model())
    assert isinstance(backend, Backend)
    assert backend.name == "host"


@pytest.mark.parametrize("split", [(12,), (1,) * 12, (3, 9), (5, 1, 6), (4, 2, 2, 4), (11, 1)])
def test_chunks_equal_one_shot_and_the_truth(split: tuple[int, ...]) -> None:
    """R11; faults 1, 3 and 7."""
    layers, hidden = model(), tokens(12)
    backend, cache = HostBackend(layers), KVCache(layers, 20)
    edges = np.cumsum((0, *split))
    parts = [advance(backend, layers, cache, hidden[a:b]) for a, b in itertools.pairwise(edges)]
    assert reference.relative_error(np.concatenate(parts), truth(layers, hidden)) < 5e-6


@pytest.mark.parametrize("n", [1, 2, 63, 64, 512])
def test_chunk_size_does_not_change_the_answer(n: int) -> None:
    """Fault 7: 600 tokens in chunks of n, against float64 of all of them."""
    layers, hidden = model((0, 50)), tokens(600)
    backend, cache = HostBackend(layers), KVCache(layers, 600)
    steps = range(0, 600, n) if n > 2 else range(0, 60, n)
    parts = [advance(backend, layers, cache, hidden[a : a + n]) for a in steps]
    got = np.concatenate(parts)
    want = truth(layers, hidden[: got.shape[0]])
    assert reference.relative_error(got, want) < 5e-6


def test_a_batch_beyond_the_block_is_one_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens go through a layer in blocks; a later block sees the K/V rows of the earlier."""
    layers, hidden = model(), tokens(23)
    want = truth(layers, hidden)
    for block in (1, 4, 7, 23, 512):
        monkeypatch.setattr(module, "_BLOCK", block)
        cache = KVCache(layers, 50)
        got = advance(HostBackend(layers), layers, cache, hidden)
        assert reference.relative_error(got, want) < 5e-6


def test_stack_equals_single_layers_bitwise() -> None:
    layers, hidden = model(), tokens(9)
    backend, cache = HostBackend(layers), KVCache(layers, 50)
    stack = backend.run(0, 3, Step(layers, cache, 0, 9, hidden))
    rows = [(k.copy(), v.copy()) for k, v in stack.kv_rows]
    x = hidden
    for number in range(3):
        single = backend.run(number, 1, Step(layers, cache, 0, 9, x))
        x = single.hidden
        for kept, again in zip(rows[number], single.kv_rows[0], strict=True):
            np.testing.assert_array_equal(kept, again)
    np.testing.assert_array_equal(stack.hidden, x)


@pytest.mark.parametrize("n", [1, 9])
def test_nothing_of_the_step_changes(n: int) -> None:
    """R7, R10: the batch is read-only, counts and prefix rows stay, rows are the caller's to push."""
    layers = model()
    backend, cache = HostBackend(layers), KVCache(layers, 50)
    advance(backend, layers, cache, tokens(4))
    prefix = [tuple(part.copy() for part in layer.prefix()) for layer in cache]
    versions = [layer.version for layer in cache]
    hidden = tokens(n, 2)
    before = hidden.copy()
    hidden.flags.writeable = False
    run = backend.run(0, 3, Step(layers, cache, 4, n, hidden))
    np.testing.assert_array_equal(hidden, before)
    assert not np.shares_memory(run.hidden, hidden)
    assert [(layer.positions, layer.rows) for layer in cache] == [(4, 4)] * 3
    assert [layer.version for layer in cache] == versions
    for layer, kept in zip(cache, prefix, strict=True):
        for part, old in zip(layer.prefix(), kept, strict=True):
            np.testing.assert_array_equal(part, old)
    assert run.experts == [(0,)] * 3  # R22: expert 0 of each
    for layer, (k, v) in zip(cache, run.kv_rows, strict=True):
        assert k.shape == v.shape == (n, layer.n_kv_heads, layer.key_dim)
        assert k.dtype == v.dtype == np.float32


@pytest.mark.parametrize("n", [1, 7, 40])
def test_two_runs_are_bitwise_equal_and_scratch_never_leaks(n: int) -> None:
    layers = model()
    backend, cache = HostBackend(layers), KVCache(layers, 100)
    advance(backend, layers, cache, tokens(20))
    step = Step(layers, cache, 20, n, tokens(n, 2))
    first = backend.run(0, 3, step)
    rows = [(k.copy(), v.copy()) for k, v in first.kv_rows]
    for scratch in backend._idle:
        assert scratch.buffers
        for buffer in scratch.buffers.values():
            buffer.fill(np.nan)
    for layer in cache:
        for part in layer.tail(n):
            part.fill(np.nan)
    second = backend.run(0, 3, step)
    np.testing.assert_array_equal(first.hidden, second.hidden)
    assert np.isfinite(first.hidden).all()
    for kept, again in zip(rows, second.kv_rows, strict=True):
        np.testing.assert_array_equal(kept[0], again[0])
        np.testing.assert_array_equal(kept[1], again[1])


class ForeignCache:
    """Another engine's cache: the protocol alone, no tail."""

    def __init__(self, k: np.ndarray, v: np.ndarray) -> None:
        self._rows = k, v
        self.n_kv_heads, self.key_dim, self.value_dim = k.shape[1], k.shape[2], v.shape[2]
        self.positions = self.rows = k.shape[0]

    def prefix(self) -> tuple[np.ndarray, np.ndarray]:
        return self._rows


@pytest.mark.parametrize("n", [1, 6])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_cache_without_a_tail_is_served(n: int, dtype: type) -> None:
    layers = model()
    backend, cache = HostBackend(layers), KVCache(layers, 50, dtype=dtype)
    advance(backend, layers, cache, tokens(8))
    foreign = [ForeignCache(*(part.copy() for part in layer.prefix())) for layer in cache]
    hidden = tokens(n, 2)
    own = backend.run(0, 3, Step(layers, cache, 8, n, hidden))
    other = backend.run(0, 3, Step(layers, foreign, 8, n, hidden))
    np.testing.assert_array_equal(own.hidden, other.hidden)
    for one, two in zip(own.kv_rows, other.kv_rows, strict=True):
        np.testing.assert_array_equal(one[0], two[0])
        np.testing.assert_array_equal(one[1], two[1])


@pytest.mark.parametrize("edges", [(0, 30), (0, 7, 8, 30), tuple(range(31))])
def test_a_float16_cache_is_read_as_it_is_stored(edges: tuple[int, ...]) -> None:
    """The batch's own rows too: the answer is that of the stored rows in float64, however the tokens came in."""
    layer = random_layer(np.random.default_rng(0), bias=True)
    spec, hidden = layer.attention, tokens(30)
    backend, cache = HostBackend([layer]), KVCache([layer], 50, dtype=np.float16)
    parts = [advance(backend, [layer], cache, hidden[a:b]) for a, b in itertools.pairwise(edges)]

    x = hidden.astype(np.float64)
    normed = reference.rms_norm(x, layer.attn_norm, layer.norm_eps)
    q = reference.project(normed, spec.q, spec.q_bias).reshape(30, spec.n_heads, spec.head_dim)
    assert spec.rope is not None
    k, v = (part.astype(np.float64) for part in cache[0].prefix())
    x = x + reference.project(reference.attention(reference.rotate(q, spec.rope, 0), k, v, 0).reshape(30, -1), spec.o)
    want = x + reference.feed_forward(layer.ffn, reference.rms_norm(x, layer.ffn_norm, layer.norm_eps))
    assert reference.relative_error(np.concatenate(parts), want) < 5e-6
    assert reference.relative_error(truth([layer], hidden), want) > 2e-5  # so much the rounding matters


def test_float16_rows_round_trip() -> None:
    layers = model()
    backend, cache = HostBackend(layers), KVCache(layers, 50, dtype=np.float16)
    run = backend.run(0, 3, Step(layers, cache, 0, 5, tokens(5)))
    rows = [(k.copy(), v.copy()) for k, v in run.kv_rows]
    cache.push(run.kv_rows)
    for layer, (k, v) in zip(cache, rows, strict=True):
        assert k.dtype == np.float32
        np.testing.assert_array_equal(layer.prefix()[0], k)
        np.testing.assert_array_equal(layer.prefix()[1], v)


def test_rows_beyond_float16_are_a_named_error() -> None:
    layers = model()
    bias = np.full(layers[1].attention.v.rows, 1e5, np.float32)
    layers[1] = replace(layers[1], attention=replace(layers[1].attention, v_bias=bias))
    cache = KVCache(layers, 50, dtype=np.float16)
    with pytest.raises(CacheError, match=r"layer 1: .*beyond float16"):
        HostBackend(layers).run(0, 3, Step(layers, cache, 0, 5, tokens(5)))
    assert cache.positions == 0


def test_eviction_does_not_change_the_answer() -> None:
    """Fault 6: windows of 4 and 7 over 60 tokens, evicted again and again, against float64 of the whole."""
    layers, hidden = model((4, 0, 7)), tokens(60)
    backend, cache = HostBackend(layers), KVCache(layers, 60)
    parts = []
    for a in range(0, 60, 3):
        parts.append(advance(backend, layers, cache, hidden[a : a + 3]))
        cache.evict()
    assert [layer.rows for layer in cache] == [3, 60, 6]
    assert reference.relative_error(np.concatenate(parts), truth(layers, hidden)) < 5e-6


def decline(layers: list[Layer], step: Step, layer: int = 0) -> str:
    answer = HostBackend(layers).can_serve(layer, step)
    assert isinstance(answer, Decline)
    return answer.reason


def test_declines() -> None:
    """R12, R13, R15: each with its reason, and without the layer's number, so that equal reasons are said once."""
    layers = model()
    cache = KVCache(layers, 50)
    advance(HostBackend(layers), layers, cache, tokens(10))
    assert decline(layers, Step(layers, cache, 9, 1)) == "the cache holds 10 positions, the step starts at 9"
    assert decline(layers, Step(layers, cache, 10, 0)) == "an empty batch"
    other = KVCache([random_layer(np.random.default_rng(0), kv_heads=4)] * 3, 50)
    assert decline(layers, Step(layers, other, 0, 1)) == "the cache has 4 heads of 16 and 16, the layer 2 of 16"
    missing = ForeignCache(*(part[2:] for part in cache[0].prefix()))
    missing.positions = 10
    assert decline(layers, Step(layers, [missing] * 3, 10, 1)) == "the cache lacks 2 evicted rows that the step sees"  # type: ignore[list-item]
    assert isinstance(HostBackend(layers).can_serve(1, Step(layers, [missing] * 3, 10, 1)), Serve)  # type: ignore[list-item]
    missing._rows = tuple(part[7:] for part in cache[1].prefix())  # type: ignore[assignment]
    missing.rows = 3  # the window of 5 needs 4
    assert "evicted" in decline(layers, Step(layers, [missing] * 3, 10, 1), 1)  # type: ignore[list-item]
    layers[2] = replace(layers[2], mixer=TokenMixer.STATE_SPACE)
    assert decline(layers, Step(layers, cache, 10, 1), 2) == "a state space mixes tokens"


def test_a_plan_needs_no_batch() -> None:
    layers = model()
    step = Step(layers, KVCache(layers, 50), 0, 512)
    assert isinstance(HostBackend(layers).can_serve(0, step), Serve)


def test_a_run_that_does_not_fit_is_a_named_error() -> None:
    """R20"""
    layers = model()
    backend, cache = HostBackend(layers), KVCache(layers, 50)
    with pytest.raises(ShapeError, match="layer 0 needs a hidden batch float32 \\[2, 40\\], got none"):
        backend.run(0, 3, Step(layers, cache, 0, 2))
    with pytest.raises(ShapeError, match="got float32 \\[3, 40\\]"):
        backend.run(0, 3, Step(layers, cache, 0, 2, tokens(3)))
    with pytest.raises(ShapeError, match="got float64"):
        backend.run(0, 3, Step(layers, cache, 0, 2, tokens(2).astype(np.float64)))
    with pytest.raises(ShapeError, match="the host cannot run layer 0: the cache holds 0 positions"):
        backend.run(0, 3, Step(layers, cache, 1, 2, tokens(2)))
    narrow = [layers[0], random_layer(np.random.default_rng(0), hidden=48)]
    with pytest.raises(ShapeError, match="layer 1 is 48 wide, layer 0 40"):
        HostBackend(narrow).run(0, 2, Step(narrow, KVCache(narrow, 50), 0, 2, tokens(2)))


@pytest.mark.parametrize("name", ["rms_norm", "linear", "store_rows", "attend", "activate"])
def test_out_of_memory_at_any_op_leaves_the_step_as_it_was(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 4: at the second layer of the second chunk; a retry equals a clean run."""
    from frink_numba.host import body

    layers = model()
    clean_backend, clean = HostBackend(layers), KVCache(layers, 50)
    backend, cache = HostBackend(layers), KVCache(layers, 50)
    for each, kept in ((clean_backend, clean), (backend, cache)):
        advance(each, layers, kept, tokens(6))
    want = advance(clean_backend, layers, clean, tokens(5, 2))
    real, calls = getattr(body, name), 0

    def failing(*arguments: object, **named: object) -> object:
        nonlocal calls
        calls += 1
        if calls > {"rms_norm": 5, "linear": 5, "store_rows": 2, "attend": 1, "activate": 1}[name]:  # in layer 1
            raise MemoryError
        return real(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(body, name, failing)
        with pytest.raises(MemoryError):
            advance(backend, layers, cache, tokens(5, 2))
    assert cache.positions == 6
    np.testing.assert_array_equal(advance(backend, layers, cache, tokens(5, 2)), want)
    for one, other in zip(cache, clean, strict=True):
        np.testing.assert_array_equal(one.prefix()[0], other.prefix()[0])


def test_threads_run_at_once_on_caches_of_their_own() -> None:
    layers, hidden = model(), tokens(40)
    backend = HostBackend(layers, WeightStore(40_000))  # less than the model: threads put each other's weights out

    def work(seed: int) -> np.ndarray:
        cache = KVCache(layers, 50)
        cut = 5 + 5 * (seed % 4)
        return np.concatenate([advance(backend, layers, cache, part) for part in (hidden[:cut], hidden[cut:])])

    want = truth(layers, hidden)
    with ThreadPoolExecutor(4) as pool:
        for got in pool.map(work, range(16)):
            assert reference.relative_error(got, want) < 5e-6


def test_nan_travels_to_the_output_without_a_warning() -> None:
    """Design, section 5: NaN never passes for an answer; the host neither hides it nor stops at it."""
    layers, hidden = model(), tokens(4)
    hidden[2, 3] = np.inf
    got = advance(HostBackend(layers), layers, KVCache(layers, 50), hidden)
    assert np.isnan(got[2]).any()


def test_close_can_be_called_twice_and_leaves_anothers_store_alone() -> None:
    layers = model()
    store = WeightStore(1 << 30)
    backend = HostBackend(layers, store)
    first: Run = backend.run(0, 3, Step(layers, KVCache(layers, 50), 0, 2, tokens(2)))
    assert store.used_bytes > 0
    backend.close()
    backend.close()
    assert store.used_bytes > 0
    own = HostBackend(layers)
    second = own.run(0, 3, Step(layers, KVCache(layers, 50), 0, 2, tokens(2)))
    own.close()
    assert own._store.used_bytes == 0
    np.testing.assert_array_equal(first.hidden, second.hidden)


def test_large_work_arrays_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = model()
    backend = HostBackend(layers)
    monkeypatch.setattr(module, "_SCRATCH_BYTES", 100)
    backend.run(0, 3, Step(layers, KVCache(layers, 50), 0, 2, tokens(2)))
    assert backend._idle == []
