"""Repacking ahead of uploads: the same packs, in order, no further ahead than allowed, and nothing left behind."""

from __future__ import annotations

import gc
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from frink_numba.backend import Edges, Step
from frink_numba.cuda.backend import CudaBackend
from frink_numba.cuda.tensor import pack_ahead, workers
from frink_numba.cuda.tensor.pack_ahead import PackAhead
from frink_numba.cuda.tensor.weights import pack_layer
from frink_numba.host.kv_cache import KVCache
from tests.cuda.fake_tensor import tensor_device
from tests.cuda.tensor_stacks import OPTIONS, hidden_rows, step_over, unlike_layers
from tests.kernels.packed_weights import random_matrix

LAYERS = unlike_layers()
OTHERS = unlike_layers(3, OPTIONS[:2])


def packing_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("frink-pack")]


def test_the_packs_are_those_made_one_by_one() -> None:
    ahead = PackAhead(LAYERS)
    try:
        for layer in LAYERS:
            made = ahead.take(layer)
            assert made is not None
            for got, want in zip(made, pack_layer(layer), strict=True):
                np.testing.assert_array_equal(got.data, want.data)
                np.testing.assert_array_equal(got.row_scale, want.row_scale)
                assert got.norm_bounds == want.norm_bounds
        assert ahead.take(LAYERS[0]) is None, "taken already"
    finally:
        ahead.close()
    assert not packing_threads()


def test_no_more_layers_wait_than_their_bytes_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that is larger than the bound waits alone."""
    started = []
    monkeypatch.setattr(pack_ahead, "_MOST_BYTES", 1)
    monkeypatch.setattr(pack_ahead, "pack_layer", lambda layer, threads: started.append(layer) or [])
    ahead = PackAhead(LAYERS)
    for number, layer in enumerate(LAYERS):
        assert ahead.take(layer) == []
        assert len(started) <= number + 2
    ahead.close()


def test_a_failure_in_a_thread_is_the_uploads(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """R21: the run answers None, the reason is said, no thread is left, and the next run repeats the upload."""
    real = pack_ahead.pack_layer

    def broken(layer: object, threads: int) -> object:
        if layer is LAYERS[2]:
            raise MemoryError("no room to repack")
        return real(layer, threads)

    monkeypatch.setattr(pack_ahead, "pack_layer", broken)
    backend = CudaBackend(LAYERS, tensor_device())
    step = step_over(LAYERS, KVCache(LAYERS, 64), hidden_rows(6))
    assert backend.run(0, len(LAYERS), step) is None
    assert "no room to repack" in caplog.text
    assert not packing_threads()
    monkeypatch.setattr(pack_ahead, "pack_layer", real)
    device = backend.device
    device.memory._ceiling = None  # what a lack of memory on the host has to do with the device is another matter
    assert backend.run(0, len(LAYERS), step) is not None
    assert not packing_threads()


def some_edges() -> Edges:
    width = LAYERS[0].hidden_dim
    matrix = random_matrix("Q8_0", 64, width, np.random.default_rng(5))
    return Edges(matrix, 1.0, np.ones(width, np.float32), 1e-5, matrix)


def test_what_is_expected_is_repacked_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """`expect`: once, all of a model in its order, edges last; the step takes it, and nothing is left behind."""
    made: list[object] = []
    for name in ("pack_layer", "pack_edges"):
        real = getattr(pack_ahead, name)
        monkeypatch.setattr(pack_ahead, name, lambda part, *a, real=real: made.append(part) or real(part, *a))
    backend = CudaBackend(LAYERS, tensor_device())
    edges = some_edges()
    for _ in range(2):
        backend.expect(edges)
    body = backend.device.body
    while not all(future.done() for future in body._expected[1]._made.values()):
        time.sleep(0.001)
    assert len(made) == len(LAYERS) + 1
    assert {id(part) for part in made} == {id(part) for part in (*LAYERS, edges)}
    cache = KVCache(LAYERS, 64)
    ids = np.arange(6)
    step = Step(LAYERS, cache, 0, 6, tokens=ids, edges=edges, lookup=lambda: hidden_rows(6), logits=1)
    run = backend.run(0, len(LAYERS), step)
    assert len(made) == len(LAYERS) + 1, "repacked anew"
    assert body._expected is None
    assert not packing_threads()
    plain = CudaBackend(LAYERS, tensor_device()).run(0, len(LAYERS), replace(step, caches=KVCache(LAYERS, 64)))
    np.testing.assert_array_equal(run.logits, plain.logits)
    for got, want in zip(run.kv_rows, plain.kv_rows, strict=True):
        np.testing.assert_array_equal(got[0], want[0])
        np.testing.assert_array_equal(got[1], want[1])


@pytest.mark.parametrize("ending", ["close", "drop", "another"])
def test_what_is_expected_and_does_not_come_is_let_go_of(ending: str) -> None:
    """Neither threads nor packs outlive the backend, or the next model that is expected."""
    device = tensor_device()
    backend = CudaBackend(LAYERS, device)
    backend.expect(some_edges())
    before = device.body._expected[1]
    if ending == "close":
        backend.close()
    elif ending == "drop":
        del backend
        gc.collect()
    else:
        other = CudaBackend(LAYERS[:2], device)
        other.expect(None)
        assert device.body._expected[1] is not before
        backend.close()
        assert device.body._expected is not None, "it is the other's"
        other.close()
    assert device.body._expected is None
    assert before.done
    assert not packing_threads()


def test_layers_of_another_model_do_not_take_what_is_expected() -> None:
    device = tensor_device()
    backend, other = CudaBackend(LAYERS, device), CudaBackend(LAYERS[:2], device)
    backend.expect(None)
    single = step_over(OTHERS, KVCache(OTHERS, 64), hidden_rows(6))
    others = CudaBackend(OTHERS, device)
    assert others.run(0, len(OTHERS), single) is not None
    assert device.body._expected is not None
    assert other.run(0, 2, step_over(LAYERS[:2], KVCache(LAYERS[:2], 64), hidden_rows(6))) is not None
    assert backend.run(0, len(LAYERS), step_over(LAYERS, KVCache(LAYERS, 64), hidden_rows(6))) is not None
    assert device.body._expected is None


@pytest.mark.parametrize("given", ["", "4K"])
def test_a_model_beyond_the_devices_memory_is_not_repacked(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one beyond what FRINK_CUDA_MEMORY allows."""
    if given:
        monkeypatch.setenv("FRINK_CUDA_MEMORY", given)
    backend = CudaBackend(LAYERS, tensor_device() if given else tensor_device(memory_bytes=1 << 12))
    backend.expect(some_edges())
    assert backend.device.body._expected is None


