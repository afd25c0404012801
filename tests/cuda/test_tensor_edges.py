"""Runs that begin with tokens and end with logits on the device: embedding, final norm and output matrix."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from frink_numba.backend import Edges, Step
from frink_numba.cuda.backend import CudaBackend
from frink_numba.cuda.tensor import edges as edges_module
from frink_numba.host.dequantize import dequantize_rows
from frink_numba.host.kv_cache import KVCache
from tests import reference
from tests.cuda.fake_tensor import tensor_device
from tests.cuda.quantized_layers import quantized_layer
from tests.cuda.tensor_stacks import HIDDEN, LIMIT, OPTIONS, random_rows, unlike_layers
from tests.random_blocks import random_matrix
from tests.random_layers import LayerOptions

LAYERS = unlike_layers(9, [OPTIONS[0], OPTIONS[1]])
VOCABULARY = 200
TIERS = ("wgmma", "mma")


def make_edges(width: int = HIDDEN, tied: bool = False, vocabulary: int = VOCABULARY, kinds=("Q8_0", "Q5_1")) -> Edges:
    rng = np.random.default_rng(3)
    embedding = random_matrix(kinds[0], vocabulary, width, rng)
    output = embedding if tied else random_matrix(kinds[1], vocabulary, width, rng)
    return Edges(embedding, 2.5, (1 + rng.normal(0, 0.4, width)).astype(np.float32), 1e-5, output)


EDGES = make_edges()


def token_step(layers, cache, batch: int, logits: int, edges: Edges = EDGES, seed: int = 1, **fields) -> Step:
    tokens = np.random.default_rng(seed).integers(0, edges.embedding.rows, batch)

    def lookup() -> np.ndarray:
        return dequantize_rows(edges.embedding, tokens) * np.float32(edges.embedding_scale)

    whole = {"tokens": tokens, "edges": edges, "lookup": lookup, "logits": logits, **fields}
    return Step(layers, cache, cache.positions, batch, **whole)


def expected(step: Step) -> tuple[np.ndarray, np.ndarray]:
    """(hidden batch, wanted logits), float64."""
    edges = step.edges
    x = reference.weights(edges.embedding)[step.tokens] * edges.embedding_scale
    for layer, cache in zip(step.layers, step.caches, strict=True):
        x, _, _ = reference.layer(layer, x, *(part[: step.start_pos] for part in cache.prefix()))
    last = reference.rms_norm(x[len(x) - step.logits :], edges.output_norm, edges.norm_eps)
    return x, last @ reference.weights(edges.output).T


def new_cache(layers=LAYERS, positions: int = 0, backend: CudaBackend | None = None) -> KVCache:
    cache = KVCache(layers, 512, allocate=backend.host_bytes if backend is not None else None)
    if positions:
        cache.push(random_rows(layers, positions))
    return cache


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("batch", "logits", "start_pos"), [(1, 1, 0), (1, 1, 9), (5, 5, 3), (12, 1, 4), (40, 40, 0)])
def test_from_tokens_to_logits(tier: str, tied: bool, batch: int, logits: int, start_pos: int):
    """R24: nothing goes up but the ids, nothing comes down but the logits and the layers' rows."""
    edges = make_edges(tied=tied)
    backend = CudaBackend(LAYERS, tensor_device(tier))
    step = token_step(LAYERS, new_cache(positions=start_pos), batch, logits, edges)
    run = backend.run(0, len(LAYERS), step)
    assert run is not None
    assert run.hidden is None
    assert reference.relative_error(run.logits, expected(step)[1]) < 2 * LIMIT  # two layers, and the head
    assert (backend.stats.hidden_up, backend.stats.hidden_down) == (0, 0)
    assert backend.stats.logits_down == run.logits.nbytes == 4 * logits * VOCABULARY


def test_a_wanted_hidden_state_comes_down_too():
    backend = CudaBackend(LAYERS, tensor_device())
    step = token_step(LAYERS, new_cache(), 6, 2, hidden_after=frozenset({len(LAYERS) - 1}))
    run = backend.run(0, len(LAYERS), step)
    hidden, logits = expected(step)
    assert reference.relative_error(run.hidden, hidden) < 2 * LIMIT
    assert reference.relative_error(run.logits, logits) < 2 * LIMIT


@pytest.mark.parametrize("rows", [1, 3, 16])
def test_logits_in_parts(rows: int, monkeypatch: pytest.MonkeyPatch):
    """More rows of logits than there is room for on the device: part by part, each down before the next."""
    monkeypatch.setattr(edges_module, "_MOST_ROWS", rows)
    for schedule in ("lazy", "random"):
        backend = CudaBackend(LAYERS, tensor_device(schedule=schedule))
        step = token_step(LAYERS, new_cache(), 20, 19)
        run = backend.run(0, len(LAYERS), step)
        assert reference.relative_error(run.logits, expected(step)[1]) < 2 * LIMIT


