"""SentencePiece vocabularies against the sentencepiece library, and blanks around special tokens (fault 31)."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frink_numba.errors import GgufError, TokenizerError
from frink_numba.host.tokenizer import Tokenizer
from tests.golden.tokenizer_cases import RUNS, load
from tests.vocabularies import CONTROL, NORMAL, USER_DEFINED, keys, sentencepiece, with_runs

CASES: list[dict[str, Any]] = load("sentencepiece")["cases"]


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_metadata(sentencepiece())


def pieces(ids: list[int]) -> list[str]:
    return [tokenizer().token(i) for i in ids]


@pytest.mark.parametrize(
    ("column", "metadata"),
    [
        ("ids", sentencepiece()),
        ("no_prefix", sentencepiece(add_space_prefix=False)),
        ("squeezed", sentencepiece(remove_extra_whitespaces=True)),
        ("bare", sentencepiece(pieces="bare_pieces")),
        ("runs", with_runs()),  # as Gemma's: no blank before a text, runs of blanks and line ends are tokens
    ],
)
def test_ids_equal_sentencepiece(column: str, metadata: dict[str, Any]) -> None:
    """With and without the blank before a text, blanks squeezed, and a vocabulary without bytes."""
    encode = Tokenizer.from_metadata(metadata).encode
    cases = [case for case in CASES if column in case]
    assert len(cases) > 100
    assert [case["text"] for case in cases if encode(case["text"], add_bos=False) != case[column]] == []


def test_columns_differ() -> None:
    """The golden tells the rules apart."""
    for column in ("no_prefix", "squeezed", "bare", "runs"):
        assert sum(case["ids"] != case[column] for case in CASES if column in case) > 25


def test_pinned_pieces() -> None:
    """Fault 31: one blank before the text, after BOS too; emoji are their bytes, not unknown."""
    assert pieces(tokenizer().encode("<s>[INST] hi", special=True)) == ["<s>", "▁[", "INST", "]", "▁hi"]
    assert pieces(tokenizer().encode("a\n🦙")) == ["<s>", "▁a", "<0x0A>", "<0xF0>", "<0x9F>", "<0xA6>", "<0x99>"]
    assert pieces(tokenizer().encode("3333+777\n\n  x"))[-5:] == ["7", "<0x0A>", "<0x0A>", "▁▁", "x"]


def test_text_after_a_special_token_is_encoded_as_a_text_of_its_own() -> None:
    """[INST] turns: each stretch between special tokens has the ids that sentencepiece gives it alone."""
    alone = {case["text"]: case["ids"] for case in CASES}
    first, second = "if (a) {\n        b();\n    } else if (c)\n  d();\n", " \n "
    ids = tokenizer().encode(f"<s>{first}</s><s>{second}</s>", special=True)
    assert ids == [1, *alone[first], 2, 1, *alone[second], 2]
    text = "<s>[INST] hi [/INST] yes </s><s>[INST] more [/INST]"
    assert tokenizer().decode(tokenizer().encode(text, special=True)) == text
    # As text, "<s>" is none.
    assert tokenizer().encode(text, add_bos=False) == alone[text]


def test_decoding_drops_the_blank_of_each_text() -> None:
    """At the start, and after special tokens; blanks of the text's own stay."""
    t = tokenizer()
    for text in ("hi", " hi", "  hi", "", " ", "   "):
        ids = t.encode(text)
        assert t.decode(ids) == "<s>" + text
        assert t.decode(ids, special=False) == text
        assert t.decode(t.encode(text, add_bos=False)) == text
        stream = t.stream(special=False)
        assert "".join(map(stream.push, ids)) + stream.flush() == text


def test_a_continuation_keeps_its_blank() -> None:
    """A stream that goes on after an ordinary id begins no text; after a special one it does."""
    t = tokenizer()
    once, *_, last = t.encode("a b", add_bos=False)
    assert [t.token(once), t.token(last)] == ["▁a", "▁b"]
    assert t.stream(after=once).push(last) == " b"
    assert t.stream(after=1).push(last) == "b"
    assert t.stream().push(last) == "b"
    assert t.decode([once, last]) == "a b"


def test_without_the_prefix_nothing_is_dropped() -> None:
    """add_space_prefix false: ids and text have exactly the blanks that are there."""
    t = Tokenizer.from_metadata(sentencepiece(add_space_prefix=False))
    for text in ("hi", " hi", "  hi"):
        assert t.decode(t.encode(text), special=False) == text
    assert t.stream(after=1).push(t.encode(" b", add_bos=False)[0]) == " b"


