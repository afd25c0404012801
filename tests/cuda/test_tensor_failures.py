"""R21 on the tensor-core body: whatever fails, nothing of the host changes, and no later step is any different."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from frink_numba.backend import Decline, Serve
from frink_numba.cuda.backend import CudaBackend
from frink_numba.host.kv_cache import KVCache
from tests.cuda.fake_gpu import OUT_OF_MEMORY, FakeCudaError, FakeRuntime
from tests.cuda.fake_tensor import tensor_device
from tests.cuda.steps import rows_of
from tests.cuda.tensor_stacks import OPTIONS, assert_equal, hidden_rows, random_rows, step_over, taken, unlike_layers

LAYERS = unlike_layers(7, [OPTIONS[1], OPTIONS[2], OPTIONS[5]])
BATCHES = (3, 10)
pytestmark = pytest.mark.usefixtures("segments")  # so that a failure meets copies under way


def new_cache(backend: CudaBackend) -> KVCache:
    cache = KVCache(LAYERS, 512, allocate=backend.host_bytes)
    cache.push(random_rows(LAYERS, 6))
    return cache


def go(backend: CudaBackend, cache: KVCache, batch: int, seed: int = 1):
    return backend.run(0, len(LAYERS), step_over(LAYERS, cache, hidden_rows(batch, seed)))


def story(backend: CudaBackend, cache: KVCache, batch: int) -> list[list[np.ndarray]]:
    """Two steps, their rows pushed."""
    answers = []
    for seed in (1, 2):
        run = go(backend, cache, batch, seed)
        answers.append(taken(run))
        cache.push(run.kv_rows)
    return answers


def calls_of(batch: int, steps_before: int) -> list[str]:
    """The points at which a step can fail: each allocation, copy, launch, capture, replay, record and wait."""
    backend = CudaBackend(LAYERS, tensor_device())
    runtime: FakeRuntime = backend.device.runtime
    cache = new_cache(backend)
    for seed in range(steps_before):
        cache.push(go(backend, cache, batch, seed).kv_rows)
    before = len(runtime.calls)
    go(backend, cache, batch)
    return runtime.calls[before:]


def test_the_points_of_failure_are_of_every_kind():
    """The loops below are not empty by accident."""
    first, later = calls_of(10, 0), calls_of(10, 1)
    kinds = {"device_bytes", "pinned_bytes", "send", "zero", "graph", "replay", "fetch", "record", "wait"}
    assert {*kinds, "gemm", "attention", "qkv_prepare", "mirror_rows", "synchronize"} <= set(first)
    assert {"send", "replay", "record", "wait", "synchronize"} <= set(later)
    assert "device_bytes" not in later
    assert later.count("replay") == len(LAYERS) + 1  # up to each layer's K/V rows, and the rest of the last
    assert len(first) > 100


def check_untouched(cache: KVCache, rows: list[np.ndarray], hidden: np.ndarray, before: np.ndarray) -> None:
    assert cache.positions == rows[0].shape[0]
    assert_equal(rows_of(cache), rows)
    np.testing.assert_array_equal(hidden, before)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kind", ["launch", "memory", "lost"])
def test_a_failure_at_every_point_of_a_first_step(batch: int, kind: str, caplog: pytest.LogCaptureFixture):
    """None, one line, caches and hidden batch as they were; then the same steps go as if nothing had been."""
    good = CudaBackend(LAYERS, tensor_device())
    want = story(good, new_cache(good), batch)
    points = calls_of(batch, 0)
    for point, name in enumerate(points):
        if name == "release" or (kind != "launch" and point % 5):  # letting go of memory is not part of the work
            continue
        backend = CudaBackend(LAYERS, tensor_device(schedule="random", seed=point))
        runtime, cache = backend.device.runtime, new_cache(backend)
        runtime.error = FakeCudaError(OUT_OF_MEMORY if kind == "memory" else "CUDA_ERROR_LAUNCH_FAILED")
        runtime.sticky, runtime.fail_at = kind == "lost", len(runtime.calls) + point
        rows, hidden = rows_of(cache), hidden_rows(batch)
        step, before = step_over(LAYERS, cache, hidden), hidden.copy()
        caplog.clear()
        with caplog.at_level(logging.WARNING, "frink_numba"):
            assert backend.run(0, len(LAYERS), step) is None, name
        assert len([r for r in caplog.records if "failed" in r.getMessage()]) <= 1
        check_untouched(cache, rows, hidden, before)
        if kind == "lost":
            answer = backend.can_serve(0, step)
            assert isinstance(answer, Decline)
            assert answer.reason.startswith("device lost: ")
            continue
        if kind == "memory":  # what was held when it ran out is all that there is from now on
            assert backend.device.memory.bytes() <= backend.device.runtime.memory_bytes
            answers = [backend.can_serve(l, step) for l in range(len(LAYERS))]  # noqa: E741
            if not all(isinstance(answer, Serve) for answer in answers):
                assert backend.device.held_bytes <= backend.device.memory.bytes()
                continue
        for got, expected in zip(story(backend, cache, batch), want, strict=True):
            assert_equal(got, expected, f"after failure {point}: {name}")


@pytest.mark.parametrize("batch", BATCHES)
def test_a_failure_at_every_point_of_a_later_step(batch: int):
    """With rows of earlier steps on the device: a failed step leaves no stale row, whatever it had written over."""
    points = calls_of(batch, 1)
    good = CudaBackend(LAYERS, tensor_device())
    twin = new_cache(good)
    twin.push(go(good, twin, batch, 5).kv_rows)
    want = story(good, twin, batch)
    for point, name in enumerate(points):
        backend = CudaBackend(LAYERS, tensor_device(schedule="random", seed=point))
        runtime, cache = backend.device.runtime, new_cache(backend)
        cache.push(go(backend, cache, batch, 5).kv_rows)
        runtime.fail_at = len(runtime.calls) + point
        rows, hidden = rows_of(cache), hidden_rows(batch)
        before = hidden.copy()
        assert backend.run(0, len(LAYERS), step_over(LAYERS, cache, hidden)) is None, name
        check_untouched(cache, rows, hidden, before)
        for got, expected in zip(story(backend, cache, batch), want, strict=True):
            assert_equal(got, expected, f"after failure {point}: {name}")


def test_a_failure_while_others_rows_are_pushed():
    """The host serves the step that failed: its rows go up with the next, and only those and what a mirror lost."""
    backend = CudaBackend(LAYERS, tensor_device())
    runtime, cache = backend.device.runtime, new_cache(backend)
    cache.push(go(backend, cache, 10, 5).kv_rows)
    runtime.fail_at = len(runtime.calls) + calls_of(10, 1).index("synchronize")
    assert go(backend, cache, 10) is None
    cache.push(random_rows(LAYERS, 10, seed=8))
    good = CudaBackend(LAYERS, tensor_device())
    twin = KVCache(LAYERS, 512)
    twin.push([tuple(part.copy() for part in layer.prefix()) for layer in cache])
    for got, expected in zip(story(backend, cache, 4), story(good, twin, 4), strict=True):
        assert_equal(got, expected)


def test_an_interrupt_waits_for_the_device_and_leaves_no_stale_row():
    """Memory that the device still writes to is not handed out again; the next step is right."""
    good = CudaBackend(LAYERS, tensor_device())
    twin = new_cache(good)
    twin.push(go(good, twin, 10, 5).kv_rows)
    want = story(good, twin, 10)
    for point in range(0, len(calls_of(10, 1)), 3):
        backend = CudaBackend(LAYERS, tensor_device())
        runtime, cache = backend.device.runtime, new_cache(backend)
        cache.push(go(backend, cache, 10, 5).kv_rows)
        runtime.error, runtime.fail_at = KeyboardInterrupt(), len(runtime.calls) + point
        with pytest.raises(KeyboardInterrupt):
            go(backend, cache, 10)
        assert not any(stream.queue for stream in runtime.streams)
        for got, expected in zip(story(backend, cache, 10), want, strict=True):
            assert_equal(got, expected, f"after {point}")
