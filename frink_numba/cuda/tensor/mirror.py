"""K/V rows on the device beside the host's cache, which stays authoritative (R10): kept as long as provably equal.

A cache may tell what became of its rows:

    cache.version                    grows with every change but new rows behind the last
    cache.unchanged_since(version)   how many of the first rows are what they were then
    cache.lend(n)                    where n new rows may be written; `.pushed`: how many of these have become rows

A mirror's rows count as equal up to the first that was changed since, and new ones from when the lease that the run
wrote to was pushed. What is not known to be equal goes up again. Of a cache that tells nothing, everything does.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from frink_numba.cuda.runtime import Runtime
from frink_numba.cuda.shapes import LayerShape
from frink_numba.kernels.fused_attention import head_pitch

_GRANULE = 256  # positions


@dataclass(slots=True, eq=False)
class Mirror:
    """K and V of one layer and cache, each f16 [capacity, n_kv_heads, pitch], at `k` and `v`."""

    block: Any
    nbytes: int
    capacity: int
    k: int
    v: int
    rows: int = 0  # equal to the cache's at `version`
    version: int = 0
    lease: Any = None  # what the last run wrote to behind `rows`
    owners: Any = None  # of the cache's K and V, once they were found to be page-locked
    reference: Any = None

    def known_rows(self, cache: Any) -> int:
        """How many of the first rows equal the cache's now."""
        if not hasattr(cache, "unchanged_since"):
            self.rows, self.lease = 0, None
            return 0
        if self.lease is not None:
            if self.lease.first == self.rows:
                self.rows += self.lease.pushed
            self.lease = None
        self.rows = min(self.rows, cache.unchanged_since(self.version))
        self.version = cache.version
        return self.rows


class Mirrors:
    """The mirrors of one device, by cache object; a cache that is gone takes its mirror with it."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._held: dict[int, Mirror] = {}
        self.changes = 0

    @property
    def nbytes(self) -> int:
        return sum(mirror.nbytes for mirror in list(self._held.values()))

    def held(self, cache: Any) -> int:
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

    def get(self, shape: LayerShape, cache: Any, positions: int, stream: Any) -> Mirror:
        """The mirror with room for `positions` positions; what it held stays, what is new is zero."""
        mirror = self._find(cache)
        if mirror is not None and mirror.capacity >= positions:
            return mirror
        capacity = _capacity(mirror, positions)
        nbytes = _nbytes(shape, capacity)
        block = self._runtime.device_bytes(nbytes)
        k = self._runtime.address(block)
        v = k + nbytes // 2
        self._runtime.zero(k, nbytes, stream)
        made = Mirror(block, nbytes, capacity, k, v)
        if mirror is not None:
            for target, source in ((k, mirror.k), (v, mirror.v)):
                self._runtime.move(target, source, mirror.nbytes // 2, stream)
            made.rows, made.version, made.lease = mirror.rows, mirror.version, mirror.lease
            # The old block stays until the device has copied it: freeing waits for the device.
        key, held = id(cache), self._held

        def gone(_: object) -> None:
            held.pop(key, None)
            self.changes += 1

        made.reference = weakref.ref(cache, gone)
        held[key] = made
        self.changes += 1
        return made

    def forget(self, nbytes: int, keep: Sequence[Any] = ()) -> None:
        """Drop mirrors, the least recently made first but those of `keep`, until `nbytes` are free or none is left."""
        kept = {id(cache) for cache in keep}
        for key in [key for key in self._held if key not in kept]:
            if nbytes <= 0:
                return
            mirror = self._held.pop(key, None)
            self.changes += 1
            nbytes -= mirror.nbytes if mirror is not None else 0

    def _find(self, cache: Any) -> Mirror | None:
        mirror = self._held.get(id(cache))
        return mirror if mirror is not None and mirror.reference() is cache else None


def _capacity(old: Mirror | None, positions: int) -> int:
    """Positions of a new mirror: what is needed, and a quarter more when it has grown before."""
    wanted = positions if old is None else positions + positions // 4
    return -(-wanted // _GRANULE) * _GRANULE


def _nbytes(shape: LayerShape, capacity: int) -> int:
    return 2 * 2 * capacity * shape.n_kv_heads * head_pitch(shape.head_dim)
