"""The cuda backend over a fake device: what it declines, what it serves, what it leaves behind."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from frink_numba.backend import Backend, Decline, Serve
from frink_numba.cuda.backend import CudaBackend
from frink_numba.cuda.settled import Settled
from frink_numba.errors import ShapeError
from frink_numba.layer import Activation
from frink_numba.quant import QuantMatrix
from tests import reference
from tests.cuda.fake_gpu import ILLEGAL_ADDRESS, fake_device
from tests.cuda.steps import filled_cache, make_step, rows_of, small_model


def reason(backend: CudaBackend, step, l: int = 0) -> str:  # noqa: E741
    answer = backend.can_serve(l, step)
    assert isinstance(answer, Decline), answer
    return answer.reason


def test_it_is_a_backend_and_says_where_it_runs():
    """B1, and the plan's note: device and tier."""
    layers = small_model(0, 2)
    backend = CudaBackend(layers, fake_device(3), "cuda:3")
    assert isinstance(backend, Backend)
    assert backend.name == "cuda:3"
    assert backend.can_serve(1, make_step(layers)) == Serve("Fake GPU 3, simt tier")


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_a_batch_of_fewer_than_four_rows(batch: int):
    """R2: one reason for all of them."""
    layers = small_model(0, 1)
    backend = CudaBackend(layers, fake_device())
    assert reason(backend, make_step(layers, batch)) == "a batch of fewer than 4 rows"
    assert isinstance(backend.can_serve(0, make_step(layers, 4)), Serve)


def test_a_feature_without_a_kernel():
    """R4: by name, layer by layer."""
    layers = small_model(0, 3)
    layers[1] = replace(layers[1], ffn=replace(layers[1].ffn, activation=Activation.GEGLU))
    backend = CudaBackend(layers, fake_device())
    step = make_step(layers)
    assert [isinstance(backend.can_serve(l, step), Serve) for l in range(3)] == [True, False, True]  # noqa: E741
    assert reason(backend, step, 1) == "the activation geglu"


def test_parts_that_do_not_fit_together():
    """R20: with both sides of the contradiction."""
    layers = small_model(0, 1)
    odd = QuantMatrix.from_float32(np.ones((64, 44), np.float32))
    layers[0] = replace(layers[0], attention=replace(layers[0].attention, q=odd))
    assert reason(CudaBackend(layers, fake_device()), make_step(layers)) == "q is 64 x 44, not 64 x 40"


def test_a_cache_with_other_positions_or_rows():
    """R12: positions and rows must both be the start; an evicted cache has fewer rows."""
    layers = small_model(0, 2, window=4)
    backend = CudaBackend(layers, fake_device())
    expected = "its cache does not hold exactly the rows before the batch"
    assert reason(backend, make_step(layers, start_pos=6, cache=filled_cache(layers, 5))) == expected
    evicted = filled_cache(layers, 20)
    assert evicted.evict() > 0
    assert evicted[0].positions == 20
    assert reason(backend, make_step(layers, start_pos=20, cache=evicted)) == expected
    assert isinstance(backend.can_serve(0, make_step(layers, start_pos=20)), Serve)


@pytest.mark.parametrize("change", [{"n_kv_heads": 4}, {"key_dim": 32}, {"value_dim": 8}])
def test_a_cache_of_another_shape(change: dict[str, int]):
    """R13."""
    layers = small_model(0, 1)
    cache = filled_cache(layers, 0)
    for name, value in change.items():
        setattr(cache[0], name, value)
    assert reason(CudaBackend(layers, fake_device()), make_step(layers, cache=cache)) == (
        "its cache has other K/V heads or widths than the layer"
    )


def test_a_step_of_other_layers():
    """The verdicts were made for these layers, not for lookalikes."""
    backend = CudaBackend(small_model(0, 1), fake_device())
    assert reason(backend, make_step(small_model(0, 1))) == "the step's layer is not the one the backend was made for"


