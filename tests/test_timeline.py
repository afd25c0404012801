"""The timeline of a step, over a device made of NumPy: every launch is counted, and what it leaves behind is sound."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from benchmarks.timeline import Timeline, take
from frink_numba.backend import Edges, Step
from frink_numba.cuda.backend import CudaBackend
from frink_numba.host.kv_cache import KVCache
from tests.cuda.fake_tensor import tensor_device
from tests.cuda.tensor_stacks import hidden_rows, unlike_layers
from tests.kernels.packed_weights import random_matrix

LAYERS = unlike_layers()[1:4]


def a_step(backend: CudaBackend) -> tuple[Callable[[], None], list[np.ndarray]]:
    """A step as the benchmark makes it, and the logits of each time it ran."""
    width = LAYERS[0].hidden_dim
    matrix = random_matrix("Q8_0", 64, width, np.random.default_rng(5))
    edges = Edges(matrix, 1.0, np.ones(width, np.float32), 1e-5, matrix)
    cache, answers = KVCache(LAYERS, 20, allocate=backend.host_bytes), []
    cache.reserve(20)

    def step() -> None:
        cache.truncate(0)
        asked = Step(LAYERS, cache, 0, 20, tokens=np.arange(20), edges=edges, lookup=lambda: hidden_rows(20), logits=1)
        run = backend.run(0, len(LAYERS), asked)
        assert run is not None
        cache.push(run.kv_rows)
        answers.append(run.logits.copy())

    return step, answers


@pytest.mark.parametrize("block_rows", [None, 10, 12])
def test_every_launch_is_timed_and_the_step_stays_what_it_was(block_rows: int | None) -> None:
    """Of all blocks of a step: each has a program of its own here, as the last alone ends with logits."""
    device = tensor_device(block_rows=block_rows)
    backend = CudaBackend(LAYERS, device)
    step, answers = a_step(backend)
    worked = []

    def timer(_: object, work: Callable[[], None]) -> float:
        work()
        device.runtime.synchronize(device.workspace.compute)
        worked.append(work)
        return 10.0

    made = take(step, backend, timer, 2)
    programs = device.body._programs.values()
    assert len(programs) == (1 if block_rows is None else 2)
    parts = [part for program in programs for part in (*program.segments, *program.heads)]
    launched = Counter(op.name for part in parts for op in part.launches)
    assert {name: count for name, (count, _) in made.operations.items()} == launched
    assert len(worked) == 2 * (1 + len(launched))
    assert len(made.step) == len(made.host) == len(made.without_rows) == 2
    assert all(0 < host <= step for host, step in zip(made.host, made.step, strict=True))
    rows_bytes = sum(2 * 4 * 20 * x.attention.n_kv_heads * x.attention.head_dim for x in LAYERS)
    assert made.megabytes_down == pytest.approx((rows_bytes + 4 * 64) / 1e6)
    step()
    np.testing.assert_array_equal(answers[-1], answers[0])


def test_ratios_follow_from_the_parts() -> None:
    """The two figures that have goals: a step over its kernels alone, and the host's share of it."""
    made = Timeline([120.0, 130.0, 140.0], [6.0, 6.5, 7.0], [115.0] * 3, [104.0] * 3, 1.5,
                    {"qkv": (2, [60.0, 61.0, 62.0]), "o": (2, [39.0, 39.0, 39.0])})  # fmt: skip
    rows = {row.case: row for row in made.rows("m pp8", "cuda", "wgmma")}
    assert rows["m pp8: kernels alone"].value == 100.0
    assert rows["m pp8: step / kernels alone"].value == pytest.approx(1.3)
    assert rows["m pp8: host share"].value == pytest.approx(5.0)
    assert rows["m pp8: qkv x 2"].metric == "us"
