"""Generation: from a prompt to a stream of tokens and text. Where the tokens come from: `token_source.py`."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from frink_numba.errors import PromptError
from frink_numba.host.answer import Answer, Piece
from frink_numba.host.integers import checked_integer

if TYPE_CHECKING:
    from frink_numba.host.decoder import Decoder, Progress
    from frink_numba.host.kv_cache import KVCache
    from frink_numba.host.model import Model
    from frink_numba.host.token_source import MakeSource, TokenSource


class Generation(Answer, Iterator[Piece]):
    """An answer under way: iterate it.

    The texts of all pieces joined are the answer: no character is split over two pieces, and nothing of a stop string
    is shown. The last piece may be the model's stop token, with the text that was held back until then. `source`: where
    the tokens come from.
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
        if chunk_size is not None:
            chunk_size = checked_integer("chunk_size", chunk_size, 1)
        tokenizer = decoder.model.tokenizer
        cache = decoder.new_cache() if cache is None else cache
        super().__init__(tokenizer, prompt_tokens, cache, max_new_tokens=max_new_tokens, stop=stop)
        decoder.check_prompt(self.prompt_tokens, self.cache)
        self.source = source(self.cache)
        self._pieces = self._run(decoder, self.source, chunk_size, progress)

    def __next__(self) -> Piece:
        return next(self._pieces)

    def close(self) -> None:
        """End it early; the cache stays usable."""
        self._pieces.close()

    def _run(
        self,
        decoder: Decoder,
        source: TokenSource,
        chunk_size: int | None,
        progress: Progress | None,
    ) -> Generator[Piece, None, None]:
        cache = self.cache
        output = decoder.prefill(self.prompt_tokens, cache, chunk_size=chunk_size, progress=progress)
        assert output.logits is not None
        whole = list(self.prompt_tokens)
        vocabulary = decoder.model.tokenizer.vocab_size
        ready = deque([source.first(whole, output.logits[:vocabulary])])  # chosen and not handed out
        while True:
            token = ready.popleft()
            whole.append(token)
            yield self.add(token)
            if self.finish_reason is not None:
                return
            if not (ready and cache.staged):
                ready = deque(source.more(whole, self.room))
            cache.advance()


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
