"""Tiny models with random weights, one per special fact: what `make_tiny.py` computes goldens of, and tests load.

A variant is described once, in the words of Hugging Face's configurations; `tiny_gguf.py` writes it as GGUF. Weights
are scaled so that every fact matters: attention is peaked, norms and biases are far from one and zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.golden.draws import integers, normal

FOLDER = Path(__file__).parent / "tiny"
CONTEXT = 4096  # positions that every model is made for


@dataclass(frozen=True)
class Experts:
    """The mixture of every layer."""

    count: int
    used: int
    ffn: int
    shared: int = 0  # width of the shared expert; 0: none


@dataclass(frozen=True)
class Variant:
    """One tiny model. `config` goes to the transformers configuration class named by `config_class`."""

    name: str
    architecture: str  # GGUF's name
    config_class: str
    hidden: int = 64
    ffn: int = 96
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    vocab: int = 80
    eps: float = 1e-2
    theta: float = 10000.0
    tied: bool = False
    window: int = 0
    tokens: int = 100
    context: int | None = None  # the context length that the model is opened with; None: its own
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default"})
    local_rope: Mapping[str, Any] | None = None  # of layers with a window, where the family tells them apart
    config: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, Any] = field(default_factory=dict)  # GGUF's hyper-parameters beyond the common ones
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    qk_norm: str = ""  # "head": of each head, "whole": of all
    from_one: bool = False  # norms multiply by 1 + weight
    fused: bool = False  # q, k and v are one matrix, and so are gate and up
    biases: tuple[str, ...] = ()  # projections that have one
    experts: Experts | None = None
    adapted: tuple[str, ...] = ()  # projections that a LoRA adapter changes
    quantized: str = ""  # kind of the matrices; empty: F32

    @property
    def golden(self) -> Path:
        return FOLDER / f"{self.name}.npy"

    @property
    def rotary(self) -> int:
        """Leading channels of a head that turn."""
        return int(self.head_dim * self.rope.get("partial_rotary_factor", 1.0))


_LLAMA = ("llama", "LlamaConfig")
_QWEN2 = ("qwen2", "Qwen2Config")
_PHI3 = ("phi3", "Phi3Config")
_GRANITE = ("granite", "GraniteConfig")
_QKV = ("q_proj", "k_proj", "v_proj")
_ALL_BIASES = {
    "config": {"attention_bias": True, "mlp_bias": True},
    "biases": (*_QKV, "o_proj", "gate_proj", "up_proj", "down_proj"),
}
_POST_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")
_FOUR_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
_LINEAR = {"rope_type": "linear", "factor": 4.0}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def _longrope(original: int, pairs: int = 8, **more: Any) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "short_factor": [1 + 0.25 * i for i in range(pairs)],
        "long_factor": [1.5 + i for i in range(pairs)],
        "original_max_position_embeddings": original,
        **more,
    }


def _phi3_longrope(original: int, pairs: int = 8, **rope: Any) -> dict[str, Any]:
    config = {"original_max_position_embeddings": original}
    return {"fused": True, "rope": _longrope(original, pairs, **rope), "config": config}


def _gemma2(attention_cap: float = 50.0, logit_cap: float = 30.0, scalar: int = 16, **more: Any) -> dict[str, Any]:
    return {
        "architecture": "gemma2",
        "config_class": "Gemma2Config",
        "layers": 4,
        "tied": True,
        "window": 7,
        "norms": _FOUR_NORMS,
        "from_one": True,
        "config": {
            "query_pre_attn_scalar": scalar,
            "sliding_window": 7,
            "attn_logit_softcapping": attention_cap,
            "final_logit_softcapping": logit_cap,
        },
        "keys": {
            "attn_logit_softcapping": attention_cap,
            "final_logit_softcapping": logit_cap,
            **({"attention.scale": scalar**-0.5} if scalar != 16 else {}),
        },
        **more,
    }


def _gemma3(**config: Any) -> dict[str, Any]:
    return {
        "architecture": "gemma3",
        "config_class": "Gemma3TextConfig",
        "layers": 7,
        "tied": True,
        "window": 7,
        "norms": _FOUR_NORMS,
        "from_one": True,
        "qk_norm": "head",
        "config": {"query_pre_attn_scalar": 16, "sliding_window": 7, **config},
    }


def _olmo(config_class: str, **more: Any) -> dict[str, Any]:
    return {
        "architecture": "olmo2",
        "config_class": config_class,
        "norms": _POST_NORMS,
        "qk_norm": "whole",
        **more,
    }


def _exaone4(*windowed: bool, window: int = 7, **more: Any) -> dict[str, Any]:
    """Which layers have a window; with none at all the model has no windows."""
    kinds = ["sliding_attention" if each else "full_attention" for each in windowed]
    return {
        "architecture": "exaone4",
        "config_class": "Exaone4Config",
        "norms": _POST_NORMS,
        "qk_norm": "head",
        "layers": len(windowed),
        "window": window if any(windowed) else 0,
        "config": {"sliding_window": window if any(windowed) else None, "layer_types": kinds},
        **more,
    }


_MULTIPLIERS = {
    "config": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.4,
        "logits_scaling": 2.5,
    },
    "keys": {"embedding_scale": 3.0, "residual_scale": 0.4, "attention.scale": 0.4, "logit_scale": 2.5},
}


def _mixture(
    count: int, used: int, ffn: int, shared: int = 0, *, number: str = "num_experts", width: str = "", **more: Any
) -> dict[str, Any]:
    """`number`, `width`: what the configuration calls the number of experts, and their width if it is not the FFN's."""
    config: dict[str, Any] = {number: count, "num_experts_per_tok": used, **more}
    keys = {"expert_count": count, "expert_used_count": used}
    if width:
        config[width] = ffn
        keys["expert_feed_forward_length"] = ffn
    if shared:
        config["shared_expert_intermediate_size"] = shared
        keys["expert_shared_feed_forward_length"] = shared
    return {"experts": Experts(count, used, ffn, shared), "config": config, "keys": keys}


