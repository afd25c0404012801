"""R4, R5, R14 to R19: which layers the stack takes, and R16: nothing is forgotten."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from frink_numba import layer as description
from frink_numba.cuda.classify import RULES, decline_reason
from frink_numba.kernels.kinds import supported_kinds
from frink_numba.layer import (
    Activation,
    AttentionSpec,
    Expert,
    FeedForward,
    Layer,
    Lora,
    Rope,
    RopeLayout,
    TokenMixer,
)
from frink_numba.quant import KINDS, QuantMatrix
from tests.random_layers import LayerOptions, random_layer


def plain(**options: Any) -> Layer:
    return random_layer(np.random.default_rng(0), LayerOptions(**options))


def with_attention(layer: Layer | None = None, **changes: Any) -> Layer:
    layer = layer or plain()
    return replace(layer, attention=replace(layer.attention, **changes))


def with_rope(**changes: Any) -> Layer:
    layer = plain()
    assert layer.attention.rope is not None
    return with_attention(layer, rope=replace(layer.attention.rope, **changes))


def with_ffn(**changes: Any) -> Layer:
    layer = plain()
    return replace(layer, ffn=replace(layer.ffn, **changes))


def with_expert(**changes: Any) -> Layer:
    layer = plain()
    return with_ffn(experts=(replace(layer.ffn.experts[0], **changes),))


def some(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


SQUARE = QuantMatrix.from_float32(np.ones((40, 40), np.float32))

DECLINED = {
    "Layer.post_norm_eps": (replace(plain(), post_norm_eps=1e-3), "a post-norm epsilon of 0.001"),
    "Layer.mixer": (replace(plain(), mixer=TokenMixer.STATE_SPACE), "a state space in place of attention"),
    "Layer.mixer convolution": (
        replace(plain(), mixer=TokenMixer.SHORT_CONVOLUTION),
        "a short convolution in place of attention",
    ),
    "Layer.lora": (replace(plain(), lora=(Lora("q", some(2, 40), some(64, 2), 1.0),)), "an attached LoRA"),
    "Layer.attn_norm": (replace(plain(), attn_norm=None), "no norm before the attention"),
    "Layer.ffn_norm": (replace(plain(), ffn_norm=None), "no norm before the FFN"),
    "Layer.residual_scale": (replace(plain(), residual_scale=0.22), "a residual scale of 0.22"),
    "AttentionSpec.head_dim": (with_attention(head_dim=257), "a head_dim of 257, over 256"),
    "AttentionSpec.q_norm": (plain(qk_norm="rows"), "a QK norm with a distinct row per head"),
    "AttentionSpec.k_norm": (with_attention(k_norm=some(2, 16)), "a QK norm with a distinct row per head"),
    "AttentionSpec.qk_norm_after_rope": (with_attention(qk_norm_after_rope=True), "a QK norm after the rotation"),
    "AttentionSpec.scale": (with_attention(scale=0.25), "an overridden attention scale"),
    "AttentionSpec.scale zero": (with_attention(scale=0.0), "an overridden attention scale"),
    "AttentionSpec.sinks": (with_attention(sinks=some(4)), "attention sinks"),
    "AttentionSpec.output_gate": (with_attention(output_gate=SQUARE), "an output gate"),
    "AttentionSpec.interleaved_q_gate": (with_attention(interleaved_q_gate=True), "an interleaved q gate"),
    "AttentionSpec.value_norm": (with_attention(value_norm=some(64)), "a norm between the value sum and the output"),
    "AttentionSpec.o_bias": (with_attention(o_bias=some(40)), "a bias after the output projection"),
    "AttentionSpec.o_scale": (with_attention(o_scale=some(40)), "a scale after the output projection"),
    "AttentionSpec.rope": (with_rope(rot_dim=18), "a rotary width of 18, wider than the head of 16"),
    "Rope.rot_dim zero": (with_rope(rot_dim=0), "a rotary width of 0"),
    "Rope.rot_dim odd": (with_rope(rot_dim=7), "an odd rotary width of 7"),
    "Rope.layout": (with_rope(layout="spiral"), "a rope layout spiral"),
    "FeedForward.activation": (with_ffn(activation=Activation.GEGLU), "the activation geglu"),
    "FeedForward.activation erf": (with_ffn(activation=Activation.GEGLU_ERF), "the activation geglu_erf"),
    "FeedForward.activation relu": (with_ffn(activation=Activation.REGLU_SQUARED), "the activation reglu_squared"),
    "FeedForward.experts none": (with_ffn(experts=()), "0 experts"),
    "FeedForward.experts two": (with_ffn(experts=plain().ffn.experts * 2), "2 experts"),
    "FeedForward.router": (with_ffn(router=SQUARE), "a router of experts"),
    "FeedForward.n_experts_used": (with_ffn(n_experts_used=2), "2 experts a token"),
    "FeedForward.normalized_weights": (with_ffn(normalized_weights=True), "expert weights that are normalized"),
    "FeedForward.shared": (with_ffn(shared=plain().ffn.experts[0]), "a shared expert"),
    "FeedForward.shared_gate": (with_ffn(shared_gate=some(40)), "a gate of the shared expert"),
    "Expert.gate_bias": (with_expert(gate_bias=some(56)), "a bias at the gate projection"),
    "Expert.up_bias": (with_expert(up_bias=some(56)), "a bias at the up projection"),
    "Expert.down_bias": (with_expert(down_bias=some(40)), "a bias at the down projection"),
    "Expert.down_scale": (with_expert(down_scale=some(40)), "a scale after the down projection"),
    "Expert.resident": (with_expert(resident=False), "an expert that is not resident"),
}


@pytest.mark.parametrize("case", DECLINED)
def test_each_feature_that_no_kernel_has_is_declined_with_its_own_reason(case: str):
    """R4, R5, R15: by name, and never with another feature's reason."""
    layer, reason = DECLINED[case]
    got = decline_reason(layer)
    assert got is not None
    assert got.startswith(reason)
    assert "\n" not in got


