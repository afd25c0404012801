"""The tokenizer's facts in a file's metadata, checked: token texts and types, scores, merges, special ids, rules.

Keys are those of the GGUF specification (section "Tokenizer"). A key of this group that nothing here knows is refused,
since it may change the ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from frink_numba.errors import GgufError, UnsupportedModelError

GROUP = "tokenizer.ggml."
REPLACEMENT = "\ufffd"


class TokenType(IntEnum):
    """What a token is, as stored in tokenizer.ggml.token_type."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2  # stands for text outside the vocabulary
    CONTROL = 3  # steers the model; part of a text only where special tokens are asked for
    USER_DEFINED = 4  # matched in every text before anything else
    UNUSED = 5
    BYTE = 6  # one byte, spelled <0x41>


# Keys that are read below, and keys that say nothing about how text becomes ids. Ids of single tokens (fill-in-the-
# middle, mask, padding, ...) are let pass by their ending.
_READ = {
    *("model", "pre", "tokens", "token_type", "scores", "merges", "bos_token_id", "eos_token_id", "eot_token_id"),
    *("eom_token_id", "unknown_token_id", "add_bos_token", "add_eos_token", "add_space_prefix"),
    "remove_extra_whitespaces",
}
_HARMLESS = {"token_type_count"}
_HARMLESS_ENDINGS = ("_token_id", "_token_ids")


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """The checked facts. A rule that the file does not state is None: the tokenizer's kind decides."""

    model: str  # tokenizer.ggml.model
    pre: str | None  # tokenizer.ggml.pre
    tokens: Sequence[str]  # text of each token, "" possible, in the spelling of the model's kind
    types: np.ndarray  # int32 [vocab], values of TokenType
    scores: np.ndarray | None  # float32 [vocab]
    merges: Sequence[str] | None  # "left right", best first
    raw: Mapping[int, bytes]  # exact bytes of tokens whose text is not valid UTF-8
    bos_id: int | None
    eos_id: int | None
    eot_id: int | None
    eom_id: int | None
    unknown_id: int | None
    add_bos: bool | None
    add_eos: bool
    add_space_prefix: bool | None
    remove_extra_whitespaces: bool

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Vocabulary:
        """Read and check the metadata; GgufError names the key, UnsupportedModelError what is not served."""
        keys = _Keys(metadata)
        model = keys.text("model")
        if model is None:
            raise GgufError(f"the file has no tokenizer: key {GROUP}model is missing")
        keys.refuse_unknown()
        tokens = keys.strings("tokens")
        if not tokens:
            raise GgufError(f"key {GROUP}tokens is missing or empty")
        ids = {name: keys.token_id(f"{name}_token_id", len(tokens)) for name in ("bos", "eos", "eot", "eom", "unknown")}
        raw = keys.invalid_utf8(tokens)
        types = keys.numbers("token_type", len(tokens), np.dtype(np.int32))
        if types is None:
            types = _guessed_types(len(tokens), ids)
        scores = keys.numbers("scores", len(tokens), np.dtype(np.float32))
        if scores is not None and np.isnan(scores).any():
            raise GgufError(f"key {GROUP}scores: the score of token {int(np.isnan(scores).argmax())} is not a number")
        add_bos, add_eos = keys.flag("add_bos_token"), keys.flag("add_eos_token")
        for rule, name in ((add_bos, "bos"), (add_eos, "eos")):
            if rule and ids[name] is None:
                raise GgufError(f"key {GROUP}add_{name}_token is true, but {GROUP}{name}_token_id is missing")
        return cls(
            model=model,
            pre=keys.text("pre"),
            tokens=tokens,
            types=types,
            scores=scores,
            merges=keys.strings("merges"),
            raw=raw,
            bos_id=ids["bos"],
            eos_id=ids["eos"],
            eot_id=ids["eot"],
            eom_id=ids["eom"],
            unknown_id=ids["unknown"],
            add_bos=add_bos,
            add_eos=bool(add_eos),
            add_space_prefix=keys.flag("add_space_prefix"),
            remove_extra_whitespaces=bool(keys.flag("remove_extra_whitespaces")),
        )

    def ids_of(self, *types: TokenType) -> list[int]:
        """The ids of the tokens of these types, ascending."""
        return [int(i) for i in np.flatnonzero(np.isin(self.types, types))]

    def spellings(self, ids: Iterable[int]) -> dict[str, int]:
        """Token text -> id for `ids`, less empty texts and texts that are not valid UTF-8.

        GgufError when two of the tokens have the same text: which of them a text means would be a guess.
        """
        wanted = [(text, i) for i in ids if (text := self.tokens[i]) and i not in self.raw]
        found = dict(wanted)
        if len(found) != len(wanted):
            text, i = next((text, i) for text, i in wanted if found[text] != i)
            raise GgufError(f"key {GROUP}tokens: tokens {i} and {found[text]} are both spelled {text[:80]!r}")
        return found

    def text_spellings(self) -> dict[str, int]:
        """`spellings` of all that text may become: not of control tokens, so that no text can produce one."""
        special = np.isin(self.types, (TokenType.CONTROL, TokenType.UNKNOWN))
        found = dict(zip(self.tokens, range(len(self.tokens)), strict=True))
        if len(found) != len(self.tokens) or self.raw or "" in found:
            return self.spellings(np.flatnonzero(~special).tolist())
        for i in np.flatnonzero(special).tolist():
            del found[self.tokens[i]]
        return found


