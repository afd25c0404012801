"""Text to token ids and back, as the model file's own metadata says.

Rules for special tokens, BOS and the blank that SentencePiece puts before a text are llama.cpp's, which defines them;
everything between special tokens is the work of tokenizer_bpe and tokenizer_sentencepiece.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

from frink_numba.errors import TokenizerError, UnsupportedModelError
from frink_numba.host.text_stream import TextStream
from frink_numba.host.tokenizer_bpe import BytePairText
from frink_numba.host.tokenizer_sentencepiece import SentencePieceText
from frink_numba.host.vocabulary import TokenType, Vocabulary

# Control tokens that end an answer. Files often name only one of those that a model uses.
_STOP_NAMES = frozenset(
    {
        *("<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>"),
        *("<end_of_turn>", "<|end_of_turn|>", "<EOT>", "<end_of_utterance>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
    }
)
# Phi-3's published tokenizer drops the blanks behind its special tokens, but for these; no key of a file says so.
_KEEP_BLANKS = frozenset({"<unk>", "<s>", "<|endoftext|>"})
_BLANKS = " \t\n\x0b\x0c\r\x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
_LITERAL = frozenset({TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED})


class OrdinaryText(Protocol):
    """Text without special tokens, as one kind of vocabulary writes it."""

    add_bos: bool  # the rule where the file states none
    add_space_prefix: bool  # a text, and what follows a special token, begins with a blank that is not its own

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, which begins a text or follows a special token."""

    def piece(self, token: int) -> bytes:
        """The bytes of a token that is not special."""


_KINDS: dict[str, Callable[[Vocabulary], OrdinaryText]] = {"gpt2": BytePairText, "llama": SentencePieceText}


