"""float32 activations to f16 operands that cannot overflow: each row gets a power of two.

    half[m, k] = x[m, k] / scale[m],   scale[m] = 2**e with max_k |half[m, k]| in [2**14, 2**15),   norm[m] >= |x[m]|_2

One block a row; the row is read twice, the second time from the cache. A row of zeros has scale 1. Not-a-number and
infinity stay what they are, in their own row.
"""

from __future__ import annotations

import functools
from typing import Any

from frink_numba.kernels.cubins import Source

THREADS = 256
ARGUMENTS = (
    ("x", "u64"),  # float32 [rows, cols]
    ("half", "u64"),  # f16 [rows, cols]
    ("scale", "u64"),  # float32 [rows]
    ("norm", "u64"),  # float32 [rows]
    ("cols", "u32"),  # a multiple of 4
)


def build(overlap: bool) -> tuple[Any, Any]:
    """The kernel for numba, and its signature. Grid: one block a row, 256 threads, no dynamic shared memory.

    overlap: launched with the attribute of that name (sm_90).
    """
    from numba import cuda, types

    from frink_numba.kernels.instructions import launch_dependents, wait_for_predecessors
    from frink_numba.kernels.ptx import numba_type, shared_address
    from frink_numba.kernels.row_operations import (
        absolute,
        block_reduce,
        larger,
        load4,
        root,
        row_scales,
        store_float,
        store_half4,
    )

    u32, u64, f32 = types.uint32, types.uint64, types.float32
    scratch_size = 2 * THREADS // 32
    reduce = block_reduce(("add", "max"), THREADS)

    def half_rows(x, half, scale, norm, cols):
        if overlap:
            launch_dependents()
            wait_for_predecessors()
        scratch = cuda.shared.array(scratch_size, types.float32)
        thread = u32(cuda.threadIdx.x)
        row = u64(cuda.blockIdx.x)
        source = x + row * u64(cols) * u64(4)
        top = f32(0.0)
        squares = f32(0.0)
        for k in range(u32(thread * u32(4)), cols, u32(4 * THREADS)):
            v = load4(source + u64(k) * u64(4))
            top = larger(top, larger(larger(absolute(v[0]), absolute(v[1])), larger(absolute(v[2]), absolute(v[3]))))
            squares += (v[0] * v[0] + v[1] * v[1]) + (v[2] * v[2] + v[3] * v[3])
        sums = reduce(squares, top, shared_address(scratch), thread)
        factors = row_scales(sums[1])
        if thread == 0:
            store_float(scale + row * u64(4), factors[0])
            # A little more than the norm: the bound of `gemm_epilogue` must hold for the rounded operands too.
            store_float(norm + row * u64(4), root(sums[0]) * f32(1.002))
        target = half + row * u64(cols) * u64(2)
        for k in range(u32(thread * u32(4)), cols, u32(4 * THREADS)):
            store_half4(target + u64(k) * u64(2), load4(source + u64(k) * u64(4)), factors[1])

    return half_rows, types.void(*(numba_type(spec) for _, spec in ARGUMENTS))


def source(overlap: bool) -> Source:
    """What to compile."""
    return Source(f"half_rows overlap={overlap}", functools.partial(build, overlap), THREADS)
