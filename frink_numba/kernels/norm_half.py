"""RMS norm of the hidden rows, straight into f16 operands that cannot overflow.

    y[m, k] = x[m, k] * weight[k] / sqrt(mean_k x[m, k]**2 + eps)
    half[m, k] = y[m, k] / scale[m],   scale[m] = 2**e with max_k |half[m, k]| in [2**14, 2**15),   norm[m] >= |y[m]|_2

One block a row; the row is read twice, the second time from the cache.
"""

from __future__ import annotations

import functools
from typing import Any

from frink_numba.kernels.cubins import Source

ARGUMENTS = (
    ("x", "u64"),  # float32 [rows, cols]
    ("weight", "u64"),  # float32 [cols]
    ("half", "u64"),  # f16 [rows, cols]
    ("scale", "u64"),  # float32 [rows]
    ("norm", "u64"),  # float32 [rows]
    ("cols", "u32"),  # a multiple of 4
    ("eps", "f32"),
)


def build(threads: int, overlap: bool) -> tuple[Any, Any]:
    """The kernel for numba, and its signature. Grid: one block of `threads` a row, no dynamic shared memory."""
    from numba import cuda, types

    from frink_numba.kernels.instructions import launch_dependents, wait_for_predecessors
    from frink_numba.kernels.ptx import numba_type, shared_address
    from frink_numba.kernels.row_operations import (
        absolute,
        block_reduce,
        larger,
        load4,
        quotient,
        reciprocal,
        root,
        row_scales,
        store_float,
        store_half4,
    )

    u32, u64, f32 = types.uint32, types.uint64, types.float32
    scratch_size = 3 * threads // 32
    reduce = block_reduce(("add", "add", "max"), threads)

    def norm_half(x, weight, half, scale, norm, cols, eps):
        if overlap:
            launch_dependents()
            wait_for_predecessors()
        scratch = cuda.shared.array(scratch_size, types.float32)
        thread = u32(cuda.threadIdx.x)
        row = u64(cuda.blockIdx.x)
        source = x + row * u64(cols) * u64(4)
        top = f32(0.0)
        squares = f32(0.0)
        weighted = f32(0.0)
        for k in range(u32(thread * u32(4)), cols, u32(4 * threads)):
            v = load4(source + u64(k) * u64(4))
            w = load4(weight + u64(k) * u64(4))
            squares += (v[0] * v[0] + v[1] * v[1]) + (v[2] * v[2] + v[3] * v[3])
            a, b, c, d = v[0] * w[0], v[1] * w[1], v[2] * w[2], v[3] * w[3]
            weighted += (a * a + b * b) + (c * c + d * d)
            top = larger(top, larger(larger(absolute(a), absolute(b)), larger(absolute(c), absolute(d))))
        sums = reduce(squares, weighted, top, shared_address(scratch), thread)
        inverse = reciprocal(root(quotient(sums[0], f32(cols)) + eps))
        factors = row_scales(sums[2] * inverse)
        if thread == 0:
            store_float(scale + row * u64(4), factors[0])
            # A little more than the norm: the bound of `gemm_epilogue` must hold for the rounded operands too.
            store_float(norm + row * u64(4), root(sums[1]) * inverse * f32(1.002))
        target = half + row * u64(cols) * u64(2)
        factor = inverse * factors[1]
        for k in range(u32(thread * u32(4)), cols, u32(4 * threads)):
            v = load4(source + u64(k) * u64(4))
            w = load4(weight + u64(k) * u64(4))
            store_half4(target + u64(k) * u64(2), (v[0] * w[0], v[1] * w[1], v[2] * w[2], v[3] * w[3]), factor)

    return norm_half, types.void(*(numba_type(spec) for _, spec in ARGUMENTS))


def source(threads: int, overlap: bool) -> Source:
    """What to compile for blocks of `threads`."""
    return Source(f"norm_half overlap={overlap}", functools.partial(build, threads, overlap), threads)
