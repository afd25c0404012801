"""Metadata that is damaged or asks for what is not served: each is a named error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frink_numba.errors import GgufError, UnsupportedModelError
from frink_numba.host.tokenizer import Tokenizer
from frink_numba.host.vocabulary import TokenType, Vocabulary
from tests.vocabularies import CONTROL, NORMAL, USER_DEFINED, byte_level, keys, letters, sentencepiece


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": None}, r"no tokenizer: key tokenizer\.ggml\.model is missing"),
        ({"model": 3}, r"tokenizer\.ggml\.model should hold a string, but holds int"),
        ({"pre": ["gpt-2"]}, r"tokenizer\.ggml\.pre should hold a string, but holds list"),
        ({"tokens": None}, r"tokenizer\.ggml\.tokens is missing or empty"),
        ({"tokens": []}, r"tokenizer\.ggml\.tokens is missing or empty"),
        ({"tokens": "abc"}, r"tokenizer\.ggml\.tokens should hold an array of strings, but holds str"),
        ({"tokens": np.arange(9)}, "should hold an array of strings, but holds ndarray"),
        ({"merges": 1}, r"tokenizer\.ggml\.merges should hold an array of strings"),
        ({"token_type": [1, 1]}, r"tokenizer\.ggml\.token_type has 2 items for 7 tokens"),
        ({"token_type": "normal"}, r"tokenizer\.ggml\.token_type should hold an array of numbers, but holds str"),
        ({"scores": [0.0] * 8}, r"tokenizer\.ggml\.scores has 8 items for 7 tokens"),
        ({"scores": [0.0] * 6 + [float("nan")]}, "the score of token 6 is not a number"),
        ({"bos_token_id": 7}, r"tokenizer\.ggml\.bos_token_id is 7, outside the vocabulary of 7 tokens"),
        ({"eos_token_id": -1}, r"tokenizer\.ggml\.eos_token_id is -1, outside"),
        ({"eot_token_id": 2**32 - 1}, r"tokenizer\.ggml\.eot_token_id is 4294967295, outside"),
        ({"eom_token_id": 1.0}, r"tokenizer\.ggml\.eom_token_id should hold a token id, but holds float"),
        ({"unknown_token_id": True}, r"tokenizer\.ggml\.unknown_token_id should hold a token id, but holds bool"),
        ({"add_bos_token": 1}, r"tokenizer\.ggml\.add_bos_token should hold true or false, but holds int"),
        ({"add_bos_token": True}, r"add_bos_token is true, but tokenizer\.ggml\.bos_token_id is missing"),
        ({"add_eos_token": True}, r"add_eos_token is true, but tokenizer\.ggml\.eos_token_id is missing"),
        ({"tokens": [*"abcdef", "a"]}, "tokens 0 and 6 are both spelled 'a'"),
    ],
)
def test_damage_is_named(change: dict[str, Any], message: str) -> None:
    """GgufError with the key and what it holds."""
    metadata = letters() | {f"tokenizer.ggml.{name}": value for name, value in change.items()}
    for name, value in change.items():
        if value is None:
            del metadata[f"tokenizer.ggml.{name}"]
    with pytest.raises(GgufError, match=message):
        Tokenizer.from_metadata(metadata)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tokenizer.ggml.precompiled_charsmap", np.arange(5, dtype=np.uint8)),
        ("tokenizer.ggml.add_sep_token", True),
        ("tokenizer.ggml.normalizer.lowercase", True),
        ("tokenizer.ggml.suppress_tokens", np.array([3])),
        ("tokenizer.ggml.not_heard_of", "x"),
    ],
)
def test_keys_that_may_change_the_ids_are_refused(key: str, value: Any) -> None:
    """A key that nothing reads is an error by name, unless it is switched off."""
    with pytest.raises(UnsupportedModelError, match=f"{key}, which is not served"):
        Tokenizer.from_metadata(letters() | {key: value})
    off = type(value)() if not isinstance(value, np.ndarray) else value[:0]
    Tokenizer.from_metadata(letters() | {key: off})


def test_harmless_keys_pass() -> None:
    """Ids of single tokens, other groups and templates say nothing about ids of a text."""
    more = {
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.fim_pre_token_id": 4,
        "tokenizer.ggml.seperator_token_id": 4,
        "tokenizer.ggml.token_type_count": 2,
        "tokenizer.chat_template": "x",
        "tokenizer.huggingface.json": "{}",
        "general.name": "x",
    }
    assert Tokenizer.from_metadata(letters() | more).encode("abc") == [0, 1, 2]


def test_missing_types() -> None:
    """The tokens that the metadata names are special, the others normal."""
    metadata = letters(special={"<s>": NORMAL, "<u>": NORMAL}, bos_token_id=7, unknown_token_id=8)
    del metadata["tokenizer.ggml.token_type"]
    vocabulary = Vocabulary.from_metadata(metadata)
    assert vocabulary.types.tolist() == [1] * 7 + [TokenType.CONTROL, TokenType.UNKNOWN]
    assert Tokenizer.from_metadata(metadata).encode("a<s>b<u>", special=True) == [0, 7, 1, 8]


def test_numbers_of_any_type() -> None:
    """Types as int32 or uint32 arrays, scores as float32 or int32."""
    metadata = sentencepiece()
    expected = Tokenizer.from_metadata(metadata).encode("hello world")
    types, scores = (np.array(metadata[f"tokenizer.ggml.{name}"]) for name in ("token_type", "scores"))
    other = keys(token_type=types.astype(np.uint32), scores=scores.astype(np.int32))
    assert Tokenizer.from_metadata(metadata | other).encode("hello world") == expected


def test_equal_texts_of_different_kinds() -> None:
    """A control token may look like an ordinary one; two special ones may not look alike."""
    tokenizer = Tokenizer.from_metadata(letters(special={}))
    assert tokenizer.encode("a") == [0]
    metadata = letters(special={"x": CONTROL})
    metadata["tokenizer.ggml.tokens"][-1] = "a"
    tokenizer = Tokenizer.from_metadata(metadata)
    assert (tokenizer.encode("a"), tokenizer.encode("a", special=True)) == ([0], [7])
    metadata = letters(special={"x": CONTROL, "y": USER_DEFINED})
    metadata["tokenizer.ggml.tokens"][-1] = "x"
    with pytest.raises(GgufError, match="tokens 7 and 8 are both spelled 'x'"):
        Tokenizer.from_metadata(metadata)


def test_empty_texts() -> None:
    """Tokens without text, several of them too, are never found and decode to nothing."""
    metadata = letters(special={"x": CONTROL, "y": NORMAL})
    metadata["tokenizer.ggml.tokens"][-2:] = ["", ""]
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.encode("abc", special=True) == [0, 1, 2]
    assert tokenizer.decode([7, 0, 8]) == "a"


_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 800),
    st.floats(allow_nan=True),
    st.text(max_size=4),
    st.lists(st.text(max_size=3), max_size=8),
    st.lists(st.integers(-2, 9), max_size=12).map(np.array),
    st.lists(st.floats(), min_size=7, max_size=7).map(np.array),
    st.lists(st.sampled_from(["a b", "ab c", "a", "x y", "a  b", "b a"]), max_size=4),
)
_NAMES = (
    *("model", "pre", "tokens", "token_type", "scores", "merges", "bos_token_id", "eos_token_id", "eot_token_id"),
    *("unknown_token_id", "add_bos_token", "add_eos_token", "add_space_prefix", "remove_extra_whitespaces", "other"),
)


@settings(max_examples=400, deadline=None)
@given(
    base=st.sampled_from([letters(("a b",)), sentencepiece(), byte_level("llama-bpe")]),
    changes=st.dictionaries(st.sampled_from(_NAMES), _VALUES, min_size=1, max_size=3),
)
def test_any_metadata_loads_or_is_refused(base: dict[str, Any], changes: dict[str, Any]) -> None:
    """Nothing but a GgufError or an UnsupportedModelError comes out; what loads can encode ids that it can decode."""
    metadata = base | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    try:
        tokenizer = Tokenizer.from_metadata(metadata)
        ids = tokenizer.encode("a b<s>", special=True)
    except (GgufError, UnsupportedModelError):
        return
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    tokenizer.decode(ids)
