"""Page-locked host memory that is lent out as NumPy arrays and comes back by itself.

Locking pages takes longer than a prefill step, so blocks are kept. A block is lent as one array; when the last view of
that array is gone, the block is free again. No copy is made between the device's answer and the caller's hands.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from frink_numba.cuda.runtime import Runtime

_KEPT_BYTES = 1 << 30  # of blocks that are not lent
_GRANULE = 1 << 16


class _Loan:
    """Owns a block while arrays look at it, as their base; with the last of them it goes back among the `free` ones."""

    __slots__ = ("__array_interface__", "__weakref__", "_block", "_free")

    def __init__(self, block: np.ndarray, free: deque[np.ndarray]) -> None:
        self._block, self._free = block, free
        self.__array_interface__: dict[str, Any] = block.__array_interface__

    def __del__(self) -> None:  # a finalizer of weakref's would take longer to make than all else here
        self._free.append(self._block)


class PinnedPool:
    """Blocks of page-locked memory of one device. Use under the device's lock; the arrays may be dropped anywhere."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        # A deque: blocks come back from whichever thread drops the last array, even in the middle of `lend`.
        self._free: deque[np.ndarray] = deque()

    def lend(self, nbytes: int) -> np.ndarray:
        """An uninitialized uint8 array of `nbytes`, page-locked. Raises what the runtime raises."""
        kept = self._free
        while sum(block.nbytes for block in list(kept)) > _KEPT_BYTES:
            kept.popleft()
        for _ in range(len(kept)):
            try:
                block = kept.popleft()
            except IndexError:
                break
            if nbytes <= block.nbytes <= 4 * nbytes + _GRANULE:
                return self._loan(block, nbytes)
            kept.append(block)
        self._runtime.release()  # blocks that were not kept
        return self._loan(self._runtime.pinned_bytes(-(-nbytes // _GRANULE) * _GRANULE), nbytes)

    def owns(self, array: np.ndarray) -> bool:
        """Whether the device can copy straight from or to `array`: contiguous memory that a pool has lent."""
        base: Any = array
        while isinstance(base, np.ndarray):
            base = base.base
        return isinstance(base, _Loan) and bool(array.flags.c_contiguous)

    def clear(self) -> None:
        """Let go of the blocks that are not lent."""
        self._free.clear()

    def _loan(self, block: np.ndarray, nbytes: int) -> np.ndarray:
        return np.asarray(_Loan(block, self._free))[:nbytes]
