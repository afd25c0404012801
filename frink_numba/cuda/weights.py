"""Device weights: a layer's matrices, norms, biases and frequencies in one block, uploaded once and shared (R8)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from frink_numba.cuda.arena import Carver
from frink_numba.cuda.launchers import Launchers
from frink_numba.cuda.memory import RopeKey, layer_bytes, matrices, rope_key, vectors
from frink_numba.cuda.runtime import Runtime
from frink_numba.cuda.shapes import LayerShape
from frink_numba.cuda.traffic import Traffic
from frink_numba.layer import Layer


@dataclass(frozen=True, slots=True, eq=False)
class DeviceLayer:
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


def upload_layer(runtime: Runtime, launchers: Launchers, layer: Layer, stream: Any, traffic: Traffic) -> DeviceLayer:
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
    return DeviceLayer(layer, LayerShape.of(layer), nbytes, placed, named, rope_key(layer))


class WeightBank:
    """The layers that one device holds, shared by all who hold them; each is freed with its last holder.

    Used under the device's lock, but for the counts. Keyed by the layer object, which an entry keeps alive.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[DeviceLayer, set[object]]] = {}
        self._held: Counter[object] = Counter()
        self.nbytes = 0

    def find(self, layer: Layer, holder: object) -> DeviceLayer | None:
        """The layer if it is here; `holder` then holds it too."""
        entry = self._entries.get(id(layer))
        if entry is None:
            return None
        self._hold(entry, holder)
        return entry[0]

    def get(self, layer: Layer) -> DeviceLayer:
        """The layer, which is here."""
        return self._entries[id(layer)][0]

    def add(self, uploaded: DeviceLayer, holder: object) -> None:
        entry = self._entries[id(uploaded.layer)] = (uploaded, set())
        self.nbytes += uploaded.nbytes
        self._hold(entry, holder)

    def drop(self, layer: Layer, holder: object) -> None:
        """`holder`, which holds the layer, needs it no more."""
        uploaded, holders = self._entries[id(layer)]
        holders.remove(holder)
        self._held[holder] -= uploaded.nbytes
        if not self._held[holder]:
            del self._held[holder]
        if not holders:
            del self._entries[id(layer)]
            self.nbytes -= uploaded.nbytes

    def held_by(self, holder: object) -> list[Layer]:
        """The layers that `holder` holds, in the order they were uploaded."""
        return [uploaded.layer for uploaded, holders in self._entries.values() if holder in holders]

    def bytes_of_others(self, holder: object) -> int:
        """Bytes of the layers that `holder` does not hold."""
        return self.nbytes - self._held[holder]

    def _hold(self, entry: tuple[DeviceLayer, set[object]], holder: object) -> None:
        if holder not in entry[1]:
            entry[1].add(holder)
            self._held[holder] += entry[0].nbytes
