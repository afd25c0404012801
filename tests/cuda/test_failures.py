"""R21: whatever fails on the device after a run was admitted, the step ends as a pure host run would have."""

from __future__ import annotations

import gc
import logging
from dataclasses import replace

import numpy as np
import pytest

from frink_numba import registry
from frink_numba.backend import Decline, Serve
from frink_numba.cuda.backend import CudaBackend
from frink_numba.dispatch import Dispatcher
from frink_numba.host.backend import HostBackend
from tests.cuda.fake_gpu import ILLEGAL_ADDRESS, OUT_OF_MEMORY, FakeCudaError, LinkerError, fake_device
from tests.cuda.steps import filled_cache, make_step, rows_of, small_model

LAYERS = small_model(0, 3, qk_norm="head", post_norms=True)


@pytest.fixture(autouse=True)
def _registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))


def dispatcher(device, order="cuda,host", layers=LAYERS) -> Dispatcher:
    registry.register_backend("cuda", lambda layers: CudaBackend(layers, device), replace=True)
    return Dispatcher(layers, host=HostBackend, backends=order)


def new_step(start_pos: int = 6):
    return make_step(LAYERS, 5, start_pos, cache=filled_cache(LAYERS, start_pos))


def take(run) -> list[np.ndarray]:
    """What a step answered, in copies: the host's rows lie in the cache's own spare room."""
    return [run.hidden.copy(), *(part.copy() for pair in run.kv_rows for part in pair)]


def host_answer() -> list[np.ndarray]:
    return take(dispatcher(fake_device(), "host").run(new_step()))


def calls_of_a_run(resident: bool) -> list[str]:
    """Every point at which a run can fail: each allocation, copy, launch, record and wait."""
    device = fake_device()
    backend = CudaBackend(LAYERS, device)
    if resident:
        backend.run(0, 3, new_step())
        device.runtime.calls.clear()
    backend.run(0, 3, new_step())
    return device.runtime.calls.copy()


COLD = calls_of_a_run(resident=False)
WARM = calls_of_a_run(resident=True)


def test_the_points_of_failure_are_of_every_kind():
    """The list below is not empty by accident."""
    assert {"device_bytes", "pinned_bytes", "stream", "event", "upload", "download", "record", "wait"} <= set(COLD)
    assert {"quantized_matmul", "rms_norm", "causal_attention", "rope", "swiglu", "synchronize"} <= set(WARM)
    assert "device_bytes" not in WARM
    assert len(COLD) > 150
    assert len(WARM) > 100


@pytest.mark.parametrize("kind", ["launch", "memory", "lost"])
def test_a_failure_at_every_point_of_a_first_run(kind: str, caplog: pytest.LogCaptureFixture):
    """Answer, hidden batch and caches are those of the host; one line is said; the next step is as good."""
    want = host_answer()
    for point in range(len(COLD)):
        device = fake_device()
        device.runtime.fail_at = point
        if kind == "memory":
            device.runtime.error = FakeCudaError(OUT_OF_MEMORY)
        device.runtime.sticky = kind == "lost"
        step = new_step()
        before, hidden = rows_of(step.caches), step.hidden.copy()
        caplog.clear()
        with caplog.at_level(logging.WARNING, "frink_numba"):
            walk = dispatcher(device)
            result = walk.run(step)
            got = take(result)
        failed = [record.getMessage() for record in caplog.records if "failed" in record.getMessage()]
        if COLD[point] == "release":  # letting go of memory is not part of the work
            continue
        assert [served.backend for served in result.served] == ["host"], COLD[point]
        assert len(failed) <= 1, failed  # equal lines are said once per process
        for one, other in zip(got, want, strict=True):
            np.testing.assert_array_equal(one, other, err_msg=f"failure {point}: {COLD[point]}")
        np.testing.assert_array_equal(step.hidden, hidden)
        assert step.caches.positions == 6
        for one, other in zip(rows_of(step.caches), before, strict=True):
            np.testing.assert_array_equal(one, other)
        # The fault is over, unless the device is lost: the same step again.
        answer = walk.backends[0].can_serve(0, new_step())
        if kind == "lost":
            assert isinstance(answer, Decline)
            assert answer.reason.startswith("device lost: ")
        again = take(walk.run(new_step()))
        for one, other in zip(again, want, strict=True):
            assert np.linalg.norm(one - other) / np.linalg.norm(other) < 1e-5


def test_a_failure_at_every_point_of_a_later_run():
    """Weights that are there stay good: after the failure the device serves again, bit for bit as before."""
    device = fake_device()
    backend = CudaBackend(LAYERS, device)
    want = take(backend.run(0, 3, new_step()))
    weights = backend.stats.weights_up
    for point in range(len(WARM)):
        device.runtime.fail_at = len(device.runtime.calls) + point
        assert backend.run(0, 3, new_step()) is None, WARM[point]
        device.runtime.fail_at = None
        for one, other in zip(take(backend.run(0, 3, new_step())), want, strict=True):
            np.testing.assert_array_equal(one, other, err_msg=f"after failure {point}: {WARM[point]}")
    assert backend.stats.weights_up == weights
    assert backend.stats.runs == 1 + len(WARM)


def test_an_error_that_shows_only_at_the_end():
    """Kernels fail asynchronously: the wait at the end raises, and everything after it does."""
    device = fake_device()
    synchronize = device.runtime.synchronize

    def broken(stream) -> None:
        device.runtime.broken = ILLEGAL_ADDRESS
        synchronize(stream)

    device.runtime.synchronize = broken
    want, result = host_answer(), dispatcher(device).run(new_step())
    for one, other in zip(take(result), want, strict=True):
        np.testing.assert_array_equal(one, other)
    assert device.problem == f"device lost: FakeCudaError: {ILLEGAL_ADDRESS}"


