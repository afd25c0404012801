"""Random layers for tests: every option of the layer description, and pairwise covers of their product."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

import numpy as np

from frink_numba.layer import (
    Activation,
    AttentionSpec,
    Expert,
    FeedForward,
    Layer,
    Lora,
    Rope,
    RopeLayout,
)
from frink_numba.quant import QuantMatrix


@dataclass(frozen=True)
class LayerOptions:
    """One choice of each option; widths are small and odd on purpose."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    hidden: int = 40
    ffn: int = 56
    layout: RopeLayout | None = RopeLayout.NORM  # None: not rotated
    partial: bool = False  # half of the head is rotated
    theta: float = 10000.0
    factors: bool = False
    magnitude: float = 1.0
    bias: bool = False  # of q, k and v
    qk_norm: str = ""  # "head", "whole" or "rows"
    qk_norm_after_rope: bool = False
    window: int = 0
    softcap: float = 0.0
    scale: float | None = None
    sinks: bool = False
    output_gate: bool = False
    value_norm: bool = False
    o_bias: bool = False
    o_scale: bool = False
    post_norms: bool = False
    post_eps: float | None = None
    activation: Activation = Activation.SWIGLU
    ffn_bias: bool = False
    down_scale: bool = False
    eps: float = 1e-5
    pre_norms: bool = True
    residual_scale: float = 1.0
    loras: str = ""  # letters of the projections that have one: q, k, v, o, g(ate), u(p), d(own)
    experts: int = 0  # 0: a dense layer
    experts_used: int = 2
    normalized: bool = False
    shared: bool = False
    shared_gate: bool = False


def random_layer(rng: np.random.Generator, options: LayerOptions | None = None, **changes: Any) -> Layer:
    """A layer whose every vector matters: norms are far from one, biases far from zero, attention is peaked."""
    o = options if options is not None else LayerOptions(**changes)
    width, kv_width = o.heads * o.head_dim, o.kv_heads * o.head_dim

    def matrix(rows: int, cols: int, gain: float = 1.0) -> QuantMatrix:
        return QuantMatrix.from_float32(rng.normal(0, gain / np.sqrt(cols), (rows, cols)).astype(np.float32))

    def vector(size: int, wanted: bool = True, center: float = 0.0) -> Any:
        return (center + rng.normal(0, 0.4, size)).astype(np.float32) if wanted else None

    def qk_norm(heads: int) -> Any:
        shapes = {"head": (o.head_dim,), "whole": (heads * o.head_dim,), "rows": (heads, o.head_dim)}
        return (1 + rng.normal(0, 0.4, shapes[o.qk_norm])).astype(np.float32) if o.qk_norm else None

    rope = None
    if o.layout is not None:
        rot_dim = o.head_dim // 4 * 2 if o.partial else o.head_dim
        factors = rng.uniform(1, 8, rot_dim // 2).astype(np.float32) if o.factors else None
        rope = Rope(o.theta, rot_dim, o.layout, factors, o.magnitude)
    attention = AttentionSpec(
        n_heads=o.heads,
        n_kv_heads=o.kv_heads,
        head_dim=o.head_dim,
        q=matrix(width, o.hidden, 2.0),
        k=matrix(kv_width, o.hidden, 2.0),
        v=matrix(kv_width, o.hidden),
        o=matrix(o.hidden, width),
        rope=rope,
        q_bias=vector(width, o.bias),
        k_bias=vector(kv_width, o.bias),
        v_bias=vector(kv_width, o.bias),
        q_norm=qk_norm(o.heads),
        k_norm=qk_norm(o.kv_heads),
        qk_norm_after_rope=o.qk_norm_after_rope,
        window=o.window,
        softcap=o.softcap,
        scale=o.scale,
        sinks=vector(o.heads, o.sinks, 1.0),
        output_gate=matrix(width, o.hidden) if o.output_gate else None,
        value_norm=vector(width, o.value_norm, 1.0),
        o_bias=vector(o.hidden, o.o_bias),
        o_scale=vector(o.hidden, o.o_scale, 1.0),
    )

    def new_expert(width: int) -> Expert:
        return Expert(
            gate=matrix(width, o.hidden),
            up=matrix(width, o.hidden),
            down=matrix(o.hidden, width),
            gate_bias=vector(width, o.ffn_bias),
            up_bias=vector(width, o.ffn_bias),
            down_bias=vector(o.hidden, o.ffn_bias),
            down_scale=vector(o.hidden, o.down_scale, 1.0),
        )

    layer = Layer(
        attn_norm=vector(o.hidden, center=1.0),
        attention=attention,
        ffn_norm=vector(o.hidden, center=1.0),
        ffn=FeedForward(o.activation, (new_expert(o.ffn),)),
        norm_eps=o.eps,
        post_attn_norm=vector(o.hidden, o.post_norms, 1.0),
        post_ffn_norm=vector(o.hidden, o.post_norms, 1.0),
        post_norm_eps=o.post_eps,
        residual_scale=o.residual_scale,
    )
    if not o.pre_norms:
        layer = replace(layer, attn_norm=None, ffn_norm=None)
    if o.experts:
        ffn = FeedForward(
            o.activation,
            (*layer.ffn.experts, *(new_expert(o.ffn + i) for i in range(1, o.experts))),
            router=matrix(o.experts, o.hidden, 2.0),
            n_experts_used=o.experts_used,
            normalized_weights=o.normalized,
            shared=new_expert(o.ffn - 8) if o.shared else None,
            shared_gate=vector(o.hidden, o.shared and o.shared_gate),
        )
        return replace(layer, ffn=ffn)
    owners = {**dict.fromkeys("qkvo", attention), **dict.fromkeys("gud", layer.ffn.experts[0])}
    loras = []
    for letter in o.loras:
        target = {"g": "gate", "u": "up", "d": "down"}.get(letter, letter)
        site = getattr(owners[letter], target)
        down, up = matrix(3, site.cols), matrix(site.rows, 3)
        loras.append(Lora(target, down.data.view(np.float32), up.data.view(np.float32), 0.7))
    return replace(layer, lora=tuple(loras))


def pairwise(choices: Mapping[str, Sequence[Any]], seed: int = 0) -> Iterator[dict[str, Any]]:
    """Few combinations in which every two choices of any two options meet at least once (greedy, of random tries)."""
    names = list(choices)
    missing = {
        (a, i, b, j)
        for a, b in combinations(names, 2)
        for i, j in product(range(len(choices[a])), range(len(choices[b])))
    }
    rng = np.random.default_rng(seed)
    while missing:
        # Each try starts from a pair that is still missing, so that every round ends at least that one.
        a, i, b, j = min(missing)
        best: dict[str, int] = {}
        best_gain: set[tuple[str, int, str, int]] = set()
        for _ in range(30):
            pick = {name: int(rng.integers(len(choices[name]))) for name in names} | {a: i, b: j}
            gain = {pair for x, y in combinations(names, 2) if (pair := (x, pick[x], y, pick[y])) in missing}
            if len(gain) > len(best_gain):
                best, best_gain = pick, gain
        missing -= best_gain
        yield {name: choices[name][index] for name, index in best.items()}
