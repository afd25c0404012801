"""Groups on the device when streams, failures and memory are against them."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import numpy as np
import pytest

from frink_numba.backend import Step
from frink_numba.cuda.backend import CudaBackend
from frink_numba.host.kv_cache import KVCache
from tests.cuda.fake_gpu import FakeCudaError
from tests.cuda.fake_tensor import tensor_device
from tests.cuda.group_steps import (
    ERROR,
    LAYERS,
    backend_on,
    cache_at,
    greedy_steps,
    run_group,
    steps_over,
    worst_error,
)
from tests.cuda.test_tensor_edges import EDGES, token_step


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("schedule", ["lazy", "reversed", "random"])
def test_no_order_of_the_streams_changes_a_bit(schedule: str, ahead: bool, segments: None):
    """Events alone order the streams: rows are in the caches before anybody looks, and not written over before."""
    want = None
    for seed in range(-1, 4 if schedule == "random" else 1):
        backend = backend_on(tensor_device(schedule="issue" if seed < 0 else schedule, seed=seed))
        caches = [cache_at(backend, 2 * at, at) for at in range(3)]
        steps = greedy_steps(caches, [1, 2, 3], 4) if ahead else steps_over(caches, [4, 1, 7])
        got = [part.copy() for run in run_group(backend, steps) for pair in run.kv_rows for part in pair]
        want = got if want is None else want
        for one, other in zip(got, want, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_failure_at_any_call_leaves_no_trace(ahead: bool):
    """R10, R21: whichever call fails, caches stay, the failure is said, and the next group is right."""
    clean = backend_on()
    clean_caches = [cache_at(clean, 2 + at, at) for at in range(3)]
    run_group(clean, greedy_steps(clean_caches, [1, 2, 3], 3) if ahead else steps_over(clean_caches, [2, 1, 5]))
    calls = len(clean.device.runtime.calls)
    failed = 0
    for at in range(0, calls, 3):
        backend = backend_on()
        caches = [cache_at(backend, 2 + number, number) for number in range(3)]
        held = [[part.copy() for layer in cache for part in layer.prefix()] for cache in caches]
        runtime = backend.device.runtime
        runtime.fail_at = len(runtime.calls) + at
        group = greedy_steps(caches, [1, 2, 3], 3) if ahead else steps_over(caches, [2, 1, 5])
        assert backend.serves_group(group) is not None
        failed += backend.run_group(group) is None
        runtime.fail_at = None
        for cache, rows in zip(caches, held, strict=True):
            for part, was in zip((part for layer in cache for part in layer.prefix()), rows, strict=True):
                np.testing.assert_array_equal(part, was)
        if at % 7 < 2:
            group = steps_over(caches, [2, 1, 5])
            assert max(map(worst_error, group, run_group(backend, group))) < ERROR
    assert failed > calls // 6


def test_a_lost_device_declines():
    backend = backend_on()
    steps = steps_over([cache_at(backend, 1) for _ in range(2)], [1, 1])
    runtime = backend.device.runtime
    runtime.fail_at, runtime.sticky, runtime.error = len(runtime.calls) + 9, True, FakeCudaError("ILLEGAL_ADDRESS")
    assert backend.run_group(steps) is None
    assert backend.serves_group(steps) is None


def test_two_models_on_one_device_do_not_mix_their_sizes():
    """R20: each asks outside of the device's lock, maybe between any two lines of the other's question."""
    from frink_numba.cuda.group import member

    body, layers = tensor_device().body, LAYERS[:1]
    members = [member(step, 32) for step in [token_step(LAYERS, KVCache(LAYERS, 64), 3, 1)]]
    own, others = (tensor_device().body.group_bytes(asked, EDGES, members) for asked in (layers, LAYERS))
    assert own != others

    class Interrupted(type(body)):
        @property
        def _group_sizes(self):
            return self.__dict__["sizes"]

        @_group_sizes.setter
        def _group_sizes(self, value):
            self.__dict__["sizes"] = value
            if value[0] is layers:
                self.group_bytes(LAYERS, EDGES, members)

    body.__dict__["sizes"] = body.__dict__.pop("_group_sizes")
    body.__class__ = Interrupted
    assert body.group_bytes(layers, EDGES, members) == own
    assert body.group_bytes(LAYERS, EDGES, members) == others


def needs(backend: CudaBackend, steps: Sequence[Step]) -> int:
    """Bytes that a group takes at least."""
    from frink_numba.cuda.group import member

    body = backend.device.body
    rows = sum(
        body.mirror_bytes(layer, object(), step.start_pos + step.batch)
        for step in steps
        if step.keep
        for layer in LAYERS
    )
    weights = sum(body.layer_bytes(layer) for layer in LAYERS) + body.edges_bytes(EDGES)
    return weights + rows + body.group_bytes(LAYERS, EDGES, [member(step, 32) for step in steps])


@pytest.mark.parametrize("keep", [True, False])
def test_the_budget_holds_to_the_byte(keep: bool, monkeypatch: pytest.MonkeyPatch):
    """B1, R7: a group that just fits runs within the budget; with a byte less it is declined before any work."""
    device = tensor_device()
    backend = backend_on(device)
    caches = [cache_at(backend, 0) for _ in range(4)]
    steps = steps_over(caches, [20, 3, 1, 9], keep=keep)
    need = needs(backend, steps)
    monkeypatch.setenv("FRINK_CUDA_MEMORY", str(need - 1))
    assert backend.serves_group(steps) is None
    monkeypatch.setenv("FRINK_CUDA_MEMORY", str(need))
    most, allocate = [], device.runtime.device_bytes

    def watched(nbytes: int):
        most.append(device.runtime.allocated() + nbytes)
        return allocate(nbytes)

    device.runtime.device_bytes = watched
    assert max(map(worst_error, steps, run_group(backend, steps))) < ERROR
    assert max(most) <= need
    assert device.held_bytes == device.runtime.allocated()


def test_mirrors_of_other_caches_make_room(monkeypatch: pytest.MonkeyPatch):
    """Idle conversations go, and come back with their rows."""
    device = tensor_device()
    backend = backend_on(device)
    first, second = ([cache_at(backend, 4, seed + at) for at in range(3)] for seed in (0, 50))
    monkeypatch.setenv("FRINK_CUDA_MEMORY", str(needs(backend, steps_over(first, [2, 2, 2]))))
    for caches in (first, second, first):
        steps = steps_over(caches, [2, 2, 2])
        runs = run_group(backend, steps)
        assert max(map(worst_error, steps, runs)) < ERROR
        for step, run in zip(steps, runs, strict=True):
            step.caches.push(run.kv_rows)
        assert device.held_bytes <= device.memory.bytes()
        gc.collect()
        assert device.runtime.allocated() <= device.memory.bytes()


def test_caches_grow_within_the_budget(monkeypatch: pytest.MonkeyPatch):
    """Old and new memory of a cache are there together only where there is room; else its rows go up again."""
    for spare in (0, 1 << 30):
        device = tensor_device()
        backend = backend_on(device)
        caches = [cache_at(backend, 250, at) for at in range(2)]
        target = steps_over([cache_at(None, 320, at) for at in range(2)], [8, 8])
        monkeypatch.setenv("FRINK_CUDA_MEMORY", str(needs(backend, target) + spare))
        most, allocate = [], device.runtime.device_bytes
        device.runtime.device_bytes = lambda n, m=most, d=device, a=allocate: (
            m.append(d.runtime.allocated() + n),
            a(n),
        )[1]
        for _ in range(3):
            steps = steps_over(caches, [8, 8])
            runs = run_group(backend, steps)
            assert max(map(worst_error, steps, runs)) < ERROR
            for step, run in zip(steps, runs, strict=True):
                step.caches.push(run.kv_rows)
        assert max(most) <= device.memory.bytes()


def test_memory_of_caches_that_are_gone_is_used_again():
    """A new batch of prompts allocates nothing on the device once one like it has run."""
    device = tensor_device()
    backend = backend_on(device)
    made = []
    gc.disable()  # nothing waits for the collector
    try:
        for _ in range(3):
            caches = [cache_at(backend, 0) for _ in range(4)]
            steps = steps_over(caches, [9, 4, 1, 7])
            runs = run_group(backend, steps)
            assert max(map(worst_error, steps, runs)) < ERROR
            made.append(device.runtime.calls.count("device_bytes"))
            del caches, steps, runs
    finally:
        gc.enable()
    assert made[0] == made[1] == made[2]
