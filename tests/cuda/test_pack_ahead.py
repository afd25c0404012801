"""Repacking ahead of uploads: the same packs, in order, no further ahead than allowed, and nothing left behind."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from frink_numba.cuda.backend import CudaBackend
from frink_numba.cuda.tensor import pack_ahead
from frink_numba.cuda.tensor.pack_ahead import PackAhead
from frink_numba.cuda.tensor.weights import pack_layer
from frink_numba.host.kv_cache import KVCache
from tests.cuda.fake_tensor import tensor_device
from tests.cuda.tensor_stacks import hidden_rows, step_over, unlike_layers

LAYERS = unlike_layers()


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
