"""Blocks of rows: a step in several gives the bits of as many steps, and nothing waits or is overwritten in between."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from frink_numba.backend import Edges, Step
from frink_numba.cuda.backend import CudaBackend
from frink_numba.host.kv_cache import KVCache
from tests import reference
from tests.cuda.fake_tensor import tensor_device
from tests.cuda.tensor_stacks import (
    LIMIT,
    advance,
    assert_equal,
    hidden_rows,
    random_rows,
    step_over,
    taken,
    unlike_layers,
)
from tests.kernels.packed_weights import random_matrix

LAYERS = unlike_layers()
WIDTH = LAYERS[0].hidden_dim
TIERS = ("wgmma", "mma")


def edges(seed: int = 5, vocabulary: int = 64) -> Edges:
    rng = np.random.default_rng(seed)
    embedding, output = (random_matrix("Q8_0", vocabulary, WIDTH, rng) for _ in "eo")
    return Edges(embedding, 1.0, np.ones(WIDTH, np.float32), 1e-5, output)


EDGES = edges()


def backend_with(block_rows: int | None, tier: str = "wgmma", **how: Any) -> CudaBackend:
    return CudaBackend(LAYERS, tensor_device(tier, block_rows=block_rows, **how))


def cache_at(start_pos: int, allocate: Any = None) -> KVCache:
    cache = KVCache(LAYERS, 512, allocate=allocate)
    if start_pos:
        cache.push(random_rows(LAYERS, start_pos))
    return cache


def token_step(cache: KVCache, batch: int, logits: int) -> Step:
    ids = np.random.default_rng(batch).integers(0, 64, batch)
    return Step(
        LAYERS, cache, cache.positions, batch, tokens=ids, edges=EDGES, lookup=lambda: hidden_rows(batch), logits=logits
    )


@pytest.mark.parametrize("start_pos", [0, 5])
@pytest.mark.parametrize(("batch", "rows"), [(40, 16), (48, 16), (33, 32), (12, 16)])
@pytest.mark.parametrize("tier", TIERS)
def test_a_step_in_blocks_equals_steps(tier: str, batch: int, rows: int, start_pos: int):
    """To the bit, hidden rows and K/V rows (R11, R24); the rest of a step has a size of its own."""
    backend = backend_with(rows, tier)
    cache, x = cache_at(start_pos, backend.host_bytes), hidden_rows(batch)
    got = taken(backend.run(0, len(LAYERS), step_over(LAYERS, cache, x)))

    single, parts = backend_with(None, tier), []
    other = cache_at(start_pos)
    for first in range(0, batch, rows):
        parts.append(advance(single, LAYERS, other, x[first : first + rows]))
    assert_equal(got, [np.concatenate(part) for part in zip(*parts, strict=True)])


@pytest.mark.parametrize("logits", [0, 1, 12, 20, 40])
def test_logits_of_blocks(logits: int):
    """From tokens to the last logits: rows of several blocks come down one behind the other, as from steps."""
    batch, rows = 40, 16
    backend = backend_with(rows)
    cache = cache_at(3, backend.host_bytes)
    step = token_step(cache, batch, logits)
    run = backend.run(0, len(LAYERS), step)
    assert run.hidden is None
    kv = [part.copy() for pair in run.kv_rows for part in pair]

    single, other, made, rows_made = backend_with(None), cache_at(3), [], []
    for first in range(0, batch, rows):
        end = min(batch, first + rows)
        wanted = max(0, min(end - first, end - (batch - logits)))
        part = Step(
            LAYERS, other, other.positions, end - first, tokens=step.tokens[first:end], edges=EDGES,
            lookup=lambda n=end - first: hidden_rows(n), logits=wanted,
        )  # fmt: skip
        answer = single.run(0, len(LAYERS), part)
        rows_made.append([x.copy() for pair in answer.kv_rows for x in pair])
        other.push(answer.kv_rows)
        if wanted:
            made.append(answer.logits.copy())
    assert_equal(kv, [np.concatenate(part) for part in zip(*rows_made, strict=True)])
    if logits:
        np.testing.assert_array_equal(run.logits, np.concatenate(made))


@pytest.mark.parametrize("logits", [1, 9, 30])
def test_the_last_layer_ends_with_the_rows_that_are_wanted(logits: int):
    """Logits of the last rows alone are those of all rows, within what kernels for other numbers of rows differ by."""
    backend = backend_with(None)
    few, everything = (
        backend.run(0, len(LAYERS), token_step(cache_at(7), 40, wanted)).logits.copy() for wanted in (logits, 40)
    )
    error = reference.relative_error(few, everything[-logits:].astype(np.float64))
    assert error < LIMIT


def test_nobody_runs_what_nobody_wants():
    """Of the last layer's products but the first, rows without logits see nothing; without logits there are none."""
    made = {}
    for logits in (0, 1, 40):
        backend = backend_with(None)
        backend.run(0, len(LAYERS), token_step(cache_at(0), 40, logits))
        program = next(iter(backend.device.body._programs.values()))
        ops = [op for part in (*program.segments, *program.heads) for op in part.launches]
        made[logits] = [op.name for op in ops if op.layer == len(LAYERS) - 1]
    assert made[0] == made[40][: len(made[0])]
    assert made[0][-1] == "prepare"
    assert "down" in made[1]
    assert "down" in made[40]


