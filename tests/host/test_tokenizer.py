"""The tokenizer of the real file against transformers, and the rules that both kinds of vocabulary share."""

from __future__ import annotations

import time
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from frink_numba.errors import TokenizerError, UnsupportedModelError
from frink_numba.host.gguf import GgufFile
from frink_numba.host.tokenizer import Tokenizer
from tests import transformers_oracle
from tests.gguf_writer import write_gguf
from tests.golden.tokenizer_cases import TEXTS, load
from tests.vocabularies import CONTROL, NORMAL, USER_DEFINED, byte_level, keys, letters, sentencepiece

CASES: list[dict[str, Any]] = load("smollm2")["cases"]
# The texts with bytes that this vocabulary lacks: transformers leaves the bytes out too.
LOSSY = {"tab\x04eot\x06ack\x13\x14\x16\x1d", "\U00040000"}


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    with GgufFile.open(smollm2_path) as file:
        return Tokenizer.from_metadata(file.metadata)


def test_ids_equal_transformers(smollm2: Tokenizer) -> None:
    """Over 300 texts, special tokens as text and as tokens."""
    assert len(CASES) > 300
    assert len({case["text"] for case in CASES}) == len(CASES)
    wrong = [case["text"] for case in CASES if smollm2.encode(case["text"]) != case["ids"]]
    assert wrong == []
    marked = [case for case in CASES if "special" in case]
    assert len(marked) > 40
    wrong = [case["text"] for case in marked if smollm2.encode(case["text"], special=True) != case["special"]]
    assert wrong == []
    unmarked = [case for case in CASES if "special" not in case]
    assert all(smollm2.encode(case["text"], special=True) == case["ids"] for case in unmarked)


def test_transformers_fallback_differs_only_before_numbers() -> None:
    """transformers reads this file with GPT-2's pre-tokenizer; that shows only where blanks stand before a number."""

    def blanks_before_number(text: str) -> bool:
        return any(a.isspace() and unicodedata.category(b)[0] == "N" for a, b in pairwise(text))

    differing = [case["text"] for case in CASES if "as_read" in case]
    assert 0 < len(differing) < 30
    assert all(map(blanks_before_number, differing))


def test_text_comes_back(smollm2: Tokenizer) -> None:
    """Decoding is exact, one-shot and streamed, but for the bytes that the vocabulary lacks."""
    for case in CASES:
        ids, text = smollm2.encode(case["text"]), case["text"]
        stream = smollm2.stream()
        streamed = "".join([stream.push(i) for i in ids]) + stream.flush()
        assert streamed == smollm2.decode(ids)
        assert (smollm2.decode(ids) == text) is (text not in LOSSY)
        if text not in LOSSY:
            assert smollm2.decode_bytes(ids) == text.encode()
            assert smollm2.decode(smollm2.encode(text, special=True)) == text


def test_pinned_ids(smollm2: Tokenizer) -> None:
    """Fault 30: digits one by one, blank lines and blanks as this vocabulary has them. Fault 31: emoji are bytes."""
    assert smollm2.encode("3333+777\n\n  x") == [35, 35, 35, 35, 27, 39, 39, 39, 8866, 1792]
    assert smollm2.encode("a\n🦙") == [81, 198, 10813, 116, 243]
    assert smollm2.encode("<|im_start|>user\nhi<|im_end|>", special=True) == [1, 4093, 198, 6004, 2]
    assert smollm2.encode("") == []


def test_facts_of_smollm2(smollm2: Tokenizer) -> None:
    """Ids and rules from the metadata; <|endoftext|> and <|im_end|> end an answer."""
    assert (smollm2.vocab_size, smollm2.bos_id, smollm2.eos_id) == (49152, 1, 2)
    assert (smollm2.add_bos, smollm2.add_eos) == (False, False)
    assert smollm2.stop_ids == {0, 2}
    assert [smollm2.token(i) for i in (0, 1, 2, 81)] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a"]
    assert [smollm2.is_control(i) for i in (0, 16, 17, 49151)] == [True, True, False, False]


def test_construction_is_fast(smollm2_path: Path) -> None:
    """Metadata decoding included, the best of five: no longer than it takes to sort 1.2 million numbers, about 0.3 s.

    Both are timed in turns, so that a slow or shared machine slows both.
    """
    numbers = np.random.default_rng(0).random(1_200_000).tolist()
    seconds, sorting = [], []
    for _ in range(5):
        with GgufFile.open(smollm2_path) as file:
            start = time.process_time()
            Tokenizer.from_metadata(file.metadata)
            seconds.append(time.process_time() - start)
        start = time.process_time()
        sorted(numbers)
        sorting.append(time.process_time() - start)
    assert min(seconds) < min(sorting)


