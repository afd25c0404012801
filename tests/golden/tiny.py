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
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default"})
    config: Mapping[str, Any] = field(default_factory=dict)
    biases: tuple[str, ...] = ()  # projections that have one
    quantized: str = ""  # kind of the matrices; empty: F32

    @property
    def golden(self) -> Path:
        return FOLDER / f"{self.name}.npy"


_LLAMA = ("llama", "LlamaConfig")
_QWEN2 = ("qwen2", "Qwen2Config")
_QKV = ("q_proj", "k_proj", "v_proj")

VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("llama_grouped", *_LLAMA),
        Variant("llama_multi_head", *_LLAMA, kv_heads=4),
        Variant("llama_one_kv_head", *_LLAMA, kv_heads=1),
        Variant("llama_tied", *_LLAMA, tied=True),
        Variant("llama_theta", *_LLAMA, theta=500.0),
        Variant("llama_head_dim", *_LLAMA, hidden=48, heads=3, kv_heads=1, head_dim=20, ffn=60),
        Variant("llama_linear", *_LLAMA, rope={"rope_type": "linear", "factor": 4.0}),
        Variant(
            "llama_llama3",
            *_LLAMA,
            theta=200.0,
            rope={
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        ),
        Variant("llama_quantized", *_LLAMA, quantized="Q4_1"),
        Variant(
            "llama_biases",
            *_LLAMA,
            config={"attention_bias": True, "mlp_bias": True},
            biases=(*_QKV, "o_proj", "gate_proj", "up_proj", "down_proj"),
        ),
        Variant("mistral_window", "llama", "MistralConfig", window=7, config={"sliding_window": 7}),
        Variant("qwen2_grouped", *_QWEN2, biases=_QKV),
        Variant("qwen2_tied", *_QWEN2, biases=_QKV, tied=True, kv_heads=4, theta=1e6),
        Variant("qwen2_linear", *_QWEN2, biases=_QKV, rope={"rope_type": "linear", "factor": 2.5}),
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
    shapes = {"model.embed_tokens.weight": (v.vocab, h), "model.norm.weight": (h,)}
    if not v.tied:
        shapes["lm_head.weight"] = (v.vocab, h)
    q, kv = v.heads * v.head_dim, v.kv_heads * v.head_dim
    for i in range(v.layers):
        block = f"model.layers.{i}."
        matrices = {
            "self_attn.q_proj": (q, h),
            "self_attn.k_proj": (kv, h),
            "self_attn.v_proj": (kv, h),
            "self_attn.o_proj": (h, q),
            "mlp.gate_proj": (v.ffn, h),
            "mlp.up_proj": (v.ffn, h),
            "mlp.down_proj": (h, v.ffn),
        }
        for name, shape in matrices.items():
            shapes[f"{block}{name}.weight"] = shape
            if name.split(".")[1] in v.biases:
                shapes[f"{block}{name}.bias"] = shape[:1]
        shapes[f"{block}input_layernorm.weight"] = shapes[f"{block}post_attention_layernorm.weight"] = (h,)
    return {name: _draw(v, name, shape) for name, shape in shapes.items()}


def _draw(variant: Variant, name: str, shape: tuple[int, ...]) -> np.ndarray:
    label = f"{variant.name} {name}"
    if name.endswith("norm.weight"):
        return 1 + normal(label, shape, 0.3)
    if name.endswith(".bias"):
        return normal(label, shape, 0.7)
    if "embed" in name:
        return _stored(variant, normal(label, shape, 0.3))
    peak = 1.3 if "q_proj" in name or "k_proj" in name else 1.0
    return _stored(variant, normal(label, shape, peak / shape[1] ** 0.5))


def _stored(variant: Variant, matrix: np.ndarray) -> np.ndarray:
    """The matrix as the file holds it: rounded to the quantized values, when the variant is quantized."""
    if not variant.quantized:
        return matrix
    from gguf import GGMLQuantizationType, quants

    kind = GGMLQuantizationType[variant.quantized]
    return quants.dequantize(quants.quantize(matrix, kind), kind)
