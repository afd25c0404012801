"""Stacks for tests of the tensor-core body: unlike layers, steps over real caches, and what they must answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from frink_numba.backend import Step
from frink_numba.cuda.backend import CudaBackend
from frink_numba.host.kv_cache import KVCache
from frink_numba.layer import Activation, Layer, RopeLayout
from tests import reference
from tests.cuda.quantized_layers import quantized_layer
from tests.random_layers import LayerOptions

HIDDEN = 64
LIMIT = 2e-3

# Options, and the kinds of q, k, v, o, gate, up and down, taken in turn.
OPTIONS = (
    (LayerOptions(head_dim=32, ffn=96), ["Q8_0"]),
    (
        LayerOptions(layout=RopeLayout.NEOX, head_dim=32, ffn=64, bias=True, qk_norm="head", window=3),
        ["Q4_0", "Q4_0", "Q8_0", "F16", "Q5_1", "Q8_0", "Q4_1"],
    ),
    (
        LayerOptions(partial=True, factors=True, magnitude=1.3, softcap=2.0, post_norms=True, qk_norm="whole", ffn=96),
        ["F32"],
    ),
    (
        LayerOptions(layout=None, heads=6, kv_heads=1, ffn=160, bias=True, eps=1e-6),
        ["Q5_0", "F16", "F16", "Q4_0", "IQ4_NL"],
    ),
    (LayerOptions(layout=RopeLayout.NEOX, theta=500.0, heads=2, kv_heads=2, head_dim=80, ffn=96, window=1), ["F16"]),
    (LayerOptions(heads=8, kv_heads=2, head_dim=20, ffn=64, partial=True, softcap=3.0, window=5), ["Q8_0", "Q4_1"]),
    (
        LayerOptions(head_dim=32, ffn=96, activation=Activation.GEGLU, sinks=True, scale=0.11, residual_scale=0.7),
        ["Q8_0"],
    ),
    (
        LayerOptions(activation=Activation.GEGLU, sinks=True, post_norms=True, residual_scale=1.5, window=4, ffn=64),
        ["F16", "Q8_0", "Q8_0", "Q4_0", "Q8_0", "F16"],
    ),
    (
        LayerOptions(head_dim=32, pre_norms=False, post_norms=True, qk_norm="head", activation=Activation.GEGLU_ERF,
                     ffn=96, residual_scale=0.6),
        ["Q8_0"],
    ),
    (
        LayerOptions(layout=RopeLayout.NEOX, head_dim=32, partial=True, magnitude=1.2, qk_norm="head",
                     qk_norm_after_rope=True, activation=Activation.GEGLU_ERF, bias=True, ffn=64),
        ["Q4_0", "Q8_0", "F16"],
    ),
    (LayerOptions(head_dim=32, bias=True, o_bias=True, ffn_bias=True, residual_scale=0.7, ffn=96), ["Q8_0"]),
    (
        LayerOptions(o_bias=True, ffn_bias=True, post_norms=True, residual_scale=1.3, ffn=64,
                     activation=Activation.GEGLU_ERF),
        ["F16", "Q8_0", "Q8_0", "Q4_0", "Q8_0", "F16"],
    ),
    (
        LayerOptions(pre_norms=False, post_norms=True, qk_norm="whole", qk_norm_after_rope=True, magnitude=0.8,
                     ffn=64, window=6),
        ["F16", "F16", "Q8_0", "F16", "Q8_0"],
    ),
)  # fmt: skip


def unlike_layers(seed: int = 0, options: Sequence[tuple[LayerOptions, list[str]]] = OPTIONS) -> list[Layer]:
    """One layer of each of the options, HIDDEN wide, with scores and gates of the size that a trained model's have."""
    rng = np.random.default_rng(seed)
    return [_tempered(quantized_layer(rng, replace(o, hidden=HIDDEN), kinds)) for o, kinds in options]


def _tempered(layer: Layer) -> Layer:
    if layer.attn_norm is None:  # then norms of q and k keep scores in bounds
        return layer
    spec, width = layer.attention, np.sqrt(layer.hidden_dim)
    scores = np.std(reference.weights(spec.q)) * np.std(reference.weights(spec.k))
    gates = np.std(reference.weights(layer.ffn.experts[0].gate))
    return replace(
        layer,
        attn_norm=(layer.attn_norm * (1.5 / (np.sqrt(scores) * width))).astype(np.float32),
        ffn_norm=(layer.ffn_norm * (1.5 / (gates * width))).astype(np.float32),
    )


def hidden_rows(batch: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(batch, HIDDEN)).astype(np.float32)


def random_rows(layers: Sequence[Layer], n: int, seed: int = 2, dtype: Any = np.float32) -> list[tuple]:
    rng = np.random.default_rng(seed)
    shapes = [(n, layer.attention.n_kv_heads, layer.attention.head_dim) for layer in layers]
    return [tuple(rng.normal(size=shape).astype(dtype) for _ in "kv") for shape in shapes]


def step_over(layers: Sequence[Layer], cache: KVCache, hidden: np.ndarray) -> Step:
    return Step(layers, cache, cache.positions, len(hidden), hidden)


def taken(run: Any) -> list[np.ndarray]:
    """Copies of what a run answered: rows may lie in the cache's own spare room."""
    assert run is not None, "the run failed"
    return [run.hidden.copy(), *(part.copy() for pair in run.kv_rows for part in pair)]


def advance(backend: CudaBackend, layers: Sequence[Layer], cache: KVCache, hidden: np.ndarray) -> list[np.ndarray]:
    """One step whose rows are pushed, as the engine does."""
    run = backend.run(0, len(layers), step_over(layers, cache, hidden))
    answer = taken(run)
    cache.push(run.kv_rows)
    return answer


def worst_error(layers: Sequence[Layer], step: Step, answer: Sequence[np.ndarray]) -> float:
    """Of the hidden batch and all K/V rows, to the float64 truth over the rows that the caches hold."""
    x, errors = step.hidden.astype(np.float64), []
    for number, (layer, cache) in enumerate(zip(layers, step.caches, strict=True)):
        keys, values = (part[: step.start_pos] for part in cache.prefix())
        x, k, v = reference.layer(layer, x, keys, values)
        rows = answer[1 + 2 * number : 3 + 2 * number]
        errors += [reference.relative_error(got, want) for got, want in zip(rows, (k, v), strict=True)]
    return max(reference.relative_error(answer[0], x), *errors)


def assert_equal(got: Sequence[np.ndarray], want: Sequence[np.ndarray], message: str = "") -> None:
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other, err_msg=message)
