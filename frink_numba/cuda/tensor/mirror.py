"""K/V rows on the device beside the host's cache, which stays authoritative (R10): kept as long as provably equal.

A cache may tell what became of its rows:

    cache.version                    grows with every change but new rows behind the last
    cache.unchanged_since(version)   how many of the first rows are what they were then
    cache.lend(n)                    where n new rows may be written; `.pushed`: how many of these have become rows

A mirror's rows count as equal up to the first that was changed since, and new ones from when the lease that the run
wrote to was pushed. What is not known to be equal goes up again. Of a cache that tells nothing, everything does.

The layers of a cache that get their mirrors together share one block of memory. A block that nobody uses any more is
kept for the next cache, within bounds: allocating and freeing device memory takes longer than a step.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from frink_numba.cuda.runtime import Runtime
from frink_numba.cuda.shapes import LayerShape
from frink_numba.kernels.fused_attention import head_pitch

_GRANULE = 256  # positions
_KEPT_BYTES = 2 << 30  # of blocks that nobody uses
_WASTE = 4  # a kept block is used again for no less than this part less of its bytes


@dataclass(slots=True, eq=False)
class Block:
    """Device memory, and how many mirrors lie in it."""

    memory: Any
    nbytes: int
    users: int = 0


@dataclass(slots=True, eq=False)
class Mirror:
    """K and V of one layer and cache, each f16 [capacity, n_kv_heads, pitch], at `k` and `v`."""

    block: Block
    nbytes: int
    capacity: int
    k: int
    v: int
    rows: int = 0  # equal to the cache's at `version`
    version: int = 0
    lease: Any = None  # what the last run wrote to behind `rows`
    owners: Any = None  # of the cache's K and V, once they were found to be page-locked
    reference: Any = None
    whole: Whole | None = None

    def known_rows(self, cache: Any) -> int:
        """How many of the first rows equal the cache's now."""
        if not hasattr(cache, "unchanged_since"):
            self.rows, self.lease = 0, None
            return 0
        _settle(self, cache)
        return self.rows


@dataclass(slots=True, eq=False)
class Whole:
    """The mirrors of all layers of a cache, seen at once: addresses uint64 [layers], and what they hold of it.

    While it is `fresh`, its `rows`, `version` and `lease` count, for every layer; else those of the mirrors do.
    """

    reference: weakref.ref[Any]
    mirrors: list[Mirror]  # empty: some were dropped, and this is of no use any more
    capacity: int
    k: np.ndarray
    v: np.ndarray
    rows: int = 0
    version: int = 0
    lease: Any = None
    fresh: bool = False
    pitch: int = 0  # of `places`: see row_targets.py
    places: Any = None  # of the cache's rows when it was last found out whether a device can write there
    writable: bool = False
    where: bytes = b""  # of all layers: where their K and V begin

    def known_rows(self, cache: Any) -> int:
        """How many of the first rows equal the cache's now, in every layer."""
        if self.fresh:
            _settle(self, cache)
        else:
            self.rows = min(
                (mirror.known_rows(layer) for mirror, layer in zip(self.mirrors, cache, strict=True)), default=0
            )
            self.version, self.lease, self.fresh = cache.version, None, True
        return self.rows

    def spread(self) -> None:
        """Let the mirrors' own numbers count again."""
        cache = self.reference()
        if cache is None:
            return
        rows, self.fresh = self.known_rows(cache), False
        for mirror, layer in zip(self.mirrors, cache, strict=True):
            mirror.rows, mirror.version, mirror.lease = rows, layer.version, None


def _settle(held: Mirror | Whole, cache: Any) -> None:
    """Bring `rows` and `version` up to what the cache tells now."""
    if held.lease is not None:
        if held.lease.first == held.rows:
            held.rows += held.lease.pushed
        held.lease = None
    held.rows = min(held.rows, cache.unchanged_since(held.version))
    held.version = cache.version


