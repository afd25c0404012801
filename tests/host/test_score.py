"""Scoring: the right token at the right place, chunk borders, and windows over texts longer than the context."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from frink_numba.errors import PromptError
from frink_numba.host.likelihood import log_softmax_at
from frink_numba.host.score import CHUNK, batch_log_probabilities, perplexity, token_log_probabilities

_VOCAB = 50


@dataclass
class _History:
    """A stand-in cache: the tokens that were run."""

    tokens: list[int] = field(default_factory=list)


class _Sums:
    """A stand-in decoder whose logits after a position depend on every token before it, and on their number."""

    def __init__(self, context: int) -> None:
        self.model = SimpleNamespace(context_length=context)
        self.windows: list[_History] = []
        self.largest = 0

    def new_cache(self) -> _History:
        self.windows.append(_History())
        return self.windows[-1]

    def prefill(self, tokens: Any, cache: _History, *, logits: str | None) -> SimpleNamespace:
        rows = []
        for token in tokens:
            cache.tokens.append(token)
            rows.append(logits_after(cache.tokens))
        assert len(cache.tokens) <= self.model.context_length
        self.largest = max(self.largest, len(rows))
        return SimpleNamespace(logits=np.array(rows) if logits == "all" else None)


def logits_after(tokens: list[int]) -> np.ndarray:
    seed = sum((place + 1) * token for place, token in enumerate(tokens)) + len(tokens)
    return (8 * np.random.default_rng(seed).standard_normal(_VOCAB)).astype(np.float32)


def _truth(history: list[int], token: int) -> float:
    logits = logits_after(history).astype(np.float64)
    return float(logits[token] - math.log(np.exp(logits).sum()))


@pytest.fixture
def tokens() -> list[int]:
    return np.random.default_rng().integers(0, _VOCAB, 2 * CHUNK + 37).tolist()


@pytest.mark.parametrize("length", [2, 3, CHUNK, CHUNK + 1, CHUNK + 2, 2 * CHUNK + 37])
def test_each_score_is_of_its_token_given_all_before(tokens: list[int], length: int) -> None:
    """No score is off by one, at chunk borders too, and no more than a chunk of logits is asked for at once."""
    decoder = _Sums(context=10_000)
    done: list[tuple[int, int]] = []
    scores = token_log_probabilities(decoder, tokens[:length], progress=lambda *call: done.append(call))  # type: ignore[arg-type]
    wanted = [_truth(tokens[:i], tokens[i]) for i in range(1, length)]
    np.testing.assert_allclose(scores, wanted, rtol=1e-6)
    assert len(decoder.windows) == 1
    assert decoder.largest <= CHUNK
    assert done[-1] == (length - 1, length - 1)


@pytest.mark.parametrize("context", [1, 2, 7, 16, 100, CHUNK, CHUNK + 50])
def test_a_long_text_is_scored_in_windows_that_overlap(tokens: list[int], context: int) -> None:
    """Every token is scored once, given the tokens of its window: at least half a context beyond the first window."""
    decoder = _Sums(context=context)
    scores = token_log_probabilities(decoder, tokens)  # type: ignore[arg-type]
    assert len(scores) == len(tokens) - 1
    starts = [0]
    while starts[-1] + context < len(tokens) - 1:
        starts.append(starts[-1] + context - context // 2)
    assert [window.tokens for window in decoder.windows] == [
        tokens[start : min(start + context, len(tokens) - 1)] for start in starts
    ]
    for target in range(1, len(tokens)):
        start = next(start for start in starts if target <= start + context)
        history = tokens[start:target]
        assert len(history) >= min(target, max(context // 2, 1))
        assert scores[target - 1] == pytest.approx(_truth(history, tokens[target]), rel=1e-6)


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_tokens_are_refused(count: int) -> None:
    with pytest.raises(PromptError, match=f"at least two tokens, got {count}"):
        token_log_probabilities(_Sums(10), [1] * count)  # type: ignore[arg-type]


def test_log_softmax_survives_huge_logits() -> None:
    """The peak is taken off first: no overflow, and the sum of all probabilities is 1."""
    logits = np.random.default_rng().uniform(-3e4, 3e4, (1, 9)).astype(np.float32)
    every = log_softmax_at(np.repeat(logits, 9, axis=0), list(range(9)))
    assert np.exp(every).sum() == pytest.approx(1.0)
    assert int(np.argmax(every)) == int(np.argmax(logits))


def test_perplexity_beyond_what_a_float_holds_is_infinite() -> None:
    assert perplexity(np.full(3, -1e4)) == np.inf


def test_perplexity_of_a_guess_is_the_number_of_choices() -> None:
    assert perplexity(np.full(7, -math.log(50))) == pytest.approx(50)
    assert perplexity(np.zeros(3)) == 1


def test_many_texts_score_as_each_alone(open_decoder) -> None:
    """Short texts together, one longer than the context in windows, in their order; progress over all tokens."""
    decoder = open_decoder("llama_grouped", context_length=64)
    draw = np.random.default_rng(2)
    texts = [draw.integers(0, 80, n).tolist() for n in (5, 2, 65, 200, 30, 64)]
    seen: list[tuple[int, int]] = []
    got = batch_log_probabilities(decoder, texts, progress=lambda *call: seen.append(call))
    for text, scores in zip(texts, got, strict=True):
        np.testing.assert_allclose(scores, token_log_probabilities(decoder, text), atol=2e-5)
    total = sum(len(text) - 1 for text in texts)
    assert seen[-1] == (total, total)
    assert seen == sorted(seen)
    with pytest.raises(PromptError, match="text 1: scoring needs at least two tokens"):
        batch_log_probabilities(decoder, [[1, 2], [3]])
