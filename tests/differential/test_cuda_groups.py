"""Groups of sequences on a GPU, against the same sequences alone on the same device, at a real model's sizes."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from frink_numba.backend import Edges, Serve, Step
from frink_numba.cuda.backend import CudaBackend
from frink_numba.host.kv_cache import KVCache
from tests import reference
from tests.differential.gpu import device_of, poison
from tests.differential.test_cuda_tiers import SIZES, layers
from tests.random_blocks import random_matrix

pytestmark = pytest.mark.gpu

VOCABULARY = 2048
BOUND = 4e-3  # two layers, by kernels that may differ for one row and for many
TIERS = ("mma", "wgmma")
# Rows of each sequence: prompts, single tokens of few and of many sequences, a few rows each, long ones and short ones.
GROUPS = ([64, 1, 200, 17, 5], [1, 1, 1, 1, 1], [1] * 20, [3, 8, 2], [600, 1, 64, 64, 64, 130], [1] * 64, [7])


@cache
def edges(size: str) -> Edges:
    rng, width = np.random.default_rng(4), SIZES[size].hidden
    embedding, output = (random_matrix("Q8_0", VOCABULARY, width, rng) for _ in range(2))
    return Edges(embedding, 1.0, (1 + rng.normal(0, 0.1, width)).astype(np.float32), 1e-5, output)


def steps_over(size: str, caches, sizes, seed: int, **fields) -> list[Step]:
    rng, between = np.random.default_rng(seed), edges(size)
    made = []
    for cache_, n in zip(caches, sizes, strict=True):
        tokens = rng.integers(0, VOCABULARY, n)
        start = cache_.positions if fields.get("keep", True) else 0
        made.append(Step(layers(size), cache_, start, n, tokens=tokens, edges=between, lookup=lambda: None, **fields))
    return made


def alone(backend: CudaBackend, step: Step, copy: KVCache):
    """The step by itself, over a cache with the same rows: (logits, the new rows)."""
    one = Step(step.layers, copy, copy.positions, step.batch, tokens=step.tokens, edges=step.edges,
               lookup=step.lookup, logits=step.logits)  # fmt: skip
    run = backend.run(0, len(step.layers), one)
    assert run is not None
    return run.logits.copy(), [part.copy() for pair in run.kv_rows for part in pair]


def check(name: str, got: np.ndarray, want: np.ndarray) -> None:
    assert np.isfinite(got).all(), f"{name}: not finite at {np.argwhere(~np.isfinite(got))[:4].tolist()}"
    error = reference.relative_error(got, want)
    assert error < BOUND, f"{name}: {error:.2e}"


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("size", SIZES)
def test_a_group_equals_its_sequences_alone(size: str, tier: str):
    """R8, R11, R24: group after group over the same caches, scratch poisoned in between; twice the same bits."""
    model = layers(size)
    backend = CudaBackend(model, device_of(tier))
    try:
        caches, copies = ([KVCache(model, 2048, allocate=backend.host_bytes) for _ in range(64)] for _ in range(2))
        for number, sizes in enumerate(GROUPS):
            steps = steps_over(size, caches[: len(sizes)], sizes, number, logits=1)
            assert isinstance(backend.serves_group(steps), Serve)
            if backend.stats.runs:
                poison(backend.device)
            first = backend.run_group(steps)
            assert first is not None, "the group failed; see the log"
            bits = [part.copy() for run in first for pair in run.kv_rows for part in pair] + [r.logits for r in first]
            runs = backend.run_group(steps)
            assert runs is not None
            again = [part for run in runs for pair in run.kv_rows for part in pair] + [r.logits for r in runs]
            for one, other in zip(bits, again, strict=True):
                np.testing.assert_array_equal(one, other)
            for at, (step, run, copy) in enumerate(zip(steps, runs, copies, strict=False)):
                logits, rows = alone(backend, step, copy)
                where = f"group {number}, sequence {at}"
                check(f"{where}: logits", run.logits, logits)
                for part, (got, want) in enumerate(zip((p for pair in run.kv_rows for p in pair), rows, strict=True)):
                    check(f"{where}: rows {part}", got, want)
                for cache_ in (step.caches, copy):  # each group is compared over equal rows
                    cache_.push(run.kv_rows)
        assert backend.stats.prefix_up == 0
    finally:
        backend.close()


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("size", SIZES)
def test_texts_whose_rows_nobody_keeps(size: str, tier: str):
    """Logits of the last rows, and scores of every token, against single prefills that keep their rows."""
    model = layers(size)
    backend = CudaBackend(model, device_of(tier))
    rng = np.random.default_rng(8)
    try:
        blank, texts = KVCache(model, 2048, allocate=backend.host_bytes), [64, 64, 1, 300, 33, 64]
        steps = steps_over(size, [blank] * len(texts), texts, 3, keep=False, logits=1)
        runs = backend.run_group(steps)
        assert runs is not None
        poison(backend.device)
        scored = steps_over(size, [blank] * len(texts), texts, 3, keep=False)
        for step in scored:
            step.logits, step.targets = step.batch, rng.integers(0, VOCABULARY, step.batch)
        scores = backend.run_group(scored)
        assert scores is not None
        for step, run, score in zip(scored, runs, scores, strict=True):
            want, _ = alone(backend, step, KVCache(model, 2048, allocate=backend.host_bytes))
            check("logits", run.logits, want[-1:])
            top = want.max(axis=1, keepdims=True).astype(np.float64)
            total = np.log(np.exp(want - top).sum(axis=1, keepdims=True))
            truth = (want - top - total)[np.arange(step.batch), step.targets]
            assert np.abs(score.scores - truth).max() < 2 * BOUND * np.abs(want).max()
    finally:
        backend.close()


@pytest.mark.parametrize("tier", TIERS)
def test_the_likeliest_tokens(tier: str):
    """The chosen token is the largest of the logits that the same group answers; going ahead is going one by one."""
    model, size = layers("small"), "small"
    backend = CudaBackend(model, device_of(tier))
    try:
        for count in (3, 40):
            caches = [KVCache(model, 256, allocate=backend.host_bytes) for _ in range(count)]
            plain = backend.run_group(steps_over(size, caches, [1] * count, count, logits=1))
            assert plain is not None
            logits = np.concatenate([run.logits for run in plain])
            greedy = steps_over(size, caches, [1] * count, count, logits=1, ahead=1, choices=VOCABULARY)
            runs = backend.run_group(greedy)
            assert runs is not None
            assert [int(run.tokens[0]) for run in runs] == logits.argmax(axis=1).tolist()
            ahead = backend.run_group(
                steps_over(size, caches, [1] * count, count, logits=1, ahead=20, choices=VOCABULARY)
            )
            assert ahead is not None
            made = [run.tokens.copy() for run in ahead]
            rows = [[part.copy() for pair in run.kv_rows for part in pair] for run in ahead]
            for at in range(20):  # the same, one at a time
                for step, tokens in zip(greedy, made, strict=True):
                    step.start_pos = step.caches.positions
                    if at:
                        step.tokens = tokens[at - 1 : at]
                runs = backend.run_group(greedy)
                assert runs is not None
                assert [int(run.tokens[0]) for run in runs] == [int(tokens[at]) for tokens in made]
                for step, run, truth in zip(greedy, runs, rows, strict=True):
                    for part, want in zip((p for pair in run.kv_rows for p in pair), truth, strict=True):
                        np.testing.assert_array_equal(part, want[at : at + 1])
                    step.caches.push(run.kv_rows)
    finally:
        backend.close()
