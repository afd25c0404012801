"""`kernel`: `cuda.jit` with the limits that a kernel is written for, in the simulator too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import cuda
from numba.cuda import config

# numba warns of every grid under 128 blocks. A short batch or a narrow matrix has such grids rightly, and the switch is
# numba's only one: it has none for a single kernel.
config.CUDA_LOW_OCCUPANCY_WARNINGS = 0


def kernel(threads: int, blocks: int = 1) -> Callable[[Callable[..., None]], Any]:
    """Compile for blocks of `threads`, with registers left for `blocks` of them on a multiprocessor.

    The simulator has no launch bounds and refuses the argument.
    """
    if config.ENABLE_CUDASIM:
        return cuda.jit
    return cuda.jit(launch_bounds=(threads, blocks))