def test_a_lost_device_is_said_once_and_never_asked_again(caplog: pytest.LogCaptureFixture):
    """Field reports: a poisoned context, and a GPU error that is swallowed. The reason stands in the plan."""
    device = fake_device()
    device.runtime.broken = ILLEGAL_ADDRESS
    walk = dispatcher(device)
    with caplog.at_level(logging.WARNING, "frink_numba"):
        walk.run(new_step())
        calls = len(device.runtime.calls)
        for _ in range(3):
            walk.run(new_step())
    assert len(device.runtime.calls) == calls
    assert len([r for r in caplog.records if "a run failed after it was admitted" in r.getMessage()]) == 1
    assert len([r for r in caplog.records if "declines: device lost" in r.getMessage()]) == 1
    assert f"device lost: FakeCudaError: {ILLEGAL_ADDRESS}" in str(walk.plan(replace(new_step(), hidden=None)))


def test_another_backend_over_a_lost_device_declines_too():
    """The device's state is the process's, not the backend's."""
    device = fake_device()
    device.runtime.broken = ILLEGAL_ADDRESS
    CudaBackend(LAYERS, device).run(0, 3, new_step())
    answer = CudaBackend(LAYERS, device).can_serve(0, new_step())
    assert answer == Decline(f"device lost: FakeCudaError: {ILLEGAL_ADDRESS}")


def test_a_compile_error_is_not_met_twice(caplog: pytest.LogCaptureFixture):
    """A kernel that does not compile now will not in the next step either."""
    device = fake_device()
    device.runtime.error, device.runtime.fail_at = LinkerError("unknown target"), COLD.index("rope_table")
    walk = dispatcher(device)
    with caplog.at_level(logging.WARNING, "frink_numba"):
        walk.run(new_step())
    assert "kernels do not compile here: LinkerError: unknown target" in caplog.text
    assert walk.backends[0].can_serve(0, new_step()) == Decline(
        "kernels do not compile here: LinkerError: unknown target"
    )


def test_after_real_exhaustion_the_layers_that_are_there_go_on():
    """Memory that others took: one step falls to the host, the next serves what fits and names the reason."""
    device = fake_device()
    free = device.runtime.memory_bytes
    one = dispatcher(device)
    backend = one.backends[0]
    backend.run(0, 3, new_step())
    held = device.held_bytes
    backend.close()
    gc.collect()
    device.runtime.memory_bytes = held - 10_000  # somebody else has the rest
    assert device.memory.bytes() == int(0.9 * free)  # asked when all was free
    want = host_answer()
    result = one.run(new_step())
    assert [served.backend for served in result.served] == ["host"]
    result = one.run(new_step())
    assert {served.backend for served in result.served} == {"cuda", "host"}
    for got, other in zip(take(result), want, strict=True):
        assert np.linalg.norm(got - other) / np.linalg.norm(other) < 1e-5
    plan = one.plan(replace(new_step(), hidden=None))
    assert "no room for its weights" in str(plan)


def test_without_the_host_in_the_list_the_failure_is_an_error():
    """B3: a named backend never falls back in silence."""
    device = fake_device()
    device.runtime.broken = ILLEGAL_ADDRESS
    with pytest.raises(registry.BackendError, match="no backend serves layer 0"):
        dispatcher(device, "cuda").run(new_step())


def test_a_failing_memory_query_declines():
    """The one question that is asked of the device may fail too."""
    device = fake_device()

    def memory():
        raise FakeCudaError("CUDA_ERROR_DEVICE_UNAVAILABLE")

    device.runtime.memory = memory
    answer = CudaBackend(LAYERS, device).can_serve(0, new_step())
    assert answer == Decline("its free memory is not known: FakeCudaError: CUDA_ERROR_DEVICE_UNAVAILABLE")


def test_a_second_chunk_that_fails_leaves_the_first_whole():
    """Field report: out of memory at layer 3 of chunk 2. All stand at the last whole chunk; a retry is clean."""
    device = fake_device()
    walk = dispatcher(device)
    cache = filled_cache(LAYERS, 0)
    rng = np.random.default_rng(3)
    chunks = [rng.normal(size=(4, 40)).astype(np.float32) for _ in range(2)]

    def chunk(number: int):
        return replace(make_step(LAYERS, 4, cache.positions, cache=cache), hidden=chunks[number])

    cache.push(walk.run(chunk(0)).kv_rows)
    first = rows_of(cache)
    device.runtime.error, device.runtime.fail_at = FakeCudaError(OUT_OF_MEMORY), len(device.runtime.calls) + 60
    backend = walk.backends[0]
    assert backend.run(0, 3, chunk(1)) is None
    assert cache.positions == 4
    for got, want in zip(rows_of(cache), first, strict=True):
        np.testing.assert_array_equal(got, want)
    device.runtime.fail_at = None
    retried = take(backend.run(0, 3, chunk(1)))
    clean = take(CudaBackend(LAYERS, fake_device()).run(0, 3, chunk(1)))
    for got, want in zip(retried, clean, strict=True):
        np.testing.assert_array_equal(got, want)


def test_what_is_declined_before_a_run_costs_no_call():
    """R7: None before the device or any cache is touched."""
    device = fake_device()
    walk = dispatcher(device)
    small = make_step(LAYERS, 3, 6, cache=filled_cache(LAYERS, 6))
    assert [served.backend for served in walk.run(small).served] == ["host"]
    assert device.runtime.calls == []
    assert isinstance(walk.backends[0].can_serve(0, new_step()), Serve)
