"""Spoilt files of a whole model: each opens and runs, or is refused by an error of this package, nothing else."""

import random
from collections import Counter
from dataclasses import replace

from frink_numba.errors import FrinkError
from frink_numba.host.decoder import Decoder
from frink_numba.host.load import load
from tests.gguf_mutation import spoil
from tests.golden.tiny import VARIANTS
from tests.golden.tiny_gguf import content, write
from tests.golden.tiny_text import text_content


def outcome(path):
    """What comes of a file: "runs", or the error's type. Any error that is not the package's own is raised."""
    try:
        with load(path) as model, Decoder(model, "host") as decoder:
            out = decoder.prefill([1, 2, 0], decoder.new_cache(), logits="all")
            assert out.logits.shape == (3, model.vocab_size)
            try:
                model.chat_template.encode([{"role": "user", "content": "hi"}])
            except FrinkError:
                return "runs without a tokenizer or template"
            return "runs"
    except FrinkError as error:
        return type(error).__name__


SMALL = {"hidden": 16, "heads": 2, "kv_heads": 1, "head_dim": 8, "ffn": 8, "layers": 2, "vocab": 24}
FACTS = ("qwen2_grouped", "qwen2moe_shared", "gemma3_scaled", "phi3_longrope_partial", "olmo3_window", "granite_tied")


def small(name):
    """A variant so small that what is spoilt is mostly its facts."""
    variant = replace(VARIANTS[name], **SMALL)
    if variant.experts is not None:
        variant = replace(variant, experts=replace(variant.experts, count=3, ffn=8, shared=8))
    file = content(variant)
    for factors in ("rope_factors_long.weight", "rope_factors_short.weight"):
        if factors in file.tensors:
            file.tensors[factors] = file.tensors[factors][: variant.rotary // 2]
    for key, value in file.metadata.items():
        if key.endswith("sliding_window_pattern"):
            file.metadata[key] = value[: variant.layers]
        elif variant.experts is not None and key.endswith(("expert_feed_forward_length", "shared_feed_forward_length")):
            file.metadata[key] = 8
        elif variant.experts is not None and key.endswith("expert_count"):
            file.metadata[key] = 3
    return file


def run_cases(folder, numbers):
    """Outcomes of the spoilt files with these numbers; an unexpected error names its number."""
    sound = []
    for number, file in enumerate((text_content(), *map(small, FACTS))):
        data = write(file, folder / f"sound{number}.gguf").read_bytes()
        header = data.index(b"token_embd.weight") + 1800  # the names and shapes of the first tensors too
        sound.append((data, header))
    counts = Counter()
    path = folder / "spoilt.gguf"
    for number in numbers:
        dice = random.Random(number)
        data, header = sound[number % len(sound)]
        path.unlink(missing_ok=True)
        path.write_bytes(spoil(data, header, dice))
        try:
            counts[outcome(path)] += 1
        except Exception as error:
            raise AssertionError(f"case {number} ended with {error!r}") from error
    return counts


def test_spoilt_models_run_or_are_refused(tmp_path):
    """Facts missing or contradictory are GgufError or UnsupportedModelError, never KeyError or a crash."""
    counts = run_cases(tmp_path, range(400))
    assert counts["runs"] + counts["runs without a tokenizer or template"] > 20
    assert counts["GgufError"] > 200
    assert counts["UnsupportedModelError"] > 10
