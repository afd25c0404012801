"""Byte-level BPE against transformers' classes, and what a vocabulary may lack."""

from __future__ import annotations

import logging
import unicodedata
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frink_numba import log
from frink_numba.errors import GgufError, UnsupportedModelError
from frink_numba.host.tokenizer import Tokenizer
from frink_numba.host.tokenizer_bpe import byte_alphabet
from tests.golden.tokenizer_cases import load
from tests.vocabularies import CONTROL, byte_level, keys, letters

CASES: list[dict[str, Any]] = load("bpe")["cases"]
RULES = ["smollm", "gpt-2", "llama-bpe", "qwen2", "default", "olmo", "tekken", "gpt-4o"]
COMPOSED = {"qwen2", "olmo"}


@cache
def tokenizer_of(pre: str) -> Tokenizer:
    return Tokenizer.from_metadata(byte_level(pre))


@pytest.mark.parametrize("pre", RULES)
def test_ids_equal_transformers(pre: str) -> None:
    """The vocabulary's merges cross words, so a wrong cut changes the ids."""
    assert len(CASES) > 150
    assert [case["text"] for case in CASES if tokenizer_of(pre).encode(case["text"]) != case[pre]] == []


def test_every_rule_gives_other_ids() -> None:
    """The golden tells them apart: no two agree on all texts."""
    columns = [str([case[pre] for case in CASES]) for pre in RULES]
    assert len(set(columns)) == len(RULES)


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["3", "3", "3", "3", "+", "7", "7", "7", "\n\n", " ", " ", "x"]),
        ("gpt-2", ["33", "33", "+", "77", "7", "\n\n", " ", " ", "x"]),
        ("llama-bpe", ["33", "3", "3", "+", "77", "7", "\n\n", " ", " ", "x"]),
        ("default", ["33", "3", "3", "+", "77", "7", "\n\n", " ", " ", "x"]),
        ("qwen2", ["3", "3", "3", "3", "+", "7", "7", "7", "\n\n", " ", " ", "x"]),
    ],
)
def test_pinned_pieces(pre: str, pieces: list[str]) -> None:
    """Fault 30's text under each rule."""
    tokenizer = tokenizer_of(pre)
    assert [tokenizer.decode([i]) for i in tokenizer.encode("3333+777\n\n  x")] == pieces


@pytest.mark.parametrize("pre", RULES)
@settings(max_examples=150, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_back(pre: str, text: str) -> None:
    """Byte for byte; under qwen2 and olmo in composed form (NFC), as those families' own tokenizers have it."""
    tokenizer = tokenizer_of(pre)
    wanted = unicodedata.normalize("NFC", text) if pre in COMPOSED else text
    # The library's Unicode tables may be newer or older than Python's.
    if pre in COMPOSED and any(unicodedata.category(letter) == "Cn" for letter in text):
        return
    assert tokenizer.decode_bytes(tokenizer.encode(text)) == wanted.encode()


def test_qwen2_composes() -> None:
    """A letter and its accent become one character, before words are cut; the other rules keep both."""
    tokenizer = tokenizer_of("qwen2")
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")
    assert tokenizer_of("gpt-2").encode("e\u0301") != tokenizer_of("gpt-2").encode("\u00e9")


def test_alphabet() -> None:
    """All bytes, printable Latin-1 as itself, the blank as U+0120, no letter twice."""
    alphabet = byte_alphabet()
    assert len(set(alphabet)) == 256
    assert (alphabet[ord("A")], alphabet[0x20], alphabet[0x0A], alphabet[0]) == ("A", "\u0120", "\u010a", "\u0100")
    assert (alphabet[0x7F], alphabet[0xA0], alphabet[0xAD], alphabet[0xFF]) == ("\u0121", "\u0142", "\u0143", "\u00ff")


def test_words_that_are_tokens_stay_whole_under_llama3() -> None:
    """Without a merge that makes it: "cab" is a token only for Llama 3's rule."""
    metadata = letters(special={"cab": 1, "\u0120ab": 1, "ab": 1})
    assert Tokenizer.from_metadata(metadata).encode("cab ab") == [2, 0, 1, 6, 0, 1]
    assert Tokenizer.from_metadata(metadata | keys(pre="llama-bpe")).encode("cab ab") == [7, 8]


def test_no_whole_word_is_a_control_token_under_llama3() -> None:
    """A text that spells one in a single word is cut up."""
    tokenizer = Tokenizer.from_metadata(letters(special={"cab": CONTROL}) | keys(pre="llama-bpe"))
    assert tokenizer.encode("cab") == [2, 0, 1]
    assert tokenizer.encode("cab", special=True) == [7]


def test_first_merge_wins() -> None:
    """Merges apply by their order, not by length or place."""
    assert Tokenizer.from_metadata(letters(("b c", "a b"))).encode("abc") == [0, 7]
    assert Tokenizer.from_metadata(letters(("a b", "b c"))).encode("abc") == [7, 2]


def test_bytes_that_the_vocabulary_lacks(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are left out of the ids, as by transformers, and said once (R23)."""
    monkeypatch.setattr(log, "_said", set())
    tokenizer = Tokenizer.from_metadata(letters())
    with caplog.at_level(logging.WARNING, "frink_numba"):
        assert tokenizer.encode("abc") == [0, 1, 2]
        assert caplog.messages == []
        assert tokenizer.encode("axbéc") == [0, 1, 2]
        assert tokenizer.encode("axbéc") == [0, 1, 2]
    assert len(caplog.messages) == 1
    assert "no token for bytes 78 A9 C3" in caplog.messages[0]


def test_tokens_outside_the_alphabet_mean_themselves() -> None:
    """A normal token of letters that spell no bytes decodes to its own text."""
    tokenizer = Tokenizer.from_metadata(letters(special={"漢字": 1}))
    assert tokenizer.decode([7, 0]) == "漢字a"


@pytest.mark.parametrize(
    ("merges", "message"),
    [
        (["a b", "x y"], "item 1 needs token 'x', which is not in tokenizer.ggml.tokens"),
        (["a b", "b a"], "item 1 needs token 'ba'"),
        (["ab"], "item 0, 'ab', is not two tokens and a blank"),
        (["a b c"], "item 0, 'a b c', is not"),
        ([""], "item 0, '', is not"),
    ],
)
def test_merges_that_contradict_the_vocabulary(merges: list[str], message: str) -> None:
    """A damaged file is a GgufError that names the item; the library would panic on some."""
    with pytest.raises(GgufError, match=message):
        Tokenizer.from_metadata(letters(("a b",)) | keys(merges=merges))


def test_merges_are_needed() -> None:
    """A file without the key is damaged; with an empty list, every byte is a token."""
    metadata = letters()
    assert Tokenizer.from_metadata(metadata).encode("ab") == [0, 1]
    del metadata["tokenizer.ggml.merges"]
    with pytest.raises(GgufError, match="merges is missing"):
        Tokenizer.from_metadata(metadata)


@pytest.mark.parametrize("pre", [None, "unheard-of"])
def test_pre_tokenizer_must_be_known(pre: str | None) -> None:
    """Fault 30: neither a missing nor an unknown one is guessed."""
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.ggml\.pre"):
        Tokenizer.from_metadata(byte_level(pre))


@pytest.mark.oracle
def test_golden_is_what_transformers_says() -> None:
    """Recomputes the golden from the same texts."""
    from tests.golden.make_tokenizer_golden import byte_level as made

    assert made() == load("bpe")
