"""Groups of sequences over three unlike layers: backends, caches, steps, and what they should answer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from frink_numba.backend import Serve, Step
from frink_numba.cuda.backend import CudaBackend
from frink_numba.host.kv_cache import KVCache
from tests import reference
from tests.cuda.fake_tensor import tensor_device
from tests.cuda.tensor_stacks import LIMIT, OPTIONS, random_rows, unlike_layers
from tests.cuda.test_tensor_edges import EDGES, VOCABULARY, expected, token_step

LAYERS = unlike_layers(9, [OPTIONS[0], OPTIONS[1], OPTIONS[5]])
ERROR = len(LAYERS) * LIMIT  # layer after layer, and the head


def backend_on(device=None) -> CudaBackend:
    return CudaBackend(LAYERS, tensor_device() if device is None else device)


def cache_at(backend: CudaBackend | None, positions: int, seed: int = 0, dtype=np.float32) -> KVCache:
    cache = KVCache(LAYERS, 1024, dtype=dtype, allocate=backend.host_bytes if backend is not None else None)
    if positions:
        cache.push(random_rows(LAYERS, positions, seed, dtype))
    return cache


def steps_over(caches: Sequence[KVCache], sizes: Sequence[int], logits: str | int = 1, **fields) -> list[Step]:
    return [
        token_step(LAYERS, cache, n, n if logits == "all" else min(n, int(logits)), seed=100 + at, **fields)
        for at, (cache, n) in enumerate(zip(caches, sizes, strict=True))
    ]


def run_group(backend: CudaBackend, steps: Sequence[Step]):
    assert isinstance(backend.serves_group(steps), Serve)
    runs = backend.run_group(steps)
    assert runs is not None, "the group failed"
    return runs


def worst_error(step: Step, run) -> float:
    """Of logits and, where they are kept, K/V rows, to the float64 truth."""
    x = reference.weights(EDGES.embedding)[step.tokens] * EDGES.embedding_scale
    errors = [reference.relative_error(run.logits, expected(step)[1])] if step.logits else []
    for number, (layer, cache) in enumerate(zip(LAYERS, step.caches, strict=True)):
        x, k, v = reference.layer(layer, x, *(part[: step.start_pos] for part in cache.prefix()))
        if step.keep:
            errors += [
                reference.relative_error(got, want) for got, want in zip(run.kv_rows[number], (k, v), strict=True)
            ]
    return max(errors)


def greedy_steps(caches: Sequence[KVCache], tokens: Sequence[int], ahead: int) -> list[Step]:
    steps = steps_over(caches, [1] * len(caches), ahead=ahead, choices=VOCABULARY)
    for step, token in zip(steps, tokens, strict=True):
        step.tokens = np.array([token])
    return steps
