"""How much device memory frink_numba may hold, and what a layer takes of it: from descriptions, without device work."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from frink_numba import settings
from frink_numba.cuda.arena import Layout
from frink_numba.kernels.kinds import packed_bytes
from frink_numba.layer import Layer
from frink_numba.quant import QuantMatrix

FREE_SHARE = 0.9  # of the memory that is free when first asked; the rest is for kernels, the driver and others


class MemoryLimit:
    """The budget of one device: FRINK_CUDA_MEMORY, else nine tenths of what was free when it was first asked for."""

    def __init__(self, query_free: Callable[[], int]) -> None:
        self._query_free = query_free
        self._free: int | None = None
        self._ceiling: int | None = None

    def bytes(self) -> int:
        """Bytes for weights and scratch together. Asks the device at most once; raises what that raises."""
        limit = settings.get("FRINK_CUDA_MEMORY")
        if limit is None:
            if self._free is None:
                self._free = self._query_free()
            limit = int(self._free * FREE_SHARE)
        return int(limit if self._ceiling is None else min(limit, self._ceiling))

    def lower(self, nbytes: int) -> None:
        """Memory ran out while `nbytes` were held: no more than that from now on."""
        self._ceiling = nbytes if self._ceiling is None else min(self._ceiling, nbytes)


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


def layer_bytes(layer: Layer) -> int:
    """Bytes that the layer's weights take on the device."""
    layout = Layout()
    for matrix in matrices(layer).values():
        layout.add(packed_bytes(matrix.kind, matrix.rows, matrix.cols))
    for vector in vectors(layer).values():
        layout.add(vector.nbytes)
    return layout.nbytes


def in_units(nbytes: int) -> str:
    """Bytes for people: "1.5 GiB"."""
    size, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.1f} {units[0]}"
