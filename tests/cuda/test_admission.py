"""Budgets: layers that do not fit run elsewhere, the plan says so, and several devices share a model."""

from __future__ import annotations

import gc
import logging
from dataclasses import replace

import numpy as np
import pytest

from frink_numba import registry
from frink_numba.backend import Decline, Serve
from frink_numba.cuda.backend import CudaBackend
from frink_numba.cuda.simt.weights import layer_bytes
from frink_numba.dispatch import Dispatcher
from frink_numba.host.backend import HostBackend
from frink_numba.layer import Activation
from tests import reference
from tests.cuda.fake_gpu import fake_device
from tests.cuda.steps import filled_cache, make_step, small_model

LAYERS = small_model(0, 6)
ONE = layer_bytes(LAYERS[0])


@pytest.fixture(autouse=True)
def _registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))


def dispatcher(devices, order="cuda,host", layers=LAYERS) -> Dispatcher:
    def factory(layers, device=None):
        return CudaBackend(layers, devices[int(device or 0)], f"cuda:{device}" if device else "cuda")

    registry.register_backend("cuda", factory, replace=True)
    return Dispatcher(layers, host=HostBackend, backends=order)


def budget(monkeypatch: pytest.MonkeyPatch, layers: float, step=None) -> None:
    """Room for the weights of so many layers beside the step's scratch."""
    backend = CudaBackend(LAYERS, fake_device())
    scratch = backend._admission.scratch(step or make_step(LAYERS))
    monkeypatch.setenv("FRINK_CUDA_MEMORY", str(int(layers * ONE) + scratch))


def runs(result) -> list[tuple[str, int, int]]:
    return [(served.backend, served.first, served.length) for served in result.served]


def check_equals_the_host(result, step) -> None:
    registered = Dispatcher(step.layers, host=HostBackend, backends="host").run(step)
    assert np.linalg.norm(result.hidden - registered.hidden) / np.linalg.norm(registered.hidden) < 1e-5


