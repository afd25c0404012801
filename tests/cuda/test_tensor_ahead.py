"""Greedy steps without the host in between: a run that chooses tokens by itself does what single steps would do."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from frink_numba.backend import Step
from frink_numba.cuda.backend import CudaBackend
from frink_numba.cuda.tensor.scratch import AHEAD_ROWS
from frink_numba.host.kv_cache import KVCache
from frink_numba.layer import Layer
from tests.cuda import fake_tensor_kernels as compute
from tests.cuda.fake_gpu import FakeCudaError
from tests.cuda.fake_tensor import tensor_device
from tests.cuda.tensor_stacks import OPTIONS, random_rows, unlike_layers
from tests.cuda.test_tensor_edges import make_edges, token_step

EDGES = make_edges()
PLAIN = unlike_layers(9, [OPTIONS[0], OPTIONS[1]])
# A norm over the whole of q and k, and heads that the attention of few rows does not serve: eight launches a layer.
OTHERS = unlike_layers(5, [OPTIONS[2], OPTIONS[5], OPTIONS[0]])
CHOICES = 190  # of 200


def new_cache(backend: CudaBackend, layers: Sequence[Layer], positions: int = 0, pinned: bool = True) -> KVCache:
    cache = KVCache(layers, 512, allocate=backend.host_bytes if pinned else None)
    if positions:
        cache.push(random_rows(layers, positions))
    return cache


def step_behind(layers: Sequence[Layer], cache: KVCache, token: int, **fields) -> Step:
    step = token_step(layers, cache, 1, 1, EDGES, choices=CHOICES, **fields)
    step.tokens[0] = token
    return step


def ahead(backend: CudaBackend, layers: Sequence[Layer], cache: KVCache, token: int, n: int):
    return backend.run(0, len(layers), step_behind(layers, cache, token, ahead=n))


def one_by_one(backend: CudaBackend, layers: Sequence[Layer], cache: KVCache, token: int, n: int) -> list[int]:
    """The same with the host in between; its rows are pushed."""
    chosen = []
    for _ in range(n):
        run = backend.run(0, len(layers), step_behind(layers, cache, token))
        token = int(run.logits[0, :CHOICES].argmax())
        chosen.append(token)
        cache.push(run.kv_rows)
    return chosen


def rows_of(cache: KVCache) -> list[np.ndarray]:
    return [part.copy() for layer in cache for part in layer.prefix()]


def same(got: KVCache, want: KVCache) -> None:
    assert got.positions == want.positions
    for one, other in zip(rows_of(got), rows_of(want), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("tier", ["wgmma", "mma"])
@pytest.mark.parametrize(("layers", "pinned"), [(PLAIN, True), (PLAIN, False), (OTHERS, True)])
def test_it_is_what_single_steps_make(tier: str, layers: Sequence[Layer], pinned: bool):
    """R10, R11, R24: the same tokens and rows, to the bit, in blocks of any size, from any position, one wait each."""
    good = CudaBackend(layers, tensor_device(tier))
    twin = new_cache(good, layers, 9)
    want = one_by_one(good, layers, twin, 3, 1 + 2 + 5 + AHEAD_ROWS)
    assert len(set(want)) > 8  # no loop of a few tokens, which could hide a wrong step

    backend = CudaBackend(layers, tensor_device(tier, schedule="random", seed=4))
    cache = new_cache(backend, layers, 9, pinned)
    token, got = 3, []
    for n in (1, 2, 5, AHEAD_ROWS):
        before = backend.stats
        run = ahead(backend, layers, cache, token, n)
        assert run.tokens.shape == (n,)
        assert run.logits is run.hidden is None
        cache.push(run.kv_rows)
        got += run.tokens.tolist()
        token = got[-1]
        after = backend.stats
        assert after.synchronizations - before.synchronizations == 1
        assert after.logits_down == after.hidden_down == after.hidden_up == 0
        assert after.prefix_up == before.prefix_up or not got[1:] or not pinned
    assert got == want
    same(cache, twin)


def test_in_the_invariant_mode_too():
    """With the kernels for many rows, and each layer looked at by itself."""
    good, backend = (CudaBackend(OTHERS, tensor_device(invariant=True)) for _ in range(2))
    cache, twin = new_cache(backend, OTHERS, 9), new_cache(good, OTHERS, 9)
    want, token = one_by_one(good, OTHERS, twin, 3, 9), 3
    for n in (1, 4, 4):
        run = ahead(backend, OTHERS, cache, token, n)
        cache.push(run.kv_rows)
        assert run.tokens.tolist() == want[:n]
        token, want = want[n - 1], want[n:]
    same(cache, twin)


def test_other_caches_and_larger_ones_use_the_same_launches():
    """A program is made once: its K/V rows may lie anywhere, and lie elsewhere when a cache has grown."""
    backend = CudaBackend(PLAIN, tensor_device())
    good = CudaBackend(PLAIN, tensor_device())
    for positions in (4, 250, 9):
        cache, twin = new_cache(backend, PLAIN, positions), new_cache(good, PLAIN, positions)
        token = 3
        for _ in range(4):  # past position 256, where the rows move on the device
            run = ahead(backend, PLAIN, cache, token, 5)
            cache.push(run.kv_rows)
            assert run.tokens.tolist() == one_by_one(good, PLAIN, twin, token, 5)
            token = int(run.tokens[-1])
        same(cache, twin)
    assert backend.device.runtime.calls.count("graph") == 1


def test_more_than_there_is_room_for_is_answered_in_part():
    backend = CudaBackend(PLAIN, tensor_device())
    cache = new_cache(backend, PLAIN)
    run = ahead(backend, PLAIN, cache, 7, AHEAD_ROWS + 5)
    assert run.tokens.shape == (AHEAD_ROWS,)
    assert all(part.shape[0] == AHEAD_ROWS for pair in run.kv_rows for part in pair)


def test_rows_that_were_not_counted_are_computed_again():
    """R10, R11: an answer that ends within a block leaves no row behind; the mirror counts as far as the cache does."""
    good = CudaBackend(PLAIN, tensor_device())
    backend = CudaBackend(PLAIN, tensor_device())
    for counted in range(6):
        cache, twin = new_cache(backend, PLAIN, 4), new_cache(good, PLAIN, 4)
        run = ahead(backend, PLAIN, cache, 11, 6)
        cache.stage(run.kv_rows)
        cache.advance(counted)
        known = one_by_one(good, PLAIN, twin, 11, counted)
        assert run.tokens[:counted].tolist() == known
        before = backend.stats.prefix_up
        after = ahead(backend, PLAIN, cache, 99, 3)
        cache.push(after.kv_rows)
        assert after.tokens.tolist() == one_by_one(good, PLAIN, twin, 99, 3)
        assert backend.stats.prefix_up == before
        same(cache, twin)


def test_steps_of_other_kinds_in_between():
    """Prompts, single steps and blocks over one cache, in turns: each finds what the others left."""
    good, backend = (CudaBackend(PLAIN, tensor_device(schedule="reversed")) for _ in range(2))
    cache, twin = new_cache(backend, PLAIN), new_cache(good, PLAIN)
    token = 5
    for turn in range(4):
        for own, held in ((backend, cache), (good, twin)):
            held.push(own.run(0, len(PLAIN), token_step(PLAIN, held, 12, 1, EDGES, seed=turn)).kv_rows)
        run = ahead(backend, PLAIN, cache, token, 1 + 2 * turn)
        cache.push(run.kv_rows)
        want = one_by_one(good, PLAIN, twin, token, 1 + 2 * turn)
        assert run.tokens.tolist() == want
        single = backend.run(0, len(PLAIN), step_behind(PLAIN, cache, want[-1]))
        cache.push(single.kv_rows)
        (token,) = one_by_one(good, PLAIN, twin, want[-1], 1)
        assert int(single.logits[0, :CHOICES].argmax()) == token
    same(cache, twin)
    assert backend.stats.prefix_up == 0


def test_logits_that_are_no_numbers_end_the_block(monkeypatch: pytest.MonkeyPatch):
    real, calls = compute.argmax, []

    def spoilt(memory, variant, blocks, a):
        calls.append(None)
        if len(calls) == 4:
            memory(a.logits, (a.pitch,), np.float32)[7] = np.nan
        real(memory, variant, blocks, a)

    monkeypatch.setattr(compute, "argmax", spoilt)
    backend = CudaBackend(PLAIN, tensor_device())
    run = ahead(backend, PLAIN, new_cache(backend, PLAIN), 7, 8)
    assert (run.tokens >= 0).tolist() == [True] * 3 + [False] * 5
    assert len(calls) == 8


def test_without_room_for_the_edges_it_is_an_ordinary_step(monkeypatch: pytest.MonkeyPatch):
    device = tensor_device()
    probe = CudaBackend(PLAIN, device)
    assert ahead(probe, PLAIN, new_cache(probe, PLAIN), 7, 4).tokens is not None
    # Scratch that is larger than a step needs would make room for them.
    spare = device.arena_bytes - device.body.scratch(PLAIN).nbytes(1, 0, EDGES, 1)
    room = device.held_bytes - device.body.edges_bytes(EDGES) - spare
    monkeypatch.setenv("FRINK_CUDA_MEMORY", str(room))
    backend = CudaBackend(PLAIN, tensor_device())
    cache = new_cache(backend, PLAIN)
    run = ahead(backend, PLAIN, cache, 7, 4)
    assert run.tokens is run.logits is None
    assert run.hidden.shape == (1, PLAIN[0].hidden_dim)
    assert all(part.shape[0] == 1 for pair in run.kv_rows for part in pair)


def points_of(blocks: Sequence[int]) -> list[str]:
    backend = CudaBackend(PLAIN, tensor_device())
    cache = new_cache(backend, PLAIN, 4)
    before = len(backend.device.runtime.calls)
    for n in blocks:
        cache.push(ahead(backend, PLAIN, cache, 3, n).kv_rows)
    return backend.device.runtime.calls[before:]


def test_a_failure_at_every_point_leaves_nothing_behind():
    """R21: of a first block and of a later one, at each call: None, the cache as it was, and then all goes on right."""
    points = points_of((2, 3))
    assert {"send", "graph", "replay", "fetch_strided", "fetch", "synchronize", "argmax", "embed"} <= set(points)
    good = CudaBackend(PLAIN, tensor_device())
    twin = new_cache(good, PLAIN, 4)
    want = one_by_one(good, PLAIN, twin, 3, 9)
    for point, name in enumerate(points):
        if name == "release":  # letting go of memory is not part of the work
            continue
        backend = CudaBackend(PLAIN, tensor_device(schedule="random", seed=point))
        cache = new_cache(backend, PLAIN, 4)
        backend.device.runtime.fail_at = len(backend.device.runtime.calls) + point
        token, got, failures = 3, [], 0
        for n in (2, 3, 2, 2, 2):
            held = rows_of(cache)
            run = ahead(backend, PLAIN, cache, token, min(n, 9 - len(got)))
            if run is None:
                failures += 1
                for one, other in zip(rows_of(cache), held, strict=True):
                    np.testing.assert_array_equal(one, other)
                continue
            cache.push(run.kv_rows)
            got += run.tokens.tolist()
            token = got[-1]
            if len(got) == 9:
                break
        assert failures == 1, name
        assert got == want[: len(got)], name
        assert len(got) >= 7


def test_an_interrupt_waits_for_the_device():
    """Memory that the device still writes to is not handed out again, and the next block is right."""
    good = CudaBackend(PLAIN, tensor_device())
    twin = new_cache(good, PLAIN, 4)
    want = one_by_one(good, PLAIN, twin, 3, 5)
    first, both = len(points_of((2,))), len(points_of((2, 3)))
    for point in range(first, both, 2):
        backend = CudaBackend(PLAIN, tensor_device())
        runtime, cache = backend.device.runtime, new_cache(backend, PLAIN, 4)
        runtime.error, runtime.fail_at = KeyboardInterrupt(), len(runtime.calls) + point
        cache.push(ahead(backend, PLAIN, cache, 3, 2).kv_rows)
        with pytest.raises(KeyboardInterrupt):
            ahead(backend, PLAIN, cache, want[1], 3)
        assert not any(stream.queue for stream in runtime.streams)
        assert ahead(backend, PLAIN, cache, want[1], 3).tokens.tolist() == want[2:]


def test_a_lost_device_declines_from_then_on():
    backend = CudaBackend(PLAIN, tensor_device())
    runtime, cache = backend.device.runtime, new_cache(backend, PLAIN)
    runtime.error, runtime.sticky = FakeCudaError("CUDA_ERROR_ILLEGAL_ADDRESS"), True
    runtime.fail_at = len(runtime.calls) + points_of((3,)).index("synchronize")
    assert ahead(backend, PLAIN, cache, 3, 3) is None
    assert backend.can_serve(0, step_behind(PLAIN, cache, 3, ahead=3)).reason.startswith("device lost")
