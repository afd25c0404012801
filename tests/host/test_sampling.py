"""The sampling chain: against transformers' processors, by its statistics, by seed, and its errors."""

import numpy as np
import pytest

from frink_numba.errors import FrinkError, SettingError
from frink_numba.host.sampling import Sampler, Sampling
from tests.golden.sampling import CASES, FILE, VOCAB, logits, seen


def dense(sampler, scores):
    ids, probabilities = sampler.distribution(scores)
    out = np.zeros(len(scores))
    out[ids] = probabilities
    return out


@pytest.mark.parametrize("number", range(len(CASES)))
def test_the_distribution_is_transformers(number):
    sampler = Sampler(Sampling(**CASES[number]), VOCAB)
    sampler.see(seen(number))
    mine, golden = dense(sampler, logits(number)), np.load(FILE)[number]
    np.testing.assert_array_equal(mine > 0, golden > 0)
    np.testing.assert_allclose(mine, golden, rtol=1e-5, atol=1e-12)
    assert mine.sum() == pytest.approx(1, abs=1e-12)


def test_the_golden_has_cases_that_cut_and_cases_that_do_not():
    kept = (np.load(FILE) > 0).sum(axis=1)
    assert kept.min() == 1
    assert kept.max() == VOCAB
    assert len(set(kept.tolist())) > 6


def test_draws_have_the_frequencies_of_the_distribution():
    """20,000 draws, a chi-squared statistic over the tokens that are expected at least 20 times."""
    scores = logits(0)
    sampler = Sampler(Sampling(temperature=1.0, top_p=0.9, seed=11), VOCAB)
    expected = dense(sampler, scores) * 20000
    drawn = np.bincount([sampler.choose(scores) for _ in range(20000)], minlength=VOCAB)
    assert not drawn[expected == 0].any()
    often = expected >= 20
    statistic = ((drawn[often] - expected[often]) ** 2 / expected[often]).sum()
    degrees = int(often.sum())
    assert degrees > 10
    assert statistic < degrees + 5 * np.sqrt(2 * degrees)


def test_equal_seeds_choose_equal_tokens():
    def run(seed):
        sampler = Sampler(Sampling(temperature=1.5, top_k=100, seed=seed), VOCAB)
        return [sampler.choose(logits(number)) for number in range(len(CASES))]

    assert run(3) == run(3)
    assert run(3) != run(4)
    assert run(None) != run(None)


def test_temperature_zero_takes_the_most_likely_and_the_lowest_id_among_equals():
    scores = np.array([0.5, 2.0, 2.0, -1.0], np.float32)
    assert Sampler(Sampling(), 4).choose(scores) == 1


def test_what_was_chosen_counts_for_the_repetition_penalty():
    scores = np.array([1.0, 0.8, -3.0], np.float32)
    sampler = Sampler(Sampling(repetition_penalty=1.5), 3)
    assert [sampler.choose(scores) for _ in range(3)] == [0, 1, 0]  # 1 / 1.5 < 0.8, then 0.8 / 1.5 < 1 / 1.5
    np.testing.assert_array_equal(scores, np.array([1.0, 0.8, -3.0], np.float32))


def test_a_penalty_pushes_negative_logits_down_too():
    sampler = Sampler(Sampling(temperature=1.0, repetition_penalty=2.0), 2)
    sampler.see([1])
    assert dense(sampler, np.array([-1.0, -1.0], np.float32))[1] == pytest.approx(
        np.exp(-2) / (np.exp(-1) + np.exp(-2))
    )


def test_large_logits_and_small_temperatures_do_not_overflow():
    scores = np.array([3e4, 2.9e4, -3e4], np.float32)
    probabilities = dense(Sampler(Sampling(temperature=1e-3), 3), scores)
    np.testing.assert_array_equal(probabilities, [1, 0, 0])


def test_a_logit_of_minus_infinity_is_never_chosen():
    scores = np.array([-np.inf, 0.0, -np.inf], np.float32)
    sampler = Sampler(Sampling(temperature=2.0, seed=0), 3)
    assert {sampler.choose(scores) for _ in range(50)} == {1}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_never_passes(temperature):
    scores = np.array([1.0, np.nan, 0.0], np.float32)
    with pytest.raises(FrinkError, match="not numbers"):
        Sampler(Sampling(temperature=temperature), 3).choose(scores)


def test_numpys_numbers_are_numbers():
    sampling = Sampling(temperature=np.float32(0.5), top_k=np.int64(3), top_p=np.float64(0.9), min_p=np.float16(0.25))
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 3, 0.9, 0.25)


@pytest.mark.parametrize("temperature", [5e-324, 1e-320, 1e-300, 1e-30, 1e300])
@pytest.mark.parametrize("penalty", [1e-6, 1.0, 1e6])
def test_extremes_choose_without_a_warning(temperature, penalty):
    """The coldest is greedy, the hottest blind; a penalty as large as any leaves numbers."""
    scores = np.array([-3e30, 2.0, 3e30, 1.0], np.float32)
    sampler = Sampler(Sampling(temperature=temperature, repetition_penalty=penalty, seed=1), 4)
    sampler.see([0, 2])
    _, p = sampler.distribution(scores)
    assert np.isfinite(p).all()
    assert p.sum() == pytest.approx(1)
    assert p[2] == (1 if temperature < 1 else pytest.approx(0.25))
    assert 0 <= sampler.choose(scores) < 4


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_infinite_logits_share_what_there_is(temperature):
    sampler = Sampler(Sampling(temperature=temperature, seed=3), 3)
    scores = np.array([np.inf, 1.0, np.inf], np.float32)
    assert {sampler.choose(scores) for _ in range(40)} == ({0} if temperature == 0 else {0, 2})


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": "hot"},
        {"top_k": -1},
        {"top_k": 1.5},
        {"top_k": True},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": None},
        {"min_p": -0.1},
        {"min_p": 2},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": 1e-300},
        {"repetition_penalty": 1e300},
        {"temperature": 10**400},
        {"temperature": "1"},
        {"temperature": True},
        {"temperature": np.array([1.0, 2.0])},
        {"top_p": 1 - 10**400},
        {"repetition_penalty": float("inf")},
        {"seed": -1},
        {"seed": 1.0},
    ],
)
def test_a_value_out_of_range_is_named(bad):
    with pytest.raises(SettingError, match=f"^{next(iter(bad))}="):
        Sampling(**bad)
