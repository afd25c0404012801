"""What the tensor-core body serves beyond the SIMT body (R4, R15): taken out of a description before it is judged.

The table of `classify.py` says what both serve. A field that only this body serves is set here to the value that
everybody serves, so that the table stays the one list of all fields (R16).
"""

from __future__ import annotations

import math
from dataclasses import replace

from frink_numba.layer import Activation, AttentionSpec, FeedForward, Layer

# The activations of gated products, by their name in `gemm_epilogue`.
GATES = {Activation.SWIGLU: "swiglu", Activation.GEGLU: "geglu"}


def lifted(layer: Layer) -> Layer:
    """`layer` without a scale of its residuals or scores, attention sinks, and a GELU in its tanh form."""
    spec, ffn = layer.attention, layer.ffn
    if isinstance(spec, AttentionSpec) and (spec.scale is not None or spec.sinks is not None):
        layer = replace(layer, attention=replace(spec, scale=None, sinks=None))
    if isinstance(ffn, FeedForward) and ffn.activation in GATES:
        layer = replace(layer, ffn=replace(ffn, activation=Activation.SWIGLU))
    if isinstance(layer, Layer) and layer.residual_scale != 1 and math.isfinite(layer.residual_scale):
        layer = replace(layer, residual_scale=1.0)
    return layer
