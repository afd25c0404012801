"""Several prompts at once: what each alone would answer, packed and cut, with caches of their own or none."""

from __future__ import annotations

import gc
import weakref
from itertools import pairwise

import numpy as np
import pytest

from frink_numba.backend import Run
from frink_numba.errors import BackendError, CacheError, Cancelled, PromptError, SettingError
from frink_numba.host.batch import MOST_SEQUENCES, packed
from frink_numba.host.layer_kv import LayerKV
from tests.golden.draws import integers

TOKENS = integers("decoder test", (600,), 80)
SIZES = (5, 1, 30, 64, 2, 17)


@pytest.fixture
def decoder(open_decoder):
    return open_decoder("llama_grouped")


def prompts(sizes=SIZES):
    edges = np.cumsum([0, *sizes])
    return [TOKENS[a:b] for a, b in pairwise(edges)]


def relative(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def test_packing_is_whole_in_order_and_within_bounds():
    """Short prompts share a group; one that is longer than a group is cut; no other is."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        rows = int(rng.integers(1, 40))
        lengths = rng.integers(1, 60, rng.integers(1, 200)).tolist()
        groups, seen = list(packed(lengths, rows)), [0] * len(lengths)
        for group in groups:
            assert sum(last - first for _, first, last in group) <= rows
            assert len({number for number, _, _ in group}) == len(group) <= MOST_SEQUENCES
            for number, first, last in group:
                assert first == seen[number] < last
                assert (first, last) == (0, lengths[number]) or lengths[number] > rows
                seen[number] = last
        assert seen == lengths
    assert len(list(packed([1] * 130, 4096))) == 3
    assert list(packed([], 10)) == []


@pytest.mark.parametrize("chunk_size", [None, 1, 16, 40])
@pytest.mark.parametrize("logits", ["last", "all", None])
@pytest.mark.parametrize("keep", [True, False])
def test_each_prompt_answers_as_alone(decoder, chunk_size, logits, keep):
    """R11, R24: behind rows of their own, however they are packed and cut."""
    caches, others = ([decoder.new_cache() for _ in SIZES] for _ in range(2))
    for at, pair in enumerate(zip(caches, others, strict=True)):
        for cache in pair if keep and at % 2 else ():
            decoder.prefill(TOKENS[300 : 300 + 7 * at], cache)
    got = decoder.prefill_batch(
        prompts(), caches if keep else None, logits=logits, hidden=(0, 2), chunk_size=chunk_size
    )
    for prompt, output, cache, other in zip(prompts(), got, caches, others, strict=True):
        want = decoder.prefill(prompt, other, logits=logits, hidden=(0, 2), chunk_size=chunk_size)
        assert (output.logits is None) == (want.logits is None)
        if want.logits is not None:
            assert output.logits.shape == want.logits.shape
            assert relative(output.logits, want.logits) < 1e-5
        for layer in (0, 2):
            assert relative(output.hidden[layer], want.hidden[layer]) < 1e-5
        if keep:
            assert cache.positions == other.positions
            for mine, theirs in zip(cache, other, strict=True):
                for one, two in zip(mine.prefix(), theirs.prefix(), strict=True):
                    assert relative(one, two) < 1e-5


def test_a_prompt_longer_than_a_chunk_needs_no_cache(decoder):
    got = decoder.prefill_batch([TOKENS[:100], TOKENS[100:103]], chunk_size=16)
    want = decoder.prefill(TOKENS[:100], decoder.new_cache())
    assert relative(got[0].logits, want.logits) < 1e-5


def test_rows_of_long_prompts_go_when_they_have_run(decoder, monkeypatch):
    """A batch whose rows nobody wants takes the memory of one long prompt."""
    made, real, most = [], type(decoder).new_cache, []

    def new_cache(self):
        cache = real(self)
        made.append(weakref.ref(cache))
        return cache

    def progress(done, total):
        gc.collect()
        caches = [cache for ref in made if (cache := ref()) is not None]
        most.append(sum(cache.positions > 0 for cache in caches))

    monkeypatch.setattr(type(decoder), "new_cache", new_cache)
    decoder.prefill_batch([TOKENS[at : at + 40] for at in (0, 40, 80, 120)], chunk_size=32, progress=progress)
    assert len(made) == 5
    assert max(most) <= 1


def test_no_prompts_answer_nothing(decoder):
    assert decoder.prefill_batch([]) == []


@pytest.mark.parametrize("chunk_size", [None, 16])
def test_scores_of_the_tokens_that_follow(decoder, chunk_size):
    """Log-probabilities, each of its own token given those before it."""
    inputs, targets = [p[:-1] for p in prompts((5, 2, 30, 64))], [p[1:] for p in prompts((5, 2, 30, 64))]
    got = decoder.prefill_batch(inputs, targets=targets, chunk_size=chunk_size)
    for own, target, output in zip(inputs, targets, got, strict=True):
        logits = decoder.prefill(own, decoder.new_cache(), logits="all").logits.astype(np.float64)
        truth = logits[np.arange(len(own)), target] - np.log(np.exp(logits).sum(axis=1))
        np.testing.assert_allclose(output.scores, truth, atol=2e-5)
        assert output.logits is None


def test_counts_of_experts_grow_by_one_a_piece(decoder):
    """R22."""
    before = [counts.get(0, 0) for counts in decoder.activations]
    decoder.prefill_batch(prompts())
    assert [counts[0] for counts in decoder.activations] == [count + len(SIZES) for count in before]


def test_a_prompt_that_fails_leaves_those_before_it_done(decoder, monkeypatch):
    """R10: all or nothing for each; the caches of the others stand where they were."""
    caches = [decoder.new_cache() for _ in range(4)]
    real, failing = LayerKV.with_tail, caches[2][1]

    def with_tail(layer, n):
        if layer is failing:
            raise MemoryError("told to fail")
        return real(layer, n)

    monkeypatch.setattr(LayerKV, "with_tail", with_tail)
    with pytest.raises((MemoryError, BackendError), match="told to fail"):
        decoder.prefill_batch(prompts((5, 6, 7, 8)), caches)
    assert caches[2].positions == 0
    assert all(cache.positions in (0, n) for cache, n in zip(caches, (5, 6, 7, 8), strict=True))


def test_progress_and_cancelling(decoder):
    seen, caches = [], [decoder.new_cache() for _ in SIZES]
    decoder.prefill_batch(prompts(), caches, chunk_size=40, progress=lambda *done: seen.append(done))
    assert seen[-1] == (sum(SIZES), sum(SIZES))
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    again = [decoder.new_cache() for _ in SIZES]
    with pytest.raises(Cancelled):
        decoder.prefill_batch(prompts(), again, chunk_size=40, progress=lambda *_: False)
    assert 0 < sum(cache.positions for cache in again) < sum(SIZES)


@pytest.mark.parametrize(
    ("given", "arguments", "error", "words"),
    [
        ([[1], []], {}, PromptError, "prompt 1: the prompt is empty"),
        ([[1], [2, 80]], {}, PromptError, "prompt 1: token 80 is outside"),
        ([[1], "text"], {}, PromptError, "prompt 1: the prompt is text"),
        ([[1], [1] * 5000], {}, PromptError, "prompt 1: 5000 tokens do not fit"),
        ([[1], [2]], {"logits": "first"}, SettingError, "logits='first'"),
        ([[1], [2]], {"targets": [[1]]}, PromptError, "2 prompts, but targets of 1"),
        ([[1], [2, 3]], {"targets": [[1], [2]]}, PromptError, "prompt 1: 2 tokens, but 1 targets"),
        ([[1]], {"chunk_size": 0}, SettingError, "chunk_size"),
    ],
)
def test_what_is_refused_names_the_prompt(decoder, given, arguments, error, words):
    with pytest.raises(error, match=words):
        decoder.prefill_batch(given, **arguments)


def test_caches_must_be_as_many_and_different(decoder, open_decoder):
    cache = decoder.new_cache()
    with pytest.raises(CacheError, match="2 prompts, but 1 caches"):
        decoder.prefill_batch([[1], [2]], [cache])
    with pytest.raises(CacheError, match="twice"):
        decoder.prefill_batch([[1], [2]], [cache, cache])
    other = open_decoder("qwen2_grouped").new_cache()
    with pytest.raises(CacheError, match="prompt 1: "):
        decoder.prefill_batch([[1], [2]], [cache, object()])
    del other
    assert cache.positions == 0


def test_a_token_each(decoder):
    """Decoding together: logits as alone, rows staged on request."""
    caches, others = ([decoder.new_cache() for _ in range(70)] for _ in range(2))
    for number, pair in enumerate(zip(caches, others, strict=True)):
        for cache in pair:
            decoder.prefill(TOKENS[number : number + 3 + number % 5], cache)
    outputs = decoder.decode_batch(TOKENS[:70], caches)
    for token, output, other in zip(TOKENS, outputs, others, strict=False):
        assert relative(output.logits, decoder.decode(int(token), other).logits) < 1e-5
    assert [cache.positions for cache in caches] == [other.positions for other in others]
    decoder.decode_batch(TOKENS[:70], caches, stage=True)
    assert {cache.staged for cache in caches} == {1}
    assert [cache.positions for cache in caches] == [other.positions for other in others]


def test_a_group_that_fails_runs_one_by_one(decoder, monkeypatch):
    """R21: any backend, also one that answers a group wrongly, costs no step."""
    backend = decoder._dispatcher.backends[0]
    calls = []
    monkeypatch.setattr(
        backend, "serves_group", lambda steps: decoder._dispatcher.backends[0].can_serve(0, steps[0]), raising=False
    )
    for wrong in (lambda steps: None, lambda steps: [], lambda steps: [Run(None, [])] * len(steps)):
        monkeypatch.setattr(
            backend, "run_group", lambda steps, w=wrong: calls.append(len(steps)) or w(steps), raising=False
        )
        caches = [decoder.new_cache() for _ in range(3)]
        got = decoder.prefill_batch(prompts((4, 5, 6)), caches)
        for prompt, output in zip(prompts((4, 5, 6)), got, strict=True):
            assert relative(output.logits, decoder.prefill(prompt, decoder.new_cache()).logits) < 1e-5
    assert calls == [3, 3, 3]


@pytest.mark.parametrize("name", ["llama_grouped", "mistral_window", "qwen2_grouped", "gemma2_caps", "llama_quantized"])
def test_the_host_runs_a_group_in_one_call(open_decoder, monkeypatch, name):
    """R24: products of all sequences together, attention of each behind its own rows; windows, caps, biases."""
    decoder = open_decoder(name)
    host = decoder._dispatcher.backends[-1]
    caches, others = ([decoder.new_cache() for _ in range(5)] for _ in range(2))
    for pair in zip(caches, others, strict=True):
        for cache in pair:
            decoder.prefill(TOKENS[:23], cache)
    calls = []
    real = host.run_group
    monkeypatch.setattr(host, "run_group", lambda steps: calls.append(len(steps)) or real(steps))
    vocab = decoder.model.vocab_size
    for turn in range(3):
        ids = (TOKENS[40 + 5 * turn : 45 + 5 * turn] % vocab).tolist()
        outputs = decoder.decode_batch(ids, caches)
        for token, output, other in zip(ids, outputs, others, strict=True):
            assert relative(output.logits, decoder.decode(token, other).logits) < 2e-5
    if decoder._dispatcher.backends[0] is host and not host.invariant:
        assert calls == [5, 5, 5]
    for cache, other in zip(caches, others, strict=True):
        for mine, theirs in zip(cache, other, strict=True):
            for one, two in zip(mine.prefix(), theirs.prefix(), strict=True):
                assert relative(one, two) < 1e-5