def test_asking_touches_neither_device_nor_step(monkeypatch: pytest.MonkeyPatch):
    """B1, R7: with a budget set nothing is asked of the device; without one it is asked once."""
    layers = small_model(0, 3)
    device = fake_device()
    backend = CudaBackend(layers, device)
    step = make_step(layers, start_pos=3)
    before = rows_of(step.caches), step.hidden.copy()
    monkeypatch.setenv("FRINK_CUDA_MEMORY", "1G")
    first = [backend.can_serve(l, step) for l in range(3)]  # noqa: E741
    assert (device.runtime.calls, device.runtime.queries) == ([], 0)
    monkeypatch.delenv("FRINK_CUDA_MEMORY")
    for _ in range(5):
        assert [backend.can_serve(l, step) for l in range(3)] == first  # noqa: E741
    assert (device.runtime.calls, device.runtime.queries) == ([], 1)
    np.testing.assert_array_equal(step.hidden, before[1])
    for got, want in zip(rows_of(step.caches), before[0], strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_plan_needs_no_hidden_batch():
    """B4."""
    layers = small_model(0, 1)
    assert isinstance(CudaBackend(layers, fake_device()).can_serve(0, replace(make_step(layers), hidden=None)), Serve)


@pytest.mark.parametrize("start_pos", [0, 9])
def test_a_run_equals_the_truth_and_leaves_the_caches_alone(start_pos: int):
    """R9 to R11: rows come back, and pushing them is the caller's."""
    layers = small_model(4, 3)
    step = make_step(layers, 6, start_pos)
    before = rows_of(step.caches)
    run = CudaBackend(layers, fake_device()).run(0, 3, step)
    assert run is not None
    x = step.hidden.astype(np.float64)
    for layer, cache, (k, v) in zip(layers, step.caches, run.kv_rows, strict=True):
        x, want_k, want_v = reference.layer(layer, x, *cache.prefix())
        assert reference.relative_error(k, want_k) < 1e-5
        assert reference.relative_error(v, want_v) < 1e-5
    assert reference.relative_error(run.hidden, x) < 1e-5
    assert run.experts is None  # R22: expert 0 of each
    assert step.caches.positions == start_pos
    for got, want in zip(rows_of(step.caches), before, strict=True):
        np.testing.assert_array_equal(got, want)


def test_weights_go_up_once_per_layer():
    """R8: the second step of the same layers moves hidden batch, rows and prefix, and nothing else."""
    layers = small_model(5, 3)
    device = fake_device()
    backend = CudaBackend(layers, device)
    backend.run(0, 2, make_step(layers))
    once = backend.stats
    assert once.weights_up > 0
    step = make_step(layers, 7, 4)
    backend.run(0, 2, step)
    twice = backend.stats
    assert twice.weights_up == once.weights_up
    assert twice.hidden_up - once.hidden_up == twice.hidden_down - once.hidden_down == step.hidden.nbytes
    assert twice.kv_down - once.kv_down == 2 * 2 * 7 * 2 * 16 * 4
    assert twice.prefix_up == 2 * 2 * 4 * 2 * 16 * 4
    assert twice.synchronizations == twice.runs == device.runtime.waits == 2
    backend.run(0, 3, make_step(layers))  # one layer more
    assert backend.stats.weights_up == once.weights_up // 2 * 3
    assert device.runtime.up == sum(getattr(backend.stats, name) for name in ("weights_up", "hidden_up", "prefix_up"))


def test_stats_are_a_copy():
    layers = small_model(5, 1)
    backend = CudaBackend(layers, fake_device())
    backend.stats.weights_up = 99
    assert backend.stats.weights_up == 0


def test_backends_over_the_same_layers_share_their_weights():
    """Two decoders of one model: one upload; the memory goes when the last one closes."""
    layers = small_model(6, 2)
    device = fake_device()
    first, second = CudaBackend(layers, device), CudaBackend(layers, device)
    first.run(0, 2, make_step(layers))
    held = device.held_bytes
    second.run(0, 2, make_step(layers))
    assert second.stats.weights_up == 0
    assert device.held_bytes == held
    first.close()
    gc.collect()
    assert device.held_bytes == held
    second.close()
    second.close()
    gc.collect()
    assert device.held_bytes == device.runtime.allocated() == 0


def test_a_closed_backend_gives_everything_back_and_can_start_over():
    layers = small_model(6, 2)
    device = fake_device()
    backend = CudaBackend(layers, device)
    want = backend.run(0, 2, make_step(layers))
    assert device.runtime.allocated() > 0
    backend.close()
    gc.collect()
    assert device.runtime.allocated() == 0
    again = backend.run(0, 2, make_step(layers))
    np.testing.assert_array_equal(again.hidden, want.hidden)


def test_a_backend_that_is_dropped_gives_its_memory_back():
    layers = small_model(6, 2)
    device = fake_device()
    backend = CudaBackend(layers, device)
    backend.run(0, 2, make_step(layers))
    assert device.runtime.allocated() > 0
    del backend
    gc.collect()
    assert device.runtime.allocated() == 0


def test_closing_on_a_lost_device_is_quiet():
    layers = small_model(6, 1)
    device = fake_device()
    backend = CudaBackend(layers, device)
    backend.run(0, 1, make_step(layers))
    device.runtime.broken = ILLEGAL_ADDRESS
    assert backend.run(0, 1, make_step(layers)) is None
    calls = len(device.runtime.calls)
    backend.close()
    assert len(device.runtime.calls) == calls


def test_closing_when_the_device_fails_is_reported_and_goes_on(caplog: pytest.LogCaptureFixture):
    layers = small_model(6, 1)
    device = fake_device()
    backend = CudaBackend(layers, device)
    backend.run(0, 1, make_step(layers))
    device.runtime.broken = ILLEGAL_ADDRESS
    with caplog.at_level(logging.WARNING, "frink_numba"):
        backend.close()
    assert "the device failed while it was closed" in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": None}, "needs a hidden batch"),
        ({"hidden": np.zeros((5, 41), np.float32)}, "shape \\[5, 41\\]"),
        ({"hidden": np.zeros((5, 40))}, "float64"),
        ({"batch": 6}, "shape \\[5, 40\\], not \\[6, 40\\]"),
        ({"start_pos": 2}, "K rows have shape \\[0, 2, 16\\]"),
    ],
)
def test_arrays_that_do_not_fit_are_named_errors_before_any_device_work(change, message: str):
    """R20."""
    layers = small_model(0, 1)
    device = fake_device()
    with pytest.raises(ShapeError, match=message):
        CudaBackend(layers, device).run(0, 1, replace(make_step(layers), **change))
    assert device.runtime.calls == []


