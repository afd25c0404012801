"""Several answers at once: their next tokens come from one step, and each ends for itself."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from frink_numba.errors import FrinkError
from frink_numba.host.answer import Answer, Piece
from frink_numba.host.batch import MOST_SEQUENCES
from frink_numba.host.checks import about
from frink_numba.host.integers import checked_integer
from frink_numba.host.sampling import NOT_NUMBERS, Sampler, Sampling, are_numbers, most_likely
from frink_numba.host.token_source import MOST_AHEAD, Pace

if TYPE_CHECKING:
    from frink_numba.host.decoder import Decoder, Progress
    from frink_numba.host.kv_cache import KVCache
    from frink_numba.host.parts import Output

_ROOM_AT_ONCE = 1024  # tokens of an answer: few are longer, and the rows of 64 that may be are many gigabytes
_AHEAD_OF_WAITING = 8  # tokens, while prompts wait: an answer that ends leaves its place empty so long


class BatchAnswer(Answer):
    """One of several answers; `text`: what of it can be shown so far.

    `error`: why no token follows, where that is no `finish_reason`: the logits were not numbers.
    """

    text = ""
    error: FrinkError | None = None
    sampler: Sampler | None = None  # None: the likeliest token

    @property
    def ended(self) -> bool:
        """Whether nothing follows, for either reason."""
        return self.finish_reason is not None or self.error is not None

    def add(self, token: int) -> Piece:
        piece = super().add(token)
        self.text += piece.text
        return piece


class BatchGeneration(Iterator[tuple[int, Piece]]):
    """Answers under way: iterate it for pairs of a prompt's number and its next piece.

    `answers`: one a prompt, in their order, each with its `text`, `tokens`, `finish_reason` and more (see `Answer`).
    Up to MOST_SEQUENCES go on together; where one ends, the next prompt begins. Each piece counts one row in its cache,
    so that this may be left at any piece.

    Logits that are not numbers end the answer that they belong to, which keeps what it has and says so in its `error`.
    The others go on; when they have ended, the iterator raises FrinkError, which names the prompt.
    """

    def __init__(
        self,
        decoder: Decoder,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        max_new_tokens: int | None,
        stop: Sequence[str],
        caches: Sequence[KVCache] | None,
        chunk_size: int | None,
        progress: Progress | None,
    ) -> None:
        if chunk_size is not None:
            chunk_size = checked_integer("chunk_size", chunk_size, 1)
        self._decoder, self._sampling, self._keep = decoder, sampling, caches is not None
        self._most_new, self._vocabulary = max_new_tokens, decoder.model.tokenizer.vocab_size
        held = [decoder.new_cache() for _ in prompts] if caches is None else caches
        self.answers = [
            BatchAnswer(decoder.model.tokenizer, prompt, cache, max_new_tokens=max_new_tokens, stop=stop)
            for prompt, cache in zip(prompts, held, strict=True)
        ]
        for number, answer in enumerate(self.answers):
            about(number, decoder.check_prompt, answer.prompt_tokens, answer.cache)
        self._steps = Pace()
        self._pieces = self._run(chunk_size, progress)

    def __next__(self) -> tuple[int, Piece]:
        return next(self._pieces)

    def close(self) -> None:
        """End all of them early; the caches stay usable."""
        self._pieces.close()

    def _run(self, chunk_size: int | None, progress: Progress | None) -> Generator[tuple[int, Piece], None, None]:
        waiting, going = deque(range(len(self.answers))), list[int]()
        while waiting or going:
            fresh = [waiting.popleft() for _ in range(min(len(waiting), MOST_SEQUENCES - len(going)))]
            begun = self._begin(fresh, chunk_size, progress) if fresh else []
            chosen = self._go_on(going, bool(waiting)) if going else []
            turns = [*zip(going, chosen, strict=True), *zip(fresh, begun, strict=True)]
            for place in range(max(len(tokens) for _, tokens in turns)):
                for number, tokens in turns:
                    answer = self.answers[number]
                    if place >= len(tokens) or answer.finish_reason is not None:
                        continue
                    if answer.tokens:
                        if not answer.cache.staged:  # changed since: its tokens are chosen anew in the next round
                            continue
                        answer.cache.advance()
                    piece = answer.add(tokens[place])
                    self._let_go(answer)
                    yield number, piece
            going = [number for number in [*going, *fresh] if not self.answers[number].ended]
        self._report()

    def _begin(self, numbers: Sequence[int], chunk_size: int | None, progress: Progress | None) -> list[list[int]]:
        """Run prompts; the first token of each answer, alone in a list."""
        answers = [self.answers[number] for number in numbers]
        for answer in answers:
            if self._most_new is not None:  # at once what it may need, so that little is moved as it grows
                new = min(self._most_new, _ROOM_AT_ONCE)
                answer.cache.reserve(min(len(answer.prompt_tokens) + new - 1, self._room(answer)))
            if self._sampling.temperature or self._sampling.repetition_penalty != 1:
                answer.sampler = Sampler(self._sampling, self._vocabulary)
                answer.sampler.see(token for token in answer.prompt_tokens if token < self._vocabulary)
        outputs = self._decoder.prefill_batch(
            [answer.prompt_tokens for answer in answers],
            [answer.cache for answer in answers],
            chunk_size=chunk_size,
            progress=progress,
        )
        return [self._chosen(answer, output) for answer, output in zip(answers, outputs, strict=True)]

    def _go_on(self, numbers: Sequence[int], waiting: bool) -> list[list[int]]:
        """Run the last token of each answer, whose rows are staged; the tokens behind it."""
        answers = [self.answers[number] for number in numbers]
        greedy = all(answer.sampler is None for answer in answers)
        most = min(self._steps.ahead, _AHEAD_OF_WAITING if waiting else MOST_AHEAD)
        if self._most_new is not None:
            most = min([most, *(self._most_new - len(answer.tokens) for answer in answers)])
        start = time.perf_counter()
        outputs = self._decoder.decode_batch(
            [answer.tokens[-1] for answer in answers],
            [answer.cache for answer in answers],
            ahead=most if greedy else 0,
            stage=True,
        )
        chosen = [self._chosen(answer, output) for answer, output in zip(answers, outputs, strict=True)]
        self._steps.took(max(1, *map(len, chosen)), time.perf_counter() - start)
        return chosen

    def _chosen(self, answer: BatchAnswer, output: Output) -> list[int]:
        """The answer's next tokens; none, and its `error`, where the logits are not numbers."""
        tokens = output.tokens
        if tokens is None:
            assert output.logits is not None
            logits: np.ndarray = output.logits[: self._vocabulary]
            choose = most_likely if answer.sampler is None else answer.sampler.choose
            tokens = [choose(logits)] if are_numbers(logits) else []
        if not tokens:
            answer.error = FrinkError(NOT_NUMBERS)
            self._let_go(answer)
        return tokens

    def _let_go(self, answer: BatchAnswer) -> None:
        """Drop the rows of an answer that has ended, where nobody keeps them: they may be many."""
        if answer.ended and not self._keep:
            answer.cache = answer.cache.blank()

    def _report(self) -> None:
        """FrinkError, when all have ended, for those that an error ended."""
        failed = [(number, answer.error) for number, answer in enumerate(self.answers) if answer.error is not None]
        if failed:
            number, error = failed[0]
            others = f" (and {len(failed) - 1} more, whose answers have an `error`)" if len(failed) > 1 else ""
            raise FrinkError(f"prompt {number}{others}: {error}")

    @staticmethod
    def _room(answer: BatchAnswer) -> int:
        return answer.cache.context_length - answer.cache.positions
