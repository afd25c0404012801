"""Ids to text, one at a time, without ever splitting a character."""

from __future__ import annotations

import codecs
from collections.abc import Callable


class TextStream:
    """Pushes ids, hands out text as soon as its characters are whole.

    What all pushes and the flush gave, joined, is the tokenizer's `decode` of the ids.
    """

    def __init__(self, push: Callable[[int], bytes]) -> None:
        """`push` gives the bytes of the next id."""
        self._push = push
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that `token` completes, often "" or more than one character; TokenizerError for a bad id."""
        return self._decoder.decode(self._push(token))

    def flush(self) -> str:
        """What is left: U+FFFD for a character that was begun and not finished, else "". The stream can go on."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
