"""Device weights: uploaded once, shared, freed with the last holder."""

from __future__ import annotations

import gc

import numpy as np

from frink_numba.cuda.traffic import Traffic
from frink_numba.cuda.weights import WeightBank
from tests.cuda.fake_gpu import fake_device
from tests.random_layers import random_layer


def test_layers_are_shared_and_freed_with_their_last_holder():
    device, bank = fake_device(), WeightBank()
    rng = np.random.default_rng(0)
    layers = [random_layer(rng), random_layer(rng)]
    first, second = object(), object()
    with device.working():
        stream = device.workspace.compute
        for layer in layers:
            bank.add(device.body.upload(layer, stream, Traffic()), first)
        device.runtime.drain()
    total = bank.nbytes
    assert total == device.runtime.allocated()
    assert [bank.holds(layer, second) for layer in layers] == [False, False]
    assert bank.find(layers[1], second) is bank.get(layers[1])
    assert [bank.holds(layer, second) for layer in layers] == [False, True]
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
        bank.add(device.body.upload(layer, device.workspace.compute, Traffic()), "me")
    number = id(layer)
    del layer
    gc.collect()
    others = [random_layer(np.random.default_rng(i)) for i in range(20)]
    assert number not in map(id, others)
    assert id(bank.held_by("me")[0]) == number
