"""Renders the tables of docs/models.md from the package's own tables and the goldens.

    python -m tests.golden.render_models            rewrites docs/models.md
    python -m tests.golden.render_models --check    exits 1 when it would change

What the device serves is asked of the CUDA backend's own rules about the layers of each golden model; no GPU is needed.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from frink_numba.cuda.classify import RULES, decline_reason
from frink_numba.cuda.tensor.lifts import lifted
from frink_numba.host.architectures import ARCHITECTURES
from frink_numba.host.load import load
from frink_numba.host.pre_tokenizers import SPLITTINGS
from frink_numba.layer import Layer
from tests.golden.tiny import VARIANTS, Variant
from tests.golden.tiny_gguf import adapter_content, content, write

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "models.md"

_SCALINGS = {
    "linear": "`rope.scaling.type` linear, or `rope.scaling.factor` alone",
    "llama3": "`rope_freqs.weight`, the factors of Llama 3's rule",
    "yarn": "`rope.scaling.type` yarn",
    "longrope": "`rope_factors_long.weight` and `rope_factors_short.weight`",
}
_TOKENIZERS = {  # rows of models for each name of tokenizer.ggml.pre; the table itself is SPLITTINGS
    "default": "files that say so",
    "dbrx": "OLMo 2, Phi-4",
    "gpt-2": "GPT-2",
    "gpt-4o": "Phi-4 mini",
    "llama-bpe": "Llama 3",
    "llama-v3": "Llama 3",
    "llama3": "Llama 3",
    "olmo": "OLMoE",
    "qwen2": "Qwen 2 to 3",
    "refact": "Granite 3",
    "smaug-bpe": "SmolLM3",
    "smollm": "SmolLM 1 and 2",
    "starcoder": "StarCoder",
    "tekken": "Mistral Nemo",
}


def architectures() -> str:
    """One row an architecture; evidence: the goldens, cases of `test_logits_are_transformers`."""
    lines = ["| architecture | models | host | device | evidence |", "| --- | --- | --- | --- | --- |"]
    for row in ARCHITECTURES.values():
        variants = [variant for variant in VARIANTS.values() if variant.architecture == row.name]
        lines.append(f"| `{row.name}` | {row.models} | yes | {_device(variants)} | {_names(variants)} |")
    return "\n".join(lines)


def scalings() -> str:
    """One row a kind of rotary scaling."""
    lines = ["| scaling | a file states it by | evidence |", "| --- | --- | --- |"]
    for kind, stated in _SCALINGS.items():
        variants = [variant for variant in VARIANTS.values() if variant.rope["rope_type"] == kind]
        lines.append(f"| {kind} | {stated} | {_names(variants)} |")
    return "\n".join(lines)


def tokenizers() -> str:
    """One row a pre-tokenizer, and one for SentencePiece."""
    lines = ["| `tokenizer.ggml.model` | `tokenizer.ggml.pre` | models |", "| --- | --- | --- |"]
    lines.append("| `llama` (SentencePiece) | any | Llama 2, Mistral, Gemma, Phi-3, InternLM 2 |")
    lines += [f"| `gpt2` (byte-level BPE) | `{pre}` | {_TOKENIZERS[pre]} |" for pre in sorted(SPLITTINGS)]
    return "\n".join(lines)


def _device(variants: Iterable[Variant]) -> str:
    reasons, served = set(), False
    with tempfile.TemporaryDirectory() as folder:
        for variant in variants:
            path = write(content(variant), Path(folder) / "m.gguf")
            adapters = [write(adapter_content(variant), Path(folder) / "a.gguf")] if variant.adapted else []
            with load(path, adapters=adapters) as model:
                layers = [lifted(layer) for layer in model.layers]
                served |= not any(map(decline_reason, layers))
                for layer in layers:
                    reasons |= _reasons(layer)
    if not reasons:
        return "yes"
    return f"{'yes, but' if served else 'no:'} {'not ' if served else ''}{'; '.join(sorted(reasons))}"


def _reasons(layer: Layer) -> set[str]:
    """Every reason against a layer, not the first alone."""
    expert = layer.ffn.experts[0]
    parts: list[Any] = [layer, layer.attention, layer.attention.rope, layer.ffn, expert]
    found = set()
    for part in filter(None, parts):
        for field in fields(part):
            value = getattr(part, field.name)
            if not any(value is other for other in parts):  # a part with fields of its own
                found.add(RULES[type(part)][field.name](value, part))
    return {_of_any_size(reason) for reason in found if reason is not None}


def _of_any_size(reason: str) -> str:
    """A reason without the tiny model's number of experts, which would read like a limit."""
    return re.sub(r"^\d+ experts", "several experts", reason)


def _names(variants: Iterable[Variant]) -> str:
    return ", ".join(f"`{variant.name}`" for variant in variants)


def rendered(text: str) -> str:
    """`text` of the document with its generated parts anew; ValueError when a part's marks are missing."""
    for name, table in (("architectures", architectures), ("scalings", scalings), ("tokenizers", tokenizers)):
        pattern = re.compile(rf"(<!-- {name}:begin -->\n).*?(<!-- {name}:end -->)", re.DOTALL)
        text, count = pattern.subn(lambda match, table=table: f"{match[1]}{table()}\n{match[2]}", text)
        if count != 1:
            raise ValueError(f"docs/models.md needs one part between <!-- {name}:begin --> and <!-- {name}:end -->")
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, exit 1 when the document is out of step")
    check = parser.parse_args().check
    before = DOCUMENT.read_text("utf-8")
    after = rendered(before)
    if after != before and not check:
        DOCUMENT.write_text(after, "utf-8")
    return int(check and after != before)


if __name__ == "__main__":
    raise SystemExit(main())
