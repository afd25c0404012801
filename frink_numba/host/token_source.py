"""Where the tokens of an answer come from: what a `Generation` asks of a source, and the sources of every decoder.

    source.first(prompt, logits)     the token behind the prompt, from its last logits [vocabulary]
    source.more(tokens, most)        1 to `most` tokens that follow `tokens`, which are the prompt and the answer so far

`vocabulary` is the tokenizer's: a file may pad its own, and logits beyond are of no token. `tokens` is the generation's
own list, which grows: a source may read it and keeps nothing of it but what it copies.

When `more` is called, the cache counts the rows of all `tokens` but the last. When it returns n tokens, at least n
positions are staged behind those (`KVCache.stage`): of the last of `tokens`, and of all new ones but the last. None of
them counts yet. The generation counts one for each piece that it hands out, so that the cache always holds the prompt
and the new tokens but the last, however far a source has gone ahead and wherever the answer ends. Should the cache be
changed between two pieces, what is staged is gone, and with it the tokens that were not handed out: `more` is asked
again. What `more` raises leaves all that counts as it was.

`Decoder.prefill(..., stage=True)` and `Decoder.decode_ahead(..., stage=True)` run tokens whose rows are only staged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np

from frink_numba.host.sampling import Sampler, Sampling, most_likely

if TYPE_CHECKING:
    from frink_numba.host.decoder import Decoder
    from frink_numba.host.kv_cache import KVCache

MOST_AHEAD = 32
"""Tokens that a greedy answer is ahead of its reader at most."""

MOST_SECONDS = 0.1
"""For which it may keep the reader waiting, so that slow models still answer piece by piece."""


class TokenSource(Protocol):
    """See the module."""

    def first(self, prompt: Sequence[int], logits: np.ndarray) -> int: ...

    def more(self, tokens: Sequence[int], most: int) -> Sequence[int]: ...


MakeSource: TypeAlias = "Callable[[KVCache], TokenSource]"
"""Makes the source of an answer from the cache that it goes on in."""


class OneByOne:
    """Each token is chosen from its own logits, on the host."""

    def __init__(self, decoder: Decoder, cache: KVCache, sampling: Sampling) -> None:
        self._decoder, self._cache = decoder, cache
        self._vocabulary = decoder.model.tokenizer.vocab_size
        self._sampler = Sampler(sampling, self._vocabulary)

    def first(self, prompt: Sequence[int], logits: np.ndarray) -> int:
        self._sampler.see(token for token in prompt if token < self._vocabulary)
        return self._sampler.choose(logits)

    def more(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        output = self._decoder.prefill(tokens[-1:], self._cache, stage=True)
        assert output.logits is not None
        return [self._sampler.choose(output.logits[: self._vocabulary])]


class Pace:
    """How many tokens are chosen `ahead` of the reader next.

    The first comes alone, so that it comes soon; then four times as many each time, as long as these come soon too.
    """

    def __init__(self, most: int = MOST_AHEAD) -> None:
        self._most, self.ahead = most, 1

    def took(self, tokens: int, seconds: float) -> None:
        """So many came, at least one, in such a time; where no backend goes ahead, it is one."""
        in_time = int(tokens * MOST_SECONDS / max(seconds, 1e-9))
        self.ahead = max(1, min(4 * tokens, self._most, in_time))


class Greedy:
    """The most likely tokens, as many at a time as a backend can choose by itself."""

    def __init__(self, decoder: Decoder, cache: KVCache, most_ahead: int = MOST_AHEAD) -> None:
        self._decoder, self._cache, self._pace = decoder, cache, Pace(most_ahead)

    def first(self, prompt: Sequence[int], logits: np.ndarray) -> int:
        return most_likely(logits)

    def more(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        start = time.perf_counter()
        chosen = self._decoder.decode_ahead(tokens[-1], self._cache, min(most, self._pace.ahead), stage=True)
        self._pace.took(len(chosen), time.perf_counter() - start)
        return chosen


def usual_source(decoder: Decoder, cache: KVCache, sampling: Sampling) -> TokenSource:
    """The source of an answer of which nothing else is asked."""
    if sampling.temperature == 0 and sampling.repetition_penalty == 1:
        return Greedy(decoder, cache)
    return OneByOne(decoder, cache, sampling)