def test_reasons_are_distinct():
    """A reason tells one feature from all others."""
    reasons = {case: decline_reason(layer) for case, (layer, _) in DECLINED.items()}
    same = {"AttentionSpec.q_norm", "AttentionSpec.k_norm"}, {"AttentionSpec.scale", "AttentionSpec.scale zero"}
    for case, reason in reasons.items():
        twins = {other for other, text in reasons.items() if text == reason}
        assert twins == {case} or twins in same, (case, twins)


@pytest.mark.parametrize("site", ["q", "k", "v", "o", "gate", "up", "down"])
def test_a_kind_without_a_kernel_is_declined_at_every_site(site: str):
    """R19: by site and kind."""
    bad = QuantMatrix(KINDS["TQ1_0"], np.zeros((16, 54), np.uint8), 16, 256)
    layer = with_attention(**{site: bad}) if site in "qkvo" else with_expert(**{site: bad})
    assert decline_reason(layer) == f"the {site} projection: no CUDA kernel multiplies TQ1_0"


@pytest.mark.parametrize(
    "layer",
    [
        plain(),
        plain(layout=None),
        plain(layout=RopeLayout.NEOX, partial=True, factors=True, magnitude=1.2),
        plain(bias=True, qk_norm="head", window=7, softcap=30.0, post_norms=True),
        plain(qk_norm="whole", post_norms=True, post_eps=1e-5),
        plain(heads=1, kv_heads=1, head_dim=256),
    ],
)
def test_what_kernels_compute_is_served(layer: Layer):
    """R14, R17, R18."""
    assert decline_reason(layer) is None


def description_classes() -> list[type]:
    return [
        kind
        for kind in vars(description).values()
        if isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind.__module__ == description.__name__
    ]


def test_every_field_of_every_description_is_classified():
    """R16: the table has exactly the fields that the dataclasses have."""
    classes = description_classes()
    assert {Layer, AttentionSpec, Rope, FeedForward, Expert, Lora} <= set(classes)
    for kind in classes:
        assert set(RULES[kind]) == {field.name for field in dataclasses.fields(kind)}, kind.__name__
    assert set(RULES) == set(classes)


@dataclass(frozen=True, eq=False)
class NewLayer(Layer):
    gadget: int = 0


@dataclass(frozen=True, eq=False)
class NewAttention(AttentionSpec):
    gadget: bool = False


@dataclass(frozen=True, eq=False)
class NewRope(Rope):
    gadget: float = 0.0


@dataclass(frozen=True, eq=False)
class NewFeedForward(FeedForward):
    gadget: None = None


@dataclass(frozen=True, eq=False)
class NewExpert(Expert):
    gadget: tuple[()] = ()


def upgraded(kind: type, old: Any) -> Any:
    return kind(**{field.name: getattr(old, field.name) for field in dataclasses.fields(old)})


def test_a_field_never_heard_of_declines_wherever_it_is():
    """R16: also when its value looks like nothing, since what that means is not known."""
    layer = plain()
    cases = {
        "NewLayer": upgraded(NewLayer, layer),
        "NewAttention": replace(layer, attention=upgraded(NewAttention, layer.attention)),
        "NewRope": with_attention(rope=upgraded(NewRope, layer.attention.rope)),
        "NewFeedForward": replace(layer, ffn=upgraded(NewFeedForward, layer.ffn)),
        "NewExpert": with_ffn(experts=(upgraded(NewExpert, layer.ffn.experts[0]),)),
    }
    for name, changed in cases.items():
        assert decline_reason(changed) == f"an unknown field: {name}.gadget"


def test_a_description_of_an_unknown_kind_declines():
    """R16: a part that is no description at all is no reason to crash."""
    assert decline_reason(replace(plain(), ffn="mixture")) == "a description of an unknown kind: str"  # type: ignore[arg-type]


def test_every_kind_with_a_kernel_is_served():
    """R19: the kinds that the issue names are among them."""
    asked = {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"}
    asked |= {"IQ4_NL", "IQ4_XS"}
    assert asked <= supported_kinds
    for name in asked:
        kind = KINDS[name]
        wide = QuantMatrix(kind, np.zeros((16, kind.row_bytes(256)), np.uint8), 16, 256)
        assert decline_reason(with_expert(gate=wide)) is None


def test_it_is_importable_without_numba():
    """The answer needs neither numba nor a device."""
    code = (
        "import sys, frink_numba.cuda.classify, frink_numba.cuda.shapes, frink_numba.cuda.memory\n"
        "assert not {'numba', 'cuda', 'numba_cuda'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