def _guessed_types(count: int, ids: Mapping[str, int | None]) -> np.ndarray:
    """Types of a file that states none: the tokens that the metadata names are special, the others normal."""
    types = np.full(count, TokenType.NORMAL, np.int32)
    for name, i in ids.items():
        if i is not None:
            types[i] = TokenType.UNKNOWN if name == "unknown" else TokenType.CONTROL
    return types


class _Keys:
    """Typed access to the tokenizer's keys; each method gives None for a key that is not there."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata

    def refuse_unknown(self) -> None:
        for key in self._metadata:
            name = key.removeprefix(GROUP)
            if name == key or name in _READ or name in _HARMLESS or name.endswith(_HARMLESS_ENDINGS):
                continue
            if np.any(self._metadata[key]):
                raise UnsupportedModelError(
                    f"the tokenizer has {key}, which is not served: the token ids might differ from the model's own"
                )

    def text(self, name: str) -> str | None:
        value = self._metadata.get(GROUP + name)
        if value is not None and not isinstance(value, str):
            raise self._wrong(name, "a string", value)
        return value

    def flag(self, name: str) -> bool | None:
        value = self._metadata.get(GROUP + name)
        if value is not None and not isinstance(value, bool):
            raise self._wrong(name, "true or false", value)
        return value

    def token_id(self, name: str, count: int) -> int | None:
        value = self._metadata.get(GROUP + name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(name, "a token id", value)
        if not 0 <= value < count:
            raise GgufError(f"key {GROUP}{name} is {value}, outside the vocabulary of {count} tokens")
        return value

    def strings(self, name: str) -> list[str] | None:
        value = self._metadata.get(GROUP + name)
        if value is None:
            return None
        if not isinstance(value, list) or not set(map(type, value)) <= {str}:
            raise self._wrong(name, "an array of strings", value)
        return value

    def numbers(self, name: str, count: int, dtype: np.dtype) -> np.ndarray | None:
        value = self._metadata.get(GROUP + name)
        if value is None:
            return None
        array = np.asarray(value)
        if array.ndim != 1 or array.dtype.kind not in "iuf":
            raise self._wrong(name, "an array of numbers", value)
        if len(array) != count:
            raise GgufError(f"key {GROUP}{name} has {len(array)} items for {count} tokens")
        return array.astype(dtype)

    def invalid_utf8(self, tokens: Sequence[str]) -> dict[int, bytes]:
        """Exact bytes of the tokens that are not valid UTF-8; metadata without `raw` has none."""
        raw = getattr(self._metadata, "raw", None)
        if raw is None or REPLACEMENT not in "".join(tokens):
            return {}
        suspects = [i for i, text in enumerate(tokens) if REPLACEMENT in text]
        stored = raw(f"{GROUP}tokens")
        return {i: stored[i] for i in suspects if stored[i] != tokens[i].encode()}

    def _wrong(self, name: str, expected: str, value: Any) -> GgufError:
        return GgufError(f"key {GROUP}{name} should hold {expected}, but holds {type(value).__name__}")
