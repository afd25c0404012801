"""A layer's matrices, norms, biases and frequencies on the device, in one block, uploaded once (R8)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from frink_numba.cuda.arena import Carver, Layout
from frink_numba.cuda.parts import RopeKey, matrices, rope_key, vectors
from frink_numba.cuda.runtime import Runtime
from frink_numba.cuda.shapes import LayerShape
from frink_numba.cuda.simt.launchers import Launchers
from frink_numba.cuda.traffic import Traffic
from frink_numba.kernels.kinds import packed_bytes
from frink_numba.layer import Layer


@dataclass(frozen=True, slots=True, eq=False)
class SimtLayer:
    """A layer on the device. `matrices` by site (q, k, v, o, gate, up, down), `vectors` by name where present."""

    layer: Layer
    shape: LayerShape
    nbytes: int
    matrices: dict[str, Any]
    vectors: dict[str, Any]
    rope_key: RopeKey | None

    @property
    def magnitude_scale(self) -> float:
        rope = self.layer.attention.rope
        return 1.0 if rope is None else rope.magnitude_scale


def upload_layer(runtime: Runtime, launchers: Launchers, layer: Layer, stream: Any, traffic: Traffic) -> SimtLayer:
    """Allocate one block for `layer` and fill it in the order of `stream`. Raises what runtime and launchers raise."""
    nbytes = layer_bytes(layer)
    carver = Carver(runtime.device_bytes(nbytes))
    placed = {}
    for site, matrix in matrices(layer).items():
        source = launchers.pack(matrix)
        data = carver.array(source.shape, np.uint8)
        runtime.upload(data, source, stream)
        traffic.weights_up += source.nbytes
        placed[site] = launchers.matrix(matrix.kind, data, matrix.rows, matrix.cols)
    small = vectors(layer)
    named = {}
    for name, vector in small.items():
        named[name] = carver.array(vector.shape, vector.dtype)
        runtime.upload(named[name], np.ascontiguousarray(vector), stream)
        traffic.weights_up += vector.nbytes
    return SimtLayer(layer, LayerShape.of(layer), nbytes, placed, named, rope_key(layer))


def layer_bytes(layer: Layer) -> int:
    """Bytes that the layer's weights take on the device."""
    layout = Layout()
    for matrix in matrices(layer).values():
        layout.add(packed_bytes(matrix.kind, matrix.rows, matrix.cols))
    for vector in vectors(layer).values():
        layout.add(vector.nbytes)
    return layout.nbytes