def test_two_decoders_on_two_threads():
    """Their runs take turns on the device; every answer equals the one it gives alone."""
    layers = small_model(7, 3)
    device = fake_device(schedule="random")
    steps = [make_step(layers, 4 + number, 3 * number, seed=number) for number in range(4)]
    alone = [CudaBackend(layers, fake_device()).run(0, 3, step) for step in steps]
    wrong: list[int] = []

    def decode(number: int) -> None:
        backend = CudaBackend(layers, device)
        for _ in range(5):
            run = backend.run(0, 3, steps[number])
            if run is None or not np.array_equal(run.hidden, alone[number].hidden):
                wrong.append(number)
        backend.close()

    threads = [threading.Thread(target=decode, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    gc.collect()
    assert device.runtime.allocated() == 0


def test_one_backend_on_two_threads():
    """A decoder that two threads share: counts add up, answers stay right."""
    layers = small_model(7, 2)
    backend = CudaBackend(layers, fake_device())
    step = make_step(layers)
    want = backend.run(0, 2, step).hidden
    wrong: list[int] = []

    def use() -> None:
        for _ in range(10):
            if not isinstance(backend.can_serve(1, step), Serve):
                wrong.append(0)
            if not np.array_equal(backend.run(0, 2, step).hidden, want):
                wrong.append(1)

    threads = [threading.Thread(target=use) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert backend.stats.runs == 31


class Caches:
    """What a weak reference may point at."""


def test_a_step_with_other_edges_is_not_like_the_last_one() -> None:
    """Their logits may take more room: nothing else than caches, edges, device, rows and places may be the same."""
    caches, edges, state = Caches(), object(), (1, 2, 3, 4)
    settled = Settled(weakref.ref(caches), {(4, 1)}, 100, state, edges)
    step = {"caches": caches, "edges": edges, "batch": 4, "logits": 1, "start_pos": 96, "rows": 4}
    device = SimpleNamespace(state=state)
    assert settled.holds(device, SimpleNamespace(**step))
    changes = {"caches": Caches(), "edges": object(), "batch": 5, "logits": 2, "start_pos": 97}
    for name, value in {**changes, "edges ": None}.items():
        assert not settled.holds(device, SimpleNamespace(**step | {name.strip(): value})), name
    assert not settled.holds(SimpleNamespace(state=(1, 2, 3, 5)), SimpleNamespace(**step))
