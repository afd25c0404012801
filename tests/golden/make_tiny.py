"""Compute the goldens of the tiny models with transformers, in float32: `python -m tests.golden.make_tiny`.

Needs the `oracle` extra (made with torch 2.13 and transformers 5.24). `--check` writes nothing: it computes the
goldens anew and fails when a committed one differs by 1e-6 or more. Beside each variant stands its distance to a
float64 run. Of some variants it also reads the GGUF file, where transformers can, and fails when the weights give other
logits: the files are laid out as that reader expects them, too.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tests.golden.tiny import (
    ALPHA,
    CONTEXT,
    FOLDER,
    RANK,
    VARIANTS,
    Variant,
    adapter,
    golden_logits,
    tokens,
    weights,
)
from tests.golden.tiny_gguf import content, write

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def build(variant: Variant) -> torch.nn.Module:
    """The variant as a model of transformers, float32, every parameter set."""
    v = variant
    config = getattr(transformers, v.config_class)(
        hidden_size=v.hidden,
        intermediate_size=v.ffn,
        num_hidden_layers=v.layers,
        num_attention_heads=v.heads,
        num_key_value_heads=v.kv_heads,
        head_dim=v.head_dim,
        vocab_size=v.vocab,
        rms_norm_eps=v.eps,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=v.tied,
        rope_parameters=_rope_parameters(v),
        attn_implementation="eager",
        experts_implementation="eager",
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        **v.config,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    parameters = {name: torch.from_numpy(value) for name, value in weights(v).items()}
    for name, (a, b) in adapter(v).items():
        parameters[name] = torch.from_numpy((weights(v)[name] + ALPHA / RANK * b.astype(np.float64) @ a).astype("f4"))
    if v.tied:
        parameters["lm_head.weight"] = parameters["model.embed_tokens.weight"]
    model.load_state_dict(parameters, strict=True)
    return model


def _rope_parameters(v: Variant) -> dict[str, Any]:
    own = {**v.rope, "rope_theta": v.theta}
    if v.config_class not in ("Gemma3TextConfig", "Olmo3Config"):
        return own
    return {"full_attention": own, "sliding_attention": v.local_rope or {"rope_type": "default", "rope_theta": 10000.0}}


def logits(model: torch.nn.Module, ids: np.ndarray) -> np.ndarray:
    """[len(ids), vocab] in the model's dtype."""
    with torch.no_grad():
        return model(torch.from_numpy(ids)[None], use_cache=False).logits[0].numpy()


# One variant of each architecture whose files transformers can read, and of each way to store a tensor.
READABLE = {
    *("llama_grouped", "llama_biases", "llama_quantized", "qwen2_grouped", "qwen3_head_dim", "gemma2_caps"),
    *("gemma3_scaled", "phi3_partial", "qwen2moe_shared", "qwen3moe_normalized"),
}


def read_back(variant: Variant, ids: np.ndarray) -> np.ndarray | None:
    """Logits of the weights that transformers reads from the variant's GGUF file; None where it is not asked to."""
    if variant.name not in READABLE:
        return None
    with tempfile.TemporaryDirectory() as folder:
        write(content(variant), Path(folder) / "m.gguf")
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, gguf_file="m.gguf", config=build(variant).config, dtype=torch.float32
        )
    return logits(model.eval(), ids)


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """The largest relative error of a row."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float((np.linalg.norm(a - b, axis=1) / np.linalg.norm(b, axis=1)).max())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with the committed files, write nothing")
    parser.add_argument("names", nargs="*", help="variants; all by default")
    arguments = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    torch.set_num_threads(1)  # products this small only wait for other threads
    worst = 0.0
    for name in arguments.names or VARIANTS:
        variant = VARIANTS[name]
        model, ids = build(variant), tokens(variant)
        golden = logits(model, ids)
        line = f"{name}: float64 differs by {distance(golden, logits(model.double(), ids)):.1e}"
        if arguments.check:
            difference = distance(golden_logits(variant), golden)
            line += f", the committed file by {difference:.1e}"
            again = read_back(variant, ids)
            if again is not None:
                line += f", the GGUF file as read by transformers by {distance(golden, again):.1e}"
                difference = max(difference, distance(golden, again))
            worst = max(worst, difference)
        else:
            np.save(variant.golden, golden)
        print(line)
    return int(worst >= 1e-6)


if __name__ == "__main__":
    sys.exit(main())
