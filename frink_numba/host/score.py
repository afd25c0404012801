"""How likely a text is: the log-probability of each token given those before it, and the perplexity."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from frink_numba.errors import FrinkError, PromptError
from frink_numba.host.likelihood import log_softmax_at

if TYPE_CHECKING:
    from frink_numba.host.decoder import Decoder

CHUNK = 256
"""Tokens whose logits are held at once: 50 MB at a vocabulary of 50,000."""


def token_log_probabilities(
    decoder: Decoder, tokens: Sequence[int], *, progress: Callable[[int, int], None] | None = None
) -> np.ndarray:
    """Natural logarithm of p(tokens[i] | tokens[:i]) for i = 1 .. n-1, float64 [n - 1].

    The first token has no probability, for nothing stands before it. A text longer than the context is scored in
    windows that overlap by half, so that every token beyond the first window sees at least half a context before it.
    `progress` is called with (tokens done, tokens in all). PromptError for fewer than two tokens.
    """
    if len(tokens) < 2:
        raise PromptError(f"scoring needs at least two tokens, got {len(tokens)}: the first has nothing before it")
    context = decoder.model.context_length
    scores = np.empty(len(tokens) - 1)
    # The last token is only a target: it needs no step of its own.
    inputs = len(tokens) - 1
    start = scored = 0
    while scored < inputs:
        stop = min(start + context, inputs)
        cache = decoder.new_cache()
        for first in range(start, stop, CHUNK):
            last = min(first + CHUNK, stop)
            fresh = max(first, scored)
            if fresh >= last:
                decoder.prefill(tokens[first:last], cache, logits=None)
                continue
            logits = decoder.prefill(tokens[first:last], cache, logits="all").logits
            assert logits is not None  # "all" was asked for
            scores[fresh:last] = log_softmax_at(logits[fresh - first :], tokens[fresh + 1 : last + 1])
            if not np.isfinite(scores[fresh:last]).all():
                raise FrinkError("the model's logits are not finite: its weights are damaged, or beyond float32")
            if progress:
                progress(last, inputs)
        scored = stop
        start = stop - context // 2
    return scores


def batch_log_probabilities(
    decoder: Decoder, texts: Sequence[Sequence[int]], *, progress: Callable[[int, int], None] | None = None
) -> list[np.ndarray]:
    """`token_log_probabilities` of many texts, in their order: those within the context go through the model together.

    PromptError, which names the text, for fewer than two tokens.
    """
    for number, text in enumerate(texts):
        if len(text) < 2:
            raise PromptError(
                f"text {number}: scoring needs at least two tokens, got {len(text)}: the first has nothing before it"
            )
    context, total = decoder.model.context_length, sum(len(text) - 1 for text in texts)
    short = [number for number, text in enumerate(texts) if len(text) - 1 <= context]
    together = sum(len(texts[number]) - 1 for number in short)
    scores: list[np.ndarray] = [np.empty(0)] * len(texts)
    outputs = decoder.prefill_batch(
        [texts[number][:-1] for number in short],
        targets=[texts[number][1:] for number in short],
        progress=None if progress is None else lambda done, _: progress(done, total),
    )
    for number, output in zip(short, outputs, strict=True):
        assert output.scores is not None  # targets were given
        if not np.isfinite(output.scores).all():
            raise FrinkError("the model's logits are not finite: its weights are damaged, or beyond float32")
        scores[number] = output.scores
    done = together
    for number in sorted(set(range(len(texts))) - set(short)):
        scores[number] = token_log_probabilities(decoder, texts[number])
        done += len(texts[number]) - 1
        if progress:
            progress(done, total)
    return scores


def perplexity(log_probabilities: np.ndarray) -> float:
    """exp of the mean negative log-probability: 1 for a text that was certain, the vocabulary's size for a guess.

    Infinite beyond what a float holds.
    """
    try:
        return math.exp(-float(np.mean(log_probabilities)))
    except OverflowError:
        return math.inf
