"""How likely given tokens are: the logarithm of one softmax value a row, so that no logits need leave the device.

    out[i] = logits[i, token[i]] - log(sum_j exp(logits[i, j]))

One block a row, two passes over it: the largest, then the sum of the rest relative to it. A logit that is not a number
makes the row's result not-a-number. A token outside the row gives 0.
"""

from __future__ import annotations

import functools
from typing import Any

from frink_numba.kernels.cubins import Source

THREADS = 512
_LOG2E, _LN2 = 1.4426950408889634, 0.6931471805599453
ARGUMENTS = (
    ("logits", "u64"),  # float32 [rows, count]
    ("tokens", "u64"),  # int32 [rows]
    ("out", "u64"),  # float32 [rows]
    ("count", "u32"),
)


def build(overlap: bool) -> tuple[Any, Any]:
    """The kernel for numba, and its signature."""
    from numba import cuda, types

    from frink_numba.kernels.instructions import launch_dependents, load_float, wait_for_predecessors
    from frink_numba.kernels.ptx import instruction, numba_type, shared_address
    from frink_numba.kernels.row_operations import block_reduce, larger, store_float

    load_word = instruction("ld.global.u32 $0, [$1];", "u32", "u64")
    lowest = instruction("mov.b32 $0, 0xff800000;", "f32", pure=True)
    exp2 = instruction("ex2.approx.ftz.f32 $0, $1;", "f32", "f32", pure=True)
    log2 = instruction("lg2.approx.f32 $0, $1;", "f32", "f32", pure=True)
    u32, u64, f32 = types.uint32, types.uint64, types.float32
    top_of, sum_of = block_reduce(("max",), THREADS), block_reduce(("add",), THREADS)
    scratch_size = THREADS // 32

    def log_likelihood(logits, tokens, out, count):
        if overlap:
            launch_dependents()
            wait_for_predecessors()
        tops = cuda.shared.array(scratch_size, types.float32)
        sums = cuda.shared.array(scratch_size, types.float32)
        thread = u32(cuda.threadIdx.x)
        row = u64(cuda.blockIdx.x)
        source = logits + row * u64(count) * u64(4)
        top = lowest()
        for at in range(thread, count, u32(THREADS)):
            top = larger(top, load_float(source + u64(at) * u64(4)))
        top = top_of(top, shared_address(tops), thread)[0]
        total = f32(0.0)
        for at in range(thread, count, u32(THREADS)):
            total += exp2((load_float(source + u64(at) * u64(4)) - top) * f32(_LOG2E))
        total = sum_of(total, shared_address(sums), thread)[0]
        if thread == 0:
            token = load_word(tokens + row * u64(4))
            result = f32(0.0)
            if token < count:
                result = (load_float(source + u64(token) * u64(4)) - top) - log2(total) * f32(_LN2)
            store_float(out + row * u64(4), result)

    return log_likelihood, types.void(*(numba_type(spec) for _, spec in ARGUMENTS))


def source(overlap: bool) -> Source:
    """What to compile."""
    return Source(f"log_likelihood overlap={overlap}", functools.partial(build, overlap), THREADS)
