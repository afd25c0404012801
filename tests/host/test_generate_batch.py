"""Several answers at once: each is the answer that its prompt would get alone, and ends for itself."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from frink_numba.errors import CacheError, Cancelled, FrinkError, PromptError, SettingError
from frink_numba.host import generate_batch
from frink_numba.host.generate_batch import BatchGeneration
from frink_numba.host.kv_cache import KVCache
from frink_numba.host.sampling import NOT_NUMBERS
from tests.golden.tiny_text import BOS

PROMPTS = ["the quick brown fox", "a", [BOS, *b"jumps over"], "the lazy dog, and then some more of it", "!?", "zzz"]


def alone(decoder, prompt, **how):
    answer = decoder.generate(prompt, **how)
    text = "".join(piece.text for piece in answer)
    return answer, text


def finished(batch: BatchGeneration) -> BatchGeneration:
    for _ in batch:
        pass
    return batch


def assert_as_alone(decoder, prompts, **how):
    batch = finished(decoder.generate_batch(prompts, **how))
    for prompt, answer in zip(prompts, batch.answers, strict=True):
        want, text = alone(decoder, prompt, **how)
        assert answer.tokens == want.tokens
        assert answer.text == text
        assert (answer.finish_reason, answer.stop_string) == (want.finish_reason, want.stop_string)
        assert answer.prompt_tokens == want.prompt_tokens
    return batch


@pytest.mark.parametrize(
    "how",
    [
        {"max_new_tokens": 12},
        {"max_new_tokens": 1},
        {"max_new_tokens": 12, "temperature": 0.8, "top_k": 20, "seed": 4},
        {"max_new_tokens": 12, "repetition_penalty": 1.3},
        {"max_new_tokens": 9, "temperature": 1.2, "top_p": 0.9, "min_p": 0.02, "seed": 1, "chunk_size": 5},
    ],
)
def test_each_answer_is_the_one_alone(text_decoder, how):
    """Greedy, drawn and penalized: each has its own random state and its own tokens seen."""
    assert_as_alone(text_decoder, PROMPTS, **how)


@pytest.mark.parametrize("most", [1, 2, 4])
def test_a_prompt_begins_where_an_answer_ends(text_decoder, monkeypatch, most):
    """More prompts than go on together wait for their turn; answers end at different times."""
    monkeypatch.setattr(generate_batch, "MOST_SEQUENCES", most)
    stop = alone(text_decoder, PROMPTS[0], max_new_tokens=12)[1][4:6]
    batch = assert_as_alone(text_decoder, PROMPTS, max_new_tokens=12, stop=[stop])
    assert batch.answers[0].finish_reason == "stop"
    assert any(answer.finish_reason == "length" for answer in batch.answers)


def test_pieces_come_step_by_step(text_decoder):
    """Each step gives one piece of every answer that is under way, in the order of the prompts."""
    seen: list[list[int]] = []
    for number, piece in text_decoder.generate_batch(PROMPTS[:3], max_new_tokens=4):
        if not seen or number <= seen[-1][-1]:
            seen.append([])
        seen[-1].append(number)
        assert isinstance(piece.token, int)
    assert seen == [[0, 1, 2]] * 4


def test_caches_hold_all_but_the_last_token(text_decoder):
    """R10: after each piece, its cache counts the prompt and the new tokens but the last."""
    caches = [text_decoder.new_cache() for _ in PROMPTS]
    batch = text_decoder.generate_batch(PROMPTS, max_new_tokens=5, caches=caches)
    for number, _ in batch:
        answer = batch.answers[number]
        assert answer.cache is caches[number]
        assert answer.cache.positions == len(answer.prompt_tokens) + len(answer.tokens) - 1
    more = finished(
        text_decoder.generate_batch([[a.tokens[-1]] for a in batch.answers], max_new_tokens=3, caches=caches)
    )
    for prompt, first, second in zip(PROMPTS, batch.answers, more.answers, strict=True):
        assert first.tokens + second.tokens == alone(text_decoder, prompt, max_new_tokens=8)[0].tokens


def test_left_in_the_middle_the_caches_stay_usable(text_decoder):
    caches = [text_decoder.new_cache() for _ in PROMPTS]
    batch = text_decoder.generate_batch(PROMPTS, max_new_tokens=9, caches=caches)
    for _ in range(2 * len(PROMPTS) + 2):  # two pieces each, and a third of the first two
        next(batch)
    batch.close()
    for at, (cache, answer) in enumerate(zip(caches, batch.answers, strict=True)):
        assert len(answer.tokens) == 2 + (at < 2)
        assert cache.positions == len(answer.prompt_tokens) + len(answer.tokens) - 1
        rest, _ = alone(text_decoder, [answer.tokens[-1]], cache=cache, max_new_tokens=3)
        whole, _ = alone(text_decoder, PROMPTS[at], max_new_tokens=len(answer.tokens) + 3)
        assert answer.tokens + rest.tokens == whole.tokens


def test_rows_go_with_an_answer_that_nobody_keeps(text_decoder):
    batch = finished(text_decoder.generate_batch(PROMPTS, max_new_tokens=3))
    gc.collect()
    assert sum(answer.cache.nbytes for answer in batch.answers) == 0


@pytest.mark.parametrize("close", [lambda decoder: decoder.close(), lambda decoder: decoder.model.close()])
@pytest.mark.parametrize("kept", [False, True])
def test_a_decoder_closed_in_the_middle_takes_no_piece_that_was_chosen(text_decoder, kept, close):
    """What the last step chose is handed out, the last pieces included; whoever keeps rows or not."""
    caches = [text_decoder.new_cache() for _ in PROMPTS] if kept else None
    want = [alone(text_decoder, prompt, max_new_tokens=3)[1] for prompt in PROMPTS]
    batch, shown = text_decoder.generate_batch(PROMPTS, max_new_tokens=3, caches=caches), [""] * len(PROMPTS)
    for number, piece in batch:
        shown[number] += piece.text
        if number == 0 and len(batch.answers[0].tokens) == 3:
            close(text_decoder)
    assert shown == [answer.text for answer in batch.answers] == want
    assert {answer.finish_reason for answer in batch.answers} == {"length"}


def test_room_is_for_what_answers_usually_need(text_decoder, monkeypatch):
    """Much `max_new_tokens` asks for no memory until an answer is long; it then grows, and stays what it is alone."""
    monkeypatch.setattr(generate_batch, "_ROOM_AT_ONCE", 4)
    asked = []
    real = KVCache.reserve
    monkeypatch.setattr(KVCache, "reserve", lambda cache, n: (asked.append(n), real(cache, n))[1])
    cache = text_decoder.new_cache()
    batch = text_decoder.generate_batch(["a"], max_new_tokens=40, caches=[cache])
    next(batch)
    assert max(asked) == len(batch.answers[0].prompt_tokens) + 3
    assert_as_alone(text_decoder, PROMPTS, max_new_tokens=40)


def test_the_context_ends_an_answer(text_decoder):
    caches = [text_decoder.new_cache(30), text_decoder.new_cache(25)]
    batch = finished(text_decoder.generate_batch([[BOS] * 20, [BOS] * 20], caches=caches))
    assert [answer.finish_reason for answer in batch.answers] == ["context", "context"]
    assert [len(answer.tokens) for answer in batch.answers] == [11, 6]


def test_chats(text_decoder):
    chats = [[{"role": "user", "content": text}] for text in ("hi", "who are you")]
    batch = finished(text_decoder.generate_batch(chats, max_new_tokens=4))
    for chat, answer in zip(chats, batch.answers, strict=True):
        assert answer.tokens == alone(text_decoder, chat, max_new_tokens=4)[0].tokens


def test_no_prompts_end_at_once(text_decoder):
    assert list(text_decoder.generate_batch([])) == []


def test_a_failure_in_the_middle_loses_no_token(text_decoder, monkeypatch):
    """What fails leaves every cache behind what was handed out (R10)."""
    caches = [text_decoder.new_cache() for _ in PROMPTS]
    batch = text_decoder.generate_batch(PROMPTS, max_new_tokens=9, caches=caches)
    for _ in range(2 * len(PROMPTS)):
        next(batch)
    with monkeypatch.context() as patch:
        patch.setattr(type(text_decoder._steps), "run", lambda *_: (_ for _ in ()).throw(MemoryError("told to fail")))
        with pytest.raises(MemoryError):
            next(batch)
    for cache, answer in zip(caches, batch.answers, strict=True):
        assert cache.positions == len(answer.prompt_tokens) + len(answer.tokens) - 1


def test_cancelling_the_prompts(text_decoder):
    batch = text_decoder.generate_batch(PROMPTS, chunk_size=20, progress=lambda *_: False)
    with pytest.raises(Cancelled):
        next(batch)


@pytest.mark.parametrize(
    ("prompts", "arguments", "error", "words"),
    [
        ("one text", {}, PromptError, "list of prompts"),
        (["a", []], {}, PromptError, "prompt 1: the prompt is empty"),
        (["a", [10_000]], {}, PromptError, "prompt 1: token 10000"),
        (["a"], {"max_new_tokens": 0}, SettingError, "max_new_tokens"),
        (["a"], {"temperature": -1}, SettingError, "temperature"),
        (["a"], {"stop": "x"}, SettingError, "stop"),
        (["a"], {"chunk_size": 0}, SettingError, "chunk_size"),
        (["a", "b"], {"caches": []}, CacheError, "2 prompts, but 0 caches"),
        (["a"], {"caches": [1]}, CacheError, "prompt 0: the cache is a int"),
        (["a", "b"], {"caches": [None, None]}, CacheError, "prompt 0: the cache is a NoneType"),
        ([3], {}, PromptError, "prompt 0: a prompt is a text"),
        (["a", b"b"], {}, PromptError, "prompt 1: "),
    ],
)
def test_bad_arguments_are_refused_before_the_first_token(text_decoder, prompts, arguments, error, words):
    with pytest.raises(error, match=words):
        text_decoder.generate_batch(prompts, **arguments)


@pytest.fixture
def spoil(text_decoder, monkeypatch):
    """spoil(cache, positions): the logits behind so many positions of the cache, or more, are not numbers."""

    def spoil(cache, positions):
        def spoilt(real, caches, outputs):
            for output, held in zip(outputs, caches, strict=True):
                if held is cache and held.positions + held.staged >= positions:
                    output.logits[3] = np.nan
            return outputs

        for name in ("prefill_batch", "decode_batch"):
            real = getattr(text_decoder, name)
            monkeypatch.setattr(
                text_decoder, name, lambda ids, caches, r=real, **how: spoilt(r, caches, r(ids, caches, **how))
            )

    return spoil


@pytest.mark.parametrize("most", [1, 2, 64])
@pytest.mark.parametrize("how", [{}, {"temperature": 0.7, "seed": 3}])
@pytest.mark.parametrize("before", [0, 1, 3])
def test_logits_that_are_no_numbers_end_their_answer_alone(text_decoder, spoil, monkeypatch, how, before, most):
    """Its tokens before them stay, its cache holds their rows, the others are what they are alone; then it is said."""
    monkeypatch.setattr(generate_batch, "MOST_SEQUENCES", most)
    caches = [text_decoder.new_cache() for _ in PROMPTS]
    batch = text_decoder.generate_batch(PROMPTS, max_new_tokens=6, caches=caches, **how)
    bad = batch.answers[1]
    spoil(bad.cache, len(bad.prompt_tokens) + before)
    with pytest.raises(FrinkError, match=r"^prompt 1: the logits are not numbers"):
        finished(batch)
    for prompt, answer in zip(PROMPTS, batch.answers, strict=True):
        want, text = alone(text_decoder, prompt, max_new_tokens=before or 1 if answer is bad else 6, **how)
        assert answer.tokens == want.tokens[: before if answer is bad else None]
        if answer is not bad:
            assert (answer.text, answer.finish_reason, answer.error) == (text, "length", None)
    assert bad.cache.positions == len(bad.prompt_tokens) + max(0, before - 1)
    assert (bad.finish_reason, str(bad.error)) == (None, NOT_NUMBERS)
    assert list(batch) == []


def test_several_answers_that_fail_are_said_once(text_decoder, spoil):
    """The first is named; each says why for itself. Nobody keeps their rows."""
    batch = text_decoder.generate_batch(PROMPTS, max_new_tokens=6)
    for number, before in ((2, 4), (4, 0)):
        spoil(batch.answers[number].cache, len(batch.answers[number].prompt_tokens) + before)
    with pytest.raises(FrinkError, match=r"^prompt 2 \(and 1 more, .*\): the logits are not numbers"):
        finished(batch)
    assert [answer.error is not None for answer in batch.answers] == [False, False, True, False, True, False]
    assert [len(answer.tokens) for answer in batch.answers] == [6, 6, 4, 6, 0, 6]
    assert sum(answer.cache.nbytes for answer in batch.answers) == 0


def test_an_answer_that_failed_is_not_said_when_the_reader_leaves(text_decoder, spoil):
    batch = text_decoder.generate_batch(PROMPTS, max_new_tokens=6)
    spoil(batch.answers[0].cache, 0)
    assert next(batch)[0] == 1
    batch.close()
    assert batch.answers[0].error is not None


@pytest.mark.parametrize("change", ["truncated", "grown"])
def test_a_cache_changed_between_pieces_is_asked_again(text_decoder, change):
    """As `generate` does: what was chosen from rows that are gone is not handed out."""

    def changed(cache):
        if change == "truncated":
            cache.truncate(cache.positions - 1)
        else:
            text_decoder.decode(5, cache)

    prompts = PROMPTS[:2]
    caches = [text_decoder.new_cache() for _ in prompts]
    batch = text_decoder.generate_batch(prompts, max_new_tokens=8, caches=caches)
    for number, _ in batch:
        if number == 0 and len(batch.answers[0].tokens) == 4:
            changed(caches[1])
    cache = text_decoder.new_cache()
    answer = text_decoder.generate(prompts[1], max_new_tokens=8, cache=cache)
    for _ in answer:
        if len(answer.tokens) == 3:  # the other answer's fourth piece came before this one's
            changed(cache)
    assert batch.answers[1].tokens == answer.tokens
    assert caches[1].positions == cache.positions
