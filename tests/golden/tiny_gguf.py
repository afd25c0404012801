"""Write the tiny models as GGUF, through the gguf package, the way llama.cpp's converter lays such models out.

Names of tensors are those of that package's own table: what it calls a parameter of transformers, per architecture.
`content()` gives the file's metadata and tensors as plain dictionaries, so that a test can flip one fact before
`write()`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map, quants

from tests.golden.tiny import ALPHA, CONTEXT, Variant, adapter, weights

_ARCHITECTURES = {name: architecture for architecture, name in MODEL_ARCH_NAMES.items()}
_PAIRED = {"llama", "granite", "granitemoe", "smollm3", "internlm2"}  # Q and K are stored with adjacent pairs

_STATED_HEADS = {"qwen3", "qwen3moe", "gemma", "gemma2", "gemma3"}  # files always state the width of a head
_GRANITE_NAMES = {
    "block_sparse_moe.router": "mlp.gate",
    "block_sparse_moe": "mlp",
    "shared_mlp.input_linear": "mlp.shared_expert.gate_up_proj",
    "shared_mlp.output_linear": "mlp.shared_expert.down_proj",
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
        f"{a}.context_length": CONTEXT,
        f"{a}.embedding_length": v.hidden,
        f"{a}.feed_forward_length": v.ffn,
        f"{a}.attention.head_count": v.heads,
        f"{a}.attention.head_count_kv": v.kv_heads,
        f"{a}.attention.layer_norm_rms_epsilon": v.eps,
        f"{a}.rope.freq_base": v.theta,
        f"{a}.rope.dimension_count": v.rotary,
        f"{a}.vocab_size": v.vocab,
        "tokenizer.ggml.model": "no_vocab",
    }
    if v.head_dim * v.heads != v.hidden or a in _STATED_HEADS:
        metadata[f"{a}.attention.key_length"] = metadata[f"{a}.attention.value_length"] = v.head_dim
    if v.window:
        metadata[f"{a}.attention.sliding_window"] = v.window
    if v.local_rope:
        metadata[f"{a}.rope.freq_base_swa"] = v.local_rope["rope_theta"]
    metadata |= {f"{a}.{key}": value for key, value in {**_rope_keys(v), **v.keys}.items()}

    map_name = get_tensor_name_map(_ARCHITECTURES[a], v.layers).get_name
    tensors: dict[str, Any] = {}
    for name, value in weights(v).items():
        for full, part in _split(v, name, value).items():
            tensors[map_name(full, (".weight", ".bias"))] = _stored(v, full, part)
    if v.rope["rope_type"] == "llama3":
        tensors["rope_freqs.weight"] = llama3_factors(v)
    if v.rope["rope_type"] == "longrope":
        for length in ("long", "short"):
            tensors[f"rope_factors_{length}.weight"] = np.array(v.rope[f"{length}_factor"], np.float32)
    return Content(a, metadata, tensors)


def adapter_content(variant: Variant) -> Content:
    """The GGUF content of the variant's LoRA adapter."""
    architecture = variant.architecture
    map_name = get_tensor_name_map(_ARCHITECTURES[architecture], variant.layers).get_name
    tensors = {}
    for name, (a, b) in adapter(variant).items():
        full = map_name(name, (".weight",))
        tensors[f"{full}.lora_a"], tensors[f"{full}.lora_b"] = a, _stored(variant, name, b)
    metadata = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": ALPHA}
    return Content(architecture, metadata, tensors)


def _rope_keys(v: Variant) -> dict[str, Any]:
    kind, keys = v.rope["rope_type"], {}
    if kind in ("linear", "yarn"):
        keys |= {"rope.scaling.type": kind, "rope.scaling.factor": v.rope["factor"]}
    if kind in ("yarn", "longrope"):
        original = keys["rope.scaling.original_context_length"] = v.rope["original_max_position_embeddings"]
    for theirs, ours in {"attention_factor": "attn_factor", "beta_fast": "beta_fast", "beta_slow": "beta_slow"}.items():
        if theirs in v.rope:
            keys[f"rope.scaling.yarn_{ours}"] = v.rope[theirs]
    if kind == "longrope":
        keys["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(CONTEXT / original) / math.log(original))
        if v.architecture != "phi3":  # files of that one do not name the type
            keys["rope.scaling.type"] = kind
    return keys


def _split(v: Variant, name: str, value: np.ndarray) -> dict[str, np.ndarray]:
    """A parameter of transformers as the parameters that a file holds: of experts, gate and up apart."""
    if v.architecture == "granitemoe":  # under the names of other families, which stand for the same tensors
        for theirs, other in _GRANITE_NAMES.items():
            name = name.replace(theirs, other)
    if name.endswith(("experts.gate_up_proj", "shared_expert.gate_up_proj.weight")):
        gate, up = np.split(value, 2, axis=-2)
        stem = name.removesuffix(".weight").removesuffix("gate_up_proj")
        return {f"{stem}gate_proj.weight": gate.copy(), f"{stem}up_proj.weight": up.copy()}
    if name.endswith("experts.down_proj"):
        return {f"{name}.weight": value}
    return {name: value[0] if name.endswith("shared_expert_gate.weight") else value}


def _stored(variant: Variant, name: str, value: np.ndarray) -> Any:
    if variant.architecture in _PAIRED and ("q_proj" in name or "k_proj" in name):
        value = halves_to_pairs(value, variant.head_dim)
    if variant.from_one and name.endswith("norm.weight"):
        value = value + 1
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
    np.float64: GGUFWriter.add_float64,
    str: GGUFWriter.add_string,
    list: GGUFWriter.add_array,
}
