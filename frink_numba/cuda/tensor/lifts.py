"""What the tensor-core body serves beyond the SIMT body (R4, R15): taken out of a description before it is judged.

The table of `classify.py` says what both serve. A field that only this body serves is set here to the value that
everybody serves, so that the table stays the one list of all fields (R16).
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from frink_numba.layer import Activation, AttentionSpec, Expert, FeedForward, Layer

# The activations of gated products, by their name in `gemm_epilogue`.
GATES = {Activation.SWIGLU: "swiglu", Activation.GEGLU: "geglu", Activation.GEGLU_ERF: "geglu_erf"}

# The root of the mean square of a stream's row up to which products of the stream itself, without a norm before them,
# are sure to stay within f16; beyond it a row of V (or of a q or k without a norm) may become not-a-number. It stands
# in for the bound that a norm's weight gives. f16 keeps 2**29 below the bound exact: rows from 2**-10 on lose nothing.
LARGEST_STREAM = 2.0**8


def lifted(layer: Layer) -> Layer:
    """`layer` without what only this body serves:

    a scale of its residuals or scores, attention sinks, a QK norm after the rotation, GELU, norms that are not there,
    biases of the output projection and of the FFN.
    """
    spec, ffn = layer.attention, layer.ffn
    if isinstance(spec, AttentionSpec):
        if any(each is not None for each in (spec.scale, spec.sinks, spec.o_bias)) or spec.qk_norm_after_rope:
            spec = replace(spec, scale=None, sinks=None, qk_norm_after_rope=False, o_bias=None)
            layer = replace(layer, attention=spec)
        if layer.attn_norm is None or layer.ffn_norm is None:
            ones = np.broadcast_to(np.float32(1), (layer.hidden_dim,))
            attn_norm, ffn_norm = (ones if norm is None else norm for norm in (layer.attn_norm, layer.ffn_norm))
            layer = replace(layer, attn_norm=attn_norm, ffn_norm=ffn_norm)
    if isinstance(ffn, FeedForward) and ffn.activation in GATES:
        ffn = replace(ffn, activation=Activation.SWIGLU, experts=tuple(map(_without_biases, ffn.experts)))
        layer = replace(layer, ffn=ffn)
    if isinstance(layer, Layer) and layer.residual_scale != 1 and math.isfinite(layer.residual_scale):
        layer = replace(layer, residual_scale=1.0)
    return layer


def _without_biases(expert: Expert) -> Expert:
    biases = (expert.gate_bias, expert.up_bias, expert.down_bias)
    if all(bias is None for bias in biases):
        return expert
    return replace(expert, gate_bias=None, up_bias=None, down_bias=None)
