"""Generation: text that never splits a character, stop strings, why an answer ends, and what is refused."""

from itertools import pairwise

import numpy as np
import pytest

from frink_numba.errors import CacheError, Cancelled, FrinkError, PromptError, SettingError
from frink_numba.host import token_source
from frink_numba.host.generate import Piece
from tests.golden.draws import integers
from tests.golden.tiny_text import BOS, END_OF_TURN, EOS, TOKENS, text_content


@pytest.fixture
def script(monkeypatch):
    """script(tokens) makes the next answers consist of these tokens, whatever the model says."""

    def script(tokens):
        class Scripted:
            def __init__(self, sampling, vocab):
                self.rest = iter(tokens)

            def see(self, seen):
                pass

            def choose(self, logits):
                return next(self.rest)

        monkeypatch.setattr(token_source, "Sampler", Scripted)
        monkeypatch.setattr(token_source, "usual_source", token_source.OneByOne)

    return script


def texts(answer):
    return [piece.text for piece in answer]


def test_no_character_is_split_over_pieces(text_decoder, script):
    text = "h\u00e9 \U0001f999 \u4f60\u597d e\u0301"
    data = text.encode()
    script([*data, EOS])
    answer = text_decoder.generate("x")
    pieces = list(answer)
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.token for piece in pieces] == [*data, EOS]
    assert all("\ufffd" not in piece.text for piece in pieces)
    for piece, (start, stop) in zip(pieces, pairwise(range(len(data) + 1)), strict=False):
        whole = data[:stop].decode(errors="ignore")
        assert piece.text == whole[len(data[:start].decode(errors="ignore")) :]  # as soon as it is whole


def test_an_unfinished_character_shows_at_the_end_only(text_decoder, script):
    script([0x61, 0xF0, 0x9F, 0xA6])
    assert texts(text_decoder.generate("x", max_new_tokens=4)) == ["a", "", "", "\ufffd"]
    script([0x61, 0xF0, 0x9F, 0x62, EOS])
    assert texts(text_decoder.generate("x")) == ["a", "", "", "\ufffdb", ""]


def test_stop_tokens_end_an_answer_and_have_no_text(text_decoder, script):
    for stop in (EOS, END_OF_TURN):
        script([0x61, stop])
        answer = text_decoder.generate("x")
        assert list(answer) == [Piece(0x61, "a"), Piece(stop, "")]
        assert answer.finish_reason == "stop"
        assert answer.stop_string is None
        assert answer.tokens == [0x61, stop]


def test_other_control_tokens_have_no_text_either(text_decoder, script):
    script([0x61, BOS, 0x62, EOS])
    assert texts(text_decoder.generate("x")) == ["a", "", "b", ""]


def test_a_stop_string_ends_an_answer_and_is_not_shown(text_decoder, script):
    script(list(b"one\n\ntwo"))
    answer = text_decoder.generate("x", stop=["\n\n", "never"])
    assert texts(answer) == ["o", "", "", "ne", ""]  # "ne" could have become "never"
    assert (answer.finish_reason, answer.stop_string) == ("stop", "\n\n")
    assert answer.cache.positions == 2 + 4  # BOS, the prompt, and the new tokens but the last
    script([*b"one\ntwo", EOS])
    assert texts(text_decoder.generate("x", stop=["\n\n"])) == ["o", "n", "e", "", "\nt", "w", "o", ""]


def test_a_stop_string_of_whole_characters_waits_for_their_bytes(text_decoder, script):
    script([*"a\U0001f999b".encode(), EOS])
    answer = text_decoder.generate("x", stop=["\U0001f999b"])
    assert texts(answer) == ["a", "", "", "", "", ""]
    assert answer.stop_string == "\U0001f999b"


def test_held_back_text_comes_with_the_last_piece(text_decoder, script):
    script(list(b"ab#"))
    answer = text_decoder.generate("x", stop=["##"], max_new_tokens=3)
    assert texts(answer) == ["a", "b", "#"]
    assert answer.finish_reason == "length"
    script([*b"ab#", EOS])
    answer = text_decoder.generate("x", stop=["##"])
    assert texts(answer) == ["a", "b", "", "#"]