def _granite_mixture(shared: int = 0) -> dict[str, Any]:
    mixture = _mixture(5, 2, 96, number="num_local_experts")
    config, keys = {**mixture["config"], **_MULTIPLIERS["config"]}, {**mixture["keys"], **_MULTIPLIERS["keys"]}
    if shared:
        config["shared_intermediate_size"] = keys["expert_shared_feed_forward_length"] = shared
    return {"experts": Experts(5, 2, 96, shared), "config": config, "keys": keys}


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("llama_grouped", *_LLAMA),
        Variant("llama_multi_head", *_LLAMA, kv_heads=4),
        Variant("llama_one_kv_head", *_LLAMA, kv_heads=1),
        Variant("llama_tied", *_LLAMA, tied=True),
        Variant("llama_theta", *_LLAMA, theta=500.0),
        Variant("llama_head_dim", *_LLAMA, hidden=48, heads=3, kv_heads=1, head_dim=20, ffn=60),
        Variant("llama_linear", *_LLAMA, rope=_LINEAR),
        Variant("llama_llama3", *_LLAMA, theta=200.0, rope=_LLAMA3),
        Variant("llama_yarn", *_LLAMA, theta=200.0, rope=_YARN),
        Variant(
            "llama_yarn_turns",
            *_LLAMA,
            theta=200.0,
            rope={**_YARN, "factor": 8.0, "beta_fast": 4.0, "beta_slow": 0.5, "attention_factor": 0.8},
        ),
        Variant("llama_longrope_long", *_LLAMA, rope=_longrope(64)),
        Variant("llama_longrope_short", *_LLAMA, rope=_longrope(128), context=128),
        Variant("llama_quantized", *_LLAMA, quantized="Q4_1"),
        Variant("llama_biases", *_LLAMA, **_ALL_BIASES),
        Variant("mistral_window", "llama", "MistralConfig", window=7, config={"sliding_window": 7}),
        Variant("qwen2_grouped", *_QWEN2, biases=_QKV),
        Variant("qwen2_tied", *_QWEN2, biases=_QKV, tied=True, kv_heads=4, theta=1e6),
        Variant("qwen2_linear", *_QWEN2, biases=_QKV, rope={"rope_type": "linear", "factor": 2.5}),
        Variant("qwen2_yarn", *_QWEN2, biases=_QKV, theta=200.0, rope=_YARN),
        Variant("qwen3_grouped", "qwen3", "Qwen3Config", qk_norm="head"),
        Variant("qwen3_head_dim", "qwen3", "Qwen3Config", qk_norm="head", head_dim=24, theta=1e6, tied=True),
        Variant("gemma_grouped", "gemma", "GemmaConfig", from_one=True, tied=True, head_dim=24),
        Variant("gemma2_caps", **_gemma2(1.5, 4.0)),
        Variant("gemma2_window", **_gemma2()),
        Variant("gemma2_scale", **_gemma2(scalar=100, head_dim=24)),
        Variant("gemma3_two_bases", **_gemma3(), theta=1e6),
        Variant(
            "gemma3_scaled",
            **_gemma3(final_logit_softcapping=6.0) | {"keys": {"final_logit_softcapping": 6.0}},
            theta=500.0,
            rope=_LINEAR,
            local_rope={"rope_type": "default", "rope_theta": 50.0},
        ),
        Variant("phi3_fused", *_PHI3, fused=True),
        Variant("phi3_partial", *_PHI3, fused=True, rope={"rope_type": "default", "partial_rotary_factor": 0.5}),
        Variant("phi3_window", *_PHI3, fused=True, window=7, config={"sliding_window": 7}),
        Variant("phi3_longrope_long", *_PHI3, **_phi3_longrope(64)),
        Variant("phi3_longrope_short", *_PHI3, **_phi3_longrope(128), context=128),
        Variant("phi3_longrope_partial", *_PHI3, **_phi3_longrope(64, 4, partial_rotary_factor=0.5)),
        Variant("olmo2_whole_norm", **_olmo("Olmo2Config")),
        Variant("olmo2_multi_head", **_olmo("Olmo2Config"), kv_heads=4, theta=5e5),
        Variant(
            "olmo3_window",
            **_olmo("Olmo3Config", config={"sliding_window": 7}),
            layers=5,
            window=7,
            theta=200.0,
            rope=_YARN,
            local_rope={"rope_type": "default", "rope_theta": 200.0},
            keys={"attention.sliding_window_pattern": [True, True, True, False, True]},
        ),
        Variant("granite_multipliers", *_GRANITE, **_MULTIPLIERS),
        Variant("granite_tied", *_GRANITE, **_MULTIPLIERS, tied=True, kv_heads=4),
        Variant("granitemoe", "granitemoe", "GraniteMoeConfig", **_granite_mixture()),
        Variant("granitemoe_shared", "granitemoe", "GraniteMoeSharedConfig", **_granite_mixture(40), tied=True),
        Variant("smollm3_unrotated", "smollm3", "SmolLM3Config", layers=5),
        Variant("smollm3_yarn", "smollm3", "SmolLM3Config", layers=5, theta=200.0, rope=_YARN, tied=True),
        Variant("exaone4_plain", **_exaone4(False, False, False, theta=200.0, rope=_LLAMA3, tied=True)),
        Variant("exaone4_hybrid", **_exaone4(True, True, True, False, True)),
        Variant(
            "exaone4_pattern",
            **_exaone4(False, True, True, False),
            keys={"attention.sliding_window_pattern": [False, True, True, False]},
        ),
        Variant("internlm2_grouped", "internlm2", "LlamaConfig", theta=1e6),
        Variant(
            "qwen2moe_shared",
            "qwen2moe",
            "Qwen2MoeConfig",
            biases=_QKV,
            **_mixture(6, 2, 24, 40, width="moe_intermediate_size"),
        ),
        Variant(
            "qwen3moe_normalized",
            "qwen3moe",
            "Qwen3MoeConfig",
            qk_norm="head",
            **_mixture(8, 3, 24, width="moe_intermediate_size", norm_topk_prob=True),
        ),
        Variant("olmoe_whole_norm", "olmoe", "OlmoeConfig", qk_norm="whole", **_mixture(5, 2, 96)),
        Variant("llama_lora", *_LLAMA, adapted=(*_QKV, "o_proj", "gate_proj", "up_proj", "down_proj")),
        Variant("phi3_lora", *_PHI3, fused=True, adapted=("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
        Variant("mixtral", "llama", "MixtralConfig", **_mixture(4, 2, 96, number="num_local_experts")),
    )
}


