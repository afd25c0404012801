"""An answer as it grows: token after token, the text that can be shown, and why it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from frink_numba.host.integers import checked_integer
from frink_numba.host.stop_text import StopText

if TYPE_CHECKING:
    from frink_numba.host.kv_cache import KVCache
    from frink_numba.host.text_stream import TextStream
    from frink_numba.host.tokenizer import Tokenizer

FinishReason = Literal["stop", "length", "context"]


@dataclass(frozen=True, slots=True)
class Piece:
    """One new token, and the text that can be shown since the piece before: "" while a character or a possible stop
    string is unfinished."""

    token: int
    text: str


class Answer:
    """What follows a prompt so far.

    `prompt_tokens`: the prompt's ids. `tokens`: the new ones so far. `finish_reason` after the last piece: "stop" (a
    stop token or string; `stop_string` says which string), "length" (`max_new_tokens`) or "context" (it is full).
    `cache` holds the prompt and the new tokens but the last, after each piece.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_tokens: Sequence[int],
        cache: KVCache,
        *,
        max_new_tokens: int | None,
        stop: Sequence[str],
    ) -> None:
        if max_new_tokens is not None:
            max_new_tokens = checked_integer("max_new_tokens", max_new_tokens, 1)
        self.prompt_tokens = list(prompt_tokens)
        self.tokens: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.cache = cache
        self._stop_text = StopText(stop)
        self._most, self._tokenizer = max_new_tokens, tokenizer
        self._stream: TextStream | None = None  # made when the prompt is known to be good

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the answer, if one did."""
        return self._stop_text.found

    @property
    def room(self) -> int:
        """Tokens that may still follow the last one."""
        left = self.cache.context_length - self.cache.positions
        return left if self._most is None else min(left, self._most - len(self.tokens))

    def add(self, token: int) -> Piece:
        """Take the next token, whose row is not in the cache; `finish_reason` is set when it is the last."""
        if self._stream is None:
            self._stream = self._tokenizer.stream(special=False, after=self.prompt_tokens[-1])
        self.tokens.append(token)
        text = self._stop_text.push(self._stream.push(token))
        reason = self._reason(token)
        if reason is not None:
            if self.stop_string is None:
                text += self._stop_text.push(self._stream.flush()) + self._stop_text.flush()
            # The flush may complete a stop string.
            self.finish_reason = "stop" if self.stop_string is not None else reason
        return Piece(token, text)

    def _reason(self, token: int) -> FinishReason | None:
        """Why the answer ends with `token`; None when it does not."""
        if token in self._tokenizer.stop_ids or self.stop_string is not None:
            return "stop"
        if len(self.tokens) == self._most:
            return "length"
        if self.cache.positions == self.cache.context_length:
            return "context"
        return None
