"""act(gate) * up of two float32 products into f16 operands that cannot overflow, row by row.

For gate and up matrices of different kinds, which cannot share one product; else its epilogue does this. Scale and norm
as in `norm_half.py`. One block a row; the rows are read twice, the second time from the cache.
"""

from __future__ import annotations

import functools
from typing import Any

from frink_numba.kernels.cubins import Source

ARGUMENTS = (
    ("gate", "u64"),  # float32 [rows, cols]
    ("up", "u64"),  # float32 [rows, cols]
    ("half", "u64"),  # f16 [rows, cols]
    ("scale", "u64"),  # float32 [rows]
    ("norm", "u64"),  # float32 [rows]
    ("cols", "u32"),  # a multiple of 4
)


def build(gate_name: str, threads: int, overlap: bool) -> tuple[Any, Any]:
    """The kernel for numba, and its signature. `gate_name` as in gemm_epilogue. Grid: one block of `threads` a row."""
    from numba import cuda, types

    from frink_numba.kernels.gates import activate
    from frink_numba.kernels.instructions import launch_dependents, wait_for_predecessors
    from frink_numba.kernels.ptx import Emitter, Register, emitted, numba_type, shared_address
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

    @emitted("f32x4", "f32x4", "f32x4")
    def gated(e: Emitter, g: list[Register], u: list[Register]) -> list[Register]:
        return [activate(e, gate_name, a) * b for a, b in zip(g, u, strict=True)]

    u32, u64, f32 = types.uint32, types.uint64, types.float32
    scratch_size = 2 * threads // 32
    reduce = block_reduce(("add", "max"), threads)

    def gated_half(gate, up, half, scale, norm, cols):
        if overlap:
            launch_dependents()
            wait_for_predecessors()
        scratch = cuda.shared.array(scratch_size, types.float32)
        thread = u32(cuda.threadIdx.x)
        row = u64(cuda.blockIdx.x)
        start = row * u64(cols) * u64(4)
        top = f32(0.0)
        squares = f32(0.0)
        for k in range(u32(thread * u32(4)), cols, u32(4 * threads)):
            at = start + u64(k) * u64(4)
            v = gated(load4(gate + at), load4(up + at))
            squares += (v[0] * v[0] + v[1] * v[1]) + (v[2] * v[2] + v[3] * v[3])
            top = larger(top, larger(larger(absolute(v[0]), absolute(v[1])), larger(absolute(v[2]), absolute(v[3]))))
        sums = reduce(squares, top, shared_address(scratch), thread)
        factors = row_scales(sums[1])
        if thread == 0:
            store_float(scale + row * u64(4), factors[0])
            store_float(norm + row * u64(4), root(sums[0]) * f32(1.002))
        target = half + row * u64(cols) * u64(2)
        for k in range(u32(thread * u32(4)), cols, u32(4 * threads)):
            at = start + u64(k) * u64(4)
            store_half4(target + u64(k) * u64(2), gated(load4(gate + at), load4(up + at)), factors[1])

    return gated_half, types.void(*(numba_type(spec) for _, spec in ARGUMENTS))


def source(gate_name: str, threads: int, overlap: bool) -> Source:
    """What to compile for blocks of `threads`."""
    name = f"gated_half {gate_name} overlap={overlap}"
    return Source(name, functools.partial(build, gate_name, threads, overlap), threads)
