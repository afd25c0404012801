"""Generation: from a prompt to a stream of tokens and text. Where the tokens come from: `token_source.py`."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from frink_numba.errors import PromptError
from frink_numba.host.integers import checked_integer
from frink_numba.host.stop_text import StopText

if TYPE_CHECKING:
    from frink_numba.host.decoder import Decoder, Progress
    from frink_numba.host.kv_cache import KVCache
    from frink_numba.host.model import Model
    from frink_numba.host.token_source import MakeSource, TokenSource

FinishReason = Literal["stop", "length", "context"]


@dataclass(frozen=True, slots=True)
class Piece:
    """One new token, and the text that can be shown since the piece before: "" while a character or a possible stop
    string is unfinished."""

    token: int
    text: str


class Generation(Iterator[Piece]):
    """An answer under way: iterate it.

    The texts of all pieces joined are the answer: no character is split over two pieces, and nothing of a stop string
    is shown. The last piece may be the model's stop token, with the text that was held back until then.

    `prompt_tokens`: the prompt's ids. `tokens`: the new ones so far. `finish_reason` after the last piece: "stop" (a
    stop token or string; `stop_string` says which string), "length" (`max_new_tokens`) or "context" (it is full).
    `cache` holds the prompt and the new tokens but the last, after each piece. `source`: where the tokens come from.
    """

    def __init__(
        self,
        decoder: Decoder,
        prompt_tokens: Sequence[int],
        source: MakeSource,
        *,
        max_new_tokens: int | None,
        stop: Sequence[str],
        cache: KVCache | None,
        chunk_size: int | None,
        progress: Progress | None,
    ) -> None:
        if max_new_tokens is not None:
            max_new_tokens = checked_integer("max_new_tokens", max_new_tokens, 1)
        if chunk_size is not None:
            chunk_size = checked_integer("chunk_size", chunk_size, 1)
        self.prompt_tokens = list(prompt_tokens)
        self.tokens: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.cache = decoder.new_cache() if cache is None else cache
        decoder.check_prompt(self.prompt_tokens, self.cache)
        self._stop_text = StopText(stop)
        self.source = source(self.cache)
        self._pieces = self._run(decoder, self.source, max_new_tokens, chunk_size, progress)

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the answer, if one did."""
        return self._stop_text.found

    def __next__(self) -> Piece:
        return next(self._pieces)

    def close(self) -> None:
        """End it early; the cache stays usable."""
        self._pieces.close()

    def _run(
        self,
        decoder: Decoder,
        source: TokenSource,
        max_new_tokens: int | None,
        chunk_size: int | None,
        progress: Progress | None,
    ) -> Generator[Piece, None, None]:
        tokenizer, cache = decoder.model.tokenizer, self.cache
        stream = tokenizer.stream(special=False, after=self.prompt_tokens[-1])
        output = decoder.prefill(self.prompt_tokens, cache, chunk_size=chunk_size, progress=progress)
        assert output.logits is not None
        whole = list(self.prompt_tokens)
        ready = deque([source.first(whole, output.logits[: tokenizer.vocab_size])])  # chosen and not handed out
        while True:
            token = ready.popleft()
            self.tokens.append(token)
            whole.append(token)
            text = self._stop_text.push(stream.push(token))
            reason = self._reason(token, max_new_tokens, tokenizer.stop_ids)
            if reason is not None:
                if self.stop_string is None:
                    text += self._stop_text.push(stream.flush()) + self._stop_text.flush()
                # The flush may complete a stop string.
                self.finish_reason = "stop" if self.stop_string is not None else reason
                yield Piece(token, text)
                return
            yield Piece(token, text)
            if not (ready and cache.staged):
                most = cache.context_length - cache.positions
                if max_new_tokens is not None:
                    most = min(most, max_new_tokens - len(self.tokens))
                ready = deque(source.more(whole, most))
            cache.advance()

    def _reason(self, token: int, max_new_tokens: int | None, stop_ids: frozenset[int]) -> FinishReason | None:
        """Why the answer ends with `token`; None when it does not."""
        if token in stop_ids or self.stop_string is not None:
            return "stop"
        if len(self.tokens) == max_new_tokens:
            return "length"
        if self.cache.positions == self.cache.context_length:
            return "context"
        return None


def encode_prompt(
    model: Model,
    prompt: str | Sequence[int] | Sequence[Mapping[str, object]] | np.ndarray,
    *,
    chat: bool,
    special: bool,
    begins: bool,
) -> list[int]:
    """Token ids of a text, of messages, or of ids; `begins`: nothing precedes them, so that the BOS rule applies.

    PromptError when `prompt` is none of these or empty.
    """
    if isinstance(prompt, str):
        if chat:
            return _encode_chat(model, [{"role": "user", "content": prompt}], begins)
        return model.tokenizer.encode(prompt, add_bos=None if begins else False, special=special)
    if isinstance(prompt, bytes) or not isinstance(prompt, Sequence | np.ndarray):
        raise PromptError(f"a prompt is a text, token ids, or a list of messages, not a {type(prompt).__name__}")
    messages = [entry for entry in prompt if isinstance(entry, Mapping)]
    if messages and len(messages) == len(prompt):
        return _encode_chat(model, messages, begins)
    if messages or chat:
        raise PromptError("chat takes a text, or a list of messages {'role': ..., 'content': ...}")
    return list(prompt)


def _encode_chat(model: Model, messages: Sequence[Mapping[str, object]], begins: bool) -> list[int]:
    if not begins:
        raise PromptError("a chat is rendered whole, from its first message: give it an empty cache")
    return model.chat_template.encode(messages)