def test_an_unfinished_character_may_complete_a_stop_string(text_decoder, script):
    script([0x61, 0xF0])
    answer = text_decoder.generate("x", stop=["\ufffd"], max_new_tokens=2)
    assert texts(answer) == ["a", ""]
    assert (answer.finish_reason, answer.stop_string) == ("stop", "\ufffd")


def test_an_answer_ends_where_the_context_does(open_decoder, script):
    decoder = open_decoder(text_content(), context_length=8)
    script(b"abcdefgh")
    answer = decoder.generate("xyz")  # 4 tokens with BOS: room for 4 more, and one after the last
    assert texts(answer) == ["a", "b", "c", "d", "e"]
    assert answer.finish_reason == "context"
    assert answer.cache.positions == 8
    script(b"abc")
    full = decoder.generate(list(b"12345678"))
    assert texts(full) == ["a"]
    assert full.finish_reason == "context"


def test_greedy_answers_are_the_most_likely_tokens_of_the_decoder(text_decoder):
    answer = text_decoder.generate("hello", max_new_tokens=12)
    assert answer.finish_reason is None
    pieces = list(answer)
    cache = text_decoder.new_cache()
    logits = text_decoder.prefill([BOS, *b"hello"], cache).logits
    for piece in pieces:
        assert piece.token == logits[:TOKENS].argmax()
        logits = text_decoder.decode(piece.token, cache).logits
    assert answer.prompt_tokens == [BOS, *b"hello"]
    assert answer.finish_reason in ("length", "stop")


def test_rows_that_pad_the_vocabulary_are_never_chosen(open_decoder):
    """The embedding has more rows than the tokenizer has tokens; one of the spare ones is made the most likely."""
    file = text_content()
    file.tensors["output.weight"][TOKENS:] = 50 * file.tensors["output.weight"][:1]
    decoder = open_decoder(file)
    every = decoder.prefill([BOS, 1], decoder.new_cache(), logits="all").logits
    assert (every.argmax(axis=1) >= TOKENS).any()
    for temperature in (0, 5.0):
        answer = decoder.generate([BOS, 1], max_new_tokens=40, temperature=temperature, seed=1)
        assert all(piece.token < TOKENS for piece in answer)


def test_equal_seeds_give_equal_answers(text_decoder):
    def run(seed, **how):
        return [p.token for p in text_decoder.generate("abc", max_new_tokens=20, temperature=2.0, seed=seed, **how)]

    assert run(5) == run(5)
    assert run(5) == run(5, chunk_size=1)
    assert run(5) != run(6)


def test_the_penalty_counts_the_prompt(text_decoder):
    prompt = integers("penalty", (30,), 256).tolist()
    plain = list(text_decoder.generate(prompt, max_new_tokens=30))
    held = list(text_decoder.generate(prompt, max_new_tokens=30, repetition_penalty=1e6))
    chosen = [piece.token for piece in plain]
    assert set(chosen) & set(prompt) or len(set(chosen)) < len(chosen)  # without the penalty something comes again
    tokens = [piece.token for piece in held]
    assert len(set(tokens)) == len(tokens)
    assert not set(tokens) & set(prompt)


def test_prompts_come_as_text_ids_arrays_or_messages(text_decoder):
    assert text_decoder.generate("ab").prompt_tokens == [BOS, 0x61, 0x62]
    assert text_decoder.generate([0x61, 0x62]).prompt_tokens == [0x61, 0x62]
    assert text_decoder.generate((0x61,)).prompt_tokens == [0x61]
    assert text_decoder.generate(np.array([0x61, 0x62])).prompt_tokens == [0x61, 0x62]
    rendered = [BOS, *b"user: hi", END_OF_TURN, *b"bot:"]
    assert text_decoder.generate("hi", chat=True).prompt_tokens == rendered  # fault 32: one BOS
    assert text_decoder.generate([{"role": "user", "content": "hi"}]).prompt_tokens == rendered


def test_control_tokens_in_a_text_are_text_unless_asked_for(text_decoder):
    assert text_decoder.generate("a</s>").prompt_tokens == [BOS, *b"a</s>"]
    assert text_decoder.generate("a</s>", special=True).prompt_tokens == [BOS, 0x61, EOS]


