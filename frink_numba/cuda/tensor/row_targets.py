"""Where a run's new K/V rows go on the host: the cache's spare room if the device can write there, else elsewhere."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from frink_numba.cuda.arena import Carver, float_bytes
from frink_numba.cuda.body import KvSource, Rows
from frink_numba.cuda.runtime import Runtime
from frink_numba.cuda.tensor.mirror import Mirror, Whole
from frink_numba.cuda.tensor.weights import TensorLayer
from frink_numba.cuda.traffic import Traffic

if TYPE_CHECKING:
    from frink_numba.cuda.device import Workspace

_MOST_PITCH = 1 << 31  # bytes from row to row of a copy, that the driver takes
ALL = slice(None)


class Target(NamedTuple):
    """Where a layer's new rows go, K and V [n, heads, width], and the addresses of that memory."""

    k: np.ndarray
    v: np.ndarray
    k_address: int
    v_address: int


class RowTargets(Protocol):
    """The targets of one run, for the layers of the run in their order."""

    rows: Sequence[Rows]
    place: tuple[bytes, int] | None  # equal where rows go to the same addresses; None where nobody knows

    def fetch(self, first: int, last: int, address: int, stream: Any, room: int, part: slice = ALL) -> None:
        """Rows `part` of layers first .. last-1 come down from `address` on, in the order of `stream`.

        Each of K and V has room for `room` rows there.
        """

    def done(self) -> None:
        """The run has succeeded: the mirrors' new rows are those that went to the targets."""


class LayerTargets:
    """Layer by layer: of runs over some of a model's layers, and over caches that do not know each other."""

    def __init__(
        self,
        runtime: Runtime,
        work: Workspace,
        traffic: Traffic,
        layers: Sequence[TensorLayer],
        mirrors: Sequence[Mirror],
        sources: Sequence[KvSource],
        n: int,
    ) -> None:
        """For `n` new rows of each layer. A mirror remembers what its cache has lent."""
        self.place: tuple[bytes, int] | None = None
        self._runtime, self._work, self._traffic = runtime, work, traffic
        self._targets = self._take(layers, mirrors, sources, n)
        self.rows: Sequence[Rows] = [(target.k, target.v) for target in self._targets]

    def fetch(self, first: int, last: int, address: int, stream: Any, room: int, part: slice = ALL) -> None:
        """In one copy where the targets lie at equal distances in one block."""
        targets = self._targets[first:last]
        rows = targets[0].k[part]
        nbytes, block = rows.nbytes, targets[0].k.base
        places = [place for target in targets for place in (target.k_address, target.v_address)]
        alike = all(
            target.k.nbytes == targets[0].k.nbytes == target.v.nbytes
            and target.k.base is block
            and target.v.base is block
            for target in targets
        )
        pitch, step = places[1] - places[0], nbytes // len(rows) * room
        even = targets[0].k.nbytes <= pitch < _MOST_PITCH
        if alike and even and places == list(range(places[0], places[0] + pitch * len(places), pitch)):
            self._traffic.kv_down += nbytes * len(places)
            self._runtime.fetch_strided(rows, pitch, len(places), address, stream, step)
            return
        for target in targets:
            for rows in (target.k[part], target.v[part]):
                self._traffic.kv_down += rows.nbytes
                self._runtime.fetch(rows, address, stream)
                address += rows.nbytes // len(rows) * room

    def done(self) -> None:
        """The mirrors have what their caches lent already."""

    def _take(
        self, layers: Sequence[TensorLayer], mirrors: Sequence[Mirror], sources: Sequence[KvSource], n: int
    ) -> list[Target]:
        targets: list[Target | None] = []
        for mirror, source in zip(mirrors, sources, strict=True):
            lend = getattr(source.cache, "lend", None)
            lease = lend(n) if lend is not None else None
            if lease is not None and not self._writable(mirror, lease):
                lease = None
            mirror.lease = lease
            targets.append(None if lease is None else Target(lease.k, lease.v, lease.k_address, lease.v_address))
        missing = [layer.shape for layer, target in zip(layers, targets, strict=True) if target is None]
        if not missing:
            return [target for target in targets if target is not None]
        lent = self._work.pinned.lend(float_bytes(*(n * shape.kv_width for shape in missing for _ in "kv")))
        carver, out = Carver(lent), []
        for layer, target in zip(layers, targets, strict=True):
            if target is None:
                shape = (n, layer.shape.n_kv_heads, layer.shape.head_dim)
                k, v = carver.array(shape), carver.array(shape)
                target = Target(k, v, k.ctypes.data, v.ctypes.data)
            out.append(target)
        return out

    def _writable(self, mirror: Mirror, lease: Any) -> bool:
        """Whether the device can copy rows straight into a lease: float32 in page-locked memory."""
        owners = (lease.k.base, lease.v.base)
        if mirror.owners is not None and all(map(operator.is_, mirror.owners, owners)):
            return True
        pinned = self._work.pinned
        fits = lease.k.dtype == np.float32 and pinned.owns(lease.k) and pinned.owns(lease.v)
        mirror.owners = owners if fits and all(owner is not None for owner in owners) else None
        return fits


