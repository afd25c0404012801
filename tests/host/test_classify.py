"""Every field of the layer description is served or a reason to decline; shapes are checked (R4, R15, R16, R20)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from frink_numba import layer as description
from frink_numba.host.classify import RULES, decline_reason
from frink_numba.layer import Expert, Layer, Lora, TokenMixer
from frink_numba.quant import QuantMatrix
from tests.random_layers import random_layer


def plain(**options: Any) -> Layer:
    return random_layer(np.random.default_rng(0), **options)


def changed(layer: Layer, **fields: Any) -> Layer:
    """`layer` with fields of its attention, its expert, its FFN or its own replaced, whichever has them."""
    for name, value in fields.items():
        if name in {field.name for field in dataclasses.fields(Layer)}:
            layer = replace(layer, **{name: value})
        elif name in {field.name for field in dataclasses.fields(layer.attention)}:
            layer = replace(layer, attention=replace(layer.attention, **{name: value}))
        elif name in {field.name for field in dataclasses.fields(layer.ffn)}:
            layer = replace(layer, ffn=replace(layer.ffn, **{name: value}))
        else:
            expert = replace(layer.ffn.experts[0], **{name: value})
            layer = replace(layer, ffn=replace(layer.ffn, experts=(expert,)))
    return layer


def test_every_field_is_classified() -> None:
    """R16: walks the dataclasses of layer.py."""
    classes = [
        value
        for value in vars(description).values()
        if isinstance(value, type) and dataclasses.is_dataclass(value) and value.__module__ == description.__name__
    ]
    assert set(classes) == set(RULES)
    for kind in RULES:
        assert [field.name for field in dataclasses.fields(kind)] == list(RULES[kind]), kind


def test_an_unknown_field_is_a_reason() -> None:
    """R16: whatever its value, at any depth."""

    @dataclass(frozen=True, slots=True, eq=False)
    class LaterExpert(Expert):
        clamp: float = 0.0

    @dataclass(frozen=True, slots=True, eq=False)
    class LaterLayer(Layer):
        parallel: bool = False

    layer = plain()
    old = layer.ffn.experts[0]
    expert = LaterExpert(**{field.name: getattr(old, field.name) for field in dataclasses.fields(Expert)})
    assert decline_reason(changed(layer, experts=(expert,))) == "the host does not know the field LaterExpert.clamp"
    later = LaterLayer(**{field.name: getattr(layer, field.name) for field in dataclasses.fields(Layer)})
    assert decline_reason(later) == "the host does not know the field LaterLayer.parallel"


def test_everything_served_at_once_is_served() -> None:
    everything = plain(
        factors=True, magnitude=1.1, bias=True, qk_norm="head", window=5, softcap=3.0, scale=0.3, sinks=True,
        value_norm=True, o_bias=True, o_scale=True, post_norms=True, post_eps=1e-3, ffn_bias=True, down_scale=True,
    )  # fmt: skip
    assert decline_reason(everything) is None
    assert decline_reason(plain(layout=None, output_gate=True)) is None
    assert decline_reason(plain(pre_norms=False, residual_scale=0.2, loras="qkvogud")) is None
    assert decline_reason(plain(experts=5, normalized=True, shared=True, shared_gate=True)) is None


def small(rows: int, cols: int) -> QuantMatrix:
    return QuantMatrix.from_float32(np.ones((rows, cols), np.float32))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"mixer": TokenMixer.SHORT_CONVOLUTION}, "a short convolution mixes tokens"),
        ({"mixer": TokenMixer.STATE_SPACE}, "a state space mixes tokens"),
        ({"lora": (Lora("gates", np.ones((2, 2)), np.ones((2, 2)), 1.0),)}, "a LoRA of 'gates' is not served"),
        ({"interleaved_q_gate": True}, "an interleaved q gate is not served"),
        ({"resident": False}, "an expert is not resident"),
        ({"activation": "relu"}, "activation relu is not served"),
        ({"experts": ()}, "no expert at all"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_served_is_named(fields: dict[str, Any], reason: str) -> None:
    """R4, R15"""
    assert decline_reason(changed(plain(), **fields)) == reason


def test_experts_that_nothing_chooses_among_are_declined() -> None:
    layer = plain()
    assert decline_reason(changed(layer, experts=layer.ffn.experts * 2)) == "2 experts without a router"
    shared = changed(layer, shared=layer.ffn.experts[0])
    assert decline_reason(shared) == "1 experts and a shared one without a router"


def test_a_lora_beside_a_router_is_declined() -> None:
    """It would have to say of which expert; one of the attention is served."""
    layer = plain(experts=3)
    loras = plain(loras="qg").lora
    assert decline_reason(changed(layer, lora=loras[:1])) is None
    assert "beside a router" in (decline_reason(changed(layer, lora=loras)) or "")


def test_every_expert_is_looked_at() -> None:
    layer = plain(experts=3, shared=True)
    bad = replace(layer.ffn.experts[2], down=small(40, 40))
    assert "down is 40 x 40" in (decline_reason(changed(layer, experts=(*layer.ffn.experts[:2], bad))) or "")
    assert "down is 40 x 40" in (decline_reason(changed(layer, shared=bad)) or "")
    bad = replace(layer.ffn.shared, resident=False)
    assert decline_reason(changed(layer, shared=bad)) == "an expert is not resident"


def vector(n: int) -> np.ndarray:
    return np.ones(n, np.float32)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"n_heads": 0}, "0 heads of 16"),
        ({"n_kv_heads": 3}, "4 heads of 16 do not share 3"),
        ({"window": -1}, "window of -1"),
        ({"softcap": -1.0}, "soft cap of -1"),
        ({"q": small(63, 40)}, "q is 63 x 40, but the layer needs 64 x 40"),
        ({"k": small(64, 40)}, "k is 64 x 40, but the layer needs 32 x 40"),
        ({"v": small(32, 41)}, "v is 32 x 41"),
        ({"o": small(64, 40)}, "o is 64 x 40, but the layer needs 40 x 64"),
        ({"output_gate": small(4, 40)}, "the output gate is 4 x 40"),
        ({"up": small(55, 40)}, "up is 55 x 40, but the layer needs 56 x 40"),
        ({"gate": small(55, 40)}, "up is 56 x 40, but the layer needs 55 x 40"),
        ({"down": small(56, 40)}, "down is 56 x 40"),
        ({"ffn_norm": vector(39)}, "the FFN norm has shape [39], but the layer needs [40]"),
        ({"post_attn_norm": vector(1)}, "the norm after attention has shape [1]"),
        ({"q_bias": vector(32)}, "q's bias has shape [32], but the layer needs [64]"),
        ({"v_bias": vector(64)}, "v's bias"),
        (
            {"q_norm": np.ones((2, 16), np.float32)},
            "q's norm has shape [2, 16], but the layer needs [16] or [64] or [4, 16]",
        ),
        ({"k_norm": vector(64)}, "k's norm"),
        ({"sinks": vector(2)}, "attention sinks"),
        ({"value_norm": vector(16)}, "the value norm"),
        ({"o_scale": vector(2)}, "o's scale"),
        ({"gate_bias": vector(40)}, "gate's bias"),
        ({"down_scale": vector(56)}, "down's scale"),
        ({"router": small(2, 40)}, "the router is 2 x 40, but the layer needs 1 x 40"),
        ({"n_experts_used": 2}, "2 of 1 experts a token"),
        ({"n_experts_used": 0}, "0 of 1 experts a token"),
        ({"shared_gate": vector(41)}, "the shared expert's gate has shape [41]"),
        ({"shared_gate": vector(40)}, "a gate of a shared expert that is not there"),
        (
            {"lora": (Lora("q", np.ones((2, 39)), np.ones((64, 2)), 1.0),)},
            "the LoRA of q, down, has shape [2, 39], but the layer needs [2, 40]",
        ),
        ({"lora": (Lora("down", np.ones((2, 56)), np.ones((40, 3)), 1.0),)}, "the LoRA of down, up,"),
        ({"attn_norm": vector(41)}, "q is 64 x 40, but the layer needs 64 x 41"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_shapes_that_contradict_are_named(fields: dict[str, Any], words: str) -> None:
    """R20"""
    assert words in (decline_reason(changed(plain(), **fields)) or "")


@pytest.mark.parametrize("rot_dim", [0, 1, 7, 18])
def test_a_rotary_width_that_does_not_fit_is_named(rot_dim: int) -> None:
    """R15: zero, odd, or wider than the head."""
    layer = plain()
    assert layer.attention.rope is not None
    rope = replace(layer.attention.rope, rot_dim=rot_dim)
    assert decline_reason(changed(layer, rope=rope)) == f"a rotary width of {rot_dim} does not fit heads of 16"


def test_frequency_factors_have_one_value_a_pair() -> None:
    layer = plain()
    assert layer.attention.rope is not None
    for size in (7, 16):
        rope = replace(layer.attention.rope, freq_factors=vector(size))
        assert "rope frequency factors" in (decline_reason(changed(layer, rope=rope)) or "")


def test_a_gate_together_with_a_value_norm_is_declined() -> None:
    assert "an output gate together with a value norm" in (
        decline_reason(plain(output_gate=True, value_norm=True)) or ""
    )