@pytest.mark.parametrize("where", ["announcing", "packing"])
def test_the_collector_may_let_go_of_a_backend_anywhere(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dropped backend in a cycle goes while packs are made, in a thread that a run waits for: nobody hangs."""
    device = tensor_device()
    old = CudaBackend(OTHERS, device)
    assert old.run(0, len(OTHERS), step_over(OTHERS, KVCache(OTHERS, 64), hidden_rows(6))) is not None
    cycle: list[object] = [old]
    cycle.append(cycle)
    gc.disable()
    try:
        del old, cycle
        name = "_fill" if where == "announcing" else "pack_layer"
        owner = PackAhead if where == "announcing" else pack_ahead
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a: (gc.collect(), real(*a))[1])
        backend = CudaBackend(LAYERS, device)
        done = []

        def work() -> None:
            if where == "announcing":
                backend.expect(None)
            done.append(backend.run(0, len(LAYERS), step_over(LAYERS, KVCache(LAYERS, 64), hidden_rows(6))))

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(30)
        assert len(done) == 1, "it hangs"
        assert done[0] is not None
    finally:
        gc.enable()
    for other in threading.enumerate():
        if other.name == "frink-let-go":
            other.join(30)
    assert {id(part) for part in device.bank.held_by(backend._holder)} == {id(layer) for layer in LAYERS}
    assert device.bank.bytes_of_others(backend._holder) == 0


def test_what_is_on_the_device_already_is_not_repacked() -> None:
    """R8: a prefill before the first answer, or another backend over the same layers, has brought it up."""
    device = tensor_device()
    first, second = CudaBackend(LAYERS, device), CudaBackend(LAYERS, device)
    assert first.run(0, len(LAYERS), step_over(LAYERS, KVCache(LAYERS, 64), hidden_rows(6))) is not None
    for backend in (first, second):
        backend.expect(None)
        assert device.body._expected is None


def test_one_that_is_closed_while_a_run_takes_from_it_answers_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another model is announced in the middle of an upload: the rest is repacked by the run itself."""
    monkeypatch.setattr(pack_ahead, "_MOST_BYTES", 1)
    ahead = PackAhead(LAYERS)
    while not ahead._made[id(LAYERS[0])].done():
        time.sleep(0.001)
    ahead._workers.stop()
    assert ahead.take(LAYERS[0]) is not None
    assert ahead.take(LAYERS[1]) is None
    ahead.close()


def test_without_threads_each_layer_is_packed_as_it_goes_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a process whose main thread has ended, or that may have no more threads: the device serves all the same."""
    monkeypatch.setattr(workers, "_ending", lambda: True)
    ahead = PackAhead(LAYERS)
    assert [ahead.take(layer) for layer in LAYERS] == [None] * len(LAYERS)
    ahead.close()
    backend = CudaBackend(LAYERS, tensor_device())
    backend.expect(None)
    assert backend.run(0, len(LAYERS), step_over(LAYERS, KVCache(LAYERS, 64), hidden_rows(5))) is not None
    backend.close()
    assert not caplog.records
