"""Write the tiny models as GGUF, through the gguf package, the way llama.cpp's converter lays such models out.

`content()` gives the file's metadata and tensors as plain dictionaries, so that a test can flip one fact before
`write()`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quants

from tests.golden.tiny import Variant, weights

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@dataclass
class Content:
    """What a file holds. A tensor is float32, float16, or (bytes, kind) for a quantized one; NumPy order."""

    architecture: str
    metadata: dict[str, Any]
    tensors: dict[str, Any]


def content(variant: Variant) -> Content:
    """The GGUF content of `variant`."""
    v, a = variant, variant.architecture
    metadata: dict[str, Any] = {
        "general.name": v.name,
        f"{a}.block_count": v.layers,
        f"{a}.context_length": 4096,
        f"{a}.embedding_length": v.hidden,
        f"{a}.feed_forward_length": v.ffn,
        f"{a}.attention.head_count": v.heads,
        f"{a}.attention.head_count_kv": v.kv_heads,
        f"{a}.attention.layer_norm_rms_epsilon": v.eps,
        f"{a}.rope.freq_base": v.theta,
        f"{a}.rope.dimension_count": v.head_dim,
        f"{a}.vocab_size": v.vocab,
        "tokenizer.ggml.model": "no_vocab",
    }
    if v.head_dim * v.heads != v.hidden:
        metadata[f"{a}.attention.key_length"] = metadata[f"{a}.attention.value_length"] = v.head_dim
    if v.window:
        metadata[f"{a}.attention.sliding_window"] = v.window
    if v.rope["rope_type"] == "linear":
        metadata[f"{a}.rope.scaling.type"] = "linear"
        metadata[f"{a}.rope.scaling.factor"] = v.rope["factor"]
    tensors = {gguf_name(name): _stored(v, name, value) for name, value in weights(v).items()}
    if v.rope["rope_type"] == "llama3":
        tensors["rope_freqs.weight"] = llama3_factors(v)
    return Content(a, metadata, tensors)


def gguf_name(name: str) -> str:
    """GGUF's name of a parameter of transformers."""
    stem, _, suffix = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, number, stem = stem.split(".", 3)
        return f"blk.{number}.{_NAMES[stem]}.{suffix}"
    return f"{_NAMES[stem]}.{suffix}"


def _stored(variant: Variant, name: str, value: np.ndarray) -> Any:
    if variant.architecture == "llama" and ("q_proj" in name or "k_proj" in name):
        value = halves_to_pairs(value, variant.head_dim)
    if variant.quantized and value.ndim == 2:
        kind = GGMLQuantizationType[variant.quantized]
        return quants.quantize(value, kind), kind
    return value


def halves_to_pairs(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Reorder each head's rows from split halves to adjacent pairs: row i goes to 2i, row i + head_dim/2 to 2i + 1."""
    heads = rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(rows.shape)


def llama3_factors(variant: Variant) -> np.ndarray:
    """float32 [head_dim/2]: what each rotation frequency is divided by under Llama 3's rule."""
    rope = variant.rope
    wavelength = 2 * np.pi * variant.theta ** (np.arange(0, variant.head_dim, 2) / variant.head_dim)
    turns = rope["original_max_position_embeddings"] / wavelength
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - kept) / rope["factor"] + kept)).astype(np.float32)


def write(what: Content, path: Path) -> Path:
    """Write the file; returns `path`."""
    writer = GGUFWriter(path, what.architecture)
    for key, value in what.metadata.items():
        _ADD[type(value)](writer, key, value)
    for name, tensor in what.tensors.items():
        if isinstance(tensor, tuple):
            writer.add_tensor(name, tensor[0], raw_dtype=tensor[1])
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


_ADD = {
    bool: GGUFWriter.add_bool,
    int: GGUFWriter.add_uint32,
    float: GGUFWriter.add_float32,
    str: GGUFWriter.add_string,
    list: GGUFWriter.add_array,
}
