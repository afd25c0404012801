"""Runs a model over tokens: prefill in chunks, decode one by one, generate text (R1, R10, R11)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Literal

import numpy as np

from frink_numba.backend import Backend, LayerCache, Step
from frink_numba.dispatch import Dispatcher
from frink_numba.errors import Cancelled, FrinkError, PromptError, SettingError
from frink_numba.host.backend import HostBackend
from frink_numba.host.batch import MOST_SEQUENCES, packed
from frink_numba.host.checks import (
    about,
    check_cache,
    check_is_cache,
    checked_caches,
    checked_layers,
    checked_targets,
    checked_tokens,
)
from frink_numba.host.integers import checked_integer, shown
from frink_numba.host.kv_cache import KVCache
from frink_numba.host.model import Model
from frink_numba.host.parts import Output, Part
from frink_numba.host.sampling import NOT_NUMBERS, most_likely
from frink_numba.host.step_runner import StepRunner
from frink_numba.layer import Layer
from frink_numba.plan import CacheAt, Plan

if TYPE_CHECKING:
    from frink_numba.host.generate import Generation
    from frink_numba.host.generate_batch import BatchGeneration

CHUNK_SIZE = 512  # tokens of a step, where no backend says otherwise

Progress = Callable[[int, int], object]
"""Called as progress(tokens done, tokens in all) after each chunk; answering False cancels the rest."""


class Decoder:
    """A model and the backends that run it.

    `backends`: names in order, a comma list, or None for FRINK_BACKEND. Several threads may use one decoder, each with
    a cache of its own: their steps take turns. `close` gives back what the backends hold; so does closing the model.
    """

    def __init__(self, model: Model, backends: str | Sequence[str] | None = None) -> None:
        """BackendError or SettingError when `backends` names none, an unknown one, or none that can run here."""
        model.check_open()
        self.model = model
        self._lock = threading.Lock()
        self._steps = StepRunner(model)
        self._dispatcher: Dispatcher | None = Dispatcher(model.layers, host=self._host, backends=backends)
        model.add_user(self)

    def new_cache(self, context_length: int | None = None, *, dtype: type = np.float32) -> KVCache:
        """An empty K/V cache for `context_length` positions (default: the model's), rows of `dtype` float32 or float16.

        SettingError for a length beyond the model's.
        """
        layers, own = self._open().layers, self.model.context_length
        length = own if context_length is None else checked_integer("context_length", context_length, 1, own)
        return KVCache(layers, length, dtype=dtype, allocate=self._open().host_bytes)

    def prefill(
        self,
        tokens: Sequence[int] | np.ndarray,
        cache: KVCache,
        *,
        logits: Literal["last", "all"] | None = "last",
        hidden: Collection[int] = (),
        chunk_size: int | None = None,
        progress: Progress | None = None,
        start: int | None = None,
        stage: bool = False,
    ) -> Output:
        """Run `tokens` from the cache's end on, and append their K/V rows to it.

        The tokens go through the layers in chunks of `chunk_size` (None: what suits the backend); the answer does not
        depend on it, but for rounding, and with FRINK_INVARIANT not even in that.
        `hidden` names layers, from 0, whose outputs to keep. `start`, if given, is the position that the caller
        believes the cache to be at. `stage`: all tokens go as one chunk whose rows are written and do not count until
        `cache.advance` says so.

        A chunk is all or nothing: after an error, or when `progress` cancels (Cancelled), the cache stands behind the
        last whole chunk, `cache.positions` says where, and a prefill of the remaining tokens continues.
        PromptError for an empty prompt, a token outside the vocabulary, or tokens beyond the context; CacheError for a
        cache of another model or at another position. Both leave the cache as it was.
        """
        self._open()
        ids = checked_tokens(tokens, self.model.vocab_size)
        chunk_size = self._checked_chunk(logits, chunk_size)
        wanted = checked_layers(hidden, len(self._open().layers))
        self._check_cache(cache, len(ids), start)
        over = logits == "last"
        output = self._allocate(len(ids), None if over else logits, wanted)
        cache.reserve(len(ids))
        for first in range(0, len(ids), max(chunk_size, len(ids)) if stage else chunk_size):
            last = len(ids) if stage else min(first + chunk_size, len(ids))
            self._run([Part(ids, first, last, cache, wanted, output, stage=stage, hands_over=over)])
            if progress is not None and progress(last, len(ids)) is False and last < len(ids):
                raise Cancelled(f"cancelled after {last} of {len(ids)} tokens; the cache holds {cache.positions}")
        return output

    def prefill_batch(
        self,
        prompts: Sequence[Sequence[int] | np.ndarray],
        caches: Sequence[KVCache] | None = None,
        *,
        logits: Literal["last", "all"] | None = "last",
        hidden: Collection[int] = (),
        targets: Sequence[Sequence[int] | np.ndarray] | None = None,
        chunk_size: int | None = None,
        progress: Progress | None = None,
    ) -> list[Output]:
        """Run several prompts, each from the end of its own cache on; what `prefill` answers for each, in their order.

        Short prompts go through the layers together, up to `chunk_size` tokens at a time, and long ones are cut, so
        that a batch takes no more memory than one long prompt. `caches` None: nobody wants the K/V rows, which are then
        neither kept nor, from a device, brought back. `targets`: for each prompt as many tokens, of which `scores` tell
        how likely each is behind the prompt's token at its place; there are no logits then.

        All or nothing for each piece of a prompt: after an error, or when `progress` cancels, each cache stands behind
        the last piece that was run. Errors of arguments as in `prefill`, which name the prompt, come before any work.
        """
        self._open()
        model, dispatcher = self.model, self._open()
        if targets is not None:  # without a backend that scores by itself, their logits come to the host
            logits = None if dispatcher.scores else "all"
        chunk_size = self._checked_chunk(logits, chunk_size)
        logits = None if targets is not None else logits
        wanted = checked_layers(hidden, len(dispatcher.layers))
        ids = [about(number, checked_tokens, prompt, model.vocab_size) for number, prompt in enumerate(prompts)]
        if caches is None:
            blank = self.new_cache()
            held = [blank if len(own) <= chunk_size else self.new_cache() for own in ids]
        else:
            held = checked_caches(caches, len(ids))
        for number, (own, cache) in enumerate(zip(ids, held, strict=True)):
            about(number, self._check_cache, cache, len(own), None)
        outputs = [self._allocate(len(own), "all" if logits == "all" else None, wanted) for own in ids]
        sought: list[np.ndarray | None] = [None] * len(ids)
        if targets is not None:
            sought = list(checked_targets(targets, ids, model.vocab_size))
            for output, own in zip(outputs, ids, strict=True):
                output.scores = np.empty(len(own))
        done, total = 0, sum(map(len, ids))
        for group in packed([len(own) for own in ids], chunk_size):
            parts = [
                Part(
                    *(ids[n], first, last, held[n], wanted, outputs[n]),
                    keep=caches is not None or len(ids[n]) > chunk_size,
                    targets=sought[n],
                    hands_over=logits == "last",
                )
                for n, first, last in group
            ]
            for alike in (True, False):  # a step keeps all rows or none
                if chosen := [part for part in parts if part.keep is alike]:
                    self._run(chosen)
            done += sum(part.last - part.first for part in parts)
            if caches is None:  # a long prompt's rows go as soon as its last piece has run
                del parts, chosen
                for n, _, last in group:
                    held[n] = blank if last == len(ids[n]) else held[n]
            if progress is not None and progress(done, total) is False and done < total:
                raise Cancelled(f"cancelled after {done} of {total} tokens")
        return outputs

    def decode(self, token: int, cache: KVCache, *, start: int | None = None) -> Output:
        """Run one token at the cache's end; `logits` [vocab] tell the token after it. Errors as in `prefill`."""
        return self.prefill((token,), cache, start=start)

    def decode_batch(
        self, tokens: Sequence[int], caches: Sequence[KVCache], *, ahead: int = 0, stage: bool = False
    ) -> list[Output]:
        """Run one token at the end of each of several caches, all in one step: as `decode`, for each.

        `ahead` n: where a backend chooses tokens by itself, an output's `tokens` are the likeliest next one, the one
        behind that, and so on: 1 to n, as many as all contexts have room for; `logits` are None then, and the rows of
        all but the last are pushed too. Where logits are not numbers its tokens end; without any, its cache stays as it
        was. `stage`: rows are written, and do not count until `cache.advance` says so.
        """
        layers, context = self._open().layers, self.model.context_length
        ids = checked_tokens(tokens, self.model.vocab_size)
        held = checked_caches(caches, len(ids))
        for number, cache in enumerate(held):
            about(number, check_cache, cache, layers, context, 1)
        ahead = checked_integer("ahead", ahead, 0)
        choices = self.model.tokenizer.vocab_size if ahead else 0
        ahead = min([ahead, *(cache.context_length - cache.positions for cache in held)])
        for cache in held if ahead else ():
            cache.reserve(ahead)
        parts = [
            Part(
                *(ids[at : at + 1], 0, 1, cache, frozenset(), Output()),
                stage=stage or ahead > 0,
                hands_over=True,
                ahead=ahead,
                choices=choices,
            )
            for at, cache in enumerate(held)
        ]
        for first in range(0, len(parts), MOST_SEQUENCES):
            self._run(parts[first : first + MOST_SEQUENCES])
        for part in parts:
            if part.chosen is not None:
                part.output.tokens = part.tokens()
        if ahead and not stage:
            for part in parts:
                part.cache.advance(1 if part.output.tokens is None else len(part.output.tokens))
        return [part.output for part in parts]

    def decode_ahead(self, token: int, cache: KVCache, most: int, *, stage: bool = False) -> list[int]:
        """The most likely token behind `token`, the one behind that, and so on: 1 to `most` of them.

        As many as a backend chooses without the host in between, and as the context has room for; one where no backend
        can. Of equals the lowest id. The rows of `token` and of all that are answered but the last are pushed; with
        `stage` they are written, and do not count until `cache.advance` says so.
        FrinkError where the first logits are not numbers; other errors as in `prefill`.
        """
        self._open()
        ids = checked_tokens((token,), self.model.vocab_size)
        self._check_cache(cache, 1, None)
        most = min(checked_integer("most", most, 1), cache.context_length - cache.positions)
        choices = self.model.tokenizer.vocab_size
        output = self._allocate(1, "last", ())
        cache.reserve(most)
        part = Part(ids, 0, 1, cache, frozenset(), output, stage=True, ahead=most, choices=choices)
        self._run([part])
        assert output.logits is not None
        chosen = [most_likely(output.logits[:choices])] if part.chosen is None else part.tokens()
        if not chosen:
            raise FrinkError(NOT_NUMBERS)
        if not stage:
            cache.advance(len(chosen))
        return chosen

    def few_rows(self, cache: KVCache, most: int) -> tuple[int, float]:
        """How many rows the next step of `cache` may have, at most `most`, to be a step of one row in all but its rows.

        That is: it costs about as much, and its logits are those of steps of one row each, to the bit (0.0) or but for
        a rounding, relative to their norm. (1, 0.0) where no backend promises more.
        """
        dispatcher = self._open()
        check_is_cache(cache)
        most = min(checked_integer("most", most, 1), cache.context_length - cache.positions)
        if most <= 1:
            return 1, 0.0
        with self._lock:
            return dispatcher.few_rows(Step(dispatcher.layers, cache, cache.positions, most, edges=self._steps.edges))

    def generate_batch(
        self,
        prompts: Sequence[str | Sequence[int] | Sequence[Mapping[str, object]]],
        *,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        seed: int | None = None,
        stop: Sequence[str] = (),
        chat: bool = False,
        special: bool = False,
        caches: Sequence[KVCache] | None = None,
        chunk_size: int | None = None,
        progress: Progress | None = None,
    ) -> BatchGeneration:
        """Continue several prompts together: an iterator of (prompt's number, `Piece`). See `BatchGeneration`.

        Arguments as in `generate`, and each answer is what it would be alone, but for rounding. `caches`: continue
        behind what they hold, one a prompt; without, an answer's rows go when it ends. An answer whose logits are not
        numbers ends with an `error`; the iterator raises it, with the prompt's number, when the others have ended.
        """
        from frink_numba.host.generate import encode_prompt
        from frink_numba.host.generate_batch import BatchGeneration
        from frink_numba.host.sampling import Sampling

        self._open()
        if isinstance(prompts, str | bytes) or not isinstance(prompts, Sequence):
            raise PromptError("prompts is a list of prompts; for one prompt call generate")
        held = None if caches is None else checked_caches(caches, len(prompts))
        self._open().expect(self._steps.edges)  # while the tokenizer is made
        sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed)
        begins = [True] * len(prompts) if held is None else [not cache.positions for cache in held]
        return BatchGeneration(
            self,
            [
                about(number, encode_prompt, self.model, prompt, chat=chat, special=special, begins=first)
                for number, (prompt, first) in enumerate(zip(prompts, begins, strict=True))
            ],
            sampling,
            max_new_tokens=max_new_tokens,
            stop=stop,
            caches=held,
            chunk_size=chunk_size,
            progress=progress,
        )

    def generate(
        self,
        prompt: str | Sequence[int] | Sequence[Mapping[str, object]],
        *,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        seed: int | None = None,
        stop: Sequence[str] = (),
        chat: bool = False,
        special: bool = False,
        cache: KVCache | None = None,
        chunk_size: int | None = None,
        progress: Progress | None = None,
        speculate: int = 0,
    ) -> Generation:
        """Continue `prompt`: an iterator of `Piece(token, text)`, with `finish_reason` at its end. See `Generation`.

        `prompt`: a text; token ids; or messages ({"role": ..., "content": ...}), which go through the file's chat
        template. `chat` makes a text the one message of a user. `special` recognizes control tokens in a text.
        `max_new_tokens` None: until the model stops or the context is full. `stop`: texts that end the answer and are
        not part of it. Sampling parameters as in `sampling.Sampling`; the default is greedy. `cache`: continue behind
        what it holds. `speculate`: draft up to so many tokens, 63 at most, from the text so far, which makes greedy
        answers that repeat something faster on the host, where 3 suits, and never changes them (`speculation.py`).
        Bad arguments are refused here, not at the first token.
        """
        from frink_numba.host.generate import Generation, encode_prompt
        from frink_numba.host.sampling import Sampling
        from frink_numba.host.speculation import Speculative, checked_speculation
        from frink_numba.host.token_source import usual_source

        self._open()
        if cache is not None:
            check_is_cache(cache)
        self._open().expect(self._steps.edges)  # while the tokenizer is made
        sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed)
        drafted = checked_speculation(speculate, sampling)
        return Generation(
            self,
            encode_prompt(self.model, prompt, chat=chat, special=special, begins=cache is None or not cache.positions),
            lambda held: Speculative(self, held, drafted) if drafted else usual_source(self, held, sampling),
            max_new_tokens=max_new_tokens,
            stop=stop,
            cache=cache,
            chunk_size=chunk_size,
            progress=progress,
        )

    @property
    def chunk_size(self) -> int:
        """Tokens that go through the layers at a time, where a call says nothing of it: the first backend's choice."""
        return self._open().chunk_size or CHUNK_SIZE

    def plan(self, batch: int = CHUNK_SIZE, cache: KVCache | None = None, *, length: int | None = None) -> Plan:
        """Which backend would serve which layers of a step of `batch` tokens behind `cache`, and why no other (B4).

        Also what that takes of a device's memory. `length`: where the step ends, in place of a cache.
        """
        dispatcher = self._open()
        batch = checked_integer("batch", batch, 1)
        if length is not None:
            start = checked_integer("length", length, batch, self.model.context_length) - batch
            caches: Sequence[LayerCache] = [
                CacheAt(x.attention.n_kv_heads, x.attention.head_dim, x.attention.head_dim, start)
                for x in dispatcher.layers
            ]
        else:
            caches = self.new_cache() if cache is None else cache
            start = caches.positions
        return dispatcher.plan(Step(dispatcher.layers, caches, start, batch, edges=self._steps.edges, logits=1))

    @property
    def activations(self) -> list[dict[int, int]]:
        """For each layer, how many steps used which expert so far (R22); a dense layer has expert 0."""
        return self._steps.activations

    def close(self) -> None:
        """Close the backends; may be called twice."""
        with self._lock:
            dispatcher, self._dispatcher = self._dispatcher, None
            self._steps.close()
        if dispatcher is not None:
            dispatcher.close()

    def __enter__(self) -> Decoder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def check_prompt(self, tokens: Sequence[int] | np.ndarray, cache: KVCache) -> None:
        """Raise what `prefill` would raise for these arguments, without running anything."""
        self._check_cache(cache, len(checked_tokens(tokens, self.model.vocab_size)), None)

    def _host(self, layers: Sequence[Layer]) -> Backend:
        return HostBackend(layers, self.model.weights)

    def _open(self) -> Dispatcher:
        self.model.check_open()
        if self._dispatcher is None:
            raise FrinkError("the decoder is closed; make another")
        return self._dispatcher

    def _run(self, parts: Sequence[Part]) -> None:
        with self._lock:
            self._steps.run(self._open(), parts)

    def _allocate(self, count: int, logits: str | None, layers: Collection[int]) -> Output:
        output = Output()
        if logits is not None:
            shape = (self.model.vocab_size,) if logits == "last" else (count, self.model.vocab_size)
            output.logits = np.empty(shape, np.float32)
        output.hidden = {layer: np.empty((count, self.model.hyper.hidden), np.float32) for layer in sorted(layers)}
        return output

    def _checked_chunk(self, logits: str | None, chunk_size: int | None) -> int:
        """Tokens of a step; SettingError where `logits` or it is none of its values."""
        if logits is not None and not (isinstance(logits, str) and logits in ("last", "all")):
            raise SettingError(f"logits={shown(logits)}: expected 'last', 'all' or None")
        if chunk_size is None:  # logits of many positions are many bytes at a time
            chunk_size = min(self.chunk_size, CHUNK_SIZE) if logits == "all" else self.chunk_size
        return checked_integer("chunk_size", chunk_size, 1)

    def _check_cache(self, cache: KVCache, count: int, start: int | None) -> None:
        check_cache(cache, self._open().layers, self.model.context_length, count, start)