def test_layers_that_do_not_fit_run_on_the_host(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    """The plan shows a device run and a host run, with the reason, and the run does what the plan says."""
    budget(monkeypatch, 4.5)
    device = fake_device()
    walk = dispatcher([device])
    step = make_step(LAYERS)
    plan = walk.plan(replace(step, hidden=None))
    assert [(row.layers, row.backend) for row in plan.rows] == [("0-3", "cuda"), ("4-5", "host")]
    assert "no room for its weights: the layers take 399.0 KiB" in plan.rows[1].why
    assert "the device memory budget is" in plan.rows[1].why
    assert device.runtime.calls == []
    with caplog.at_level(logging.WARNING, "frink_numba"):
        for _ in range(3):
            result = walk.run(step)
            assert runs(result) == [("cuda", 0, 4), ("host", 4, 2)]
    assert len([r for r in caplog.records if "no room" in r.getMessage()]) == 1
    assert device.held_bytes <= device.memory.bytes()
    assert walk.backends[0].stats.weights_up <= 4 * ONE
    check_equals_the_host(result, step)


def test_no_layer_fits(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FRINK_CUDA_MEMORY", "1000")
    result = dispatcher([fake_device()]).run(make_step(LAYERS))
    assert runs(result) == [("host", 0, 6)]


def test_layers_that_no_kernel_serves_take_no_room(monkeypatch: pytest.MonkeyPatch):
    """A budget of four layers holds 0, 1, 3 and 4 when 2 is not served."""
    layers = list(LAYERS)
    layers[2] = replace(layers[2], ffn=replace(layers[2].ffn, activation=Activation.GEGLU))
    budget(monkeypatch, 4)
    step = make_step(layers)
    result = dispatcher([fake_device()], layers=layers).run(step)
    assert runs(result) == [("cuda", 0, 2), ("host", 2, 1), ("cuda", 3, 2), ("host", 5, 1)]
    check_equals_the_host(result, step)


def test_two_devices_each_take_a_run(monkeypatch: pytest.MonkeyPatch):
    """Each device is a backend of its own: the second is asked for what the first declined, and counts from there."""
    budget(monkeypatch, 3)
    devices = [fake_device(0), fake_device(1)]
    walk = dispatcher(devices, "cuda:0,cuda:1,host")
    step = make_step(LAYERS, start_pos=4)
    budget(monkeypatch, 3, step)
    for _ in range(3):
        result = walk.run(step)
        assert runs(result) == [("cuda:0", 0, 3), ("cuda:1", 3, 3)]
    check_equals_the_host(result, step)
    assert [backend.stats.runs for backend in walk.backends[:2]] == [3, 3]
    assert [backend.stats.weights_up for backend in walk.backends[:2]] == [devices[0].bank.nbytes - _padding()] * 2
    walk.close()
    gc.collect()
    assert [device.runtime.allocated() for device in devices] == [0, 0]


def _padding() -> int:
    """What alignment adds to three layers."""
    device = fake_device()
    backend = CudaBackend(LAYERS, device)
    backend.run(0, 3, make_step(LAYERS))
    return device.bank.nbytes - backend.stats.weights_up


def test_a_larger_step_pushes_the_last_layers_out_and_they_stay_out(monkeypatch: pytest.MonkeyPatch):
    """Scratch that grew is kept, so that layers do not come and go from step to step (R8)."""
    budget(monkeypatch, 6)
    device = fake_device()
    walk = dispatcher([device])
    assert runs(walk.run(make_step(LAYERS))) == [("cuda", 0, 6)]
    large = make_step(LAYERS, batch=40, start_pos=60)
    first = runs(walk.run(large))
    assert first[0][0] == "cuda"
    assert 0 < first[0][2] < 6
    assert device.held_bytes <= device.memory.bytes()
    uploaded = walk.backends[0].stats.weights_up
    for _ in range(3):
        assert runs(walk.run(make_step(LAYERS))) == first
        assert runs(walk.run(large)) == first
    assert walk.backends[0].stats.weights_up == uploaded
    check_equals_the_host(walk.run(large), large)


def test_what_other_models_hold_counts(monkeypatch: pytest.MonkeyPatch):
    """Two models on one device: the second gets what the first left; closing the first makes room."""
    other = small_model(9, 6)
    budget(monkeypatch, 8.5)  # scratch may be a quarter larger than the first step needs
    device = fake_device()
    first = dispatcher([device])
    assert runs(first.run(make_step(LAYERS))) == [("cuda", 0, 6)]
    second = dispatcher([device], layers=other)
    assert runs(second.run(make_step(other)))[0] == ("cuda", 0, 2)
    first.close()
    gc.collect()
    assert runs(second.run(make_step(other))) == [("cuda", 0, 6)]


def test_answers_do_not_depend_on_how_often_one_asks(monkeypatch: pytest.MonkeyPatch):
    """B1: asking has no side effect that shows."""
    budget(monkeypatch, 2)
    backend = CudaBackend(LAYERS, fake_device())
    step = make_step(LAYERS)
    kinds = [type(backend.can_serve(l, step)) for l in (0, 0, 1, 1, 2, 0, 1, 2, 5)]  # noqa: E741
    assert kinds == [Serve, Serve, Serve, Serve, Decline, Serve, Serve, Decline, Decline]


def test_memory_that_ran_out_changes_the_answer_for_the_same_step(monkeypatch: pytest.MonkeyPatch):
    budget(monkeypatch, 6)
    device = fake_device()
    backend = CudaBackend(LAYERS, device)
    step = make_step(LAYERS)
    assert isinstance(backend.can_serve(0, step), Serve)
    device.memory.lower(100)
    assert isinstance(backend.can_serve(0, step), Decline)


def test_a_hidden_state_ends_a_run_and_the_plan_shows_it():
    """Hidden states after layers 1 and 3: three runs, each with one upload, one download and one wait."""
    device = fake_device()
    walk = dispatcher([device])
    step = make_step(LAYERS, hidden_after=frozenset({1, 3}))
    plan = walk.plan(replace(step, hidden=None))
    assert [(row.layers, row.backend) for row in plan.rows] == [("0-1", "cuda"), ("2-3", "cuda"), ("4-5", "cuda")]
    result = walk.run(step)
    assert runs(result) == [("cuda", 0, 2), ("cuda", 2, 2), ("cuda", 4, 2)]
    stats = walk.backends[0].stats
    assert (stats.runs, stats.synchronizations, device.runtime.waits) == (3, 3, 3)
    assert stats.hidden_up == stats.hidden_down == 3 * step.hidden.nbytes
    whole = walk.run(make_step(LAYERS))
    np.testing.assert_array_equal(result.hidden, whole.hidden)
    assert sorted(result.hidden_states) == [1, 3]


def test_a_cache_in_float16_is_read_as_it_is():
    """R11 over the engine's own float16 cache: the prefix is what was stored, the batch's own rows are float32."""
    cache = filled_cache(LAYERS, 7, dtype=np.float16)
    step = make_step(LAYERS, 5, 7, cache=cache)
    result = dispatcher([fake_device()]).run(step)
    assert runs(result) == [("cuda", 0, 6)]
    x = step.hidden.astype(np.float64)
    for layer, rows in zip(LAYERS, cache, strict=True):
        x, _, _ = reference.layer(layer, x, *rows.prefix())
    assert reference.relative_error(result.hidden, x) < 1e-5
