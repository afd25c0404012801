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


def perplexity(log_probabilities: np.ndarray) -> float:
    """exp of the mean negative log-probability: 1 for a text that was certain, the vocabulary's size for a guess.

    Infinite beyond what a float holds.
    """
    try:
        return math.exp(-float(np.mean(log_probabilities)))
    except OverflowError:
        return math.inf
