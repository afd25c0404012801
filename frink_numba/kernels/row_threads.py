"""How many threads work on a row: the order of its sums follows from it, whatever kernel takes them."""

from __future__ import annotations

import functools


@functools.cache
def row_threads(cols: int) -> int:
    """Threads of a block that works on a row of `cols` float32, a multiple of 4: few turns, and no idle warps."""
    return 64 if cols <= 512 else 128 if cols <= 2048 else 256 if cols <= 8192 else 512