@settings(max_examples=300, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581")))
def test_any_text_comes_back(text: str) -> None:
    """Byte for byte, through bytes where no token fits. (U+2581 is a blank to these vocabularies.)"""
    assert tokenizer().decode_bytes(tokenizer().encode(text), special=False) == text.encode()


def test_user_defined_tokens() -> None:
    """Literal, blanks included; a text after one begins with the blank that is not its own, as after control tokens."""
    t = Tokenizer.from_metadata(sentencepiece({"<tool>": USER_DEFINED, "   ": USER_DEFINED}))
    tool = t.vocab_size - 2
    ids = t.encode("a<tool>b   c", add_bos=False)
    assert [t.token(i) for i in ids] == ["▁a", "<tool>", "▁b", "   ", "▁c"]
    assert t.decode(ids) == "a<tool>b   c"
    assert t.decode([tool], special=False) == "<tool>"


def test_phi3_drops_the_blanks_behind_its_special_tokens() -> None:
    """As the `rstrip` of its published tokenizer, which no key of the file states: the library's rule is the oracle."""
    from tokenizers import AddedToken

    special = {"<|user|>": CONTROL, "<|end|>": CONTROL, "<|endoftext|>": CONTROL, "<|tool|>": USER_DEFINED}
    metadata = sentencepiece(special, add_space_prefix=False)
    phi3 = Tokenizer.from_metadata({**metadata, "general.architecture": "phi3"})
    other = Tokenizer.from_metadata({**metadata, "general.architecture": "llama"})
    engine = Tokenizer.from_metadata(metadata)._text._engine
    engine.add_special_tokens([AddedToken(t, rstrip=t != "<|endoftext|>", normalized=False) for t in special])
    for text, drops in {
        "<|user|>\nhi <|end|>\n<|user|>  \u2003\u3000 \n x": True,
        "<|endoftext|>\n a<|tool|> b\n": True,
        "<|end|>": False,
        " \n<|end|>\x1c y": False,
        "<|user|> \n": True,
    }.items():
        ids = phi3.encode(text, special=True, add_bos=False)
        assert [phi3.token(i) for i in ids] == [engine.id_to_token(i) for i in engine.encode(text).ids]
        assert (ids != other.encode(text, special=True, add_bos=False)) == drops
    assert phi3.encode("<s>\nx", special=True) == other.encode("<s>\nx", special=True)
    assert phi3.encode("a<|user|>\nb", add_bos=False) == other.encode("a<|user|>\nb", add_bos=False)  # ordinary text


def test_no_merge_makes_a_special_or_byte_token() -> None:
    """Tokens that steer, and bytes, are out of reach even where pieces could merge into them."""
    special = {"INST]": CONTROL, "<0": NORMAL, "<0x": NORMAL, "<0x4": NORMAL, "<0x41": NORMAL}
    t = Tokenizer.from_metadata(sentencepiece(special))
    assert t.token(t.vocab_size - 5) == "INST]"
    assert t.vocab_size - 5 not in t.encode("INST]")
    assert t.encode("INST]", special=True, add_bos=False) == [t.vocab_size - 5]
    assert "<0x41>" not in [t.token(i) for i in t.encode("<0x41>")]
    assert t.decode(t.encode("<0x41>", add_bos=False)) == "<0x41>"


def test_unknown_characters_without_bytes() -> None:
    """One unknown for a run of them; without such a token a named error."""
    bare = sentencepiece(pieces="bare_pieces")
    t = Tokenizer.from_metadata(bare)
    ids = t.encode("a漢字", add_bos=False)
    assert [t.token(i) for i in ids] == ["▁a", "<unk>"]
    assert t.decode(ids, special=False) == "a"
    del bare["tokenizer.ggml.unknown_token_id"]
    t = Tokenizer.from_metadata(bare)
    assert t.decode(t.encode("a", add_bos=False)) == "a"
    with pytest.raises(TokenizerError, match="no token for the unknown"):
        t.encode("a漢字")


def test_higher_scores_merge_first() -> None:
    """Score-greedy, not left to right: "bc" beats "ab" when its score is higher."""

    def ids(ab: float, bc: float) -> list[int]:
        tokens, scores = ["<unk>", "a", "b", "c", "ab", "bc"], [0.0, -9.0, -9.0, -9.0, ab, bc]
        types = [2, 1, 1, 1, 1, 1]
        metadata = keys(model="llama", tokens=tokens, scores=scores, token_type=types, add_space_prefix=False)
        return Tokenizer.from_metadata(metadata).encode("abc")

    assert ids(-1.0, -2.0) == [4, 3]
    assert ids(-2.0, -1.0) == [1, 5]


def test_damage_is_named() -> None:
    """Scores that are missing, and byte tokens that spell no byte."""
    with pytest.raises(GgufError, match=r"tokenizer\.ggml\.scores is missing"):
        Tokenizer.from_metadata({k: v for k, v in sentencepiece().items() if not k.endswith("scores")})
    with pytest.raises(GgufError, match="token 700 is a byte, but is spelled '<0xZZ>'"):
        Tokenizer.from_metadata(sentencepiece({"<0xZZ>": 6}))


def test_a_very_long_token_costs_no_time() -> None:
    """Only cuts into lengths that occur are tried: a token of a million letters loads at once."""
    t = Tokenizer.from_metadata(sentencepiece({"x" * 1_000_000: NORMAL}))
    assert t.decode(t.encode("xx", add_bos=False)) == "xx"


@pytest.mark.oracle
def test_golden_is_what_sentencepiece_says() -> None:
    """Encodes the golden's texts with the library, from the golden's own pieces."""
    import sentencepiece as library
    from sentencepiece import sentencepiece_model_pb2

    def processor(
        name: str, prefix: bool = True, squeeze: bool = False, runs: tuple[str, ...] = ()
    ) -> library.SentencePieceProcessor:
        model = sentencepiece_model_pb2.ModelProto()
        rows = {text: (score, kind) for text, score, kind in load("sentencepiece")[name]}
        rows |= {run.replace(" ", "\u2581"): (0.0, 4) for run in runs}
        for text, (score, kind) in rows.items():
            model.pieces.add(piece=text, score=score, type=kind)
        model.trainer_spec.model_type = 2  # BPE
        model.trainer_spec.byte_fallback = name == "pieces"
        model.normalizer_spec.name = "identity"
        model.normalizer_spec.add_dummy_prefix = prefix
        model.normalizer_spec.remove_extra_whitespaces = squeeze
        return library.SentencePieceProcessor(model_proto=model.SerializeToString())

    oracles = {
        "ids": processor("pieces"),
        "no_prefix": processor("pieces", prefix=False),
        "squeezed": processor("pieces", squeeze=True),
        "bare": processor("bare_pieces"),
        "runs": processor("pieces", prefix=False, runs=RUNS),
    }
    for case in CASES:
        assert all(oracle.encode(case["text"]) == case[name] for name, oracle in oracles.items() if name in case)
