"""A stream of bytes in pieces of any size gives the text of all of them, never half a character."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from frink_numba.host.text_stream import TextStream
from frink_numba.host.tokenizer import Tokenizer
from tests.vocabularies import CONTROL, byte_level, sentencepiece

TOKENIZERS = [
    Tokenizer.from_metadata(byte_level(special={"<|begin|>": CONTROL})),
    Tokenizer.from_metadata(sentencepiece()),
]


def stream_of(pieces: list[bytes]) -> TextStream:
    return TextStream(lambda i: pieces[i])


@settings(max_examples=300, deadline=None)
@given(pieces=st.lists(st.binary(max_size=5)))
def test_joined_pushes_are_the_decoded_bytes(pieces: list[bytes]) -> None:
    """For any bytes, valid or not, cut anywhere."""
    stream = stream_of(pieces)
    text = "".join([stream.push(i) for i in range(len(pieces))]) + stream.flush()
    assert text == b"".join(pieces).decode("utf-8", "replace")


@settings(max_examples=300, deadline=None)
@given(which=st.sampled_from(TOKENIZERS), data=st.data(), special=st.booleans())
def test_joined_pushes_are_decode(which: Tokenizer, data: st.DataObject, special: bool) -> None:
    """For any ids of both kinds of vocabulary, control tokens among them."""
    ids = data.draw(st.lists(st.integers(0, which.vocab_size - 1), max_size=30))
    stream = which.stream(special=special)
    assert "".join(map(stream.push, ids)) + stream.flush() == which.decode(ids, special=special)


def test_an_emoji_over_several_tokens_comes_whole() -> None:
    """Nothing until its last byte, then all of it, though joined with what follows."""
    stream = stream_of([b"a\xf0", b"\x9f", b"\xa6", b"\x99b"])
    assert [stream.push(i) for i in range(4)] == ["a", "", "", "🦙b"]
    assert stream.flush() == ""


def test_a_dangling_part_is_replaced_at_the_end() -> None:
    """flush gives U+FFFD, once, and the stream can go on."""
    stream = stream_of([b"a\xf0\x9f", b"b"])
    assert stream.push(0) == "a"
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""
    assert stream.push(1) == "b"


def test_a_broken_part_is_replaced_as_soon_as_it_is_broken() -> None:
    """A following byte that cannot continue the character ends it."""
    stream = stream_of([b"\xf0\x9f", b"x", b"\xff"])
    assert [stream.push(i) for i in range(3)] == ["", "\ufffdx", "\ufffd"]
