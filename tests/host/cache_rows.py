"""Caches for tests of the K/V cache: layers with heads of their own, drawn rows, and what a cache holds now."""

from __future__ import annotations

import numpy as np

from frink_numba.host.kv_cache import KVCache
from frink_numba.layer import Layer
from tests.random_layers import random_layer

Rows = list[tuple[np.ndarray, np.ndarray]]


def layers(*windows: int) -> list[Layer]:
    """One layer a window, each with its own number of heads."""
    rng = np.random.default_rng(0)
    return [random_layer(rng, heads=2 * (i + 1), kv_heads=i + 1, head_dim=4, window=w) for i, w in enumerate(windows)]


def draw(cache: KVCache, n: int, seed: int = 0) -> Rows:
    rng = np.random.default_rng(seed)
    return [
        tuple(
            rng.normal(size=(n, layer.n_kv_heads, width)).astype(np.float32)
            for width in (layer.key_dim, layer.value_dim)
        )  # type: ignore[misc]
        for layer in cache
    ]


def snapshot(cache: KVCache) -> list[tuple[object, ...]]:
    return [(c.positions, c.rows, c.version, *(part.copy() for part in c.prefix())) for c in cache]


def same(one: list[tuple[object, ...]], other: list[tuple[object, ...]]) -> bool:
    return all(all(np.array_equal(a, b) for a, b in zip(x, y, strict=True)) for x, y in zip(one, other, strict=True))  # type: ignore[arg-type]
