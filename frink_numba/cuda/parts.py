"""What of a layer goes to the device: its matrices, vectors and rotary frequencies, from the description alone."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from frink_numba.layer import Layer
from frink_numba.quant import QuantMatrix


def matrices(layer: Layer) -> dict[str, QuantMatrix]:
    """The layer's matrices by site, in the order they are stored on the device."""
    spec, expert = layer.attention, layer.ffn.experts[0]
    return {
        "q": spec.q,
        "k": spec.k,
        "v": spec.v,
        "o": spec.o,
        "gate": expert.gate,
        "up": expert.up,
        "down": expert.down,
    }


def vectors(layer: Layer) -> dict[str, np.ndarray]:
    """The layer's float32 vectors that are there, and its inverse frequencies (float64), in storage order."""
    spec = layer.attention
    named = {
        "attn_norm": layer.attn_norm,
        "ffn_norm": layer.ffn_norm,
        "post_attn_norm": layer.post_attn_norm,
        "post_ffn_norm": layer.post_ffn_norm,
        "q_bias": spec.q_bias,
        "k_bias": spec.k_bias,
        "v_bias": spec.v_bias,
        "q_norm": spec.q_norm,
        "k_norm": spec.k_norm,
        "sinks": spec.sinks,
        "inverse_frequencies": inverse_frequencies(layer),
    }
    return {name: vector for name, vector in named.items() if vector is not None}


def inverse_frequencies(layer: Layer) -> np.ndarray | None:
    """float64 [rot_dim/2]: radians per position of each rotated pair (R17); None for a layer that is not rotated."""
    rope = layer.attention.rope
    if rope is None:
        return None
    exponents = np.arange(0, rope.rot_dim, 2, dtype=np.float64) / rope.rot_dim
    frequencies = float(rope.theta) ** -exponents
    return frequencies if rope.freq_factors is None else frequencies / rope.freq_factors.astype(np.float64)


RopeKey: TypeAlias = tuple[float, bytes]


def rope_key(layer: Layer) -> RopeKey | None:
    """Equal for layers whose tables of cosines and sines are equal; None for a layer that is not rotated."""
    rope, frequencies = layer.attention.rope, inverse_frequencies(layer)
    return None if rope is None or frequencies is None else (rope.magnitude_scale, frequencies.tobytes())
