"""Runs that come again as one graph: the same bits, a handful of driver calls, never rows in the wrong place."""

from __future__ import annotations

import logging
from collections import Counter

import numpy as np
import pytest

from frink_numba.backend import Edges, Step
from frink_numba.cuda.backend import CudaBackend
from frink_numba.cuda.tensor import cuts
from frink_numba.cuda.tensor.step_graph import StepGraph, StepGraphs
from frink_numba.host.kv_cache import KVCache
from tests.cuda.fake_gpu import FakeCudaError
from tests.cuda.fake_tensor import tensor_device
from tests.cuda.steps import rows_of
from tests.cuda.tensor_stacks import OPTIONS, assert_equal, hidden_rows, unlike_layers
from tests.kernels.packed_weights import random_matrix

LAYERS = unlike_layers(7, [OPTIONS[1], OPTIONS[2], OPTIONS[1], OPTIONS[2]])
ROWS = 20


@pytest.fixture(autouse=True)
def _segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows come down in several parts, as those of real models do."""
    monkeypatch.setattr(cuts, "_SEGMENT_BYTES", 1)
    monkeypatch.setattr(cuts, "_SEGMENTS", 4)


def new_edges() -> Edges:
    width = LAYERS[0].hidden_dim
    matrix = random_matrix("Q8_0", 64, width, np.random.default_rng(5))
    return Edges(matrix, 1.0, np.ones(width, np.float32), 1e-5, matrix)


EDGES = new_edges()


def new_cache(backend: CudaBackend, capacity: int = 64) -> KVCache:
    cache = KVCache(LAYERS, 256, allocate=backend.host_bytes)
    cache.reserve(capacity)
    return cache


def step_of(cache: KVCache, seed: int, logits: int = 1, rows: int = ROWS) -> Step:
    ids = np.random.default_rng(seed).integers(0, 64, rows)
    return Step(
        LAYERS, cache, cache.positions, rows, tokens=ids, edges=EDGES, lookup=lambda: hidden_rows(rows), logits=logits
    )


def go(backend: CudaBackend, cache: KVCache, seed: int, logits: int = 1, rows: int = ROWS) -> np.ndarray:
    run = backend.run(0, len(LAYERS), step_of(cache, seed, logits, rows))
    assert run is not None
    made = run.logits.copy() if logits else np.zeros(0, np.float32)
    cache.push(run.kv_rows)
    return made


def want(seeds: list[int]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Logits and rows of prompts one behind the other, each step the first of its device."""
    cache, logits = KVCache(LAYERS, 256), []
    for seed in seeds:
        logits.append(go(CudaBackend(LAYERS, tensor_device()), cache, seed))
    return logits, rows_of(cache)


@pytest.mark.parametrize("schedule", ["lazy", "reversed", "random"])
def test_a_step_that_comes_again_is_one_graph_with_the_same_answers(schedule: str) -> None:
    """R9, R10: other tokens at the same place; in whatever order the streams run, all is as in a first step."""
    backend = CudaBackend(LAYERS, tensor_device(schedule=schedule))
    runtime, cache = backend.device.runtime, new_cache(backend)
    for seed in range(5):
        cache.truncate(0)
        runtime.calls.clear()
        before = backend.stats
        logits = go(backend, cache, seed)
        (right,), rows = want([seed])
        np.testing.assert_array_equal(logits, right)
        assert_equal(rows_of(cache), rows)
        if seed >= 2:
            assert runtime.calls == ["replay", "fetch", "synchronize"]
        after = backend.stats
        assert after.kv_down - before.kv_down == sum(part.nbytes for part in rows)
        assert after.logits_down - before.logits_down == logits.nbytes


def test_calls_of_a_step_that_is_queued_piece_by_piece() -> None:
    """The host's time goes here: a launch, a copy and their events for each segment, and no more than that."""
    backend = CudaBackend(LAYERS, tensor_device())
    cache = new_cache(backend)
    go(backend, cache, 0)
    backend.device.runtime.calls.clear()
    go(backend, cache, 1)
    (program,) = backend.device.body._programs.values()
    segments = len(program.segments)
    assert segments > 2
    counts = Counter(backend.device.runtime.calls)
    assert counts.pop("synchronize") == counts.pop("send") == 1
    assert counts.pop("replay") == len(program.parts)
    assert counts.pop("fetch_strided", 0) + counts.pop("fetch") // 2 <= 2 * segments + 1
    assert counts.pop("record") <= 2 * segments
    assert counts.pop("wait") <= 2 * segments + 1
    assert not counts


