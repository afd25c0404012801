"""Repacks the next layers in threads while others go up: the one costs a processor, the other the bus.

It may begin before anything goes up at all, as soon as somebody knows that a model is going to be used.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress

from frink_numba.backend import Edges
from frink_numba.cuda.tensor.edges import pack_edges
from frink_numba.cuda.tensor.weights import layer_bytes, pack_layer
from frink_numba.cuda.tensor.workers import Workers
from frink_numba.kernels.gemm_pack import PackedMatrix
from frink_numba.layer import Layer

_THREADS = 8
_FEW_THREADS = 4  # for layers so small that more threads wait for the interpreter: SmolLM2's took as long with 8
_SMALL_BYTES = 8 << 20
_NAME = "frink-pack"
_MOST_BYTES = 1 << 30  # of repacked layers that wait; one waits however large it is


class PackAhead:
    """The packs of `layers`, and then of `edges`, made in their order ahead of their being taken.

    Close it, whatever happens.
    """

    def __init__(self, layers: Sequence[Layer], edges: Edges | None = None) -> None:
        self._layers = tuple(layers)
        self._left: deque[Layer | Edges] = deque(layers)
        if edges is not None:
            self._left.append(edges)
        self._made: dict[int, Future[list[PackedMatrix]]] = {}
        largest = max((layer_bytes(layer) for layer in layers), default=1)
        most = _FEW_THREADS if largest < _SMALL_BYTES else _THREADS
        threads = max(1, min(os.cpu_count() or 1, most, len(self._left)))
        self._ahead = max(1, min(len(self._left), _MOST_BYTES // largest))
        # Where a few large layers are all that may wait, their own matrices are cut among the threads.
        self._inside = max(1, threads // self._ahead)
        self._workers = Workers(threads, _NAME)
        with suppress(RuntimeError):  # no thread begins: whoever takes a part finds that nobody has packed it
            self._fill()

    def names(self, layers: Sequence[Layer]) -> bool:
        """Whether all of `layers` are among its own."""
        return {id(layer) for layer in layers} <= {id(layer) for layer in self._layers}

    def take(self, part: Layer | Edges) -> list[PackedMatrix] | None:
        """The part's packs, in the order of `LayerPacks.all` or as `pack_edges` has them. Raises what failed.

        None for a part that was not named, or taken before.
        """
        future = self._made.pop(id(part), None)
        with suppress(IndexError, RuntimeError):  # somebody closes it at this moment
            self._fill()
        try:
            return None if future is None else future.result()
        except CancelledError:  # somebody has closed it
            return None

    @property
    def done(self) -> bool:
        """Whether all was taken."""
        return not (self._left or self._made)

    def close(self) -> None:
        """Stop, and wait for what is being done."""
        self._left.clear()
        self._made.clear()
        self._workers.stop()

    def _fill(self) -> None:
        while self._left and len(self._made) < self._ahead:
            part = self._left.popleft()
            if isinstance(part, Layer):
                self._made[id(part)] = self._workers.submit(pack_layer, part, self._inside)
            else:
                self._made[id(part)] = self._workers.submit(pack_edges, part)