def tokens(variant: Variant) -> np.ndarray:
    """int64 [variant.tokens]: the prompt whose logits are the golden."""
    return integers(f"{variant.name} tokens", (variant.tokens,), variant.vocab)


def golden_logits(variant: Variant) -> np.ndarray:
    """float32 [tokens, vocab], computed by transformers in float32."""
    return np.load(variant.golden)


def weights(variant: Variant) -> dict[str, np.ndarray]:
    """Every parameter under transformers' name, float32; matrices [out, in]."""
    v, h = variant, variant.hidden
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v.vocab, h), "model.norm.weight": (h,)}
    if not v.tied:
        shapes["lm_head.weight"] = (v.vocab, h)
    for i in range(v.layers):
        block = f"model.layers.{i}."
        for name, shape in {**_attention(v), **_feed_forward(v)}.items():
            shapes[block + name] = shape
            if name.split(".")[1] in v.biases:
                shapes[f"{block}{name.removesuffix('.weight')}.bias"] = shape[:1]
        for name in v.norms:
            shapes[f"{block}{name}.weight"] = (h,)
    return {name: _draw(v, name, shape) for name, shape in shapes.items()}


ALPHA, RANK = 6.0, 3  # of every adapter


def adapter(variant: Variant) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """(A [rank, in], B [out, rank]) of each adapted projection, under the name of its weight."""
    found = {}
    for name, weight in weights(variant).items():
        if name.split(".")[-2] in variant.adapted:
            (rows, cols), label = weight.shape, f"{variant.name} {name}"
            found[name] = (
                normal(f"{label} a", (RANK, cols), cols**-0.5),
                normal(f"{label} b", (rows, RANK), 0.1),
            )
    return found


