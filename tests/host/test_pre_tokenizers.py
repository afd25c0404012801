"""Words against an independent reading of the published patterns (fault 30), and names that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from frink_numba.errors import UnsupportedModelError
from frink_numba.host.pre_tokenizers import SPLITTINGS, splitting
from frink_numba.host.tokenizer_bpe import byte_alphabet
from tests.golden.tokenizer_cases import load

CASES: list[dict[str, Any]] = load("splits")["cases"]
BYTE_OF = {letter: byte for byte, letter in enumerate(byte_alphabet())}


def words(pre: str, text: str) -> list[str]:
    cut = splitting(pre).build().pre_tokenize_str(text)
    return [bytes(BYTE_OF[letter] for letter in word).decode() for word, _ in cut]


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe", "qwen2", "default", "tekken", "gpt-4o"])
def test_words_equal_the_published_patterns(pre: str) -> None:
    """The golden cut the texts with the `regex` package."""
    assert len(CASES) == 200
    assert [case["text"] for case in CASES if words(pre, case["text"]) != case[pre]] == []


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", ["3", "3", "3", "3", "+", "7", "7", "7", "\n\n ", " x"]),
        ("gpt-2", ["3333", "+", "777", "\n\n ", " x"]),
        ("llama-bpe", ["333", "3", "+", "777", "\n\n", " ", " x"]),
        ("qwen2", ["3", "3", "3", "3", "+", "7", "7", "7", "\n\n", " ", " x"]),
        ("default", ["333", "3", "+", "777", "\n\n ", " x"]),
        ("tekken", ["3", "3", "3", "3", "+", "7", "7", "7", "\n\n", " ", " x"]),
        ("gpt-4o", ["333", "3", "+", "777", "\n\n", " ", " x"]),
    ],
)
def test_pinned_words(pre: str, expected: list[str]) -> None:
    """Fault 30's text: each rule cuts it in its own way."""
    assert words(pre, "3333+777\n\n  x") == expected


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("smollm", "x  7", ["x", "  ", "7"]),
        ("gpt-2", "x  7", ["x", " ", " 7"]),
        ("gpt-2", "I'LL we'll", ["I", "'", "LL", " we", "'ll"]),
        ("llama-bpe", "I'LL we'll", ["I", "'LL", " we", "'ll"]),
        ("qwen2", "(foo)\n\nbar", ["(foo", ")\n\n", "bar"]),
        ("default", "(foo)$ x", ["(", "foo", ")$", " x"]),
        ("tekken", "fooBar I'LL we'll", ["foo", "Bar", " I", "'LL", " we", "'ll"]),
        ("tekken", "HTTPServer;\n/x", ["HTTPServer", ";\n/", "x"]),
        ("llama-bpe", "HTTPServer;\n/x", ["HTTPServer", ";\n", "/x"]),
        ("gpt-4o", "fooBar I'LL we'll", ["foo", "Bar", " I'LL", " we'll"]),
    ],
)
def test_what_tells_them_apart(pre: str, text: str, expected: list[str]) -> None:
    """Blanks before digits, contractions in capitals, signs with line ends, signs alone."""
    assert words(pre, text) == expected


def test_names_of_one_rule() -> None:
    """Files spell Llama 3's rule in three ways."""
    assert splitting("llama3") is splitting("llama-v3") is splitting("llama-bpe")
    assert splitting("refact") is splitting("starcoder") is splitting("smollm")


@pytest.mark.parametrize(("pre", "same"), [("dbrx", "llama-bpe"), ("smaug-bpe", "llama-bpe"), ("olmo", "gpt-2")])
def test_rules_that_differ_in_more_than_words(pre: str, same: str) -> None:
    """They cut alike, but add no BOS, or compose first."""
    assert [case["text"] for case in CASES if words(pre, case["text"]) != words(same, case["text"])] == []
    one, other = splitting(pre), splitting(same)
    assert (one.add_bos, one.compose) != (other.add_bos, other.compose)
    assert not one.add_bos


@pytest.mark.parametrize("pre", ["deepseek-llm", "exaone4", "command-r", "QWEN2", "", "falcon"])
def test_unknown_names_are_refused(pre: str) -> None:
    """With the name and the list of those that run."""
    with pytest.raises(UnsupportedModelError, match=f"'{pre}'.*Served: {', '.join(SPLITTINGS)}"):
        splitting(pre)


def test_a_missing_name_is_refused() -> None:
    """Fault 30: no guess, since a wrong cut looks plausible; the error names the key."""
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.ggml\.pre is missing.*Served: default, gpt-2"):
        splitting(None)


@pytest.mark.oracle
def test_golden_is_what_the_regex_package_says() -> None:
    """Recomputes the golden."""
    from tests.golden.make_tokenizer_golden import splits

    assert splits()["cases"] == CASES
