"""One layer's K/V rows in the host's cache, and what all layers of a cache have in common."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from frink_numba.errors import CacheError
from frink_numba.layer import Layer

DTYPES = (np.dtype(np.float32), np.dtype(np.float16))
_FIRST_CAPACITY = 64  # rows of a layer's first buffer; it doubles from there


@dataclass(slots=True, eq=False)
class Counted:
    """How many of the rows that all layers were given together have become rows of the cache."""

    rows: int = 0


@dataclass(slots=True)
class Shared:
    """What all layers of a cache have in common: one assignment to `positions` moves every layer at once."""

    context_length: int
    dtype: np.dtype[Any]
    allocate: Callable[[int], np.ndarray]
    positions: int = 0
    cuts: list[int] = field(default_factory=list)  # the positions that were left after each truncation
    staged: int = 0  # rows that lie behind the last of every layer and do not count yet
    counted: Counted | None = None  # of those that were staged together with them
    evictions: int = 0
    moves: int = 0  # grows whenever a layer goes on in other buffers
    lent: weakref.ref[Any] | None = None  # the lease on rows of all layers that was given out last
    layers_lent: bool = False  # whether a layer may have given out a lease since

    def check_room(self, n: int) -> None:
        if n < 0:
            raise CacheError(f"cannot add {n} positions")
        if self.positions + n > self.context_length:
            raise CacheError(
                f"{n} positions after {self.positions} exceed the context of {self.context_length}; truncate the "
                "cache, or load the model with a longer context"
            )


@dataclass(slots=True, eq=False)
class Lease:
    """Room behind a layer's last row for somebody to write new rows to: K and V [n, heads, width].

    Another lease, or a push of other rows, makes it void.
    """

    first: int  # row
    k: np.ndarray
    v: np.ndarray
    k_address: int = 0  # of the first row in memory, where it was lent by `lend`
    v_address: int = 0
    counted: Counted | None = None

    @property
    def pushed(self) -> int:
        """How many of these very rows, from the first on, have become rows of the cache."""
        return self.counted.rows if self.counted is not None else 0


class LayerKV:
    """One layer's rows, K [rows, n_kv_heads, key_dim] and V [rows, n_kv_heads, value_dim]; a `LayerCache`."""

    def __init__(self, shared: Shared, index: int, layer: Layer) -> None:
        attention = layer.attention
        self.index = index
        self.n_kv_heads = attention.n_kv_heads
        self.key_dim = attention.head_dim
        self.value_dim = attention.head_dim
        self.window = attention.window
        self._shared = shared  # not the KVCache: a cycle would keep the buffers until the collector comes by
        self._evicted = 0
        self._evictions = 0
        self._k, self._v = self._allocate(0)
        self._addresses: tuple[int, int] | None = None  # of these two, once somebody asked
        self._lent: Lease | None = None  # the tail given out last

    @property
    def positions(self) -> int:
        """Positions seen so far, evicted ones included."""
        return self._shared.positions

    @property
    def rows(self) -> int:
        """Rows kept: `positions` less the evicted ones."""
        return self._shared.positions - self._evicted

    @property
    def version(self) -> int:
        """Grows whenever rows change otherwise than by new ones behind the last; see `unchanged_since`."""
        return len(self._shared.cuts) + self._evictions

    def unchanged_since(self, version: int) -> int:
        """How many of the first rows are what they were at that version: what a mirror of the rows may keep."""
        changes = self.version - version
        if not changes:
            return self.rows
        # Which of the changes were evictions is not kept: they shift all rows.
        return 0 if self._evictions or changes < 0 else min(self.rows, *self._shared.cuts[version:])

    @property
    def buffers(self) -> tuple[np.ndarray, np.ndarray]:
        """K and V [capacity, heads, width], of which `rows` count."""
        return self._k, self._v

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, spare capacity included."""
        return int(self._k.nbytes + self._v.nbytes)

    def prefix(self) -> tuple[np.ndarray, np.ndarray]:
        """Read-only views of K and V, valid until the cache changes."""
        k, v = self._k[: self.rows], self._v[: self.rows]
        k.flags.writeable = False
        v.flags.writeable = False
        return k, v

    def tail(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Writable views of the `n` rows after the last. They do not count until a push; the next tail reuses them."""
        return self.with_tail(n)[2:]

    def lend(self, n: int) -> Lease:
        """The `tail`, with word of whether it was pushed."""
        self.with_tail(n)
        lease = self._lent
        assert lease is not None
        if self._addresses is None:
            self._addresses = self._k.ctypes.data, self._v.ctypes.data
        lease.k_address = self._addresses[0] + lease.first * self._k.strides[0]
        lease.v_address = self._addresses[1] + lease.first * self._v.strides[0]
        return lease

    def with_tail(self, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """(K, V, tail K, tail V): K and V with `n` more rows than there are, to be read only, and `tail`.

        CacheError when the positions would pass the context length.
        """
        shared = self._shared
        shared.staged = 0  # what lay there is written over
        shared.lent, shared.layers_lent = None, True
        first = shared.positions - self._evicted
        end = first + n
        if n < 0 or end > self._k.shape[0] or shared.positions + n > shared.context_length:
            self.reserve(n)
        k, v = self._k[:end], self._v[:end]
        tail_k, tail_v = k[first:], v[first:]
        self._lent = Lease(first, tail_k, tail_v)
        return k, v, tail_k, tail_v

    def reserve(self, n: int) -> None:
        """Room for `n` more rows: capacity doubles, up to the context length. Rows and counts stay as they are."""
        self._shared.check_room(n)
        capacity = self.capacity_for(n)
        if capacity > self._k.shape[0]:
            self.move_to(*self._allocate(capacity))

    def capacity_for(self, n: int) -> int:
        """Rows that the buffers hold, or must hold to have room for `n` more."""
        held, need = self._k.shape[0], self.rows + n
        if need <= held:
            return held
        return min(max(need, 2 * held, _FIRST_CAPACITY), self._shared.context_length)

    def holds(self, rows: int) -> bool:
        return rows <= self._k.shape[0]

    def move_to(self, k: np.ndarray, v: np.ndarray) -> None:
        """Go on in larger buffers."""
        self._left()
        k[: self.rows] = self._k[: self.rows]
        v[: self.rows] = self._v[: self.rows]
        self._k, self._v = k, v
        self._addresses = self._lent = None

    def check_rows(self, k: np.ndarray, v: np.ndarray, n: int) -> None:
        """CacheError, naming the layer and the shapes, unless K and V are `n` rows of this layer's widths."""
        want_k, want_v = (n, self.n_kv_heads, self.key_dim), (n, self.n_kv_heads, self.value_dim)
        if k.shape != want_k or v.shape != want_v:
            raise CacheError(
                f"layer {self.index}: K rows {list(k.shape)} and V rows {list(v.shape)} do not fit a cache of "
                f"{list(want_k)} and {list(want_v)}"
            )
        for rows in (k, v):
            if rows.dtype not in DTYPES:
                raise CacheError(f"layer {self.index}: K/V rows must be float32 or float16, not {rows.dtype}")

    def wrote(self, k: np.ndarray, v: np.ndarray) -> bool:
        """Whether these are the tail itself, whose rows were written in place."""
        lent = self._lent
        return lent is not None and k is lent.k and v is lent.v and lent.first == self.rows

    def write_tail(self, k: np.ndarray, v: np.ndarray) -> None:
        """Copy rows [n, heads, width] behind the last ones, uncounted. CacheError when float16 cannot hold a value."""
        if self.wrote(k, v):
            return
        tail_k, tail_v = self.tail(k.shape[0])
        store_rows(k, tail_k, self.index)
        store_rows(v, tail_v, self.index)
        self._lent = None

    def stage(self, counted: Counted) -> None:
        """The rows behind the last will count as `counted` says: the lease on them, if there is one, was kept."""
        if self._lent is not None:
            self._lent.counted, self._lent = counted, None

    def _left(self) -> None:
        """The buffers are left for others: nothing that was lent there counts."""
        shared = self._shared
        shared.staged, shared.lent = 0, None
        shared.moves += 1

    def void(self) -> None:
        """Take back the tail that was given out last."""
        self._lent = None

    def evictable(self) -> int:
        """Rows that no query from `positions` on can see."""
        if not self.window:
            return 0
        return max(0, self.positions - self.window + 1 - self._evicted)

    def without(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Buffers that hold all rows but the first `n`."""
        kept = self.rows - n
        k, v = self._allocate(kept)
        k[:kept] = self._k[n : self.rows]
        v[:kept] = self._v[n : self.rows]
        return k, v

    def adopt(self, buffers: tuple[np.ndarray, np.ndarray], evicted: int) -> None:
        """Take `buffers`, which lack `evicted` rows of those held."""
        self._left()
        self._k, self._v = buffers
        self._addresses = self._lent = None
        self._evicted += evicted
        self._evictions += 1
        self._shared.evictions += 1

    def check_truncate(self, n: int) -> None:
        """CacheError when a query at position `n` would miss a row that was evicted."""
        if n and self._evicted > max(0, n - self.window + 1):
            raise CacheError(
                f"layer {self.index}: cannot truncate to {n} positions, since the first {self._evicted} rows were "
                f"evicted and its window of {self.window} reaches back before them; truncate to 0 and start over"
            )

    def forget_evictions(self) -> None:
        """After a truncation to nothing."""
        self._evicted = 0

    def _allocate(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        return self._array(rows, self.key_dim), self._array(rows, self.value_dim)

    def _array(self, rows: int, width: int) -> np.ndarray:
        shape, dtype = (rows, self.n_kv_heads, width), self._shared.dtype
        return self._shared.allocate(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)


def store_rows(rows: np.ndarray, out: np.ndarray, layer: int) -> None:
    """Copy K or V rows to `out`, float32 or float16; CacheError when float16 cannot hold a value."""
    if rows.dtype == out.dtype:
        out[...] = rows
        return
    with np.errstate(over="raise"):
        try:
            out[...] = rows
        except FloatingPointError:
            raise CacheError(
                f"layer {layer}: K/V rows reach {float(np.max(np.abs(rows))):g}, beyond float16; use a float32 cache"
            ) from None
