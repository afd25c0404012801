"""Device weights: uploaded once, shared, freed with the last holder."""

from __future__ import annotations

import gc
from collections import deque
from dataclasses import replace

import numpy as np
import pytest

from frink_numba.cuda.traffic import Traffic
from frink_numba.cuda.weights import WeightBank, upload_layers
from tests.cuda.fake_gpu import FakeCudaError, fake_device
from tests.random_layers import random_layer


def test_layers_are_shared_and_freed_with_their_last_holder():
    device, bank = fake_device(), WeightBank()
    rng = np.random.default_rng(0)
    layers = [random_layer(rng), random_layer(rng)]
    first, second = object(), object()
    with device.working():
        stream = device.workspace.compute
        for uploaded in upload_layers(device.runtime, device.launchers, layers, stream, Traffic()):
            bank.add(uploaded, first)
        del uploaded
        device.runtime.drain()
    total = bank.nbytes
    assert total == device.runtime.allocated()
    assert bank.find(layers[1], second) is bank.get(layers[1])
    assert bank.find(random_layer(rng), second) is None
    assert (bank.held_by(first), bank.held_by(second)) == (layers, layers[1:])
    assert bank.bytes_of_others(first) == 0
    assert bank.bytes_of_others(second) == bank.get(layers[0]).nbytes
    assert bank.bytes_of_others(object()) == total

    for layer in layers:
        bank.drop(layer, first)
    gc.collect()
    assert bank.held_by(first) == []
    assert bank.nbytes == device.runtime.allocated() == bank.get(layers[1]).nbytes
    bank.drop(layers[1], second)
    gc.collect()
    assert bank.nbytes == device.runtime.allocated() == 0


def test_a_layer_is_kept_alive_with_its_weights():
    """Its identity is the key: another object must not come to have it."""
    device, bank = fake_device(), WeightBank()
    with device.working():
        layer = random_layer(np.random.default_rng(0))
        stream = device.workspace.compute
        bank.add(*upload_layers(device.runtime, device.launchers, [layer], stream, Traffic()), "me")
    number = id(layer)
    del layer
    gc.collect()
    others = [random_layer(np.random.default_rng(i)) for i in range(20)]
    assert number not in map(id, others)
    assert id(bank.held_by("me")[0]) == number


def test_layers_are_repacked_ahead_and_uploaded_in_order():
    """More layers than are held ahead: each once, in order, and a failure in the middle leaves the first ones good."""
    rng = np.random.default_rng(1)
    layers = [random_layer(rng) for _ in range(7)]
    device = fake_device()
    packed: list[object] = []
    pack = device.launchers.pack
    launchers = replace(device.launchers, pack=lambda matrix: packed.append(matrix) or pack(matrix))
    with device.working():
        stream = device.workspace.compute
        done = list(upload_layers(device.runtime, launchers, layers, stream, Traffic()))
        assert [uploaded.layer for uploaded in done] == layers
        assert len(packed) == len(set(map(id, packed))) == 7 * 7
        device.runtime.fail_at = len(device.runtime.calls) + 40  # in the third layer
        bank = WeightBank()
        uploads = upload_layers(device.runtime, launchers, layers, stream, Traffic())
        with pytest.raises(FakeCudaError):
            deque((bank.add(uploaded, "me") for uploaded in uploads), maxlen=0)
    assert bank.held_by("me") == layers[: len(bank.held_by("me"))]
    assert 1 <= len(bank.held_by("me")) <= 4
