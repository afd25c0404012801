"""Which layers the resident stack serves: every field of the layer description, classified (R4, R5, R14 to R19).

The table below names every field of every description class. A field is served (the stack computes what it asks for
whatever its value), or has a rule that answers why a value is declined. A field or class that is not in the table makes
the layer decline, so that the table is exhaustive by construction (R16). Nothing here needs numba or a device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from frink_numba.kernels.kinds import can_multiply
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
from frink_numba.quant import QuantMatrix

MAX_HEAD_DIM = 256

Rule = Callable[[Any, Any], str | None]
"""`rule(value, owner)`: why the stack declines this value of a field of `owner`; None when it serves it."""


def decline_reason(layer: Layer) -> str | None:
    """Why the stack cannot run `layer`, in one line without the layer's number; None when it can."""
    return _walk(layer)


def _walk(owner: Any) -> str | None:
    rules = next((RULES[kind] for kind in type(owner).__mro__ if kind in RULES), None)
    if rules is None:
        return f"a description of an unknown kind: {type(owner).__name__}"
    for field in fields(owner):
        rule = rules.get(field.name)
        if rule is None:
            return f"an unknown field: {type(owner).__name__}.{field.name}"
        reason = rule(getattr(owner, field.name), owner)
        if reason is not None:
            return reason
    return None


def _served(value: Any, owner: Any) -> str | None:
    return None


def _described(value: Any, owner: Any) -> str | None:
    """A part with fields of its own, or None."""
    return None if value is None else _walk(value)


def _absent(what: str) -> Rule:
    """Declined when it is there: not None, False, 0 or empty."""

    def rule(value: Any, owner: Any) -> str | None:
        there = value is not None and value is not False and not (isinstance(value, tuple) and not value)
        return what if there else None

    return rule


def _matrix(site: str) -> Rule:
    """R19: the matrix product serves this quantization kind and shape."""

    def rule(value: QuantMatrix, owner: Any) -> str | None:
        reason = can_multiply(value.kind, value.rows, value.cols)
        return None if reason is None else f"the {site} projection: {reason}"

    return rule


def _mixer(value: TokenMixer, owner: Layer) -> str | None:
    return None if value is TokenMixer.ATTENTION else f"a {value.value} in place of attention"


def _post_norm_eps(value: float | None, owner: Layer) -> str | None:
    if value is None or value == owner.norm_eps:
        return None
    return f"a post-norm epsilon of {value:g} beside a pre-norm epsilon of {owner.norm_eps:g}"


def _head_dim(value: int, owner: AttentionSpec) -> str | None:
    return None if value <= MAX_HEAD_DIM else f"a head_dim of {value}, over {MAX_HEAD_DIM}"


def _qk_norm(value: Any, owner: AttentionSpec) -> str | None:
    return "a QK norm with a distinct row per head" if value is not None and value.ndim == 2 else None


def _rope(value: Rope | None, owner: AttentionSpec) -> str | None:
    if value is None:
        return None
    if value.rot_dim > owner.head_dim:
        return f"a rotary width of {value.rot_dim}, wider than the head of {owner.head_dim}"
    return _walk(value)


def _rot_dim(value: int, owner: Rope) -> str | None:
    if value <= 0:
        return f"a rotary width of {value}"
    return f"an odd rotary width of {value}" if value % 2 else None


def _rope_layout(value: RopeLayout, owner: Rope) -> str | None:
    return None if value in (RopeLayout.NORM, RopeLayout.NEOX) else f"a rope layout {value}"


def _activation(value: Activation, owner: FeedForward) -> str | None:
    return None if value is Activation.SWIGLU else f"the activation {value.value}"


def _pre_norm(site: str) -> Rule:
    def rule(value: Any, owner: Layer) -> str | None:
        return f"no norm before the {site}" if value is None else None

    return rule


def _residual_scale(value: float, owner: Layer) -> str | None:
    return None if value == 1 else f"a residual scale of {value:g}"


def _experts(value: tuple[Expert, ...], owner: FeedForward) -> str | None:
    return _walk(value[0]) if len(value) == 1 else f"{len(value)} experts"


def _experts_used(value: int, owner: FeedForward) -> str | None:
    return None if value == 1 else f"{value} experts a token"


def _resident(value: bool, owner: Expert) -> str | None:
    return None if value else "an expert that is not resident"


RULES: dict[type, dict[str, Rule]] = {
    Layer: {
        "attn_norm": _pre_norm("attention"),
        "attention": _described,
        "ffn_norm": _pre_norm("FFN"),
        "ffn": _described,
        "norm_eps": _served,
        "post_attn_norm": _served,
        "post_ffn_norm": _served,
        "post_norm_eps": _post_norm_eps,
        "mixer": _mixer,
        "lora": _absent("an attached LoRA"),
        "residual_scale": _residual_scale,
    },
    AttentionSpec: {
        "n_heads": _served,
        "n_kv_heads": _served,
        "head_dim": _head_dim,
        "q": _matrix("q"),
        "k": _matrix("k"),
        "v": _matrix("v"),
        "o": _matrix("o"),
        "rope": _rope,
        "q_bias": _served,
        "k_bias": _served,
        "v_bias": _served,
        "q_norm": _qk_norm,
        "k_norm": _qk_norm,
        "qk_norm_after_rope": _absent("a QK norm after the rotation"),
        "window": _served,
        "softcap": _served,
        "scale": _absent("an overridden attention scale"),
        "sinks": _absent("attention sinks"),
        "output_gate": _absent("an output gate"),
        "interleaved_q_gate": _absent("an interleaved q gate"),
        "value_norm": _absent("a norm between the value sum and the output projection"),
        "o_bias": _absent("a bias after the output projection"),
        "o_scale": _absent("a scale after the output projection"),
    },
    Rope: {
        "theta": _served,
        "rot_dim": _rot_dim,
        "layout": _rope_layout,
        "freq_factors": _served,
        "magnitude_scale": _served,
    },
    FeedForward: {
        "activation": _activation,
        "experts": _experts,
        "router": _absent("a router of experts"),
        "n_experts_used": _experts_used,
        "normalized_weights": _absent("expert weights that are normalized"),
        "shared": _absent("a shared expert"),
        "shared_gate": _absent("a gate of the shared expert"),
    },
    Expert: {
        "gate": _matrix("gate"),
        "up": _matrix("up"),
        "down": _matrix("down"),
        "gate_bias": _absent("a bias at the gate projection"),
        "up_bias": _absent("a bias at the up projection"),
        "down_bias": _absent("a bias at the down projection"),
        "down_scale": _absent("a scale after the down projection"),
        "resident": _resident,
    },
    Lora: {
        "target": _absent("an attached LoRA"),
        "down": _absent("an attached LoRA"),
        "up": _absent("an attached LoRA"),
        "scale": _absent("an attached LoRA"),
    },
}
