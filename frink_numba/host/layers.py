"""Build a model's layer descriptions from its tensors: every tensor is consumed, with the shape that it must have."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from frink_numba.host.architectures import Architecture
from frink_numba.host.gguf import GgufFile
from frink_numba.host.hyperparameters import ExpertCounts, Hyperparameters
from frink_numba.host.rope_scaling import ScalingKind, scaled_rope
from frink_numba.host.scaling_keys import LONG_FACTORS, SHORT_FACTORS
from frink_numba.host.tensor_reader import TensorReader
from frink_numba.layer import AttentionSpec, Expert, FeedForward, Layer, Rope
from frink_numba.quant import QuantMatrix

_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class ModelTensors:
    """All weights of a model."""

    embedding: QuantMatrix  # [vocab, hidden]
    layers: tuple[Layer, ...]
    output_norm: np.ndarray  # float32 [hidden]
    output: QuantMatrix  # [vocab, hidden]; the embedding itself when the file has no other


def build(gguf: GgufFile, architecture: Architecture, hyper: Hyperparameters, context_length: int) -> ModelTensors:
    """Read every tensor of `gguf`; `context_length`: the most positions that the model is opened for.

    GgufError names a tensor that is missing or has another shape than the hyper-parameters ask for;
    UnsupportedModelError one that this architecture does not know, since leaving it out could change the result.
    """
    reader = TensorReader(gguf)
    known = {"token_embd.weight", "output_norm.weight", "output.weight"}
    if architecture.rope_factors:
        known |= {_FACTORS, LONG_FACTORS, SHORT_FACTORS}
    in_layer = _layer_tensors(architecture, hyper) | architecture.optional_layer_tensors
    reader.refuse_unknown(known, in_layer, hyper.layers, architecture.name)
    embedding = reader.embedding(hyper.vocab, hyper.hidden)
    whole, local = _ropes(reader, architecture, hyper, context_length)
    layers = []
    for number in range(hyper.layers):
        rope = local if hyper.windows[number] else whole
        layers.append(_LayerReader(reader, architecture, hyper, number).layer(rope if hyper.rotated[number] else None))
    output = embedding
    if reader.has("output.weight"):
        output = reader.matrix("output.weight", embedding.rows, hyper.hidden)
    return ModelTensors(embedding, tuple(layers), reader.vector("output_norm.weight", hyper.hidden), output)


def _layer_tensors(architecture: Architecture, hyper: Hyperparameters) -> frozenset[str]:
    experts = hyper.experts
    return architecture.tensors(experts is not None, experts is not None and experts.shared_ffn > 0)


def _ropes(
    reader: TensorReader, architecture: Architecture, hyper: Hyperparameters, context_length: int
) -> tuple[Rope, Rope]:
    """The rotation of layers without a window and of those with one."""
    stored = _stored_factors(reader, architecture, hyper, context_length)
    dim, layout = hyper.rope_dim, architecture.rope_layout
    whole = scaled_rope(hyper.rope_theta, dim, layout, hyper.scaling, stored)
    local = scaled_rope(
        hyper.local_theta, dim, layout, hyper.local_scaling, stored if architecture.local_scaling else None
    )
    for rope in (whole, local):
        if rope.freq_factors is not None and not _are_factors(rope.freq_factors):
            reader.fail(_FACTORS, "or the scaling of the rotation gives factors that are not positive numbers")
    return whole, local


def _stored_factors(
    reader: TensorReader, architecture: Architecture, hyper: Hyperparameters, context_length: int
) -> np.ndarray | None:
    """The file's own factors. Of LongRoPE's two sets the context decides that the model is opened for, not a prompt's
    length: K rows of a cache are rotated once, and a longer prompt could not turn them back."""
    name = _FACTORS if architecture.rope_factors and reader.has(_FACTORS) else None
    if hyper.scaling.kind is ScalingKind.LONGROPE:
        if name is not None:
            reader.fail(name, "stands beside the factors of LongRoPE")
        sets = {each: reader.vector(each, hyper.rope_dim // 2) for each in (LONG_FACTORS, SHORT_FACTORS)}
        for each, factors in sets.items():
            if not _are_factors(factors):
                reader.fail(each, "holds factors that are not positive numbers")
        return sets[LONG_FACTORS if context_length > hyper.scaling.original_context else SHORT_FACTORS]
    if name is None:
        return None
    stored = reader.vector(name, hyper.rope_dim // 2)
    if not _are_factors(stored):
        reader.fail(name, "holds factors that are not positive numbers")
    return stored


def _are_factors(values: np.ndarray) -> bool:
    return bool(np.isfinite(values).all() and (values > 0).all())


class _LayerReader:
    """The tensors of one layer."""

    def __init__(self, reader: TensorReader, architecture: Architecture, hyper: Hyperparameters, number: int) -> None:
        self._reader, self._architecture, self._hyper, self._number = reader, architecture, hyper, number
        self._tensors = _layer_tensors(architecture, hyper)

    def layer(self, rope: Rope | None) -> Layer:
        hidden, hyper = self._hyper.hidden, self._hyper
        return Layer(
            attn_norm=self._vector("attn_norm.weight", hidden),
            attention=self._attention(rope),
            ffn_norm=self._vector("ffn_norm.weight", hidden),
            ffn=self._dense() if hyper.experts is None else self._mixture(hyper.experts),
            norm_eps=hyper.norm_eps,
            post_attn_norm=self._vector("post_attention_norm.weight", hidden),
            post_ffn_norm=self._vector("post_ffw_norm.weight", hidden),
            residual_scale=hyper.residual_scale,
        )

    def _attention(self, rope: Rope | None) -> AttentionSpec:
        hyper, hidden, head_dim = self._hyper, self._hyper.hidden, self._hyper.head_dim
        n_heads, n_kv_heads = hyper.n_heads[self._number], hyper.n_kv_heads[self._number]
        queries, keys = n_heads * head_dim, n_kv_heads * head_dim
        if "attn_qkv.weight" in self._tensors:
            q, k, v = self._reader.parts(self._name("attn_qkv.weight"), (queries, keys, keys), hidden)
        else:
            q = self._matrix("attn_q", queries, hidden)
            k, v = self._matrix("attn_k", keys, hidden), self._matrix("attn_v", keys, hidden)
        whole = self._architecture.whole_qk_norm
        return AttentionSpec(
            n_heads,
            n_kv_heads,
            head_dim,
            q=q,
            k=k,
            v=v,
            o=self._matrix("attn_output", hidden, queries),
            rope=rope,
            q_bias=self._vector("attn_q.bias", queries),
            k_bias=self._vector("attn_k.bias", keys),
            v_bias=self._vector("attn_v.bias", keys),
            o_bias=self._vector("attn_output.bias", hidden),
            q_norm=self._vector("attn_q_norm.weight", queries if whole else head_dim),
            k_norm=self._vector("attn_k_norm.weight", keys if whole else head_dim),
            window=hyper.windows[self._number],
            softcap=hyper.softcap,
            scale=hyper.attention_scale,
        )

    def _dense(self) -> FeedForward:
        hidden, ffn = self._hyper.hidden, self._hyper.ffn[self._number]
        if "ffn_gate.weight" in self._tensors:
            gate, up = self._matrix("ffn_gate", ffn, hidden), self._matrix("ffn_up", ffn, hidden)
        else:
            gate, up = self._reader.parts(self._name("ffn_up.weight"), (ffn, ffn), hidden)
        expert = Expert(
            gate=gate,
            up=up,
            down=self._matrix("ffn_down", hidden, ffn),
            gate_bias=self._vector("ffn_gate.bias", ffn),
            up_bias=self._vector("ffn_up.bias", ffn),
            down_bias=self._vector("ffn_down.bias", hidden),
        )
        return FeedForward(self._architecture.activation, (expert,))

    def _mixture(self, counts: ExpertCounts) -> FeedForward:
        hidden, mixture = self._hyper.hidden, self._architecture.mixture
        assert mixture is not None
        gates = self._stack("ffn_gate_exps", counts, counts.ffn, hidden)
        ups = self._stack("ffn_up_exps", counts, counts.ffn, hidden)
        downs = self._stack("ffn_down_exps", counts, hidden, counts.ffn)
        shared = None
        if counts.shared_ffn:
            shared = Expert(
                gate=self._matrix("ffn_gate_shexp", counts.shared_ffn, hidden),
                up=self._matrix("ffn_up_shexp", counts.shared_ffn, hidden),
                down=self._matrix("ffn_down_shexp", hidden, counts.shared_ffn),
            )
        return FeedForward(
            self._architecture.activation,
            tuple(Expert(*matrices) for matrices in zip(gates, ups, downs, strict=True)),
            router=self._matrix("ffn_gate_inp", counts.count, hidden),
            n_experts_used=counts.used,
            normalized_weights=mixture.normalized,
            shared=shared,
            shared_gate=self._vector("ffn_gate_inp_shexp.weight", hidden),
        )

    def _name(self, name: str) -> str:
        return f"blk.{self._number}.{name}"

    def _matrix(self, name: str, rows: int, cols: int) -> QuantMatrix:
        return self._reader.matrix(self._name(f"{name}.weight"), rows, cols)

    def _stack(self, name: str, counts: ExpertCounts, rows: int, cols: int) -> tuple[QuantMatrix, ...]:
        return self._reader.stack(self._name(f"{name}.weight"), counts.count, rows, cols)

    def _vector(self, name: str, size: int) -> np.ndarray | None:
        """None when this layer has none, and its architecture asks for none."""
        full = self._name(name)
        return self._reader.vector(full, size) if name in self._tensors or self._reader.has(full) else None