class WholeTargets:
    """Of a run over all layers of a cache that lends room as a whole: nothing is done layer by layer."""

    def __init__(
        self,
        runtime: Runtime,
        work: Workspace,
        traffic: Traffic,
        layers: Sequence[TensorLayer],
        whole: Whole,
        cache: Any,
        n: int,
    ) -> None:
        self._runtime, self._traffic, self._whole, self._layers = runtime, traffic, whole, layers
        self._lease = lease = cache.lend(n)
        find_places(whole, cache, lease.places, layers, work)
        self.rows: Sequence[Rows] = lease
        self.place: tuple[bytes, int] | None = (whole.where, lease.first) if whole.writable else None
        if not whole.writable:
            carver = Carver(work.pinned.lend(float_bytes(*(n * x.shape.kv_width for x in layers for _ in "kv"))))
            shapes = [(n, x.shape.n_kv_heads, x.shape.head_dim) for x in layers]
            self.rows = [(carver.array(shape), carver.array(shape)) for shape in shapes]

    def fetch(self, first: int, last: int, address: int, stream: Any, room: int, part: slice = ALL) -> None:
        """In one copy where the rows of all layers lie at equal distances."""
        whole = self._whole
        if whole.writable and whole.pitch:
            rows = self.rows[first][0][part]
            count, n = 2 * (last - first), len(rows)
            self._traffic.kv_down += rows.nbytes * count
            self._runtime.fetch_strided(rows, whole.pitch, count, address, stream, rows.nbytes // n * room)
            return
        for number in range(first, last):
            for all_rows in self.rows[number]:
                rows = all_rows[part]
                self._traffic.kv_down += rows.nbytes
                self._runtime.fetch(rows, address, stream)
                address += rows.nbytes // len(rows) * room

    def done(self) -> None:
        self._whole.lease = self._lease if self._whole.writable else None


def find_places(whole: Whole, cache: Any, places: Any, layers: Sequence[TensorLayer], work: Workspace) -> None:
    """All that `whole` knows of where the cache's rows are now."""
    if whole.places is places:
        return
    whole.places = places
    whole.writable = cache.dtype == np.float32 and all(map(work.pinned.owns, places.owners))
    whole.pitch = _even_pitch(layers, places)
    whole.where = places.k.tobytes() + places.v.tobytes()


def _even_pitch(layers: Sequence[TensorLayer], places: Any) -> int:
    """Bytes from a layer's K to its V, and from there to the next layer's K, where that is one number; else 0."""
    alike = len({layer.shape.kv_width for layer in layers}) == 1 == len(places.owners)
    starts = np.stack([places.k, places.v], axis=1).ravel().astype(np.int64)
    steps = np.diff(starts)
    pitch = int(steps[0])
    return pitch if alike and 0 < pitch < _MOST_PITCH and (steps == pitch).all() else 0
