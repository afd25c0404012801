"""Mixtures of experts in a decoder: counts of experts (R22), layers that alternate with another backend's (R6, R15)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from frink_numba import registry
from frink_numba.backend import Decline, Run, Serve, Step
from frink_numba.cuda.classify import decline_reason
from frink_numba.host import load as load_module
from frink_numba.host.backend import HostBackend
from frink_numba.host.decoder import Decoder
from frink_numba.host.experts import mixture
from frink_numba.host.load import load
from frink_numba.host.prepare import prepare
from frink_numba.host.scratch import Scratch
from frink_numba.host.weights import WeightStore
from frink_numba.layer import FeedForward, Layer
from tests import reference
from tests.golden.tiny import VARIANTS, golden_logits, tokens
from tests.host.errors import worst_error
from tests.random_layers import random_layer

MIXTURES = [name for name, variant in VARIANTS.items() if variant.experts]


class Device:
    """Takes the layers that the CUDA backend's rules take, and computes them as the host does."""

    name = "device"

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._host = HostBackend(layers)
        self._reasons = [decline_reason(layer) for layer in layers]

    def can_serve(self, l: int, step: Step) -> Serve | Decline:  # noqa: E741
        reason = self._reasons[l]
        return Serve() if reason is None else Decline(reason)

    def run(self, l: int, length: int, step: Step) -> Run:  # noqa: E741
        return replace(self._host.run(l, length, step), experts=None)

    def close(self) -> None:
        self._host.close()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a registered `Device`."""
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    registry.register_backend("device", Device)
    return "device,host"


@pytest.mark.parametrize("name", MIXTURES)
def test_a_decoder_counts_the_experts_of_each_layer(name, save, device):
    """R22: once for each step that used an expert; the device declines every layer of these models by name."""
    variant, ids = VARIANTS[name], tokens(VARIANTS[name])
    with load(save(name)) as model, Decoder(model, device) as decoder:
        cache = decoder.new_cache()
        (row,) = decoder.plan(batch=8).rows
        assert (row.layers, row.backend) == ("0-2", "host")
        if "attention.scale" not in variant.keys:  # one reason is told, the first
            assert row.why == f"device: {variant.experts.count} experts"
        decoder.prefill(ids[:1], cache)
        for counts in decoder.activations:
            assert len(counts) == variant.experts.used
            assert set(counts.values()) == {1}
        decoder.prefill(ids[1:], cache, chunk_size=33)
        for counts in decoder.activations:
            assert variant.experts.used < len(counts) <= variant.experts.count
            assert set(counts) <= set(range(variant.experts.count))
            assert max(counts.values()) == 4


def test_dense_layers_run_on_the_device_between_mixtures_on_the_host(save, device, monkeypatch):
    """R6, R15: the plan shows the runs, the counts name expert 0 of dense layers, the logits are the host's own."""
    real = load_module.build

    def build(*arguments):
        tensors = real(*arguments)
        first, mixed, last = tensors.layers
        return replace(tensors, layers=(dense(first), mixed, dense(last)))

    def dense(layer):
        return replace(layer, ffn=FeedForward(layer.ffn.activation, layer.ffn.experts[:1]))

    monkeypatch.setattr(load_module, "build", build)
    ids = tokens(VARIANTS["mixtral"])
    path = save("mixtral")
    with load(path) as model, Decoder(model, device) as decoder, Decoder(model, "host") as alone:
        rows = decoder.plan(batch=8).rows
        assert [(row.layers, row.backend) for row in rows] == [("0", "device"), ("1", "host"), ("2", "device")]
        got = decoder.prefill(ids, decoder.new_cache(), logits="all").logits
        np.testing.assert_array_equal(got, alone.prefill(ids, alone.new_cache(), logits="all").logits)
        assert decoder.activations[0] == decoder.activations[2] == {0: 1}
        assert set(decoder.activations[1]) == {0, 1, 2, 3}
        assert decoder.activations == alone.activations


@pytest.mark.parametrize("budget", [0, 100_000, 1 << 30])
def test_experts_within_any_budget(budget, save):
    """A model larger than the budget gives the same logits: its experts are dequantized anew."""
    name = "qwen2moe_shared"
    with load(save(name)) as model:
        model.weights.budget_bytes = budget
        with Decoder(model, "host") as decoder:
            got = decoder.prefill(tokens(VARIANTS[name]), decoder.new_cache(), logits="all").logits
    assert worst_error(got, golden_logits(VARIANTS[name])) < 1e-5


@pytest.mark.parametrize("used", [1, 2, 7])
def test_a_token_does_not_depend_on_the_others_of_its_batch(used):
    """The gathered columns of an expert come back to their own tokens: batches of 1, 2 and 90 agree."""
    layer = prepare(random_layer(np.random.default_rng(0), experts=7, experts_used=used), 0, {})
    x = np.random.default_rng(1).normal(size=(40, 90)).astype(np.float32)
    store, whole = WeightStore(), np.empty((40, 90), np.float32)
    mixture(layer.mixture, x, whole, store, Scratch())
    for size in (1, 2):
        for first in range(0, 90, 30):
            part = np.empty((40, size), np.float32)
            chosen = np.ascontiguousarray(x[:, first : first + size])
            assert len(mixture(layer.mixture, chosen, part, store, Scratch())) >= used
            assert reference.relative_error(part, whole[:, first : first + size].astype(np.float64)) < 1e-6


def test_weights_that_are_not_numbers_show():
    """A NaN in a token makes that token NaN, and no other."""
    layer = prepare(random_layer(np.random.default_rng(0), experts=5), 0, {})
    x = np.random.default_rng(1).normal(size=(40, 6)).astype(np.float32)
    x[3, 4] = np.nan
    out = np.empty((40, 6), np.float32)
    with np.errstate(invalid="ignore"):
        mixture(layer.mixture, x, out, WeightStore(), Scratch())
    assert np.isnan(out[:, 4]).all()
    assert not np.isnan(np.delete(out, 4, axis=1)).any()