def test_threads_share_a_tokenizer(smollm2: Tokenizer) -> None:
    """Encoding and decoding at once from 8 threads gives what one thread gets."""

    def round_trip(case: dict[str, Any]) -> bool:
        ids = smollm2.encode(case["text"])
        return ids == case["ids"] and smollm2.decode(ids) == smollm2.decode(case["ids"])

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(round_trip, CASES * 4))


@pytest.mark.oracle
def test_golden_is_what_transformers_says(smollm2_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recomputes the golden's fallback column, and the ids under the published pre-tokenizer."""
    from tokenizers import pre_tokenizers

    oracle = transformers_oracle.tokenizer(smollm2_path)

    def ids(text: str, special: bool) -> list[int]:
        return oracle(text, add_special_tokens=False, split_special_tokens=not special)["input_ids"]

    for case in CASES:
        assert ids(case["text"], special=False) == case.get("as_read", case["ids"])
    published = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    monkeypatch.setattr(oracle.backend_tokenizer, "pre_tokenizer", published)
    for case in CASES:
        assert ids(case["text"], special=False) == case["ids"]
        assert ids(case["text"], special=True) == case.get("special", case["ids"])


BEGIN_END = {"<|begin|>": CONTROL, "<|eot_id|>": CONTROL}


@pytest.mark.oracle
@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "gpt-2"])
def test_small_files_equal_transformers(pre: str, tmp_path: Path) -> None:
    """A written file, read by both: ordinary texts, control tokens as text and as tokens, user-defined ones always.

    transformers' reader of GGUF does not compose texts for qwen2, so they are composed here. It adds <|endoftext|>,
    its class's default, to the vocabulary.
    """
    metadata = byte_level(pre, BEGIN_END | {"<tool>": USER_DEFINED}, bos_token_id=700, eos_token_id=701)
    sizes = {"block_count": 1, "embedding_length": 32, "context_length": 64, "feed_forward_length": 32}
    facts = {"general.architecture": "llama", "llama.attention.head_count": 1}
    facts |= {f"llama.{name}": size for name, size in sizes.items()}
    write_gguf(tmp_path / "m.gguf", facts | metadata, {"token_embd.weight": np.zeros((703, 32), np.float32)})
    oracle = transformers_oracle.tokenizer(tmp_path / "m.gguf")
    with GgufFile.open(tmp_path / "m.gguf") as file:
        tokenizer = Tokenizer.from_metadata(file.metadata)
    for raw in [*TEXTS, "a<|begin|>b <tool> c<|eot_id|>", "<tool><tool> <|begin|"]:
        text = unicodedata.normalize("NFC", raw)
        want = oracle(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert tokenizer.encode(text, add_bos=False) == want
        if "<|endoftext|>" not in text:
            want = oracle(text, add_special_tokens=False)["input_ids"]
            assert tokenizer.encode(text, add_bos=False, special=True) == want


def test_special_tokens_only_where_asked() -> None:
    """A user's text that spells a control token is ordinary text, and comes back as it was."""
    tokenizer = Tokenizer.from_metadata(byte_level(special=BEGIN_END))
    text = "a<|begin|>b<|eot_id|>"
    ordinary, special = tokenizer.encode(text), tokenizer.encode(text, special=True)
    assert not {700, 701} & set(ordinary)
    assert [special[1], special[-1]] == [700, 701]
    assert len(special) == 4
    assert tokenizer.decode(ordinary) == tokenizer.decode(special) == text
    assert tokenizer.decode(special, special=False) == "ab"
    assert tokenizer.decode_bytes(special, special=False) == b"ab"


def test_no_merge_makes_a_control_token() -> None:
    """A control token that merges could spell is still out of reach of a text; other merges work."""
    metadata = letters(("a b", "ab c", "d e"), bos_token_id=8)
    metadata["tokenizer.ggml.token_type"][8] = CONTROL  # abc
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.token(8) == "abc"
    assert tokenizer.encode("abcde") == [7, 2, 9]
    assert tokenizer.encode("abcde", special=True) == [8, 9]


def test_user_defined_tokens_always() -> None:
    """Matched before all else, in every text; of two at one place the longer; literal, not in the byte alphabet."""
    tokenizer = Tokenizer.from_metadata(
        byte_level(special={"<é>": USER_DEFINED, "<é><é>": USER_DEFINED, "<c>": CONTROL, " ": USER_DEFINED})
    )
    assert tokenizer.encode("<é><é><é>") == [701, 700]
    assert tokenizer.encode("<é> <c>")[:2] == [700, 703]
    assert tokenizer.encode("<é> <c>", special=True) == [700, 703, 702]
    assert tokenizer.decode([700, 703, 702], special=False) == "<é> "


def test_special_texts_are_no_patterns() -> None:
    """Signs that mean something in a regular expression mean themselves."""
    special = {"[.*]": CONTROL, "a|b": CONTROL, "(?": CONTROL, "\\d": CONTROL}
    tokenizer = Tokenizer.from_metadata(byte_level(special=special))
    assert tokenizer.encode("[.*]a|b(?\\d", special=True) == [700, 701, 702, 703]
    assert not {700, 701, 702, 703} & set(tokenizer.encode("[x]ab5", special=True))


@pytest.mark.parametrize(
    ("metadata", "bos", "eos"),
    [
        (byte_level("gpt-2", BEGIN_END, bos_token_id=700), [], []),
        (byte_level("qwen2", BEGIN_END, bos_token_id=700), [], []),
        (byte_level("smollm", BEGIN_END, bos_token_id=700), [], []),
        (byte_level("default", BEGIN_END, bos_token_id=700), [], []),
        (byte_level("llama-bpe", BEGIN_END, bos_token_id=700), [700], []),
        (byte_level("llama-bpe", BEGIN_END), [], []),
        (byte_level("llama-bpe", BEGIN_END, bos_token_id=700, add_bos_token=False), [], []),
        (byte_level("gpt-2", BEGIN_END, bos_token_id=700, add_bos_token=True), [700], []),
        (byte_level("gpt-2", BEGIN_END, eos_token_id=701, add_eos_token=True), [], [701]),
        (sentencepiece(), [1], []),
        (sentencepiece(add_bos_token=False), [], []),
        (sentencepiece(add_bos_token=True, add_eos_token=True), [1], [2]),
    ],
)
def test_bos_and_eos_rules(metadata: dict[str, Any], bos: list[int], eos: list[int]) -> None:
    """The file's rule, else the kind's: SentencePiece and Llama 3 begin with BOS, where there is one."""
    tokenizer = Tokenizer.from_metadata(metadata)
    text = tokenizer.encode("hi", add_bos=False, add_eos=False)
    assert tokenizer.encode("hi") == bos + text + eos
    assert tokenizer.encode("") == bos + eos
    assert tokenizer.add_bos is bool(bos)


def test_bos_is_not_doubled() -> None:
    """Fault 32: the rule adds no second BOS or EOS to a text that spells one; asking for it does."""
    tokenizer = Tokenizer.from_metadata(sentencepiece(add_bos_token=True, add_eos_token=True))
    once = tokenizer.encode("<s>hi</s>", special=True)
    assert once == tokenizer.encode("hi")
    assert tokenizer.encode("<s>hi</s>", special=True, add_bos=True, add_eos=True) == [1, *once, 2]
    assert tokenizer.encode("<s>hi", special=True, add_bos=False, add_eos=False) == once[:-1]
    assert tokenizer.encode("<s>hi").count(1) == 1  # as text it is no BOS


def test_asking_for_a_token_that_is_not_there() -> None:
    """add_bos=True without a BOS is an error, not a silent nothing."""
    tokenizer = Tokenizer.from_metadata(byte_level())
    assert tokenizer.bos_id is None
    with pytest.raises(TokenizerError, match="no BOS token"):
        tokenizer.encode("a", add_bos=True)
    with pytest.raises(TokenizerError, match="no EOS token"):
        tokenizer.encode("a", add_eos=True)


def test_stop_ids() -> None:
    """EOS, EOT and EOM by key, and control tokens of a well-known name; a normal token of that name is text."""
    special = {"<a>": CONTROL, "<b>": CONTROL, "<c>": CONTROL, "<|im_end|>": CONTROL, "<end_of_turn>": NORMAL}
    tokenizer = Tokenizer.from_metadata(byte_level(special=special, eos_token_id=700, eot_token_id=701))
    assert tokenizer.stop_ids == {700, 701, 703}
    tokenizer = Tokenizer.from_metadata(byte_level(special=special, eom_token_id=702, bos_token_id=700))
    assert tokenizer.stop_ids == {702, 703}
    assert Tokenizer.from_metadata(byte_level()).stop_ids == frozenset()


@pytest.mark.parametrize("text", [b"bytes", None, 7, ["a"]])
def test_only_str_is_encoded(text: Any) -> None:
    """Anything else is a named error."""
    with pytest.raises(TokenizerError, match=type(text).__name__):
        Tokenizer.from_metadata(byte_level()).encode(text)


@pytest.mark.parametrize(("text", "position"), [("\ud800", 0), ("ab\udfff!", 2), ("🦙\udcff", 1), ("\ud83e\udd99", 0)])
def test_lone_surrogates_are_refused(text: str, position: int) -> None:
    """No Unicode text, so no ids: the error says where, and what to do. transformers refuses them too."""
    for metadata in (byte_level(), sentencepiece()):
        with pytest.raises(TokenizerError, match=rf"lone surrogate.*at character {position}; .*replace"):
            Tokenizer.from_metadata(metadata).encode(text)


@pytest.mark.parametrize("token", [-1, 700, 2**40])
def test_ids_outside_the_vocabulary(token: int) -> None:
    """decode, stream, token and is_control name the id and the vocabulary's size."""
    tokenizer = Tokenizer.from_metadata(byte_level())
    for call in (lambda: tokenizer.decode([65, token]), lambda: tokenizer.token(token)):
        with pytest.raises(TokenizerError, match=f"token id {token} is outside the vocabulary of 700 tokens"):
            call()
    for call in (lambda: tokenizer.stream().push(token), lambda: tokenizer.is_control(token)):
        with pytest.raises(TokenizerError, match="outside the vocabulary"):
            call()


@pytest.mark.parametrize("token", [1.0, "1", None])
def test_ids_are_integers(token: Any) -> None:
    """Also a float that equals an id that was decoded before."""
    tokenizer = Tokenizer.from_metadata(byte_level())
    tokenizer.decode([1])
    with pytest.raises(TokenizerError, match=f"an integer, got {type(token).__name__}"):
        tokenizer.decode([token])


def test_ids_may_be_numpy() -> None:
    """Arrays decode as lists do."""
    tokenizer = Tokenizer.from_metadata(byte_level())
    ids = tokenizer.encode("hello, wörld")
    assert tokenizer.decode(np.array(ids, np.int32)) == "hello, wörld"
    assert tokenizer.token(np.int64(ids[0])) == tokenizer.token(ids[0])


@pytest.mark.parametrize("model", ["bert", "t5", "rwkv", "plamo2", "", "GPT2"])
def test_other_models_are_refused_by_name(model: str) -> None:
    """The error lists those that run."""
    with pytest.raises(UnsupportedModelError, match=f"tokenizer '{model}'.*Served: gpt2, llama"):
        Tokenizer.from_metadata(byte_level() | keys(model=model))


def test_read_from_a_file(tmp_path: Path) -> None:
    """A written file gives the tokenizer that its metadata gives; a token that is not UTF-8 keeps its bytes."""
    metadata = byte_level(special=BEGIN_END, bos_token_id=700)
    tokens = [text.encode() for text in metadata["tokenizer.ggml.tokens"]]
    # Two broken texts would look alike; a token that does spell U+FFFD is another matter.
    broken = {**metadata, "tokenizer.ggml.tokens": [*tokens, b"\xff", b"\xfe\xfd", "\ufffd".encode()]}
    broken["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], NORMAL, NORMAL, USER_DEFINED]
    write_gguf(tmp_path / "m.gguf", {"general.architecture": "llama", **broken}, {"x": np.zeros(32, np.float32)})
    with GgufFile.open(tmp_path / "m.gguf") as file:
        tokenizer = Tokenizer.from_metadata(file.metadata)
    expected = Tokenizer.from_metadata(metadata)
    for case in load("bpe")["cases"]:
        if "\ufffd" not in case["text"]:
            assert tokenizer.encode(case["text"]) == expected.encode(case["text"])
    assert tokenizer.encode("a\ufffd")[1:] == [704]
    assert tokenizer.decode_bytes([702, 703, 704]) == b"\xff\xfe\xfd\xef\xbf\xbd"