class Mirrors:
    """The mirrors of one device, by cache object; a cache that is gone takes its mirrors with it."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._held: dict[int, Mirror] = {}
        self._wholes: dict[int, Whole] = {}
        self._kept: list[Block] = []
        self.changes = 0
        self.nbytes = 0  # of all blocks, those that nobody uses included

    def held(self, cache: Any) -> int:
        """Bytes that the mirror of a layer's cache takes."""
        mirror = self._find(cache)
        return mirror.nbytes if mirror is not None else 0

    def room(self, cache: Any) -> int:
        mirror = self._find(cache)
        return mirror.capacity if mirror is not None else 0

    def needed(self, shape: LayerShape, cache: Any, positions: int) -> int:
        """Bytes that the mirror of `positions` positions takes: what it has, if that is enough."""
        mirror = self._find(cache)
        if mirror is not None and mirror.capacity >= positions:
            return mirror.nbytes
        return _nbytes(shape, _capacity(mirror, positions))

    def take(self, shapes: Sequence[LayerShape], caches: Sequence[Any], positions: int, stream: Any) -> list[Mirror]:
        """The mirrors with room for `positions` positions; what they held stays, what is new is zero."""
        found = [self._find(cache) for cache in caches]
        for mirror in found:
            if mirror is not None and mirror.whole is not None and mirror.whole.fresh:
                mirror.whole.spread()
        short = [at for at, mirror in enumerate(found) if mirror is None or mirror.capacity < positions]
        if short:
            made = self._make([(shapes[at], caches[at], found[at]) for at in short], positions, stream)
            for at, mirror in zip(short, made, strict=True):
                found[at] = mirror
        return [mirror for mirror in found if mirror is not None]

    def whole(self, shapes: Sequence[LayerShape], cache: Any, positions: int, stream: Any) -> Whole:
        """As `take`, for all layers of a cache that tells of itself as a whole."""
        whole = self._wholes.get(id(cache))
        if whole is not None and whole.reference() is cache and whole.mirrors and whole.capacity >= positions:
            return whole
        mirrors = self.take(shapes, list(cache), positions, stream)
        for mirror in mirrors:
            self._dissolve(mirror.whole)
        k, v = (np.array([getattr(mirror, name) for mirror in mirrors], np.uint64) for name in "kv")
        capacity = min(mirror.capacity for mirror in mirrors)
        made = self._wholes[id(cache)] = Whole(weakref.ref(cache), mirrors, capacity, k, v)
        for mirror in mirrors:
            mirror.whole = made
        return made

    def whole_room(self, cache: Any) -> int:
        """Positions that the mirrors of all layers hold, where `whole` knows them already; else 0."""
        whole = self._wholes.get(id(cache))
        known = whole is not None and whole.reference() is cache and bool(whole.mirrors)
        return whole.capacity if whole is not None and known else 0

    def forget(self, nbytes: int, keep: Sequence[Any] = ()) -> None:
        """Free at least `nbytes` if there are: blocks that nobody uses, then mirrors, the oldest first.

        Those of the caches `keep` stay.
        """
        while nbytes > 0 and self._kept:
            nbytes -= self._free(self._kept.pop())
        kept = {id(cache) for cache in keep}
        blocks = {id(mirror.block) for key, mirror in list(self._held.items()) if key in kept}
        for mirror in list(self._held.values()):
            if nbytes <= 0:
                return
            block = mirror.block
            if id(block) in blocks or block.memory is None:
                continue
            for key, other in list(self._held.items()):
                if other.block is block:
                    self._held.pop(key, None)
                    self._dissolve(other.whole)
            self.changes += 1
            nbytes -= self._free(block)

    def forget_unused(self) -> None:
        """Free the blocks that are kept for caches to come."""
        while self._kept:
            self._free(self._kept.pop())

    def _make(
        self, wanted: Sequence[tuple[LayerShape, Any, Mirror | None]], positions: int, stream: Any
    ) -> list[Mirror]:
        capacities = [_capacity(old, positions) for _, _, old in wanted]
        sizes = [_nbytes(shape, capacity) for (shape, _, _), capacity in zip(wanted, capacities, strict=True)]
        block = self._block(sum(sizes))
        try:
            at, made = self._runtime.address(block.memory), []
            self._runtime.zero(at, sum(sizes), stream)
            for (_, cache, old), capacity, nbytes in zip(wanted, capacities, sizes, strict=True):
                mirror = Mirror(block, nbytes, capacity, at, at + nbytes // 2)
                at += nbytes
                if old is not None:
                    for target, source in ((mirror.k, old.k), (mirror.v, old.v)):
                        self._runtime.move(target, source, old.nbytes // 2, stream)
                    mirror.rows, mirror.version, mirror.lease = old.rows, old.version, old.lease
                self._hold(cache, mirror)
                if old is not None:  # its block may be freed now: that waits until the device has copied it
                    self._leave(old)
                made.append(mirror)
        except BaseException:
            if not block.users:
                self._free(block)
            raise
        self.changes += 1
        return made

    def _hold(self, cache: Any, mirror: Mirror) -> None:
        key = id(cache)

        def gone(_: object) -> None:
            if self._held.get(key) is mirror:
                del self._held[key]
                self.changes += 1
                self._leave(mirror)

        mirror.block.users += 1
        mirror.reference = weakref.ref(cache, gone)
        self._held[key] = mirror

    def _leave(self, mirror: Mirror) -> None:
        """The mirror is not held any more: its block is kept for others once nobody uses it."""
        self._dissolve(mirror.whole)
        block = mirror.block
        block.users -= 1
        if not block.users and block.memory is not None:
            if sum(kept.nbytes for kept in self._kept) + block.nbytes <= _KEPT_BYTES:
                self._kept.append(block)
            else:
                self._free(block)

    def _dissolve(self, whole: Whole | None) -> None:
        if whole is None:
            return
        if whole.fresh:
            whole.spread()
        for mirror in whole.mirrors:
            mirror.whole = None
        whole.mirrors = []
        for key, other in list(self._wholes.items()):
            if other is whole:
                del self._wholes[key]

    def _block(self, nbytes: int) -> Block:
        for block in list(self._kept):
            if nbytes <= block.nbytes <= nbytes + nbytes // _WASTE and block in self._kept:
                self._kept.remove(block)
                return block
        memory = self._runtime.device_bytes(nbytes)
        self.nbytes += nbytes
        return Block(memory, nbytes)

    def _free(self, block: Block) -> int:
        """Bytes that were given back. Whoever refers to the block still must not use it."""
        if block.memory is None:
            return 0
        block.memory = None
        self.nbytes -= block.nbytes
        return block.nbytes

    def _find(self, cache: Any) -> Mirror | None:
        mirror = self._held.get(id(cache))
        return mirror if mirror is not None and mirror.reference() is cache else None


def _capacity(old: Mirror | None, positions: int) -> int:
    """Positions of a new mirror: what is needed, and a quarter more when it has grown before."""
    wanted = positions if old is None else positions + positions // 4
    return -(-wanted // _GRANULE) * _GRANULE


def _nbytes(shape: LayerShape, capacity: int) -> int:
    return 2 * 2 * capacity * shape.n_kv_heads * head_pitch(shape.head_dim)