def test_other_places_have_graphs_of_their_own() -> None:
    """R11, R12: parts of a text at two positions, two caches, and a cache that has moved: never the wrong memory."""
    backend = CudaBackend(LAYERS, tensor_device())
    runtime, caches = backend.device.runtime, [new_cache(backend) for _ in range(2)]
    for turn in range(4):
        for number, cache in enumerate(caches):
            cache.truncate(0)
            seeds = [10 * turn + number, 10 * turn + number + 5]
            runtime.calls.clear()
            logits = [go(backend, cache, seed) for seed in seeds]
            right, rows = want(seeds)
            assert_equal(logits, right)
            assert_equal(rows_of(cache), rows)
            assert turn < 2 or runtime.calls.count("replay") == 2
    cache = caches[0]
    kept = rows_of(cache)
    cache.reserve(200)  # in other memory
    cache.truncate(ROWS)
    logits = go(backend, cache, 77)
    assert_equal([part[:ROWS] for part in rows_of(cache)], [part[:ROWS] for part in kept])
    other = KVCache(LAYERS, 256)
    other.push([(k[:ROWS], v[:ROWS]) for k, v in zip(kept[::2], kept[1::2], strict=True)])
    np.testing.assert_array_equal(logits, go(CudaBackend(LAYERS, tensor_device()), other, 77))
    assert_equal(rows_of(cache), rows_of(other))


@pytest.mark.parametrize("kind", ["float16", "pageable", "hidden", "all logits"])
def test_what_is_no_such_run_is_queued_piece_by_piece(kind: str) -> None:
    """Rows that do not go straight into a cache, and answers that come down in between."""
    backend = CudaBackend(LAYERS, tensor_device())
    dtype = np.float16 if kind == "float16" else np.float32
    cache = KVCache(LAYERS, 256, dtype=dtype, allocate=None if kind == "pageable" else backend.host_bytes)
    cache.reserve(64)
    for seed in range(4):
        cache.truncate(0)
        step = step_of(cache, seed)
        if kind == "hidden":
            step.tokens, step.hidden = None, hidden_rows(ROWS, seed)
        elif kind == "all logits":
            step.hidden_after = frozenset({len(LAYERS) - 1})
        backend.device.runtime.calls.clear()
        run = backend.run(0, len(LAYERS), step)
        cache.push(run.kv_rows)
        assert backend.device.runtime.calls.count("replay") > 1


def test_a_driver_that_cannot_capture_is_asked_once(caplog: pytest.LogCaptureFixture) -> None:
    """The step goes on, and so do all later ones."""
    backend = CudaBackend(LAYERS, tensor_device())
    runtime, cache = backend.device.runtime, new_cache(backend)
    go(backend, cache, 0)
    real, asked = runtime.graph, []

    def refuse(stream: object, launches: object) -> object:
        asked.append(launches)
        raise FakeCudaError("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED")

    runtime.graph = refuse
    with caplog.at_level(logging.WARNING):
        for seed in range(3):
            cache.truncate(0)
            logits = go(backend, cache, seed)
            (right,), rows = want([seed])
            np.testing.assert_array_equal(logits, right)
            assert_equal(rows_of(cache), rows)
    runtime.graph = real
    assert len(asked) == 1
    assert "cannot be captured" in caplog.text


def test_a_failed_graph_leaves_everything_as_it_was_and_the_next_step_works() -> None:
    """R10, R21: at every call of a step that is one graph."""
    for point in range(3):
        backend = CudaBackend(LAYERS, tensor_device())
        runtime, cache = backend.device.runtime, new_cache(backend)
        for seed in range(3):
            cache.truncate(0)
            go(backend, cache, seed)
        kept = rows_of(cache)
        cache.truncate(0)
        runtime.calls.clear()
        runtime.fail_at = point
        assert backend.run(0, len(LAYERS), step_of(cache, 9)) is None
        runtime.fail_at = None
        assert cache.positions == 0
        logits = go(backend, cache, 9)
        (right,), rows = want([9])
        np.testing.assert_array_equal(logits, right)
        assert_equal(rows_of(cache), rows)
        assert any(not np.array_equal(a, b) for a, b in zip(kept, rows, strict=True))


def test_graphs_go_with_what_their_launches_need() -> None:
    """Weights that are dropped take the graphs with them: no step may launch what reads freed memory."""
    backend = CudaBackend(LAYERS, tensor_device())
    cache = new_cache(backend)
    for seed in range(3):
        cache.truncate(0)
        go(backend, cache, seed)
    assert backend.device.body._graphs._known
    backend.close()
    assert not backend.device.body._graphs._known
    cache.truncate(0)
    logits = go(backend, cache, 4)
    np.testing.assert_array_equal(logits, want([4])[0][0])


def test_no_more_graphs_are_kept_than_are_of_use() -> None:
    graphs = StepGraphs()
    made = []

    def capture() -> StepGraph:
        made.append(1)
        return StepGraph(lambda: None, 0)

    for _ in range(2):
        for key in range(4):
            graphs.find(key, capture)
    assert len(made) == 4
    for key in range(4, 30):
        assert graphs.find(key, capture) is None
    assert len(graphs._known) <= 8
    assert graphs.find(0, capture) is None, "it was forgotten"
