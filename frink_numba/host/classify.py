"""What the host serves: every field of the layer description classified, and shapes checked against each other.

The list is exhaustive by construction (R16): a field that is not in the table is a reason to decline.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np

from frink_numba.host.activation import ACTIVATIONS
from frink_numba.layer import AttentionSpec, Expert, FeedForward, Layer, Lora, Rope, RopeLayout, TokenMixer
from frink_numba.quant import QuantMatrix

_LORA_TARGETS = frozenset({"q", "k", "v", "o", "gate", "up", "down"})

Rule: TypeAlias = Callable[[Any], "str | None"]  # of a field's value: None when it is served, else the reason


def _served(value: Any) -> str | None:
    return None


def _activation(value: Any) -> str | None:
    return None if value in ACTIVATIONS else f"activation {value} is not served"


def _mixer(value: Any) -> str | None:
    return None if value is TokenMixer.ATTENTION else f"a {getattr(value, 'value', value)} mixes tokens"


def _layout(value: Any) -> str | None:
    return None if value in (RopeLayout.NORM, RopeLayout.NEOX) else f"rope layout {value} is not served"


def _experts(value: Any) -> str | None:
    return None if value else "no expert at all"


def _lora_target(value: Any) -> str | None:
    return None if value in _LORA_TARGETS else f"a LoRA of {value!r} is not served"


def _absent(what: str) -> Rule:
    def rule(value: Any) -> str | None:
        return f"{what} is not served" if value else None

    return rule


RULES: Mapping[type, Mapping[str, Rule]] = {
    Layer: {
        "attn_norm": _served,
        "attention": _served,
        "ffn_norm": _served,
        "ffn": _served,
        "norm_eps": _served,
        "post_attn_norm": _served,
        "post_ffn_norm": _served,
        "post_norm_eps": _served,
        "mixer": _mixer,
        "lora": _served,
        "residual_scale": _served,
    },
    AttentionSpec: {
        "n_heads": _served,
        "n_kv_heads": _served,
        "head_dim": _served,
        "q": _served,
        "k": _served,
        "v": _served,
        "o": _served,
        "rope": _served,
        "q_bias": _served,
        "k_bias": _served,
        "v_bias": _served,
        "q_norm": _served,
        "k_norm": _served,
        "qk_norm_after_rope": _served,
        "window": _served,
        "softcap": _served,
        "scale": _served,
        "sinks": _served,
        "output_gate": _served,
        "interleaved_q_gate": _absent("an interleaved q gate"),
        "value_norm": _served,
        "o_bias": _served,
        "o_scale": _served,
    },
    Rope: {
        "theta": _served,
        "rot_dim": _served,
        "layout": _layout,
        "freq_factors": _served,
        "magnitude_scale": _served,
    },
    FeedForward: {
        "activation": _activation,
        "experts": _experts,
        "router": _served,
        "n_experts_used": _served,
        "normalized_weights": _served,
        "shared": _served,
        "shared_gate": _served,
    },
    Expert: {
        "gate": _served,
        "up": _served,
        "down": _served,
        "gate_bias": _served,
        "up_bias": _served,
        "down_bias": _served,
        "down_scale": _served,
        "resident": lambda value: None if value else "an expert is not resident",
    },
    Lora: {
        "target": _lora_target,
        "down": _served,
        "up": _served,
        "scale": _served,
    },
}


def decline_reason(layer: Layer) -> str | None:
    """Why the host does not serve `layer`: one line, or None when it does."""
    parts: list[Any] = [layer, layer.attention, layer.ffn]
    if layer.attention.rope is not None:
        parts.append(layer.attention.rope)
    parts += layer.ffn.experts
    if layer.ffn.shared is not None:
        parts.append(layer.ffn.shared)
    parts += layer.lora
    for part in parts:
        reason = _part_reason(part)
        if reason is not None:
            return reason
    return next(_mismatches(layer), None)


def _part_reason(part: Any) -> str | None:
    """The first field of a description that is unknown or not served."""
    known = next((RULES[kind] for kind in type(part).__mro__ if kind in RULES), {})
    for field in dataclasses.fields(part):
        rule = known.get(field.name)
        if rule is None:
            return f"the host does not know the field {type(part).__name__}.{field.name}"
        reason = rule(getattr(part, field.name))
        if reason is not None:
            return reason
    return None


def _mismatches(layer: Layer) -> Iterator[str]:
    """Numbers and shapes that contradict each other (R20)."""
    spec, hidden = layer.attention, layer.hidden_dim
    heads, kv_heads, head_dim = spec.n_heads, spec.n_kv_heads, spec.head_dim
    if min(heads, kv_heads, head_dim) < 1 or heads % kv_heads:
        yield f"{heads} heads of {head_dim} do not share {kv_heads} key/value heads evenly"
        return
    rope = spec.rope
    if rope is not None:
        if rope.rot_dim < 2 or rope.rot_dim % 2 or rope.rot_dim > head_dim:
            yield f"a rotary width of {rope.rot_dim} does not fit heads of {head_dim}"
        yield from _vector("rope frequency factors", rope.freq_factors, (rope.rot_dim // 2,))
    if spec.window < 0:
        yield f"a sliding window of {spec.window} is negative"
    if spec.softcap < 0:
        yield f"a soft cap of {spec.softcap:g} is negative"
    if spec.output_gate is not None and spec.value_norm is not None:
        yield "an output gate together with a value norm is not served: their order is not known"

    width, kv_width = heads * head_dim, kv_heads * head_dim
    yield from _matrix("q", spec.q, width, hidden)
    yield from _matrix("k", spec.k, kv_width, hidden)
    yield from _matrix("v", spec.v, kv_width, hidden)
    yield from _matrix("o", spec.o, hidden, width)
    yield from _matrix("the output gate", spec.output_gate, width, hidden)
    for name, vector, *shapes in (
        ("the attention norm", layer.attn_norm, (hidden,)),
        ("the FFN norm", layer.ffn_norm, (hidden,)),
        ("the norm after attention", layer.post_attn_norm, (hidden,)),
        ("the norm after the FFN", layer.post_ffn_norm, (hidden,)),
        ("q's bias", spec.q_bias, (width,)),
        ("k's bias", spec.k_bias, (kv_width,)),
        ("v's bias", spec.v_bias, (kv_width,)),
        ("q's norm", spec.q_norm, (head_dim,), (width,), (heads, head_dim)),
        ("k's norm", spec.k_norm, (head_dim,), (kv_width,), (kv_heads, head_dim)),
        ("attention sinks", spec.sinks, (heads,)),
        ("the value norm", spec.value_norm, (width,)),
        ("o's bias", spec.o_bias, (hidden,)),
        ("o's scale", spec.o_scale, (hidden,), (1,)),
    ):
        yield from _vector(name, vector, *shapes)
    yield from _expert_mismatches(layer.ffn, hidden)
    yield from _lora_mismatches(layer)


def _expert_mismatches(ffn: FeedForward, hidden: int) -> Iterator[str]:
    experts = len(ffn.experts)
    if ffn.router is None and (experts > 1 or ffn.shared is not None):
        yield f"{experts} experts {'' if ffn.shared is None else 'and a shared one '}without a router"
    if not 1 <= ffn.n_experts_used <= experts:
        yield f"{ffn.n_experts_used} of {experts} experts a token"
    yield from _matrix("the router", ffn.router, experts, hidden)
    yield from _vector("the shared expert's gate", ffn.shared_gate, (hidden,))
    if ffn.shared_gate is not None and ffn.shared is None:
        yield "a gate of a shared expert that is not there"
    for expert in (*ffn.experts, *(() if ffn.shared is None else (ffn.shared,))):
        width = expert.gate.rows
        yield from _matrix("gate", expert.gate, width, hidden)
        yield from _matrix("up", expert.up, width, hidden)
        yield from _matrix("down", expert.down, hidden, width)
        for name, vector, *shapes in (
            ("gate's bias", expert.gate_bias, (width,)),
            ("up's bias", expert.up_bias, (width,)),
            ("down's bias", expert.down_bias, (hidden,)),
            ("down's scale", expert.down_scale, (hidden,), (1,)),
        ):
            yield from _vector(name, vector, *shapes)


def _lora_mismatches(layer: Layer) -> Iterator[str]:
    for lora in layer.lora:
        owner: Any = layer.attention if lora.target in "qkvo" else layer.ffn.experts[0]
        if isinstance(owner, Expert) and layer.ffn.router is not None:
            yield f"a LoRA of {lora.target!r} beside a router of experts: it does not say of which"
            return
        matrix: QuantMatrix = getattr(owner, lora.target)
        rank = np.shape(lora.down)[0] if np.ndim(lora.down) else 0
        yield from _vector(f"the LoRA of {lora.target}, down,", lora.down, (rank, matrix.cols))
        yield from _vector(f"the LoRA of {lora.target}, up,", lora.up, (matrix.rows, rank))


def _matrix(name: str, matrix: QuantMatrix | None, rows: int, cols: int) -> Iterator[str]:
    if matrix is not None and (matrix.rows, matrix.cols) != (rows, cols):
        yield f"{name} is {matrix.rows} x {matrix.cols}, but the layer needs {rows} x {cols}"


def _vector(name: str, vector: np.ndarray | None, *shapes: tuple[int, ...]) -> Iterator[str]:
    if vector is not None and np.shape(vector) not in shapes:
        needed = " or ".join(str(list(shape)) for shape in shapes)
        yield f"{name} has shape {list(np.shape(vector))}, but the layer needs {needed}"
