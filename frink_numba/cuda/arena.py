"""Scratch memory of a run: one block, laid out before the run, so that nothing is allocated inside the layer loop."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from frink_numba.cuda.runtime import Runtime

ALIGNMENT = 256  # bytes; what the driver's own allocations have at least
_FLOAT = 4


class Layout:
    """Places parts one after the other, each aligned."""

    def __init__(self) -> None:
        self.nbytes = 0

    def add(self, nbytes: int) -> int:
        """The offset of a new part of `nbytes`."""
        offset = self.nbytes
        self.nbytes += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return offset


def share(
    sizes: Mapping[str, int], needed: Mapping[str, Collection[int]], lowest: Collection[str] = ()
) -> tuple[dict[str, int], int]:
    """Places for parts of which not all are needed at once: (offsets by name, bytes of the whole).

    sizes: bytes by name. needed: the stages of a run at which a part's contents matter. Two parts that have a stage in
    common do not overlap. The largest are placed first, each as low as it fits; `lowest` before all, which have no
    stage in common and lie at the beginning.
    """
    places: dict[str, int] = {}
    end = 0
    for name in sorted(sizes, key=lambda name: (name not in lowest, -sizes[name])):
        stages = set(needed[name])
        taken = sorted(
            (place, place + sizes[other]) for other, place in places.items() if not stages.isdisjoint(needed[other])
        )
        offset = 0
        for first, last in taken:
            if offset + sizes[name] <= first:
                break
            offset = max(offset, -(-last // ALIGNMENT) * ALIGNMENT)
        places[name] = offset
        end = max(end, offset + sizes[name])
    return places, -(-end // ALIGNMENT) * ALIGNMENT


def float_bytes(*elements: int) -> int:
    """Bytes of float32 arrays of these many elements, one after the other."""
    layout = Layout()
    for count in elements:
        layout.add(count * _FLOAT)
    return layout.nbytes


class Carver:
    """Cuts typed arrays out of one block of bytes, in the order of a layout."""

    def __init__(self, block: Any) -> None:
        self._block = block
        self._layout = Layout()

    def array(self, shape: tuple[int, ...], dtype: Any = np.float32) -> Any:
        """The next part as an array; the block must have room for it."""
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        offset = self._layout.add(nbytes)
        return self._block[offset : offset + nbytes].view(dtype).reshape(*shape)


class Arena:
    """One block of device memory that grows between runs and never inside one."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._block: Any = None
        self.nbytes = 0
        self.changes = 0  # grows whenever the block is another

    def reserve(self, nbytes: int, spare: int) -> Any:
        """The block, at least `nbytes` long; when it has to grow, by up to a quarter more, no more than `spare` bytes.

        The old block is given back first. What the runtime raises leaves the arena empty.
        """
        if nbytes > self.nbytes:
            self.clear()
            wanted = nbytes + max(0, min(nbytes // 4, spare))
            self._block = self._runtime.device_bytes(wanted)
            self.nbytes = wanted
            self.changes += 1
        return self._block

    def clear(self) -> None:
        """Give the block back."""
        if self._block is not None:
            self._block, self.nbytes = None, 0
            self._runtime.release()
