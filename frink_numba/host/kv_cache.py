"""The host's K/V rows of every layer: authoritative, in the order of positions, changed all layers or none (R10)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import DTypeLike

from frink_numba.errors import CacheError
from frink_numba.host.cache_lease import CacheLease, Places
from frink_numba.host.integers import shown
from frink_numba.host.layer_kv import DTYPES, Counted, LayerKV, Shared
from frink_numba.layer import Layer


class KVCache(Sequence[LayerKV]):
    """The caches of a model's layers, which always hold the same positions. One thread at a time may use it."""

    def __init__(
        self,
        layers: Sequence[Layer],
        context_length: int,
        *,
        dtype: DTypeLike = np.float32,
        allocate: Callable[[int], np.ndarray] | None = None,
    ) -> None:
        """Store rows as `dtype`, float32 or float16, for at most `context_length` positions.

        `allocate(bytes)` gives a new uint8 array (a backend's, whose device can copy rows straight into it); None:
        NumPy's.
        """
        try:
            stored = np.dtype(dtype)
        except TypeError:
            raise CacheError(f"a KV cache stores float32 or float16, not {shown(dtype)}") from None
        if stored not in DTYPES:
            raise CacheError(f"a KV cache stores float32 or float16, not {stored}")
        if isinstance(context_length, bool) or not hasattr(context_length, "__index__") or context_length < 1:
            raise CacheError(
                f"a KV cache needs a context of at least 1 position, an integer, not {shown(context_length)}"
            )
        self.layers = layers  # that it was made for
        self._shared = Shared(context_length.__index__(), stored, allocate or _ordinary_memory)
        self._layers = tuple(LayerKV(self._shared, index, layer) for index, layer in enumerate(layers))
        self._places: tuple[int, Places] | None = None  # at so many moves

    def blank(self) -> KVCache:
        """An empty cache like this one: for the same layers, of the same length and dtype, its memory of the same kind.

        It takes none yet, and asks nobody, so that it can be had when a decoder is closed.
        """
        return KVCache(self.layers, self.context_length, dtype=self.dtype, allocate=self._shared.allocate)

    def __len__(self) -> int:
        return len(self._layers)

    @overload
    def __getitem__(self, index: int) -> LayerKV: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[LayerKV, ...]: ...

    def __getitem__(self, index: int | slice) -> LayerKV | tuple[LayerKV, ...]:
        return self._layers[index]

    def __iter__(self) -> Iterator[LayerKV]:
        return iter(self._layers)

    def __repr__(self) -> str:
        return f"<KVCache of {len(self)} layers, {self.positions} of {self.context_length} positions, {self.dtype}>"

    @property
    def positions(self) -> int:
        """Positions seen so far, by every layer."""
        return self._shared.positions

    @property
    def context_length(self) -> int:
        """The most positions it holds."""
        return self._shared.context_length

    @property
    def dtype(self) -> np.dtype[Any]:
        """float32 or float16."""
        return self._shared.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, spare capacity included."""
        return sum(layer.nbytes for layer in self._layers)

    @property
    def evicted(self) -> bool:
        """Whether any layer lacks rows that were there."""
        return self._shared.evictions > 0 and any(layer.rows < layer.positions for layer in self._layers)

    @property
    def version(self) -> int:
        """As `LayerKV.version`, for all layers: grows whenever rows of any change but by new ones behind the last."""
        return len(self._shared.cuts) + self._shared.evictions

    def unchanged_since(self, version: int) -> int:
        """How many of the first positions are, in every layer, what they were at that version."""
        changes = self.version - version
        if not changes:
            return self.positions
        return 0 if self._shared.evictions or changes < 0 else min(self.positions, *self._shared.cuts[version:])

    @property
    def moves(self) -> int:
        """Grows whenever a layer goes on in other buffers."""
        return self._shared.moves

    @property
    def places(self) -> Places:
        """Where the layers' buffers are."""
        moves = self._shared.moves
        if self._places is None or self._places[0] != moves:
            self._places = moves, Places.of(self._layers)
        return self._places[1]

    def lend(self, n: int) -> CacheLease:
        """Room for `n` new rows in all layers at once; pushing it counts them, at the cost of one.

        CacheError beyond the context, or where rows were evicted.
        """
        if self.evicted:
            raise CacheError("a cache that has evicted rows lends room layer by layer only")
        self.reserve(n)
        shared = self._shared
        if shared.layers_lent:
            for layer in self._layers:
                layer.void()
        shared.layers_lent, shared.staged = False, 0
        lease = CacheLease(self, self.places, shared.moves, shared.positions, n)
        shared.lent = weakref.ref(lease)  # it knows the layers, which know what they share
        return lease

    def push(self, rows: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        """Append one (K, V) pair a layer: [n, n_kv_heads, width] each, float32 or float16, the same n everywhere.

        All layers or none (R10): CacheError or MemoryError leave the cache as it was.
        """
        self.stage(rows)
        self.advance(self._shared.staged)

    def stage(self, rows: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        """Write rows behind the last, as `push`, but count none of them yet: `advance` does.

        Any other change of the cache forgets those that do not count; so does an error here.
        """
        shared = self._shared
        shared.staged = 0
        if isinstance(rows, CacheLease) and shared.lent is not None and shared.lent() is rows:
            shared.check_room(rows.size)
            shared.lent, rows.counted = None, Counted()
            shared.staged, shared.counted = rows.size, rows.counted
            return
        if len(rows) != len(self._layers):
            raise CacheError(f"rows of {len(rows)} layers do not fit a cache of {len(self._layers)}")
        if not rows:
            return
        n = rows[0][0].shape[0]
        self._shared.check_room(n)
        if not all(layer.wrote(k, v) and k.shape[0] == n for layer, (k, v) in zip(self._layers, rows, strict=True)):
            for layer, (k, v) in zip(self._layers, rows, strict=True):
                layer.check_rows(k, v, n)
            self.reserve(n)
            for layer, (k, v) in zip(self._layers, rows, strict=True):
                layer.write_tail(k, v)
        counted = Counted()
        for layer in self._layers:
            layer.stage(counted)
        self._shared.staged, self._shared.counted = n, counted

    @property
    def staged(self) -> int:
        """Positions whose rows are written and do not count yet."""
        return self._shared.staged

    def advance(self, n: int = 1) -> None:
        """Count the next `n` of the staged positions, in all layers at once. CacheError when there are fewer."""
        shared = self._shared
        if not 0 <= n <= shared.staged:
            raise CacheError(f"cannot count {n} positions: {shared.staged} are staged")
        shared.positions += n
        shared.staged -= n
        if shared.counted is not None:
            shared.counted.rows += n

    def reserve(self, n: int) -> None:
        """Room for `n` more positions in every layer; capacities double, up to the context length.

        Layers that must grow get one block of memory together, K and V of one after the other: a device can then copy
        new rows of all of them at once. CacheError beyond the context; MemoryError leaves the cache as it was.
        """
        self._shared.check_room(n)
        if self.positions + n <= self.places.capacity:
            return
        sizes = [(layer, layer.capacity_for(n)) for layer in self._layers]
        growing = [(layer, rows) for layer, rows in sizes if not layer.holds(rows)]
        if not growing:
            return
        item = self.dtype.itemsize
        widths = [(layer.n_kv_heads * layer.key_dim, layer.n_kv_heads * layer.value_dim) for layer, _ in growing]
        nbytes = sum(item * rows * (key + value) for (_, rows), (key, value) in zip(growing, widths, strict=True))
        block = self._shared.allocate(nbytes).view(self.dtype)
        at = 0
        for layer, rows in growing:
            parts = []
            for width in (layer.key_dim, layer.value_dim):
                size = rows * layer.n_kv_heads * width
                parts.append(block[at : at + size].reshape(rows, layer.n_kv_heads, width))
                at += size
            layer.move_to(*parts)

    def truncate(self, n: int) -> None:
        """Forget all positions from `n` on; CacheError when evicted rows would be missed. Buffers are kept."""
        if isinstance(n, bool) or not hasattr(n, "__index__"):
            raise CacheError(f"cannot truncate a cache to {n!r} positions: expected an integer")
        n = n.__index__()
        if not 0 <= n <= self.positions:
            raise CacheError(f"cannot truncate a cache of {self.positions} positions to {n}")
        if n == self.positions:
            return
        if self._shared.evictions:
            for layer in self._layers:
                layer.check_truncate(n)
        self._shared.staged, self._shared.lent = 0, None
        self._shared.cuts.append(n)
        self._shared.positions = n
        if n == 0 and self._shared.evictions:
            for layer in self._layers:
                layer.forget_evictions()

    def evict(self) -> int:
        """Free the rows that no later query can see, in the layers with a sliding window; the number of rows freed.

        K rows hold their absolute rotation, so those that stay need no change however often this is called. CacheError
        when no layer has a window: every row stays visible then, and dropping one would change the answer.
        """
        if not any(layer.window for layer in self._layers):
            raise CacheError("no layer has a sliding window, so no row can be evicted without changing the answer")
        dropped = [(layer, n) for layer in self._layers if (n := layer.evictable())]
        buffers = [layer.without(n) for layer, n in dropped]
        for (layer, n), kept in zip(dropped, buffers, strict=True):
            layer.adopt(kept, n)
        return sum(n for _, n in dropped)


def _ordinary_memory(nbytes: int) -> np.ndarray:
    return np.empty(nbytes, np.uint8)