def test_an_answer_goes_on_behind_a_cache(text_decoder):
    whole = text_decoder.generate([*b"abcdef"], max_new_tokens=5)
    expected = [piece.token for piece in whole]
    cache = text_decoder.new_cache()
    text_decoder.prefill([*b"abc"], cache)
    rest = text_decoder.generate("def", max_new_tokens=5, cache=cache)
    assert rest.prompt_tokens == [*b"def"]  # no BOS in the middle
    assert [piece.token for piece in rest] == expected
    assert rest.cache is cache
    with pytest.raises(PromptError, match="empty cache"):
        text_decoder.generate("hi", chat=True, cache=cache)


def test_an_answer_can_be_left_early_and_its_cache_used(text_decoder):
    answer = text_decoder.generate("abc", max_new_tokens=10)
    first = next(answer)
    answer.close()
    assert list(answer) == []
    assert answer.finish_reason is None
    again = text_decoder.generate([first.token], max_new_tokens=3, cache=answer.cache)
    whole = list(text_decoder.generate("abc", max_new_tokens=4))
    assert [piece.token for piece in again] == [piece.token for piece in whole[1:]]


def test_progress_of_the_prompt_is_told_and_may_cancel(text_decoder):
    seen = []
    next(text_decoder.generate([1] * 20, chunk_size=8, progress=lambda *done: seen.append(done)))
    assert seen == [(8, 20), (16, 20), (20, 20)]
    answer = text_decoder.generate([1] * 20, chunk_size=8, progress=lambda done, total: False)
    with pytest.raises(Cancelled):
        next(answer)
    assert answer.cache.positions == 8


@pytest.mark.parametrize(
    ("prompt", "arguments", "error", "words"),
    [
        ([], {}, PromptError, "empty"),
        ([264], {}, PromptError, "token 264 is outside"),
        ([1] * 4097, {}, PromptError, "the context is 4096"),
        (7, {}, PromptError, "not a int"),
        (b"abc", {}, PromptError, "not a bytes"),
        ({"role": "user", "content": "x"}, {}, PromptError, "not a dict"),
        ([1, {"role": "user", "content": "x"}], {}, PromptError, "chat takes a text"),
        ([1, 2], {"chat": True}, PromptError, "chat takes a text"),
        ("x", {"max_new_tokens": 0}, SettingError, "max_new_tokens=0"),
        ("x", {"max_new_tokens": 2.0}, SettingError, r"max_new_tokens=2\.0"),
        ("x", {"temperature": -1}, SettingError, "temperature=-1"),
        ("x", {"top_k": -1}, SettingError, "top_k=-1"),
        ("x", {"stop": ["a", ""]}, SettingError, "stop="),
        ("x", {"stop": "END"}, SettingError, "stop='END'"),
        ("x", {"stop": 5}, SettingError, "stop=5"),
        ("x", {"max_new_tokens": "5"}, SettingError, "max_new_tokens='5'"),
        ("x", {"temperature": 10**400}, SettingError, "temperature=10000"),
        ("x", {"temperature": 10**5000}, SettingError, "temperature=a number of thousands of digits"),
        ("x", {"cache": 5}, CacheError, "the cache is a int"),
        ([10**400], {}, PromptError, "flat list of token ids"),
        ("x", {"chunk_size": 0}, SettingError, "chunk_size=0"),
        ("x", {"temprature": 1}, TypeError, "temprature"),
    ],
)
def test_bad_arguments_are_refused_before_the_first_token(text_decoder, prompt, arguments, error, words):
    with pytest.raises(error, match=words):
        text_decoder.generate(prompt, **arguments)


def test_numbers_of_any_size_and_kind_are_taken_where_they_make_sense(text_decoder):
    answer = text_decoder.generate(
        "x", max_new_tokens=np.int32(2), temperature=np.float32(0.5), top_k=10**400, seed=10**400, chunk_size=10**400
    )
    assert len(list(answer)) == 2


def test_a_closed_decoder_generates_nothing(text_decoder):
    answer = text_decoder.generate("abc")
    text_decoder.close()
    with pytest.raises(FrinkError, match="closed"):
        next(answer)
    with pytest.raises(FrinkError, match="closed"):
        text_decoder.generate("abc")
