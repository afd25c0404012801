"""Small models for backend tests: layers, caches that hold rows, and steps over them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from frink_numba.backend import Step
from frink_numba.host.kv_cache import KVCache
from frink_numba.layer import Layer
from tests.random_layers import LayerOptions, random_layer


def small_model(seed: int, n_layers: int, **options) -> list[Layer]:
    """Layers whose rows and answers all differ."""
    rng = np.random.default_rng(seed)
    return [random_layer(rng, LayerOptions(bias=True, **options)) for _ in range(n_layers)]


def filled_cache(layers: Sequence[Layer], positions: int, seed: int = 0, **how) -> KVCache:
    """A cache with random rows at `positions` positions."""
    rng = np.random.default_rng(seed)
    cache = KVCache(layers, 256, **how)
    if positions:
        cache.push(
            [
                tuple(
                    rng.normal(size=(positions, layer.attention.n_kv_heads, layer.attention.head_dim)).astype(
                        np.float32
                    )
                    for _ in "kv"
                )
                for layer in layers
            ]
        )
    return cache


def make_step(layers: Sequence[Layer], batch: int = 5, start_pos: int = 0, seed: int = 1, cache=None, **fields) -> Step:
    """A step over `layers` with a random hidden batch."""
    hidden = np.random.default_rng(seed).normal(size=(batch, layers[0].hidden_dim)).astype(np.float32)
    caches = filled_cache(layers, start_pos) if cache is None else cache
    return Step(layers, caches, start_pos, batch, hidden, **fields)


def rows_of(cache: KVCache) -> list[np.ndarray]:
    """Copies of all rows."""
    return [part.copy() for layer in cache for part in layer.prefix()]
