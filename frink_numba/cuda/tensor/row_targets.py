"""Where a run's new K/V rows go on the host: the cache's spare room if the device can write there, else elsewhere."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from frink_numba.cuda.arena import Carver, float_bytes
from frink_numba.cuda.body import KvSource
from frink_numba.cuda.runtime import Runtime
from frink_numba.cuda.tensor.mirror import Mirror
from frink_numba.cuda.tensor.weights import TensorLayer
from frink_numba.cuda.traffic import Traffic

if TYPE_CHECKING:
    from frink_numba.cuda.device import Workspace

_MOST_PITCH = 1 << 31  # bytes from row to row of a copy, that the driver takes


class Target(NamedTuple):
    """Where a layer's new rows go, K and V [n, heads, width], and the addresses of that memory."""

    k: np.ndarray
    v: np.ndarray
    k_address: int
    v_address: int


class RowTargets:
    """The targets of one run."""

    def __init__(self, runtime: Runtime, work: Workspace, traffic: Traffic) -> None:
        self._runtime, self._work, self._traffic = runtime, work, traffic

    def take(
        self, layers: Sequence[TensorLayer], mirrors: Sequence[Mirror], sources: Sequence[KvSource], n: int
    ) -> list[Target]:
        """Where `n` new rows of each layer go. A mirror remembers what its cache has lent."""
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

    def fetch(self, targets: Sequence[Target], address: int, stream: Any, room: int) -> None:
        """Rows come down from `address` on, where each of K and V has room for `room` rows, in the order of `stream`.

        In one copy where the targets lie at equal distances in one block.
        """
        nbytes, block, n = targets[0].k.nbytes, targets[0].k.base, len(targets[0].k)
        places = [place for target in targets for place in (target.k_address, target.v_address)]
        alike = all(
            target.k.nbytes == nbytes == target.v.nbytes and target.k.base is block and target.v.base is block
            for target in targets
        )
        pitch, step = places[1] - places[0], nbytes // n * room
        even = nbytes <= pitch < _MOST_PITCH
        if alike and even and places == list(range(places[0], places[0] + pitch * len(places), pitch)):
            self._traffic.kv_down += nbytes * len(places)
            self._runtime.fetch_strided(targets[0].k, pitch, len(places), address, stream, step)
            return
        for target in targets:
            for rows in (target.k, target.v):
                self._traffic.kv_down += rows.nbytes
                self._runtime.fetch(rows, address, stream)
                address += rows.nbytes // n * room

    def _writable(self, mirror: Mirror, lease: Any) -> bool:
        """Whether the device can copy rows straight into a lease: float32 in page-locked memory."""
        owners = (lease.k.base, lease.v.base)
        if mirror.owners is not None and all(map(operator.is_, mirror.owners, owners)):
            return True
        pinned = self._work.pinned
        fits = lease.k.dtype == np.float32 and pinned.owns(lease.k) and pinned.owns(lease.v)
        mirror.owners = owners if fits and all(owner is not None for owner in owners) else None
        return fits
