"""What the tensor-core tiers serve beyond the SIMT tier, each lift alone and all of them, against the float64 truth."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from frink_numba.backend import Decline, Serve
from frink_numba.cuda.backend import CudaBackend
from frink_numba.cuda.classify import decline_reason
from frink_numba.cuda.tensor import lifts
from frink_numba.cuda.tensor.lifts import lifted
from frink_numba.layer import Activation, Layer, RopeLayout
from tests import reference
from tests.cuda.quantized_layers import quantized_layer
from tests.differential.gpu import bound_of, device_of, run_twice, step_over
from tests.random_layers import LayerOptions

_BASE = {"heads": 4, "kv_heads": 2, "head_dim": 64, "hidden": 256, "ffn": 512}
LIFTS: dict[str, dict] = {
    "gelu": {"activation": Activation.GEGLU},
    "exact gelu": {"activation": Activation.GEGLU_ERF},
    "scale": {"scale": 0.05},
    "sinks": {"sinks": True},
    "residual": {"residual_scale": 0.22},
    "residual behind post-norms": {"residual_scale": 0.22, "post_norms": True},
    "biases": {"bias": True, "o_bias": True, "ffn_bias": True, "residual_scale": 0.6},
    "biases and norms behind": {"o_bias": True, "ffn_bias": True, "post_norms": True, "activation": Activation.GEGLU},
    "norm after the rotation": {"qk_norm": "head", "qk_norm_after_rope": True, "magnitude": 1.3, "partial": True},
    "norm of all heads after the rotation": {
        "qk_norm": "whole",
        "qk_norm_after_rope": True,
        "magnitude": 0.7,
        "layout": RopeLayout.NEOX,
    },
    "no norms before": {"pre_norms": False, "residual_scale": 0.01},
    "norms behind alone, by head": {"pre_norms": False, "post_norms": True, "qk_norm": "head"},
    "norms behind alone, of all heads": {"pre_norms": False, "post_norms": True, "qk_norm": "whole"},
    "all, windowed and capped": {
        "activation": Activation.GEGLU,
        "scale": 0.2,
        "sinks": True,
        "residual_scale": 1.7,
        "post_norms": True,
        "qk_norm": "head",
        "window": 19,
        "softcap": 4.0,
        "layout": RopeLayout.NEOX,
    },
    "all, exact and without norms before": {
        "activation": Activation.GEGLU_ERF,
        "scale": 0.2,
        "sinks": True,
        "residual_scale": 0.4,
        "pre_norms": False,
        "post_norms": True,
        "qk_norm": "head",
        "qk_norm_after_rope": True,
        "window": 19,
    },
}


def make(name: str, kinds: tuple[str, ...] = ("Q8_0",)) -> Layer:
    """Norms are set so that scores and gates have the size that a trained model's have, whatever their scale."""
    layer = quantized_layer(np.random.default_rng(len(name)), LayerOptions(**_BASE, **LIFTS[name]), kinds)
    if layer.attn_norm is None:
        return layer
    spec, gate = layer.attention, layer.ffn.experts[0].gate
    deviations = [float(np.std(reference.weights(matrix))) for matrix in (spec.q, spec.k, gate)]
    width, sharpness = np.sqrt(layer.hidden_dim), 1.0
    if spec.scale is not None:
        sharpness /= np.sqrt(spec.scale * np.sqrt(spec.head_dim))
    attn_norm = layer.attn_norm * (sharpness / (np.sqrt(deviations[0] * deviations[1]) * width))
    ffn_norm = layer.ffn_norm * (1.5 / (deviations[2] * width))
    return replace(layer, attn_norm=attn_norm.astype(np.float32), ffn_norm=ffn_norm.astype(np.float32))


