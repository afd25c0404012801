"""The real SmolLM2-135M-Instruct against transformers, which dequantized the same file to float32."""

import numpy as np
import pytest

from frink_numba.host.decoder import Decoder
from frink_numba.host.load import load
from frink_numba.host.score import perplexity, token_log_probabilities
from tests.golden.prompts import PROMPTS
from tests.golden.sketch import SAFETY, sketched_errors
from tests.golden.smollm2 import NEW_TOKENS, WHOLE, golden

TOLERANCE = 1e-4  # relative error of a position's logits


@pytest.fixture(scope="module")
def decoder(smollm2_path, backends):
    with load(smollm2_path) as model, Decoder(model, backends) as decoder:
        yield decoder


@pytest.mark.parametrize("name", PROMPTS)
def test_logits_are_transformers_at_every_position(decoder, name):
    """Six prompts, one of 707 tokens; `sketch.py` says why 32 numbers a position are enough."""
    kept = golden(name)
    logits = decoder.prefill(kept.tokens, decoder.new_cache(), logits="all").logits
    assert logits.shape == (len(kept.tokens), decoder.model.vocab_size)
    assert sketched_errors(logits, kept.sketch, kept.norm).max() < TOLERANCE / SAFETY
    np.testing.assert_allclose(np.linalg.norm(logits.astype(np.float64), axis=1), kept.norm, rtol=TOLERANCE)
    # The tokens that matter, far more strictly: 1e-3 where TOLERANCE allows 0.06 and more.
    top = np.take_along_axis(logits, kept.top_ids, axis=1)
    np.testing.assert_allclose(top, kept.top_logits, rtol=0, atol=1e-3)
    clear = kept.top_logits[:, 0] - kept.top_logits[:, 1] > 2e-3
    assert clear.mean() > 0.9
    np.testing.assert_array_equal(logits.argmax(axis=1)[clear], kept.top_ids[clear, 0])
    if name in WHOLE:
        error = np.linalg.norm(logits[-1].astype(np.float64) - kept.last) / kept.norm[-1]
        assert error < TOLERANCE


@pytest.mark.parametrize("name", PROMPTS)
def test_greedy_decoding_chooses_the_same_tokens(decoder, name):
    kept = golden(name)
    assert kept.margins.min() > 5e-3  # no choice hangs on rounding
    cache = decoder.new_cache()
    logits = decoder.prefill(kept.tokens, cache).logits
    chosen = []
    for _ in range(NEW_TOKENS):
        chosen.append(int(logits.argmax()))
        logits = decoder.decode(chosen[-1], cache).logits
    assert chosen == kept.greedy.tolist()


@pytest.mark.parametrize("name", PROMPTS)
def test_scores_are_transformers(decoder, name):
    """Each token's own log-probability, at its own place."""
    kept = golden(name)
    scores = token_log_probabilities(decoder, kept.tokens.tolist())
    np.testing.assert_allclose(scores, kept.log_probabilities, rtol=0, atol=1e-3)
    assert perplexity(scores) == pytest.approx(np.exp(-kept.log_probabilities.mean()), rel=1e-4)


def test_the_prompts_are_many_and_one_is_long():
    lengths = [len(golden(name).tokens) for name in PROMPTS]
    assert len(lengths) >= 5
    assert max(lengths) > 600


@pytest.mark.parametrize("name", PROMPTS)
def test_the_tokenizer_gives_the_goldens_tokens(decoder, name):
    ids = decoder.model.tokenizer.encode(PROMPTS[name], add_bos=False, special=True)
    assert ids == golden(name).tokens.tolist()


def test_generated_text_is_that_of_the_greedy_tokens(decoder):
    kept = golden("chat")
    answer = decoder.generate(PROMPTS["chat"], special=True, max_new_tokens=NEW_TOKENS)
    text = "".join(piece.text for piece in answer)
    assert answer.tokens == kept.greedy.tolist()
    assert text == decoder.model.tokenizer.decode(kept.greedy)
    assert text.startswith("The sky appears blue because of a process called Rayleigh scattering")
    assert answer.finish_reason == "length"


def test_a_chat_goes_through_the_files_template_and_stops_by_itself(decoder):
    answer = decoder.generate("What is the capital of France? Answer in one word.", chat=True, max_new_tokens=40)
    text = "".join(piece.text for piece in answer)
    assert "Paris" in text
    assert "<|im" not in text
    assert answer.finish_reason == "stop"
    assert answer.tokens[-1] in decoder.model.tokenizer.stop_ids
    assert decoder.model.tokenizer.decode(answer.prompt_tokens).count("<|im_start|>user\n") == 1
