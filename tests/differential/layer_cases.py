"""Whole layers for host-versus-device tests: a pairwise cover of every option that the resident stack serves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from frink_numba.kernels.kinds import supported_kinds
from frink_numba.layer import Layer, RopeLayout
from frink_numba.quant import KINDS
from tests import reference
from tests.cuda.quantized_layers import quantized_layer
from tests.random_layers import LayerOptions, pairwise

AT_LEAST = 200

CHOICES = {
    "kind": sorted(supported_kinds),
    "layout": [RopeLayout.NORM, RopeLayout.NEOX],
    "rotated": ["whole", "partial", "not"],
    "factors": [False, True],
    "magnitude": [1.0, 1.1386],
    "bias": [False, True],
    "qk_norm": ["", "head", "whole"],
    "window": [0, 1, 19],
    "softcap": [0.0, 4.0],
    "post_norms": [False, True],
    "start_pos": [0, 1, 37, 1000],
    "head_dim": [32, 64, 80, 96, 128, 256],
    "heads": [(3, 3), (6, 2), (4, 1)],  # multi-head, grouped, one K/V head
    "batch": [4, 5, 33, 130],
    "half_cache": [False, True],
}


@dataclass(frozen=True)
class Case:
    """One layer and one step over it."""

    number: int
    kind: str
    options: LayerOptions
    start_pos: int
    batch: int
    half_cache: bool

    def __str__(self) -> str:
        o = self.options
        return f"{self.number}-{self.kind}-{o.heads}x{o.head_dim}-{self.batch}@{self.start_pos}"


@lru_cache(maxsize=1)
def cases() -> tuple[Case, ...]:
    """At least AT_LEAST cases: covers of different random orders, one after the other."""
    made: list[Case] = []
    seed = 0
    while len(made) < AT_LEAST:
        for choice in pairwise(CHOICES, seed):
            made.append(_case(len(made), choice))
        seed += 1
    return tuple(made)


def _case(number: int, choice: dict) -> Case:
    heads, kv_heads = choice["heads"]
    options = LayerOptions(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=choice["head_dim"],
        hidden=256,
        ffn=512,
        layout=None if choice["rotated"] == "not" else choice["layout"],
        partial=choice["rotated"] == "partial",
        theta=500000.0 if number % 2 else 10000.0,
        factors=choice["factors"],
        magnitude=choice["magnitude"],
        bias=choice["bias"],
        qk_norm=choice["qk_norm"],
        window=choice["window"],
        softcap=choice["softcap"],
        post_norms=choice["post_norms"],
        eps=1e-5 if number % 3 else 1e-6,
    )
    return Case(number, choice["kind"], options, choice["start_pos"], choice["batch"], choice["half_cache"])


def make_layer(case: Case) -> Layer:
    """The layer, its norms set so that scores and gates have the size that a trained model's have.

    Where a row of the output projection is no multiple of the kind's block, that one matrix is Q8_0, or else F16.
    """
    rng = np.random.default_rng(case.number)
    o = case.options
    output = next(kind for kind in (case.kind, "Q8_0", "F16") if o.heads * o.head_dim % KINDS[kind].block == 0)
    layer = quantized_layer(rng, o, [*[case.kind] * 3, output, *[case.kind] * 3])
    scores = np.std(reference.weights(layer.attention.q)) * np.std(reference.weights(layer.attention.k))
    gates = np.std(reference.weights(layer.ffn.experts[0].gate))
    width = np.sqrt(o.hidden)
    return replace(
        layer,
        attn_norm=(layer.attn_norm * (1.5 / (o.magnitude * np.sqrt(scores) * width))).astype(np.float32),
        ffn_norm=(layer.ffn_norm * (1.5 / (gates * width))).astype(np.float32),
    )


def make_inputs(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Hidden batch, prefix K and prefix V, fresh for every case.

    The stream is about as large as what the layer adds to it, as in a trained model: where the FFN's part were a
    hundred times the rest, the error of its f16 operands would be all there is.
    """
    rng = np.random.default_rng(10_000 + case.number)
    o = case.options
    hidden = rng.normal(size=(case.batch, o.hidden)).astype(np.float32)
    if not o.post_norms:
        down = make_layer(case).ffn.experts[0].down
        hidden *= np.float32(max(1.0, float(np.std(reference.weights(down))) * np.sqrt(o.ffn) / 2))
    dtype = np.float16 if case.half_cache else np.float32
    keys, values = (1.5 * rng.normal(size=(2, case.start_pos, o.kv_heads, o.head_dim))).astype(dtype)
    return hidden, keys, values