@pytest.mark.parametrize("schedule", ["lazy", "reversed", "random"])
def test_no_order_of_the_streams_changes_a_bit(schedule: str, segments: None):
    """Events alone order the streams, from block to block too: their rows share memory, at one place or at others."""
    want = None
    for seed in range(-1, 6 if schedule == "random" else 1):
        backend = backend_with(16, schedule="issue" if seed < 0 else schedule, seed=max(seed, 0))
        cache = cache_at(5, backend.host_bytes)
        run = backend.run(0, len(LAYERS), token_step(cache, 44, 20))
        got = [run.logits.copy(), *(part.copy() for pair in run.kv_rows for part in pair)]
        want = got if want is None else want
        assert_equal(got, want)


def test_blocks_of_other_sizes_wait_for_the_rows_before(segments: None, monkeypatch: pytest.MonkeyPatch):
    """The rest of a step has its K/V rows elsewhere, where those of the block before may not be down yet."""
    from frink_numba.cuda.tensor.run import BlockRun

    def answer() -> list[np.ndarray]:
        backend = backend_with(16, schedule="lazy")
        return taken(backend.run(0, len(LAYERS), step_over(LAYERS, cache_at(0), hidden_rows(25))))

    want = answer()
    monkeypatch.setattr(BlockRun, "_wait", lambda self, slots: None)
    assert not all(map(np.array_equal, answer(), want))


def test_a_program_serves_many_blocks_of_a_step():
    """Blocks of one size in the middle of a step share a program, whose image goes up anew for each."""
    backend = backend_with(8)
    x = hidden_rows(40)
    got = taken(backend.run(0, len(LAYERS), step_over(LAYERS, cache_at(0), x)))
    assert len(backend.device.body._programs) == 1
    assert_equal(got, taken(backend.run(0, len(LAYERS), step_over(LAYERS, cache_at(0), x))))


def test_scratch_is_that_of_a_block():
    """Chunked prefill keeps scratch constant: of a block, however long the step (issue: memory)."""
    backend = backend_with(16)
    scratch = backend.device.body.scratch(LAYERS)
    sizes = {scratch.nbytes(batch, 0) for batch in (16, 32, 160, 1600)}
    assert len(sizes) == 1
    assert max(scratch.nbytes(batch, 0) for batch in (17, 31, 45)) >= sizes.pop()
    for batch in (33, 300):
        need = scratch.nbytes(batch, 0)
        backend = backend_with(16)
        assert backend.run(0, len(LAYERS), step_over(LAYERS, cache_at(0), hidden_rows(batch))) is not None
        assert need <= backend.device.arena_bytes <= need + need // 4


def test_a_failure_in_any_block_leaves_the_cache(segments: None):
    """R21: what fails in the last block fails the step, and the next one goes on from the same cache."""
    backend = backend_with(16)
    cache, x, runtime = cache_at(3, backend.host_bytes), hidden_rows(40), backend.device.runtime
    step = lambda: backend.run(0, len(LAYERS), step_over(LAYERS, cache, x))  # noqa: E731
    want, before = taken(step()), len(runtime.calls)
    step()
    calls = runtime.calls[before:]
    assert calls.count("replay") > 20
    for at in range(0, len(calls), 17):
        runtime.fail_at = len(runtime.calls) + at
        assert step() is None
        runtime.fail_at = None
        assert cache.positions == 3
        assert_equal(taken(step()), want)
