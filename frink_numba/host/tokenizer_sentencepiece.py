"""SentencePiece BPE (tokenizer.ggml.model "llama"): ordinary text to ids, and ids to bytes.

Blanks are spelled U+2581; a text begins with one that is not its own. Neighbours merge into the token of the highest
score, again and again; characters that are no token fall back to the tokens of their bytes. The tokenizers library
does the merging: each way to cut a token into two others is a merge, and the tokens' scores are their order. Source:
Kudo and Richardson, "SentencePiece" (2018), and that library, against which the tests hold the ids.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from frink_numba.errors import GgufError, TokenizerError
from frink_numba.host.vocabulary import GROUP, TokenType, Vocabulary

if TYPE_CHECKING:
    from tokenizers.normalizers import Normalizer

BLANK = "\u2581"
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_NO_SUCH_TOKEN = "\0unknown"


class SentencePieceText:
    """Ordinary text of a SentencePiece vocabulary; special tokens are the caller's business."""

    add_bos = True

    def __init__(self, vocabulary: Vocabulary) -> None:
        """GgufError when the scores are missing or a byte token is not spelled like one."""
        from tokenizers import Tokenizer, models

        for i in vocabulary.ids_of(TokenType.BYTE):
            if not _BYTE.fullmatch(vocabulary.tokens[i]):
                raise GgufError(
                    f"key {GROUP}tokens: token {i} is a byte, but is spelled {vocabulary.tokens[i][:80]!r}, not <0x41>"
                )
        spellings = vocabulary.text_spellings()
        merges = _merges(vocabulary, spellings)
        unknown = _NO_SUCH_TOKEN
        if vocabulary.unknown_id is not None:
            unknown = vocabulary.tokens[vocabulary.unknown_id]
            spellings[unknown] = vocabulary.unknown_id
        self._engine = Tokenizer(
            models.BPE(
                vocab=spellings,
                merges=merges,
                unk_token=unknown,
                fuse_unk=True,
                byte_fallback=True,
            )
        )
        self.add_space_prefix = vocabulary.add_space_prefix is not False
        self._engine.normalizer = _normalizer(self.add_space_prefix, vocabulary.remove_extra_whitespaces)
        self._vocabulary = vocabulary

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, which begins a text or follows a special token; TokenizerError when a character has none."""
        try:
            return self._engine.encode(text).ids
        except Exception as error:  # the library raises nothing more precise
            raise TokenizerError(
                "the text has a character that the vocabulary cannot spell: it is no token, its bytes are no tokens, "
                f"and there is no token for the unknown ({error})"
            ) from None

    def piece(self, token: int) -> bytes:
        """The bytes that a token stands for."""
        text = self._vocabulary.tokens[token]
        if self._vocabulary.types[token] == TokenType.BYTE:
            return bytes.fromhex(text[3:5])
        return text.replace(BLANK, " ").encode()


def _normalizer(space_prefix: bool, squeeze: bool) -> Normalizer:
    from tokenizers import Regex, normalizers

    steps: list[Normalizer] = []
    if squeeze:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if space_prefix:
        steps.append(normalizers.Prepend(BLANK))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", BLANK)])


def _merges(vocabulary: Vocabulary, spellings: dict[str, int]) -> list[tuple[str, str]]:
    """Every cut of a token into two others, best score first; of equal scores the longer left part comes first."""
    if vocabulary.scores is None:
        raise GgufError(f"key {GROUP}scores is missing, which a SentencePiece vocabulary needs")
    parts = spellings.keys() - {vocabulary.tokens[i] for i in vocabulary.ids_of(TokenType.BYTE)}
    # Only lengths that occur are tried: a token of a million letters must not cost a million cuts.
    lengths = sorted(set(map(len, parts)), reverse=True)
    ranked = [vocabulary.tokens[i] for i in np.argsort(-vocabulary.scores, kind="stable").tolist()]
    return [
        (text[:cut], text[cut:])
        for text in ranked
        if text in parts
        for cut in lengths
        if cut < len(text) and text[:cut] in parts and text[cut:] in parts
    ]
