"""The layers that a device holds: who holds which, and how many bytes they take (R8)."""

from __future__ import annotations

from collections import Counter
from typing import Any, Protocol, TypeAlias

from frink_numba.backend import Edges
from frink_numba.layer import Layer

Part: TypeAlias = Layer | Edges
"""What is held as one: a layer, or what lies around a model's layers."""


class DeviceLayer(Protocol):
    """A part of a model on a device, as the device's body made it."""

    @property
    def layer(self) -> Any:
        """The part it was made from."""

    @property
    def nbytes(self) -> int: ...


class Together(list[DeviceLayer]):
    """All of a model's layers on a device, as long as none of them goes; who remembers it keeps a weak reference."""

    __slots__ = ("__weakref__",)


class WeightBank:
    """The layers that one device holds, shared by all who hold them; each is freed with its last holder.

    Used under the device's lock, but for the counts. Keyed by the layer object, which an entry keeps alive.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[DeviceLayer, set[object]]] = {}
        self._held: Counter[object] = Counter()
        self.nbytes = 0
        self.changes = 0  # grows whenever a part comes or goes
        self._together: tuple[tuple[Layer, ...], Together] | None = None  # until then

    def find(self, layer: Part, holder: object) -> DeviceLayer | None:
        """The layer if it is here; `holder` then holds it too."""
        entry = self._entries.get(id(layer))
        if entry is None:
            return None
        self._hold(entry, holder)
        return entry[0]

    def has(self, layer: Part) -> bool:
        """Whether it is here just now, for who does not hold the device's lock."""
        return id(layer) in self._entries

    def get(self, layer: Part) -> DeviceLayer:
        """The layer, which is here."""
        return self._entries[id(layer)][0]

    def get_all(self, layers: tuple[Layer, ...]) -> Together:
        """All of a model's layers, which are here. Not to be kept: a part that goes would keep its memory."""
        if self._together is None or self._together[0] is not layers:
            self._together = layers, Together(self._entries[id(layer)][0] for layer in layers)
        return self._together[1]

    def add(self, uploaded: DeviceLayer, holder: object) -> None:
        self._together = None
        entry = self._entries[id(uploaded.layer)] = (uploaded, set())
        self.nbytes += uploaded.nbytes
        self.changes += 1
        self._hold(entry, holder)

    def drop(self, layer: Part, holder: object) -> None:
        """`holder`, which holds the layer, needs it no more."""
        self._together = None
        uploaded, holders = self._entries[id(layer)]
        holders.remove(holder)
        self._held[holder] -= uploaded.nbytes
        self.changes += 1
        if not self._held[holder]:
            del self._held[holder]
        if not holders:
            del self._entries[id(layer)]
            self.nbytes -= uploaded.nbytes

    def holds(self, part: Part, holder: object) -> bool:
        """Whether `holder` holds it. Asks, and changes nothing."""
        entry = self._entries.get(id(part))
        return entry is not None and holder in entry[1]

    def held_by(self, holder: object) -> list[Part]:
        """The layers that `holder` holds, in the order they were uploaded."""
        return [uploaded.layer for uploaded, holders in self._entries.values() if holder in holders]

    def bytes_of_others(self, holder: object) -> int:
        """Bytes of the layers that `holder` does not hold."""
        return self.nbytes - self._held[holder]

    def _hold(self, entry: tuple[DeviceLayer, set[object]], holder: object) -> None:
        if holder not in entry[1]:
            entry[1].add(holder)
            self._held[holder] += entry[0].nbytes
