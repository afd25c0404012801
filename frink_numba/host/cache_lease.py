"""Room behind the last row of every layer of a cache at once, for somebody to write new rows to."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from frink_numba.errors import CacheError
from frink_numba.host.layer_kv import Counted, LayerKV

if TYPE_CHECKING:
    from frink_numba.host.kv_cache import KVCache

Rows = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, slots=True)
class Places:
    """Where the buffers of a cache's layers begin, and bytes from row to row: uint64 [layers] each.

    capacity: rows that every layer holds.
    """

    k: np.ndarray
    v: np.ndarray
    k_pitch: np.ndarray
    v_pitch: np.ndarray
    capacity: int
    owners: tuple[Any, ...]  # of the buffers' memory, each once

    @classmethod
    def of(cls, layers: Sequence[LayerKV]) -> Places:
        buffers = [layer.buffers for layer in layers]
        owners = {id(part.base): part.base for pair in buffers for part in pair}
        return cls(
            np.array([k.ctypes.data for k, _ in buffers], np.uint64),
            np.array([v.ctypes.data for _, v in buffers], np.uint64),
            np.array([k.strides[0] for k, _ in buffers], np.uint64),
            np.array([v.strides[0] for _, v in buffers], np.uint64),
            min((k.shape[0] for k, _ in buffers), default=0),
            tuple(owners.values()),
        )


class CacheLease(Sequence[Rows]):
    """K and V [n, heads, width] of each layer, as a sequence; made by `KVCache.lend`.

    Another lease, any other change of the cache, and a push of other rows make it void.
    """

    __slots__ = ("__weakref__", "_cache", "_length", "_moves", "counted", "first", "places", "size")

    def __init__(self, cache: KVCache, places: Places, moves: int, first: int, n: int):
        self._cache = weakref.ref(cache)  # whoever remembers a lease must not keep the cache, or a layer of it
        self._length, self._moves = len(cache), moves
        self.places, self.first, self.size = places, first, n
        self.counted: Counted | None = None

    @property
    def k(self) -> np.ndarray:
        """The addresses of the first K rows, uint64 [layers]."""
        return self.places.k + np.uint64(self.first) * self.places.k_pitch

    @property
    def v(self) -> np.ndarray:
        """The addresses of the first V rows, uint64 [layers]."""
        return self.places.v + np.uint64(self.first) * self.places.v_pitch

    @property
    def lent_by(self) -> KVCache | None:
        return self._cache()

    @property
    def pushed(self) -> int:
        """How many of these very rows, from the first on, have become rows of the cache."""
        return self.counted.rows if self.counted is not None else 0

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Rows: ...

    @overload
    def __getitem__(self, index: slice) -> list[Rows]: ...

    def __getitem__(self, index: int | slice) -> Rows | list[Rows]:
        cache = self._cache()
        if cache is None or cache.moves != self._moves:
            raise CacheError("these rows lay in memory that the cache has left since: use them before it changes")
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        k, v = cache[index].buffers
        return k[self.first : self.first + self.size], v[self.first : self.first + self.size]
