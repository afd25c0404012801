"""Greedy answers several tokens at a time: drafts from the text so far, verified in one step (prompt lookup).

A draft is what followed the last few tokens where they occurred before. A step over the last token and the draft gives
the logits behind each of them; as far as the draft agrees with the most likely tokens it is the answer, and one token
more is known. Text that repeats itself (summaries, edits, quotations) comes several tokens a step.

The answer is that of one token a step, always. A step of several rows may round otherwise than steps of one row each,
so the decoder says how many rows it may have, and how far apart the logits may be (`Decoder.few_rows`):

- not at all (0.0): the rows have the same bits, and so has all that follows from them;
- by a `rounding` relative to their norm: a token counts only where its lead over the second exceeds twice that, which
  no rounding bridges. Where two tokens are as good as equal, the tokens since the last that was certain to the bit go
  through the layers once more, one by one, and the tie is decided by the very numbers that decide it without drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from frink_numba.errors import SettingError
from frink_numba.host.integers import checked_integer
from frink_numba.host.sampling import Sampling, check_logits, most_likely

if TYPE_CHECKING:
    from frink_numba.host.decoder import Decoder
    from frink_numba.host.kv_cache import KVCache

MOST_DRAFTED = 63  # tokens of a draft
_AHEAD = 8  # tokens that a backend may go ahead where there is no draft: then the next one may have come
_LONGEST = 3  # tokens that a draft's origin must have in common with the text's end, then fewer

# How many tokens of a draft must have agreed of late, on average, for drafts of this kind to be worth a wider step.
_WORTH_IT = 0.5
_RECENT = 0.25  # weight of the newest
_FORGIVING = 0.005  # a draft that is not tried counts as so much: it will be tried again


class Lookup:
    """Finds how a text may go on: as it did where its last tokens occurred before, the latest time."""

    def __init__(self) -> None:
        # For 1, 2, .. tokens: where those that begin a continuation ended.
        self._ends: list[dict[tuple[int, ...], int]] = [{} for _ in range(_LONGEST)]
        self._known = 0  # positions whose tokens, and those before them, are in there

    def find(self, tokens: Sequence[int], length: int, most: int) -> list[int]:
        """Up to `most` tokens that followed the last `length` of `tokens`; none where these are new.

        `tokens` grows from call to call. A text that repeats itself without end is continued without end.
        """
        self._learn(tokens)
        end = self._ends[length - 1].get(tuple(tokens[-length:])) if len(tokens) > length else None
        if end is None:
            return []
        period = len(tokens) - 1 - end
        return [tokens[end + 1 + i % period] for i in range(most)]

    def _learn(self, tokens: Sequence[int]) -> None:
        """Remember all that ends before the last token."""
        for at in range(self._known, len(tokens) - 1):
            for length, ends in enumerate(self._ends, 1):
                if at + 1 >= length:
                    ends[tuple(tokens[at + 1 - length : at + 1])] = at
        self._known = max(self._known, len(tokens) - 1)


class Speculative:
    """A `TokenSource` of the most likely tokens, with drafts of up to `most_drafted` tokens.

    steps: steps of more than one row. drafted, accepted: tokens of their drafts, and how many of those agreed.
    repeated: tokens that went through the layers once more to decide a tie.
    """

    def __init__(self, decoder: Decoder, cache: KVCache, most_drafted: int) -> None:
        self._decoder, self._cache, self._most_drafted = decoder, cache, most_drafted
        self._vocabulary = decoder.model.tokenizer.vocab_size
        self._lookup = Lookup()
        self._agreed = [2.0 * _WORTH_IT] * _LONGEST  # tokens of late, by what the draft had in common with the end
        self._exact = 0  # positions of the cache whose rows are, to the bit, those of one token a step
        self._rounding = 0.0  # of the rows behind those
        self._expected = -1  # positions of the cache when the tokens that were answered are handed out
        self.steps = self.drafted = self.accepted = self.repeated = 0

    def first(self, prompt: Sequence[int], logits: np.ndarray) -> int:
        return most_likely(logits)

    def more(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        at = self._cache.positions
        if at != self._expected:  # the beginning, or somebody changed the cache: it is what it is
            self._exact = at
        rows, rounding = self._decoder.few_rows(self._cache, min(most, self._most_drafted + 1))
        length, draft = self._draft(tokens, rows - 1)
        exact = self._exact == at  # so far
        self._rounding = rounding = max(rounding, 0.0 if exact else self._rounding)
        if draft:
            chosen = self._verify(tokens, draft, rounding)
            self._count(length, len(draft), len(chosen) - 1)
        elif exact:
            chosen = self._decoder.decode_ahead(tokens[-1], self._cache, min(most, _AHEAD), stage=True)
        else:
            chosen = self._verify(tokens, [], rounding)
        if exact and not (draft and rounding):
            self._exact = at + len(chosen)
        if not chosen:
            chosen = [self._repeat(tokens, at)]
        self._expected = at + len(chosen)
        return chosen

    def _draft(self, tokens: Sequence[int], most: int) -> tuple[int, list[int]]:
        """What is likely to follow, and how many of the last tokens say so; empty where nothing is worth a try."""
        if most < 1:
            return 0, []
        for length in range(_LONGEST, 0, -1):
            draft = self._lookup.find(tokens, length, most)
            if draft and self._agreed[length - 1] >= min(_WORTH_IT, most / 2):
                return length, draft
            if draft:
                self._agreed[length - 1] += _FORGIVING
        return 0, []

    def _verify(self, tokens: Sequence[int], draft: Sequence[int], rounding: float) -> list[int]:
        """One step over the last token and the draft; the tokens that are certain, none where the first is a tie."""
        output = self._decoder.prefill([tokens[-1], *draft], self._cache, logits="all", stage=True)
        assert output.logits is not None
        chosen: list[int] = []
        for row, logits in enumerate(output.logits[:, : self._vocabulary]):
            if row and np.isnan(logits.max()):
                break  # it is told when it is asked for by itself
            check_logits(logits)
            token = int(np.argmax(logits))
            if rounding and _lead(logits, token) <= 2 * rounding * float(np.linalg.norm(logits)):
                break
            chosen.append(token)
            if row == len(draft) or token != draft[row]:
                break
        return chosen

    def _count(self, length: int, drafted: int, accepted: int) -> None:
        accepted = max(accepted, 0)
        self.steps += 1
        self.drafted += drafted
        self.accepted += accepted
        agreed = self._agreed[length - 1]
        self._agreed[length - 1] = agreed + _RECENT * (accepted - agreed)

    def _repeat(self, tokens: Sequence[int], at: int) -> int:
        """The token behind `tokens` as steps of one row each have it, from where their rows are there."""
        cache, exact = self._cache, self._exact
        before = len(tokens) - 1 - at  # tokens[before + p] is the token of position p
        kept = [
            tuple(part[exact - at :].copy() if exact < at else part[:0] for part in layer.prefix()) for layer in cache
        ]
        self.repeated += at - exact
        cache.truncate(exact)
        try:
            for position in range(exact, at):
                self._decoder.prefill([tokens[before + position]], cache, logits=None)
            output = self._decoder.prefill(tokens[-1:], cache, stage=True)
        except BaseException:
            cache.truncate(exact)
            cache.push(kept)  # type: ignore[arg-type]
            raise
        assert output.logits is not None
        self._exact = at + 1
        return most_likely(output.logits[: self._vocabulary])


def _lead(logits: np.ndarray, token: int) -> float:
    """By how much the largest logit, that of `token`, exceeds all others."""
    others = max(logits[:token].max(initial=-np.inf), logits[token + 1 :].max(initial=-np.inf))
    return float(logits[token]) - float(others)


def checked_speculation(speculate: int, sampling: Sampling) -> int:
    """`speculate` as an integer; SettingError where it is none, or where tokens are drawn or penalized."""
    most = checked_integer("speculate", speculate, 0, MOST_DRAFTED)
    if most and (sampling.temperature != 0 or sampling.repetition_penalty != 1):
        raise SettingError(
            f"speculate={most} drafts greedy answers alone: it needs temperature 0 and repetition_penalty 1, not "
            f"{sampling.temperature:g} and {sampling.repetition_penalty:g}"
        )
    return most
