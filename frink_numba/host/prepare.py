"""A layer made ready for the body, once per model: vectors as columns, biases of fused sets stacked."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from frink_numba.host.activation import ACTIVATIONS
from frink_numba.host.attention import Visibility
from frink_numba.host.experts import PreparedExpert, PreparedMixture
from frink_numba.host.lora import PreparedLora, prepare_loras
from frink_numba.host.rope import rope_key
from frink_numba.host.weights import Matrices
from frink_numba.host.workspace import LayerShape
from frink_numba.layer import Activation, AttentionSpec, Expert, FeedForward, Layer, Lora, Rope


@dataclass(frozen=True, slots=True)
class PreparedLayer:
    """What the body reads. Vectors are float32 columns [channels, 1]; weights stay quantized.

    `shape_id` and `rope_id` are equal for layers of equal shape and of equal rotation: enumerations hash slowly.
    """

    number: int
    shape: LayerShape
    shape_id: int
    eps: float
    post_eps: float
    residual_scale: float
    attn_norm: np.ndarray | None
    ffn_norm: np.ndarray | None
    post_attn_norm: np.ndarray | None
    post_ffn_norm: np.ndarray | None
    qkv: Matrices
    qkv_bias: np.ndarray | None
    qkv_loras: tuple[PreparedLora, ...]
    q_norm: np.ndarray | None  # [heads, head_dim, 1] or [1, head_dim, 1] per head, [heads*head_dim, 1] whole
    k_norm: np.ndarray | None
    norms_before_rope: bool
    norms_after_rope: bool
    rope: Rope | None
    rope_id: int
    visibility: Visibility
    output_gate: Matrices
    value_norm: np.ndarray | None
    o: Matrices
    o_scale: np.ndarray | None
    o_bias: np.ndarray | None
    o_loras: tuple[PreparedLora, ...]
    dense: PreparedExpert  # the first expert, and the only one when `mixture` is None
    mixture: PreparedMixture | None


def prepare(layer: Layer, number: int, ids: dict[Hashable, int]) -> PreparedLayer:
    """`layer` is the model's layer `number` (for messages), one that `classify.decline_reason` has nothing against.

    `ids` numbers the shapes and rotations met so far; it starts empty and is the same for all layers of a model.
    """
    spec: AttentionSpec = layer.attention
    dense = _expert(layer.ffn.experts[0], layer.ffn.activation, layer.lora)
    mixture = _mixture(layer.ffn)
    rope = spec.rope
    shape = LayerShape(
        hidden=layer.hidden_dim,
        n_heads=spec.n_heads,
        n_kv_heads=spec.n_kv_heads,
        head_dim=spec.head_dim,
        ffn=dense.ffn if mixture is None else 0,
        rot_dim=0 if rope is None else rope.rot_dim,
        layout=None if rope is None else rope.layout,
    )
    has_norms = spec.q_norm is not None or spec.k_norm is not None
    scale = spec.head_dim**-0.5 if spec.scale is None else spec.scale
    return PreparedLayer(
        number=number,
        shape=shape,
        shape_id=ids.setdefault(shape, len(ids)),
        eps=layer.norm_eps,
        post_eps=layer.norm_eps if layer.post_norm_eps is None else layer.post_norm_eps,
        residual_scale=layer.residual_scale,
        attn_norm=_column(layer.attn_norm),
        ffn_norm=_column(layer.ffn_norm),
        post_attn_norm=_column(layer.post_attn_norm),
        post_ffn_norm=_column(layer.post_ffn_norm),
        qkv=(spec.q, spec.k, spec.v),
        qkv_bias=_stack((spec.q_bias, spec.q.rows), (spec.k_bias, spec.k.rows), (spec.v_bias, spec.v.rows)),
        qkv_loras=prepare_loras(layer.lora, [("q", spec.q.rows), ("k", spec.k.rows), ("v", spec.v.rows)]),
        q_norm=_head_norm(spec.q_norm, spec.n_heads, spec.head_dim),
        k_norm=_head_norm(spec.k_norm, spec.n_kv_heads, spec.head_dim),
        norms_before_rope=has_norms and not spec.qk_norm_after_rope,
        norms_after_rope=has_norms and spec.qk_norm_after_rope,
        rope=rope,
        rope_id=0 if rope is None else ids.setdefault(rope_key(rope), len(ids)),
        visibility=Visibility(scale, spec.window, spec.softcap, _float32(spec.sinks)),
        output_gate=() if spec.output_gate is None else (spec.output_gate,),
        value_norm=_column(spec.value_norm),
        o=(spec.o,),
        o_scale=_column(spec.o_scale),
        o_bias=_column(spec.o_bias),
        o_loras=prepare_loras(layer.lora, [("o", spec.o.rows)], _column(spec.o_scale)),
        dense=dense,
        mixture=mixture,
    )


def _expert(expert: Expert, activation: Activation, loras: tuple[Lora, ...] = ()) -> PreparedExpert:
    down_scale = _column(expert.down_scale)
    return PreparedExpert(
        activation=ACTIVATIONS[activation],
        ffn=expert.gate.rows,
        gate_up=(expert.gate, expert.up),
        gate_up_bias=_stack((expert.gate_bias, expert.gate.rows), (expert.up_bias, expert.up.rows)),
        gate_up_loras=prepare_loras(loras, [("gate", expert.gate.rows), ("up", expert.up.rows)]),
        down=(expert.down,),
        down_scale=down_scale,
        down_bias=_column(expert.down_bias),
        down_loras=prepare_loras(loras, [("down", expert.down.rows)], down_scale),
    )


def _mixture(ffn: FeedForward) -> PreparedMixture | None:
    if ffn.router is None:
        return None
    return PreparedMixture(
        router=(ffn.router,),
        experts=tuple(_expert(expert, ffn.activation) for expert in ffn.experts),
        n_used=ffn.n_experts_used,
        normalized=ffn.normalized_weights,
        shared=None if ffn.shared is None else _expert(ffn.shared, ffn.activation),
        shared_gate=None if ffn.shared_gate is None else _needed_column(ffn.shared_gate).T,
    )


def _float32(vector: np.ndarray | None) -> np.ndarray | None:
    return None if vector is None else np.ascontiguousarray(vector, np.float32)


def _needed_column(vector: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(vector, np.float32).reshape(-1, 1)


def _column(vector: np.ndarray | None) -> np.ndarray | None:
    return None if vector is None else _needed_column(vector)


def _stack(*parts: tuple[np.ndarray | None, int]) -> np.ndarray | None:
    """The biases of a fused set as one column, zeros where one is absent; None when all are."""
    if all(vector is None for vector, _ in parts):
        return None
    return _needed_column(np.concatenate([np.zeros(n) if vector is None else vector for vector, n in parts]))


def _head_norm(weight: np.ndarray | None, heads: int, head_dim: int) -> np.ndarray | None:
    if weight is None:
        return None
    if weight.shape == (heads * head_dim,) and heads > 1:
        return _needed_column(weight)
    return np.ascontiguousarray(weight, np.float32).reshape(-1, head_dim, 1)
