"""How byte-level BPE vocabularies cut text into words before merging: one table row per tokenizer.ggml.pre.

A wrong cut gives plausible but wrong ids, so a name that is not in the table is refused, and so is a file without one.
The patterns are those of the models' published tokenizer.json files; "default" is what llama.cpp, which defines the
key, does for that name. `tests/host/test_pre_tokenizers.py` holds each against an independent reading.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from frink_numba.errors import UnsupportedModelError

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS_AND_SPACES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_SIGNS_AND_SPACES}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_SIGNS_AND_SPACES}"
_CAPITALS, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE_LETTERS = r"[^\r\n\p{L}\p{N}]?"
_SIGNS_AND_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"{_BEFORE_LETTERS}{_CAPITALS}*{_SMALL}+|{_BEFORE_LETTERS}{_CAPITALS}+{_SMALL}*|\p{{N}}|{_SIGNS_AND_SLASHES}"
_GPT4O = (
    rf"{_BEFORE_LETTERS}{_CAPITALS}*{_SMALL}+{_CONTRACTIONS}?|{_BEFORE_LETTERS}{_CAPITALS}+{_SMALL}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{_SIGNS_AND_SLASHES}"
)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")


def _byte_level() -> PreTokenizer:
    """GPT-2's pattern, built into the tokenizers library, and its spelling of bytes as letters."""
    from tokenizers import pre_tokenizers

    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_then_byte_level() -> PreTokenizer:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()])


def _patterns(*patterns: str) -> Callable[[], PreTokenizer]:
    """Each pattern cuts the pieces that the one before it left: its matches and what lies between them."""

    def build() -> PreTokenizer:
        from tokenizers import Regex, pre_tokenizers

        cuts: list[PreTokenizer] = [pre_tokenizers.Split(Regex(p), behavior="isolated") for p in patterns]
        return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    return build


@dataclass(frozen=True, slots=True)
class Splitting:
    """How one family of vocabularies treats text before merging, and the BOS rule of a file that states none."""

    build: Callable[[], PreTokenizer]
    compose: bool = False  # text is brought to Unicode's composed form (NFC) first
    whole_words: bool = False  # a word that is a token stays whole, whatever the merges say
    add_bos: bool = False


_LLAMA3_SPLITTING = Splitting(_patterns(_LLAMA3), whole_words=True, add_bos=True)
_DIGITS_SPLITTING = Splitting(_digits_then_byte_level)

SPLITTINGS: dict[str, Splitting] = {
    "default": Splitting(_patterns(*_DEFAULT)),
    "gpt-2": Splitting(_byte_level),
    "llama-bpe": _LLAMA3_SPLITTING,
    "llama-v3": _LLAMA3_SPLITTING,
    "llama3": _LLAMA3_SPLITTING,
    "smaug-bpe": Splitting(_patterns(_LLAMA3), whole_words=True),  # SmolLM3: Llama 3's, without BOS
    "dbrx": Splitting(_patterns(_LLAMA3)),  # OLMo 2, Phi-4
    "gpt-4o": Splitting(_patterns(_GPT4O)),  # Phi-4 mini
    "olmo": Splitting(_byte_level, compose=True),  # OLMoE
    "qwen2": Splitting(_patterns(_QWEN2), compose=True),
    "refact": _DIGITS_SPLITTING,  # Granite 3
    "smollm": _DIGITS_SPLITTING,
    "starcoder": _DIGITS_SPLITTING,
    "tekken": Splitting(_patterns(_TEKKEN), whole_words=True, add_bos=True),  # Mistral Nemo
}


def splitting(pre: str | None) -> Splitting:
    """The row of tokenizer.ggml.pre; UnsupportedModelError for a name that is not served, and for None."""
    served = ", ".join(SPLITTINGS)
    if pre is None:
        raise UnsupportedModelError(
            "the file does not say how its vocabulary cuts text into words (key tokenizer.ggml.pre is missing), and a "
            f"guess would give wrong ids; convert the model again with a current converter. Served: {served}"
        )
    if pre not in SPLITTINGS:
        raise UnsupportedModelError(f"pre-tokenizer {pre[:80]!r} (tokenizer.ggml.pre) is not served. Served: {served}")
    return SPLITTINGS[pre]