def test_edges_go_up_once_and_are_shared_by_steps_of_all_sizes():
    """R8: prompts, single tokens, with and without logits; every answer is the truth's."""
    backend = CudaBackend(LAYERS, tensor_device())
    cache, weights = new_cache(backend=backend), set()
    for seed, (batch, logits) in enumerate([(12, 1), (1, 1), (12, 12), (1, 1), (1, 0), (3, 2), (12, 1), (1, 1)]):
        step = token_step(LAYERS, cache, batch, logits, seed=seed)
        run = backend.run(0, len(LAYERS), step)
        _, want = expected(step)
        if logits:
            assert reference.relative_error(run.logits, want) < 2 * LIMIT
        else:
            assert run.logits is None
        cache.push(run.kv_rows)
        weights.add(backend.stats.weights_up)
    assert len(weights) == 1
    assert backend.stats.prefix_up == 0


def test_wide_rows_share_the_workspace_with_prompts():
    """A few rows of logits behind many rows: products cut along K, of both forms, each find their counters at zero."""
    options = LayerOptions(heads=1, kv_heads=1, head_dim=32, hidden=4096, ffn=64, eps=1e-6)
    rng = np.random.default_rng(5)
    layer = quantized_layer(rng, options, ["Q8_0"])
    layer = replace(layer, attn_norm=layer.attn_norm / 16, ffn_norm=layer.ffn_norm / 16)
    edges = make_edges(4096, tied=True, vocabulary=64)
    for tier in TIERS:
        backend = CudaBackend([layer], tensor_device(tier))
        for _ in range(2):
            step = token_step([layer], new_cache([layer]), 16, 8, edges)
            run = backend.run(0, 1, step)
            assert run is not None
            assert reference.relative_error(run.logits, expected(step)[1]) < LIMIT


def test_without_room_for_the_edges_the_host_does_them(monkeypatch: pytest.MonkeyPatch):
    """The layers stay; looking up and logits are the engine's then, and the budget is kept."""
    device = tensor_device()
    step = token_step(LAYERS, new_cache(positions=3), 6, 2)
    probe = CudaBackend(LAYERS, device)
    assert probe.run(0, len(LAYERS), replace(step, logits=0)) is not None
    held = device.held_bytes
    edge_bytes = device.body.edges_bytes(EDGES)
    for room in (0, edge_bytes - 1, edge_bytes + (1 << 22)):
        monkeypatch.setenv("FRINK_CUDA_MEMORY", str(held + room))
        other = tensor_device()
        backend = CudaBackend(LAYERS, other)
        fresh = token_step(LAYERS, new_cache(positions=3), 6, 2)
        assert [backend.can_serve(l, fresh).__class__.__name__ for l in range(2)] == ["Serve"] * 2  # noqa: E741
        run = backend.run(0, len(LAYERS), fresh)
        hidden, logits = expected(fresh)
        if run.logits is None:
            assert room < edge_bytes + (1 << 22)
            assert reference.relative_error(run.hidden, hidden) < 2 * LIMIT
        else:
            assert reference.relative_error(run.logits, logits) < 2 * LIMIT
        assert other.held_bytes <= other.memory.bytes()
    assert run.logits is not None


def test_a_failure_at_every_point_of_a_step_with_edges():
    """R21: the counters, ids and logits too; the next step is right."""

    def calls(backend: CudaBackend, cache: KVCache) -> list[str]:
        before = len(backend.device.runtime.calls)
        assert backend.run(0, len(LAYERS), token_step(LAYERS, cache, 10, 3)) is not None
        return backend.device.runtime.calls[before:]

    first = CudaBackend(LAYERS, tensor_device())
    held = new_cache()
    points = [*calls(first, held), *calls(first, held)]
    want = first.run(0, len(LAYERS), token_step(LAYERS, new_cache(), 10, 3)).logits.copy()
    for point, name in enumerate(points):
        if name == "release":
            continue
        backend = CudaBackend(LAYERS, tensor_device(schedule="random", seed=point))
        backend.device.runtime.fail_at = point
        cache = new_cache()
        answers = [backend.run(0, len(LAYERS), token_step(LAYERS, cache, 10, 3)) for _ in range(3)]
        assert any(answer is None for answer in answers[:2]), name
        np.testing.assert_array_equal(answers[2].logits, want, err_msg=f"after failure {point}: {name}")