class Tokenizer:
    """Immutable, and safe to share between threads.

    Control tokens (<s>, <|im_end|>, ...) are recognized in a text only with `special=True`: text of a user that spells
    one is ordinary text. User-defined tokens are recognized always. `bos_id`, `eos_id`: int or None. `stop_ids`: the
    tokens that end an answer (EOS, EOT, EOM, by metadata or by name). `add_bos`, `add_eos`: the file's rules.
    """

    def __init__(self, vocabulary: Vocabulary, *, drop_blanks: bool = False) -> None:
        """UnsupportedModelError for a kind of tokenizer that is not served, GgufError for facts that contradict.

        `drop_blanks`: special tokens take the blanks and line ends behind them with them, as Phi-3's do.
        """
        if vocabulary.model not in _KINDS:
            raise UnsupportedModelError(
                f"tokenizer {vocabulary.model[:80]!r} (tokenizer.ggml.model) is not served. Served: {', '.join(_KINDS)}"
            )
        self._vocabulary = vocabulary
        self._text: OrdinaryText = _KINDS[vocabulary.model](vocabulary)
        self._special_ids = vocabulary.spellings(vocabulary.ids_of(*_LITERAL))
        self._drops_blanks = frozenset(self._special_ids) - _KEEP_BLANKS if drop_blanks else frozenset()
        self._pieces: dict[int, bytes] = {}
        self.bos_id = vocabulary.bos_id
        self.eos_id = vocabulary.eos_id
        rule = self._text.add_bos if vocabulary.add_bos is None else vocabulary.add_bos
        self.add_bos = rule and self.bos_id is not None
        self.add_eos = vocabulary.add_eos
        self.stop_ids = _stop_ids(vocabulary)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """The tokenizer of a GGUF file's metadata (`GgufFile.metadata`)."""
        vocabulary = Vocabulary.from_metadata(metadata)
        phi3 = metadata.get("general.architecture") == "phi3" and vocabulary.model == "llama"
        return cls(vocabulary, drop_blanks=phi3)

    @property
    def vocab_size(self) -> int:
        return len(self._vocabulary.tokens)

    def token(self, token: int) -> str:
        """The token's text as the file spells it ("\u0120the"); TokenizerError outside the vocabulary."""
        return self._vocabulary.tokens[self._checked(token)]

    def encode(
        self, text: str, *, add_bos: bool | None = None, add_eos: bool | None = None, special: bool = False
    ) -> list[int]:
        """Ids of `text`; TokenizerError when it is no str or holds lone surrogates.

        `special` recognizes control tokens in the text. `add_bos`, `add_eos`: True or False, or None for the file's
        rule, which never doubles a BOS or EOS that the text already spells.
        """
        _check_text(text)
        ids: list[int] = []
        matcher = self._all_special if special else self._user_defined
        # Splitting at one group gives text, token, text, ..., text.
        parts = [text] if matcher is None else matcher.split(text)
        for i, part in enumerate(parts):
            if i % 2:
                ids.append(self._special_ids[part])
                continue
            text = part.lstrip(_BLANKS) if i and parts[i - 1] in self._drops_blanks else part
            if text:
                ids += self._text.encode(text)
        before = _added("BOS", self.bos_id, add_bos, self.add_bos, ids[:1])
        return before + ids + _added("EOS", self.eos_id, add_eos, self.add_eos, ids[-1:])

    def decode(self, ids: Iterable[int], *, special: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD. `special=False` leaves control tokens out."""
        return self.decode_bytes(ids, special=special).decode("utf-8", "replace")

    def decode_bytes(self, ids: Iterable[int], *, special: bool = True) -> bytes:
        """The exact bytes of `ids`: of ids that `encode` made, those of the text. TokenizerError for a bad id."""
        return b"".join(map(_Pieces(self, special, after=None).push, ids))

    def stream(self, *, special: bool = True, after: int | None = None) -> TextStream:
        """Text of ids that come one by one. `after` is the id before the first: None begins a text.

        It matters to SentencePiece, which drops the blank at the beginning of a text: a continuation of "Once upon"
        by " a" needs its blank.
        """
        return TextStream(_Pieces(self, special, after).push)

    def is_control(self, token: int) -> bool:
        """Whether `token` steers the model, and is no part of the text; TokenizerError outside the vocabulary."""
        return self._types[self._checked(token)] in (TokenType.CONTROL, TokenType.UNKNOWN)

    def _checked(self, token: int) -> int:
        try:
            i = operator.index(token)
        except TypeError:
            raise TokenizerError(f"a token id is an integer, got {type(token).__name__}") from None
        if not 0 <= i < self.vocab_size:
            raise TokenizerError(f"token id {i} is outside the vocabulary of {self.vocab_size} tokens")
        return i

    def _piece(self, token: int) -> bytes:
        """The bytes of a token, without regard to what is before it."""
        piece = self._pieces.get(token)
        if piece is None:
            if token in self._vocabulary.raw:
                piece = self._vocabulary.raw[token]
            elif self._types[token] in _LITERAL:
                piece = self._vocabulary.tokens[token].encode()
            else:
                piece = self._text.piece(token)
            self._pieces[token] = piece
        return piece

    @cached_property
    def _types(self) -> list[int]:
        return self._vocabulary.types.tolist()

    @cached_property
    def _all_special(self) -> re.Pattern[str] | None:
        return _matcher(self._special_ids)

    @cached_property
    def _user_defined(self) -> re.Pattern[str] | None:
        return _matcher(self._vocabulary.spellings(self._vocabulary.ids_of(TokenType.USER_DEFINED)))


class _Pieces:
    """The bytes of ids in a row: drops control tokens where asked, and SentencePiece's blank where a text begins.

    The blank is the inverse of what `encode` adds: one at the start, and one after each special token.
    """

    def __init__(self, tokenizer: Tokenizer, special: bool, after: int | None) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._begins = True
        if after is not None:
            self.push(after)

    def push(self, token: int) -> bytes:
        tokenizer = self._tokenizer
        token = tokenizer._checked(token)
        piece = tokenizer._piece(token)
        if tokenizer._types[token] in _LITERAL:
            self._begins = True
            return piece if self._special or not tokenizer.is_control(token) else b""
        begins, self._begins = self._begins, False
        return piece.removeprefix(b" ") if begins and tokenizer._text.add_space_prefix else piece


def _check_text(text: str) -> None:
    if not isinstance(text, str):
        raise TokenizerError(f"only str can be encoded, got {type(text).__name__}; decode bytes first")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"the text has a lone surrogate, U+{ord(text[error.start]):04X}, at character {error.start}; that is no "
            'Unicode text: read or decode it with errors="replace"'
        ) from None


def _added(name: str, token: int | None, asked: bool | None, rule: bool, there: list[int]) -> list[int]:
    """[token] when it is asked for, or when the rule wants it and the text does not have it `there`; else []."""
    if asked and token is None:
        raise TokenizerError(f"this vocabulary has no {name} token to add")
    wanted = rule and there != [token] if asked is None else asked
    return [token] if wanted and token is not None else []


def _matcher(special: Iterable[str]) -> re.Pattern[str] | None:
    """Finds the tokens in a text, of several at one place the longest; None when there are none."""
    texts: Sequence[str] = sorted(special, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, texts))})") if texts else None


def _stop_ids(vocabulary: Vocabulary) -> frozenset[int]:
    stated = {vocabulary.eos_id, vocabulary.eot_id, vocabulary.eom_id}
    named = {i for i in vocabulary.ids_of(TokenType.CONTROL) if vocabulary.tokens[i] in _STOP_NAMES}
    return frozenset(i for i in stated | named if i is not None)