def stream_size(layer: Layer) -> float:
    """As large as what the layer adds to it (see layer_cases); or so that scores stay in bounds, without any norm."""
    if layer.attn_norm is None and layer.attention.q_norm is None:
        return 1 / float(np.std(reference.weights(layer.attention.q)) * np.sqrt(layer.hidden_dim))
    if layer.post_ffn_norm is not None:
        return 1.0
    down = reference.weights(layer.ffn.experts[0].down)
    return max(1.0, float(np.std(down)) * np.sqrt(down.shape[1]) / 2)


@pytest.mark.gpu
@pytest.mark.parametrize("tier", ["mma", "wgmma"])
@pytest.mark.parametrize("name", LIFTS)
# 3 and 40 rows run through kernels of their own; kinds that differ between gate and up have no common product
@pytest.mark.parametrize(("batch", "kinds"), [(3, ("Q8_0",)), (40, ("Q8_0",)), (40, ("Q4_K", "Q6_K", "Q5_K"))])
def test_a_lift_equals_the_truth(tier: str, name: str, batch: int, kinds: tuple[str, ...]):
    """R4, R15, R24."""
    layer, rng = make(name, kinds), np.random.default_rng(batch)
    hidden = (stream_size(layer) * rng.normal(size=(batch, layer.hidden_dim))).astype(np.float32)
    keys, values = rng.normal(size=(2, 37, 2, 64)).astype(np.float32)
    step = step_over([layer], hidden, [(keys, values)])
    backend = CudaBackend([layer], device_of(tier))
    assert isinstance(backend.can_serve(0, step), Serve)
    got = run_twice(backend, step)
    backend.close()
    for one, want in zip(got, reference.layer(layer, hidden, keys, values), strict=True):
        assert reference.relative_error(one, want) < bound_of(tier)


@pytest.mark.gpu
@pytest.mark.parametrize("name", LIFTS)
def test_the_simt_tier_declines_it(name: str):
    layer = make(name)
    empty = np.empty((0, 2, 64), np.float32)
    step = step_over([layer], np.ones((4, layer.hidden_dim), np.float32), [(empty, empty)])
    answer = CudaBackend([layer], device_of("simt")).can_serve(0, step)
    assert isinstance(answer, Decline)
    assert answer.reason == decline_reason(layer)


@pytest.mark.parametrize("name", LIFTS)
def test_a_lift_is_what_stands_against_the_layer(name: str):
    """The table declines the layer, and nothing else does: each lift is needed, and is enough."""
    layer = make(name)
    assert decline_reason(layer) is not None
    assert decline_reason(lifted(layer)) is None


@pytest.mark.gpu
@pytest.mark.parametrize("tier", ["mma", "wgmma"])
@pytest.mark.parametrize("batch", [3, 40])
@pytest.mark.parametrize("size", [2.0**-10, lifts.LARGEST_STREAM])
def test_a_stream_without_a_norm_may_be_small_and_large(tier: str, batch: int, size: float):
    """Numerics: to both ends of what `lifts.LARGEST_STREAM` promises, and one row far below the others."""
    layer, rng = make("norms behind alone, by head"), np.random.default_rng(batch)
    hidden = (size * rng.normal(size=(batch, layer.hidden_dim))).astype(np.float32)
    hidden[1] *= 1e-3
    keys, values = rng.normal(size=(2, 37, 2, 64)).astype(np.float32)
    step = step_over([layer], hidden, [(keys, np.float32(size) * values)])
    backend = CudaBackend([layer], device_of(tier))
    got = run_twice(backend, step)
    backend.close()
    for one, want in zip(got, reference.layer(layer, hidden, keys, np.float32(size) * values), strict=True):
        assert reference.relative_error(one, want) < bound_of(tier)


def test_other_activations_are_declined_by_name():
    """R4: never approximated by one that is near."""
    other = LayerOptions(**_BASE, activation=Activation.REGLU_SQUARED)
    layer = quantized_layer(np.random.default_rng(0), other, ("Q8_0",))
    assert decline_reason(lifted(layer)) == "the activation reglu_squared"
