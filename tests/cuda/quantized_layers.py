"""Random layers whose matrices are quantized, each site by a kind of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from frink_numba.layer import Layer
from frink_numba.quant import QuantMatrix
from tests.random_blocks import random_matrix
from tests.random_layers import LayerOptions, random_layer

_SITES = ("q", "k", "v", "o")
_FFN_SITES = ("gate", "up", "down")


def quantized_layer(rng: np.random.Generator, options: LayerOptions, kinds: Sequence[str]) -> Layer:
    """A random layer with its seven matrices (q, k, v, o, gate, up, down) of `kinds`, taken in turn.

    Scales are drawn so that products keep the size of their input, whatever the kind.
    """
    layer = random_layer(rng, options)
    expert = layer.ffn.experts[0]
    spec = {site: getattr(layer.attention, site) for site in _SITES}
    ffn = {site: getattr(expert, site) for site in _FFN_SITES}
    drawn = {
        site: _drawn(rng, matrix, kinds[number % len(kinds)])
        for number, (site, matrix) in enumerate({**spec, **ffn}.items())
    }
    return replace(
        layer,
        attention=replace(layer.attention, **{site: drawn[site] for site in _SITES}),
        ffn=replace(layer.ffn, experts=(replace(expert, **{site: drawn[site] for site in _FFN_SITES}),)),
    )


def _drawn(rng: np.random.Generator, like: QuantMatrix, kind: str) -> QuantMatrix:
    if kind == "F32":
        return like
    if kind == "F16":
        halves = like.data.view(np.float32).astype(np.float16)
        return QuantMatrix(random_matrix(kind, 1, 1, rng).kind, halves.view(np.uint8), like.rows, like.cols)
    return random_matrix(kind, like.rows, like.cols, rng)