def _attention(v: Variant) -> dict[str, tuple[int, ...]]:
    q, kv = v.heads * v.head_dim, v.kv_heads * v.head_dim
    shapes: dict[str, tuple[int, ...]] = {"self_attn.o_proj.weight": (v.hidden, q)}
    if v.fused:
        shapes["self_attn.qkv_proj.weight"] = (q + 2 * kv, v.hidden)
    else:
        for name, rows in {"q": q, "k": kv, "v": kv}.items():
            shapes[f"self_attn.{name}_proj.weight"] = (rows, v.hidden)
    if v.qk_norm:
        for name, rows in {"q": q, "k": kv}.items():
            shapes[f"self_attn.{name}_norm.weight"] = (rows if v.qk_norm == "whole" else v.head_dim,)
    return shapes


def _feed_forward(v: Variant) -> dict[str, tuple[int, ...]]:
    if v.experts is None:
        return {f"mlp.{name}": shape for name, shape in _gated(v, v.ffn).items()}
    e = v.experts
    granite = v.architecture == "granitemoe"
    block = "block_sparse_moe" if granite else "mlp"
    shapes: dict[str, tuple[int, ...]] = {
        f"{block}.{'router' if granite else 'gate'}.weight": (e.count, v.hidden),
        f"{block}.experts.gate_up_proj": (e.count, 2 * e.ffn, v.hidden),
        f"{block}.experts.down_proj": (e.count, v.hidden, e.ffn),
    }
    if granite and e.shared:
        shapes["shared_mlp.input_linear.weight"] = (2 * e.shared, v.hidden)
        shapes["shared_mlp.output_linear.weight"] = (v.hidden, e.shared)
    elif e.shared:
        shapes["mlp.shared_expert_gate.weight"] = (1, v.hidden)
        shapes |= {f"mlp.shared_expert.{name}": shape for name, shape in _gated(v, e.shared).items()}
    return shapes


def _gated(v: Variant, ffn: int) -> dict[str, tuple[int, ...]]:
    shapes = {"down_proj.weight": (v.hidden, ffn)}
    if v.fused:
        return {**shapes, "gate_up_proj.weight": (2 * ffn, v.hidden)}
    return {**shapes, "gate_proj.weight": (ffn, v.hidden), "up_proj.weight": (ffn, v.hidden)}


def _draw(variant: Variant, name: str, shape: tuple[int, ...]) -> np.ndarray:
    label = f"{variant.name} {name}"
    if name.endswith("norm.weight"):
        return (0 if variant.from_one else 1) + normal(label, shape, 0.3)
    if name.endswith(".bias"):
        return normal(label, shape, 0.7)
    if "embed" in name:
        return _stored(variant, normal(label, shape, 0.3))
    peak = 1.0
    if any(part in name for part in ("q_proj", "k_proj", "qkv_proj")):
        # LongRoPE's magnitude sharpens the attention by itself; more would only cost digits.
        peak = 0.9 if variant.rope["rope_type"] == "longrope" else 1.3
    if name.endswith((".gate.weight", ".router.weight")):
        peak = 1.5  # a router that has opinions
    return _stored(variant, normal(label, shape, peak / shape[-1] ** 0.5))


def _stored(variant: Variant, matrix: np.ndarray) -> np.ndarray:
    """The matrix as the file holds it: rounded to the quantized values, when the variant is quantized."""
    if not variant.quantized:
        return matrix
    from gguf import GGMLQuantizationType, quants

    kind = GGMLQuantizationType[variant.quantized]
    return quants.dequantize(quants.quantize(matrix, kind), kind)
