"""Several sequences in one step of the device: ragged lengths, caches of every history, what comes down."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from frink_numba.backend import Step
from frink_numba.cuda.backend import CudaBackend
from frink_numba.cuda.tensor.group_program import size_class
from frink_numba.host.kv_cache import KVCache
from tests import reference
from tests.cuda.fake_tensor import tensor_device
from tests.cuda.group_steps import (
    ERROR,
    LAYERS,
    backend_on,
    cache_at,
    greedy_steps,
    run_group,
    steps_over,
    worst_error,
)
from tests.cuda.tensor_stacks import random_rows
from tests.cuda.test_tensor_edges import EDGES, VOCABULARY, expected

LAST = len(LAYERS) - 1
TIERS = ("wgmma", "mma")

SIZES = {
    "one": [1],
    "ragged": [5, 1, 12, 3],
    "single tokens": [1] * 5,
    "few rows each": [2, 8, 1],
    "many": [3] * 33,
    "long": [130, 1, 70],
}


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("keep", [True, False])
def test_a_group_answers_what_each_sequence_alone_would(tier: str, sizes: list[int], keep: bool):
    """R11, R24: ragged lengths behind prefixes of their own; without caches nothing of K/V comes down."""
    backend = backend_on(tensor_device(tier))
    starts = [(7 * at) % 20 if keep else 0 for at in range(len(sizes))]
    caches = [cache_at(backend if at % 3 else None, start, at) for at, start in enumerate(starts)]
    if not keep:
        caches = [cache_at(None, 0)] * len(sizes)
    steps = steps_over(caches, sizes, keep=keep)
    runs = run_group(backend, steps)
    assert max(map(worst_error, steps, runs)) < ERROR
    row = sum(8 * layer.attention.n_kv_heads * layer.attention.head_dim for layer in LAYERS)
    assert backend.stats.kv_down == (row * sum(sizes) if keep else 0)
    assert backend.stats.logits_down == 4 * VOCABULARY * len(sizes)
    assert backend.stats.synchronizations == 1


def test_all_logits_and_the_hidden_batch():
    """Rows of several heads: more logits than the device makes at a time."""
    backend = backend_on()
    steps = steps_over([cache_at(backend, 3 * at, at) for at in range(4)], [90, 2, 1, 60], "all",
                       hidden_after=frozenset({LAST}))  # fmt: skip
    for step, run in zip(steps, run_group(backend, steps), strict=True):
        hidden, logits = expected(step)
        assert reference.relative_error(run.logits, logits) < ERROR
        assert reference.relative_error(run.hidden, hidden) < ERROR


def test_no_logits_at_all():
    backend = backend_on()
    steps = steps_over([cache_at(backend, at, at) for at in range(3)], [4, 4, 9], 0)
    runs = run_group(backend, steps)
    assert [run.logits for run in runs] == [None] * 3
    assert max(map(worst_error, steps, runs)) < ERROR


def test_programs_are_used_again_for_other_lengths():
    """A group of another make-up finds the launches of its class; nothing of the last group shows."""
    backend = backend_on()
    device = backend.device
    for seed, sizes in enumerate(([30, 2, 9], [1, 37], [12, 12, 12, 1], [20, 20])):
        caches = [cache_at(backend, (seed + at) % 4, seed + at) for at in range(len(sizes))]
        steps = steps_over(caches, sizes)
        assert max(map(worst_error, steps, run_group(backend, steps))) < ERROR
    assert len(device.body._group_programs) < 4


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("pinned", [True, False])
def test_a_life_in_groups_and_alone(dtype, pinned: bool):
    """R8: prompts, tokens one by one, steps alone in between, cuts and rows of others: nothing goes up twice."""
    backend, plain = backend_on(), backend_on()
    rng, foreign = np.random.default_rng(5), dict[int, int]()
    caches = [cache_at(backend if pinned else None, 0, dtype=dtype) for _ in range(4)]
    row = sum(8 * layer.attention.n_kv_heads * layer.attention.head_dim for layer in LAYERS)
    for turn in range(16):
        chosen = [at for at in range(4) if rng.integers(4)] or [0]
        sizes = [int(rng.choice([1, 1, 2, 11])) for _ in chosen]
        if turn == 6:
            caches[0].truncate(caches[0].positions // 2)
        if turn == 9:
            caches[1].push(random_rows(LAYERS, 5, 77))
            foreign[1] = 5 * row
        steps = steps_over([caches[at] for at in chosen], sizes)
        before = backend.stats.prefix_up
        alone = turn % 5 == 3
        runs = [backend.run(0, len(LAYERS), step) for step in steps] if alone else run_group(backend, steps)
        if pinned and dtype is np.float32:
            assert backend.stats.prefix_up - before == sum(foreign.pop(at, 0) for at in chosen)
        for step, run in zip(steps, runs, strict=True):
            fresh = Step(LAYERS, copy_of(step.caches), step.start_pos, step.batch, tokens=step.tokens, edges=EDGES,
                         lookup=step.lookup, logits=1)  # fmt: skip
            other = plain.run(0, len(LAYERS), fresh)
            assert reference.relative_error(run.logits, other.logits) < ERROR
            assert worst_error(step, run) < 2 * ERROR
        for step, run in zip(steps, runs, strict=True):
            step.caches.push(run.kv_rows)


def copy_of(cache: KVCache) -> KVCache:
    copy = KVCache(LAYERS, 1024, dtype=cache.dtype)
    if cache.positions:
        copy.push([(k.copy(), v.copy()) for k, v in (layer.prefix() for layer in cache)])
    return copy


@pytest.mark.parametrize("tier", TIERS)
def test_the_likeliest_tokens_come_down_alone(tier: str):
    """Greedy steps: one int a sequence in place of its logits."""
    backend = backend_on(tensor_device(tier))
    steps = steps_over([cache_at(backend, 2 + at, at) for at in range(7)], [1] * 7, ahead=1, choices=VOCABULARY)
    runs = run_group(backend, steps)
    for step, run in zip(steps, runs, strict=True):
        logits = expected(step)[1][0]
        gap = logits.max() - logits[run.tokens[0]]
        assert gap <= ERROR * np.linalg.norm(logits)
        assert run.logits is None
    assert backend.stats.logits_down == 0


def test_logits_that_are_no_numbers_choose_minus_one():
    """As a step alone: the sequence that sees a bad row has no token, its neighbours have theirs."""
    backend = backend_on()
    caches = [cache_at(backend, 3, at) for at in range(3)]
    rows = random_rows(LAYERS, 1, 9)
    rows[1][0][0, 0, 0] = np.nan
    caches[1].push(rows)
    steps = steps_over(caches, [1, 1, 1], ahead=1, choices=VOCABULARY)
    tokens = [int(run.tokens[0]) for run in run_group(backend, steps)]
    assert tokens[1] == -1
    assert min(tokens[0], tokens[2]) >= 0


def one_by_one(backend: CudaBackend, caches: Sequence[KVCache], tokens: Sequence[int], count: int) -> np.ndarray:
    """Tokens [count, sequences] that groups choose one at a time, their rows pushed."""
    chosen, now = [], list(tokens)
    for _ in range(count):
        runs = run_group(backend, greedy_steps(caches, now, 1))
        now = [int(run.tokens[0]) for run in runs]
        for cache, run in zip(caches, runs, strict=True):
            cache.push(run.kv_rows)
        chosen.append(now)
    return np.array(chosen)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("count", [3, 5])
def test_a_group_goes_ahead(tier: str, count: int, segments: None):
    """Tokens and rows are those of steps one after the other, to the bit, with one wait; then it goes on from there."""
    plain, ahead = backend_on(tensor_device(tier)), backend_on(tensor_device(tier))
    theirs, mine = ([cache_at(backend, 2 + 3 * at, at) for at in range(count)] for backend in (plain, ahead))
    tokens: Sequence[int] = range(count)
    for size in (7, 4):
        want = one_by_one(plain, theirs, tokens, size)
        before = ahead.stats.synchronizations
        runs = run_group(ahead, greedy_steps(mine, tokens, size))
        assert ahead.stats.synchronizations - before == 1
        np.testing.assert_array_equal(np.stack([run.tokens for run in runs], axis=1), want)
        for cache, run in zip(mine, runs, strict=True):
            cache.push(run.kv_rows)
        tokens = want[-1].tolist()
    for one, other in zip(mine, theirs, strict=True):
        for got, rows in zip(one, other, strict=True):
            for part, truth in zip(got.prefix(), rows.prefix(), strict=True):
                np.testing.assert_array_equal(part, truth)


def test_how_far_a_group_goes_ahead():
    """As far as the least of its members wants, and the body can; one token where a member has more than a row."""
    backend = backend_on()
    caches = [cache_at(backend, 4, at) for at in range(2)]
    steps = greedy_steps(caches, [1, 2], 5)
    steps[1].ahead = 3
    assert [len(run.tokens) for run in run_group(backend, steps)] == [3, 3]
    assert [len(run.tokens) for run in run_group(backend, greedy_steps(caches, [1, 2], 500))] == [32, 32]
    steps = steps_over(caches, [1, 2], ahead=5, choices=VOCABULARY)
    assert [len(run.tokens) for run in run_group(backend, steps)] == [1, 1]


def test_what_follows_from_no_numbers_is_no_token():
    backend = backend_on()
    caches = [cache_at(backend, 3, at) for at in range(2)]
    rows = random_rows(LAYERS, 1, 9)
    rows[1][0][0, 0, 0] = np.nan
    caches[1].push(rows)
    tokens = [run.tokens.tolist() for run in run_group(backend, greedy_steps(caches, [1, 2], 4))]
    assert min(tokens[0]) >= 0
    assert tokens[1] == [-1] * 4


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("keep", [True, False])
def test_scores_of_given_tokens(tier: str, keep: bool):
    """One float32 a row in place of a row of logits, over more rows than a head takes at a time."""
    backend, sizes = backend_on(tensor_device(tier)), [70, 1, 90, 5]
    rng = np.random.default_rng(3)
    caches = [cache_at(backend, 0) for _ in sizes]
    steps = steps_over(caches, sizes, "all", keep=keep)
    for step in steps:
        step.targets = rng.integers(0, VOCABULARY, step.batch)
    for step, run in zip(steps, run_group(backend, steps), strict=True):
        logits = expected(step)[1]
        top = logits.max(axis=1, keepdims=True)
        truth = (logits - top - np.log(np.exp(logits - top).sum(axis=1, keepdims=True)))[
            np.arange(step.batch), step.targets
        ]
        assert run.scores.shape == (step.batch,)
        assert np.abs(run.scores - truth).max() < ERROR * np.abs(logits).max()
    assert backend.stats.logits_down == 0


def test_what_is_not_a_group_is_declined():
    """Mixed members, evicted or foreign caches, a hidden batch in place of tokens: one by one."""
    backend = backend_on()
    one, two = cache_at(backend, 3), cache_at(backend, 0)
    kept, lost = steps_over([one, two], [2, 2]), steps_over([two, two], [2, 2], keep=False)
    assert backend.serves_group(kept) is not None
    assert backend.serves_group([kept[0], lost[1]]) is None
    assert backend.serves_group(steps_over([one], [2], keep=False)) is None  # rows before it that nobody keeps
    hidden = Step(LAYERS, two, 0, 2, np.zeros((2, LAYERS[0].hidden_dim), np.float32))
    assert backend.serves_group([kept[0], hidden]) is None
    assert backend.serves_group(steps_over([cache_at(backend, 0) for _ in range(65)], [1] * 65)) is None


def test_size_classes_waste_little():
    """At most an eighth more rows than are needed, but for few; and few classes up to a chunk."""
    sizes = [size_class(n) for n in range(1, 4097)]
    assert all(n <= size for n, size in enumerate(sizes, 1))
    assert all(size <= 1.13 * n + 15 for n, size in enumerate(sizes, 1))
    assert len(set(sizes)) < 64
