"""Layers of a real model's size: the tensor-core tiers against the SIMT tier, which is float32 throughout."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from frink_numba.backend import Step
from frink_numba.cuda.backend import CudaBackend
from frink_numba.host.dequantize import dequantize
from frink_numba.host.kv_cache import KVCache
from frink_numba.layer import Layer, RopeLayout
from tests import reference
from tests.cuda.quantized_layers import quantized_layer
from tests.differential.gpu import device_of
from tests.random_layers import LayerOptions

pytestmark = pytest.mark.gpu

SIZES = {
    "3b": LayerOptions(heads=24, kv_heads=8, head_dim=128, hidden=3072, ffn=8192),
    "small": LayerOptions(heads=9, kv_heads=3, head_dim=64, hidden=576, ffn=1536, layout=RopeLayout.NEOX),
}
KINDS = {"3b": ["Q4_K", "Q4_K", "Q6_K", "Q4_K", "Q4_K", "Q4_K", "Q6_K"], "small": ["Q4_1"]}
BATCHES = (700, 1, 3, 512, 8, 130)  # one after the other over the same cache
BOUND = 4e-3  # two layers


@cache
def layers(size: str) -> tuple[Layer, ...]:
    """Norms are set so that scores and gates have the size that a trained model's have."""
    rng, made = np.random.default_rng(len(size)), []
    for _ in range(2):
        layer = quantized_layer(rng, SIZES[size], KINDS[size])
        q, k, gate = layer.attention.q, layer.attention.k, layer.ffn.experts[0].gate
        deviations = [float(np.std(dequantize(matrix, 0, 8))) for matrix in (q, k, gate)]
        width = np.sqrt(layer.hidden_dim)
        attn_norm = layer.attn_norm * (1.5 / (np.sqrt(deviations[0] * deviations[1]) * width))
        ffn_norm = layer.ffn_norm * (1.5 / (deviations[2] * width))
        made.append(replace(layer, attn_norm=attn_norm.astype(np.float32), ffn_norm=ffn_norm.astype(np.float32)))
    return tuple(made)


@cache
def walked(size: str, tier: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Hidden batches and the cache's rows after all steps."""
    rng, model = np.random.default_rng(1), layers(size)
    backend = CudaBackend(model, device_of(tier))
    rows = KVCache(model, 4096, allocate=backend.host_bytes)
    hiddens = []
    for batch in BATCHES:
        hidden = rng.normal(size=(batch, SIZES[size].hidden)).astype(np.float32)
        run = backend.run(0, len(model), Step(model, rows, rows.positions, batch, hidden))
        assert run is not None
        assert run.hidden is not None
        rows.push(run.kv_rows)
        hiddens.append(run.hidden.copy())
    backend.close()
    return hiddens, [part.copy() for layer in rows for part in layer.prefix()]


@pytest.mark.parametrize("tier", ["mma", "wgmma"])
@pytest.mark.parametrize("size", SIZES)
def test_long_and_short_steps_over_one_cache(size: str, tier: str):
    """R8, R11, R24: with K/V rows mirrored, split products and the kernels for few rows."""
    hiddens, rows = walked(size, tier)
    want_hiddens, want_rows = walked(size, "simt")
    for got, want in zip(hiddens + rows, want_hiddens + want_rows, strict=True):
        assert np.isfinite(got).all()
        assert reference.relative_error(got, want) < BOUND
