"""Repacks the next layers in threads while others go up: the one costs a processor, the other the bus."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from frink_numba.cuda.tensor.weights import layer_bytes, pack_layer
from frink_numba.kernels.gemm_pack import PackedMatrix
from frink_numba.layer import Layer

_THREADS = 8
_MOST_BYTES = 1 << 30  # of repacked layers that wait; one waits however large it is


class PackAhead:
    """The packs of `layers`, made in their order ahead of their being taken. Close it, whatever happens."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._left = deque(layers)
        self._made: dict[int, Future[list[PackedMatrix]]] = {}
        threads = min(os.cpu_count() or 1, _THREADS, len(layers))
        largest = max((layer_bytes(layer) for layer in layers), default=1)
        self._ahead = max(1, min(2 * threads, _MOST_BYTES // largest))
        # Where a few large layers are all that may wait, their own matrices are cut among the threads.
        self._inside = max(1, threads // self._ahead)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="frink-pack")
        self._fill()

    def take(self, layer: Layer) -> list[PackedMatrix] | None:
        """The layer's packs in the order of `LayerPacks.all`; None for one that was not named. Raises what failed."""
        future = self._made.pop(id(layer), None)
        self._fill()
        return None if future is None else future.result()

    def close(self) -> None:
        """Stop, and wait for what is being done."""
        self._left.clear()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _fill(self) -> None:
        while self._left and len(self._made) < self._ahead:
            layer = self._left.popleft()
            self._made[id(layer)] = self._pool.submit(pack_layer, layer, self._inside)
