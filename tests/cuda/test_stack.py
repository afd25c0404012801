"""`launch_prefill_dense_stack`: the stack as a function for other engines."""

from __future__ import annotations

import gc
from dataclasses import replace

import numpy as np
import pytest

import frink_numba.cuda
from frink_numba.cuda.stack import launch_prefill_dense_stack, load_layers
from frink_numba.errors import BackendError, BackendUnavailable, DeviceError, ShapeError
from tests.cuda.fake_gpu import ILLEGAL_ADDRESS, OUT_OF_MEMORY, FakeCudaError, fake_device
from tests.cuda.test_run import check_against_the_truth, make_layers, make_prefixes

LAYERS = make_layers(0)
RNG = np.random.default_rng(0)
HIDDEN = RNG.normal(size=(5, 40)).astype(np.float32)
PREFIXES = make_prefixes(RNG, LAYERS, 4)
EMPTY = make_prefixes(RNG, LAYERS, 0)


def test_it_is_reached_from_the_package():
    assert frink_numba.cuda.launch_prefill_dense_stack is launch_prefill_dense_stack
    assert "load_layers" in dir(frink_numba.cuda)
    with pytest.raises(AttributeError, match="no attribute 'launch'"):
        frink_numba.cuda.launch  # noqa: B018


def test_layers_in_rows_out():
    """R9, R11: equal to the truth; the prefix decides where the batch starts."""
    for prefix, against in ((PREFIXES, PREFIXES), (None, EMPTY), (EMPTY, EMPTY)):
        hidden, rows = launch_prefill_dense_stack(HIDDEN, LAYERS, 5, prefix=prefix, device=fake_device())
        check_against_the_truth(LAYERS, HIDDEN, against, hidden, rows)


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_any_batch_is_served(batch: int):
    """R2 is the backend's policy, not a limit of the kernels."""
    hidden, rows = launch_prefill_dense_stack(HIDDEN[:batch], LAYERS, device=fake_device())
    check_against_the_truth(LAYERS, HIDDEN[:batch], EMPTY, hidden, rows)


def test_weights_stay_between_calls_when_the_caller_holds_them():
    """R8: two calls, one upload; leaving the block frees the device."""
    device = fake_device()
    with load_layers(LAYERS, device=device) as resident:
        once = resident.traffic.copy()
        assert once.weights_up > 0
        first, _ = launch_prefill_dense_stack(HIDDEN, resident)
        second, _ = launch_prefill_dense_stack(HIDDEN, resident)
        assert resident.traffic.weights_up == once.weights_up
        assert (resident.traffic.runs, resident.traffic.synchronizations) == (2, 2)
        np.testing.assert_array_equal(first, second)
    gc.collect()
    assert device.runtime.allocated() == 0
    resident.close()


def test_weights_of_a_single_call_go_with_it():
    device = fake_device()
    launch_prefill_dense_stack(HIDDEN, LAYERS, device=device)
    gc.collect()
    assert device.runtime.allocated() == 0


def test_one_layer_object_may_stand_twice():
    """Shared layers are held once."""
    twice = [LAYERS[0], LAYERS[1], LAYERS[0]]
    device = fake_device()
    with load_layers(twice, device=device) as resident:
        hidden, rows = launch_prefill_dense_stack(HIDDEN, resident)
    check_against_the_truth(twice, HIDDEN, [EMPTY[0], EMPTY[1], EMPTY[0]], hidden, rows)
    gc.collect()
    assert device.runtime.allocated() == 0


def test_what_no_kernel_computes_is_an_error_with_its_reason():
    sinks = replace(LAYERS[1], attention=replace(LAYERS[1].attention, sinks=np.ones(4, np.float32)))
    with pytest.raises(BackendError, match="layer 1 cannot run on the device: attention sinks"):
        load_layers([LAYERS[0], sinks], device=fake_device())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch": 4}, "shape \\[5, 40\\], not \\[4, 40\\]"),
        ({"hidden": HIDDEN[:, :39].copy()}, "shape \\[5, 39\\]"),
        ({"hidden": HIDDEN.astype(np.float64)}, "float64"),
        ({"hidden": HIDDEN[0]}, "shape \\[40\\]"),
        ({"prefix": PREFIXES[:3]}, "prefix rows of 3 layers, but 5 layers"),
        ({"prefix": [*PREFIXES[:4], PREFIXES[0]]}, "prefix K rows have shape \\[4, 2, 16\\], not \\[4, 2, 20\\]"),
        ({"prefix": [(k[:2], v) for k, v in PREFIXES]}, "prefix V rows have shape \\[4, 2, 16\\], not \\[2, 2, 16\\]"),
    ],
)
def test_arrays_that_do_not_fit_are_named(arguments, message: str):
    """R20: before the device does anything for the run."""
    device = fake_device()
    with load_layers(LAYERS, device=device) as resident:
        calls = len(device.runtime.calls)
        with pytest.raises(ShapeError, match=message):
            launch_prefill_dense_stack(**{"hidden": HIDDEN, "layers": resident, **arguments})
        assert len(device.runtime.calls) == calls


def test_no_layers_are_an_error():
    with pytest.raises(ShapeError, match="at least one layer"):
        launch_prefill_dense_stack(HIDDEN, [], device=fake_device())


def test_a_failure_is_a_device_error_and_frees_the_weights():
    for point in range(0, 200, 7):
        device = fake_device()
        device.runtime.fail_at, device.runtime.error = point, FakeCudaError(OUT_OF_MEMORY)
        with pytest.raises(DeviceError, match="out of memory"):
            launch_prefill_dense_stack(HIDDEN, LAYERS, prefix=PREFIXES, device=device)
        gc.collect()
        assert device.bank.nbytes == 0


def test_a_lost_device_is_named():
    device = fake_device()
    device.runtime.broken = ILLEGAL_ADDRESS
    with pytest.raises(DeviceError, match="device lost"):
        load_layers(LAYERS, device=device)
    with pytest.raises(DeviceError, match="device lost"):
        load_layers(LAYERS, device=device)


def test_a_budget_that_is_too_small_is_named_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FRINK_CUDA_MEMORY", "100K")
    device = fake_device()
    with pytest.raises(DeviceError, match="do not fit into the device memory budget of 100\\.0 KiB"):
        load_layers(LAYERS, device=device)
    assert device.runtime.calls == []


def test_a_device_that_is_not_there():
    with pytest.raises(BackendUnavailable):
        load_layers(LAYERS, device=77)
