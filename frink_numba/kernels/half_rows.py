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
    from frink_numba.kernels.ptx import Emitter, Register, emitted, instruction, numba_type

    load4 = instruction("ld.global.v4.f32 {$0,$1,$2,$3}, [$4];", "f32x4", "u64")
    store_float = instruction("st.global.f32 [$0], $1;", None, "u64", "f32")
    absolute = instruction("abs.f32 $0, $1;", "f32", "f32", pure=True)
    larger = instruction("max.NaN.f32 $0, $1, $2;", "f32", "f32", "f32", pure=True)
    root = instruction("sqrt.rn.f32 $0, $1;", "f32", "f32", pure=True)

    @emitted("f32x2", "f32")
    def scales(e: Emitter, largest: Register) -> list[Register]:
        """(scale, 1 / scale) for a row's largest magnitude: exponents kept where both are normal numbers."""
        exponent = e.float_bits(largest) >> 23
        for name, bound in (("max", 16), ("min", 254)):
            exponent = e.asm(f"{name}.u32 $0, $1, $2;", "u32", [exponent, e.constant("u32", bound)], pure=True)
        bits = ((exponent - 14) << 23, (e.constant("u32", 254 + 14) - exponent) << 23)
        values = [e.asm("mov.b32 $0, $1;", "f32", [b], pure=True) for b in bits]
        zero = e.builder.fcmp_ordered("==", largest.value, e.constant("f32", 0.0).value)
        one = e.constant("f32", 1.0).value
        return [Register(e, "f32", e.builder.select(zero, one, v.value)) for v in values]

    @emitted(None, "u64", "f32x4", "f32")
    def store_half4(e: Emitter, address: Register, x: list[Register], factor: Register) -> None:
        words = [
            e.asm("cvt.rn.f16x2.f32 $0, $2, $1;", "u32", [x[i] * factor, x[i + 1] * factor], pure=True) for i in (0, 2)
        ]
        e.asm("st.global.v2.u32 [$0], {$1,$2};", None, [address, *words])

    u32, u64, f32 = types.uint32, types.uint64, types.float32
    warps = THREADS // 32

    def half_rows(x, half, scale, norm, cols):
        if overlap:
            launch_dependents()
            wait_for_predecessors()
        largest = cuda.shared.array(warps, types.float32)
        squares = cuda.shared.array(warps, types.float32)
        thread = u32(cuda.threadIdx.x)
        row = u64(cuda.blockIdx.x)
        source = x + row * u64(cols) * u64(4)
        top = f32(0.0)
        total = f32(0.0)
        for k in range(u32(thread * u32(4)), cols, u32(4 * THREADS)):
            v = load4(source + u64(k) * u64(4))
            top = larger(top, larger(larger(absolute(v[0]), absolute(v[1])), larger(absolute(v[2]), absolute(v[3]))))
            total += (v[0] * v[0] + v[1] * v[1]) + (v[2] * v[2] + v[3] * v[3])
        for step in (16, 8, 4, 2, 1):
            top = larger(top, cuda.shfl_xor_sync(0xFFFFFFFF, top, step))
            total += cuda.shfl_xor_sync(0xFFFFFFFF, total, step)
        if thread & u32(31) == 0:
            largest[thread >> u32(5)] = top
            squares[thread >> u32(5)] = total
        cuda.syncthreads()
        top = largest[0]
        total = squares[0]
        for i in range(1, warps):
            top = larger(top, largest[i])
            total += squares[i]
        factors = scales(top)
        if thread == 0:
            store_float(scale + row * u64(4), factors[0])
            # A little more than the norm: the bound of `gemm_epilogue` must hold for the rounded operands too.
            store_float(norm + row * u64(4), root(total) * f32(1.002))
        target = half + row * u64(cols) * u64(2)
        for k in range(u32(thread * u32(4)), cols, u32(4 * THREADS)):
            store_half4(target + u64(k) * u64(2), load4(source + u64(k) * u64(4)), factors[1])

    return half_rows, types.void(*(numba_type(spec) for _, spec in ARGUMENTS))


def source(overlap: bool) -> Source:
    """What to compile."""
    return Source(f"half_rows overlap={overlap}", functools.partial(build, overlap), THREADS)
