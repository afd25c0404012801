"""Byte-level BPE (tokenizer.ggml.model "gpt2"): ordinary text to ids, and ids to bytes.

Bytes are spelled as letters (GPT-2's alphabet), words are cut by the pre-tokenizer of the file, and the tokenizers
library merges within each word.
"""

from __future__ import annotations

from functools import cache
from itertools import repeat
from typing import TYPE_CHECKING

from frink_numba.errors import GgufError
from frink_numba.host.pre_tokenizers import splitting
from frink_numba.host.vocabulary import GROUP, TokenType, Vocabulary
from frink_numba.log import warn_once

if TYPE_CHECKING:
    from tokenizers.models import BPE


@cache
def byte_alphabet() -> tuple[str, ...]:
    """The letter that spells each byte: itself where Latin-1 prints it, else the next letter from U+0100 on.

    Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), the released encoder.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in printable else next(others)) for byte in range(256))


@cache
def _byte_of_letter() -> dict[str, int]:
    return {letter: byte for byte, letter in enumerate(byte_alphabet())}


class BytePairText:
    """Ordinary text of a byte-level vocabulary; special tokens are the caller's business."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """UnsupportedModelError for an unknown pre-tokenizer, GgufError for merges that contradict the vocabulary."""
        from tokenizers import Tokenizer, normalizers

        rule = splitting(vocabulary.pre)
        spellings = vocabulary.text_spellings()
        self._engine = Tokenizer(_model(vocabulary, spellings, rule.whole_words))
        self._engine.pre_tokenizer = rule.build()
        if rule.compose:
            self._engine.normalizer = normalizers.NFC()
        self._vocabulary = vocabulary
        self._missing = bytes(byte for byte, letter in enumerate(byte_alphabet()) if letter not in spellings)
        self.add_bos = rule.add_bos
        self.add_space_prefix = False

    def encode(self, text: str) -> list[int]:
        """Ids of `text`. Bytes that the vocabulary lacks are left out, as by the models' own tokenizers, and said."""
        if self._missing:
            data = text.encode()
            if len(data.translate(None, self._missing)) != len(data):
                names = " ".join(f"{byte:02X}" for byte in sorted(set(data) & set(self._missing)))
                warn_once(f"the vocabulary has no token for bytes {names} of the text; they are left out of the ids")
        return self._engine.encode(text).ids

    def piece(self, token: int) -> bytes:
        """The bytes that a token stands for."""
        text, letters = self._vocabulary.tokens[token], _byte_of_letter()
        try:
            return bytes([letters[letter] for letter in text])
        except KeyError:  # not in the byte alphabet: the text means itself
            return text.encode()


def _model(vocabulary: Vocabulary, spellings: dict[str, int], whole_words: bool) -> BPE:
    from tokenizers.models import BPE

    if vocabulary.merges is None:
        raise GgufError(f"key {GROUP}merges is missing, which a byte-level vocabulary needs")
    merges = vocabulary.merges
    blanks = list(map(str.count, merges, repeat(" ")))
    if blanks.count(1) != len(merges):
        i = next(i for i, count in enumerate(blanks) if count != 1)
        raise GgufError(f"key {GROUP}merges: item {i}, {merges[i][:80]!r}, is not two tokens and a blank")
    parts = " ".join(merges).split(" ") if merges else []
    pairs = list(zip(parts[::2], parts[1::2], strict=True))
    # Checked here, since the library panics when a merge makes a token that is not there.
    known = spellings.__contains__
    if not (all(map(known, parts)) and all(map(known, map("".join, pairs)))):
        pairs = _reachable(pairs, vocabulary, spellings)
    return BPE(vocab=spellings, merges=pairs, ignore_merges=whole_words)


def _reachable(
    pairs: list[tuple[str, str]], vocabulary: Vocabulary, spellings: dict[str, int]
) -> list[tuple[str, str]]:
    """`pairs` less those that take or make a control token; GgufError when one needs a token that does not exist."""
    special = {vocabulary.tokens[i] for i in vocabulary.ids_of(TokenType.CONTROL, TokenType.UNKNOWN)}
    known = spellings.keys() | special
    for i, (left, right) in enumerate(pairs):
        for text in (left, right, left + right):
            if text not in known:
                raise GgufError(f"key {GROUP}merges: item {i} needs token {text[:80]!r}, which is not in {GROUP}tokens")
    return [pair for pair in pairs if all(text in spellings for text in (*pair, "".join(pair)))]
