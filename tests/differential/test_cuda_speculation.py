"""Drafts of a greedy answer on a GPU: steps of several rows have the bits of steps of one, so no answer changes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from frink_numba.cuda.device import open_device
from frink_numba.host.decoder import Decoder
from frink_numba.host.load import load
from frink_numba.host.speculation import Speculative
from tests.golden.tiny_gguf import write
from tests.golden.tiny_text import text_content

pytestmark = pytest.mark.gpu

PROMPTS = (
    "def area(width, height):\n    return width * height\n\ndef volume(width, height, depth):\n    return width * ",
    "The cat sat on the mat. The dog sat on the mat. The bird sat on the",
    "Once upon a time there was",
    "red green blue " * 60,  # over the positions where the keys are cut anew
)


@pytest.fixture(scope="module")
def decoder(smollm2_path) -> Iterator[Decoder]:
    if open_device(0).tier == "simt":
        pytest.skip("the simt tier serves no step of one row")
    with load(smollm2_path) as model, Decoder(model, "cuda") as decoder:
        yield decoder


@pytest.mark.parametrize("start", [0, 13, 250, 254, 255, 256, 511, 1000])
@pytest.mark.parametrize("rows", [2, 4, 8])
def test_rows_have_the_bits_of_steps_of_their_own(decoder: Decoder, start: int, rows: int):
    """Logits and K/V rows of SmolLM2, as far as the decoder promises it."""
    ids = np.random.default_rng(start).integers(0, 40000, start + rows + 1)
    cache = decoder.new_cache()
    decoder.prefill(ids[: start + 1], cache)
    few, rounding = decoder.few_rows(cache, rows)
    assert rounding == 0
    assert few >= 1
    single, mark = [], cache.positions
    for token in ids[start + 1 : start + 1 + few]:
        single.append(decoder.decode(int(token), cache).logits)
    kept = [part[mark:].copy() for layer in cache for part in layer.prefix()]
    cache.truncate(mark)
    together = decoder.prefill(ids[start + 1 : start + 1 + few], cache, logits="all").logits
    np.testing.assert_array_equal(together, np.array(single))
    for one, other in zip(kept, (part[mark:] for layer in cache for part in layer.prefix()), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("number", range(len(PROMPTS)))
def test_the_real_model(decoder: Decoder, number: int):
    prompt = PROMPTS[number]
    plain = [piece.token for piece in decoder.generate(prompt, max_new_tokens=150)]
    made = decoder.generate(prompt, max_new_tokens=150, speculate=7)
    assert [piece.token for piece in made] == plain
    assert isinstance(made.source, Speculative)
    assert number == 2 or made.source.accepted > 20


def test_a_tiny_model(tmp_path):
    """Heads that the attention for few rows does not serve."""
    with load(write(text_content(), tmp_path / "m.gguf")) as model, Decoder(model, "cuda,host") as decoder:
        for prompt in ("abcabcabcabc", "The same again. The same again."):
            plain = [piece.token for piece in decoder.generate(prompt, max_new_tokens=40)]
            made = [piece.token for piece in decoder.generate(prompt, max_new_tokens=40, speculate=7)]
            assert made == plain
