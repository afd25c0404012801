"""Some rows of a hidden batch, one behind the other: those whose logits are wanted.

    out[i] = x[rows[i]]

One block a row. Which rows is read from device memory, so that a captured step can be replayed for others.
"""

from __future__ import annotations

import functools
from typing import Any

from frink_numba.kernels.cubins import Source

THREADS = 128
ARGUMENTS = (
    ("x", "u64"),  # float32 [any, cols], cols a multiple of 4
    ("rows", "u64"),  # int32, one a block
    ("out", "u64"),  # float32 [blocks, cols]
    ("cols", "u32"),
)


def build(overlap: bool) -> tuple[Any, Any]:
    """The kernel for numba, and its signature."""
    from numba import cuda, types

    from frink_numba.kernels.instructions import launch_dependents, wait_for_predecessors
    from frink_numba.kernels.ptx import instruction, numba_type
    from frink_numba.kernels.row_operations import load4, store4

    load_word = instruction("ld.global.u32 $0, [$1];", "u32", "u64")
    u32, u64 = types.uint32, types.uint64

    def gather_rows(x, rows, out, cols):
        if overlap:
            launch_dependents()
            wait_for_predecessors()
        row = u64(cuda.blockIdx.x)
        source = x + u64(load_word(rows + row * u64(4))) * u64(cols) * u64(4)
        target = out + row * u64(cols) * u64(4)
        for at in range(u32(u32(cuda.threadIdx.x) * u32(4)), cols, u32(4 * THREADS)):
            v = load4(source + u64(at) * u64(4))
            store4(target + u64(at) * u64(4), v[0], v[1], v[2], v[3])

    return gather_rows, types.void(*(numba_type(spec) for _, spec in ARGUMENTS))


def source(overlap: bool) -> Source:
    """What to compile."""
    return Source(f"gather_rows overlap={overlap}", functools.partial(build, overlap), THREADS)
