"""A post-norm and its residual: hidden += y * weight / sqrt(mean y**2 + eps), row by row, float32 (R5).

One block a row; y is read twice, the second time from the cache.
"""

from __future__ import annotations

import functools
from typing import Any

from frink_numba.kernels.cubins import Source

ARGUMENTS = (
    ("hidden", "u64"),  # float32 [rows, cols], changed
    ("y", "u64"),  # float32 [rows, cols]
    ("weight", "u64"),  # float32 [cols]
    ("cols", "u32"),  # a multiple of 4
    ("eps", "f32"),
)


def build(threads: int, overlap: bool) -> tuple[Any, Any]:
    """The kernel for numba, and its signature. Grid: one block of `threads` a row, no dynamic shared memory."""
    from numba import cuda, types

    from frink_numba.kernels.instructions import launch_dependents, wait_for_predecessors
    from frink_numba.kernels.ptx import numba_type, shared_address
    from frink_numba.kernels.row_operations import block_reduce, load4, quotient, reciprocal, root, store4

    u32, u64, f32 = types.uint32, types.uint64, types.float32
    scratch_size = threads // 32
    reduce = block_reduce(("add",), threads)

    def norm_add(hidden, y, weight, cols, eps):
        if overlap:
            launch_dependents()
            wait_for_predecessors()
        scratch = cuda.shared.array(scratch_size, types.float32)
        thread = u32(cuda.threadIdx.x)
        start = u64(cuda.blockIdx.x) * u64(cols) * u64(4)
        squares = f32(0.0)
        for k in range(u32(thread * u32(4)), cols, u32(4 * threads)):
            v = load4(y + start + u64(k) * u64(4))
            squares += (v[0] * v[0] + v[1] * v[1]) + (v[2] * v[2] + v[3] * v[3])
        sums = reduce(squares, shared_address(scratch), thread)
        inverse = reciprocal(root(quotient(sums[0], f32(cols)) + eps))
        for k in range(u32(thread * u32(4)), cols, u32(4 * threads)):
            at = u64(k) * u64(4)
            v = load4(y + start + at)
            w = load4(weight + at)
            h = load4(hidden + start + at)
            store4(
                hidden + start + at,
                h[0] + v[0] * inverse * w[0],
                h[1] + v[1] * inverse * w[1],
                h[2] + v[2] * inverse * w[2],
                h[3] + v[3] * inverse * w[3],
            )

    return norm_add, types.void(*(numba_type(spec) for _, spec in ARGUMENTS))


def source(threads: int, overlap: bool) -> Source:
    """What to compile for blocks of `threads`."""
    return Source(f"norm_add overlap={overlap}", functools.partial(build, threads, overlap), threads)
