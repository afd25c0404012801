"""K/V rows of the host's cache into a layer's mirror on the device: float32 to f16, divided by powers of two.

One block a row. As in `qkv_prepare.py`, a row of V with a number that f16 cannot hold becomes zeros and its K row
not-a-number: who sees the row gets not-a-number, who does not see it is untouched.
"""

from __future__ import annotations

import functools
from typing import Any

from frink_numba.kernels.cubins import Source

THREADS = 128
ARGUMENTS = (
    ("k", "u64"),  # float32 [rows, width]
    ("v", "u64"),
    ("k_mirror", "u64"),  # f16 [rows, width / head_dim, pitch]
    ("v_mirror", "u64"),
    ("k_factor", "f32"),
    ("v_factor", "f32"),
    ("width", "u32"),
    ("head_dim", "u32"),
    ("pitch", "u32"),  # elements from head to head
)


def build(overlap: bool) -> tuple[Any, Any]:
    """The kernel for numba, and its signature."""
    from numba import cuda, types

    from frink_numba.kernels.instructions import launch_dependents, load_float, wait_for_predecessors
    from frink_numba.kernels.ptx import instruction, numba_type, shared_address
    from frink_numba.kernels.row_operations import absolute, block_reduce, larger

    store_half = instruction(
        "{\n.reg .b16 half;\ncvt.rn.f16.f32 half, $1;\nst.global.b16 [$0], half;\n}", None, "u64", "f32"
    )
    u32, u64, f32 = types.uint32, types.uint64, types.float32
    reduce = block_reduce(("max",), THREADS)
    scratch_size = THREADS // 32

    def mirror_rows(k, v, k_mirror, v_mirror, k_factor, v_factor, width, head_dim, pitch):
        if overlap:
            launch_dependents()
            wait_for_predecessors()
        scratch = cuda.shared.array(scratch_size, types.float32)
        thread = u32(cuda.threadIdx.x)
        row = u64(cuda.blockIdx.x)
        source = row * u64(width) * u64(4)
        target = row * u64(u32(width // head_dim)) * u64(pitch) * u64(2)
        top = f32(0.0)
        for at in range(thread, width, u32(THREADS)):
            top = larger(top, absolute(load_float(v + source + u64(at) * u64(4)) * v_factor))
        sums = reduce(top, shared_address(scratch), thread)
        held = sums[0] <= f32(65504.0)
        for at in range(thread, width, u32(THREADS)):
            head = u32(at // head_dim)
            place = target + (u64(head) * u64(pitch) + u64(at - head * head_dim)) * u64(2)
            key = load_float(k + source + u64(at) * u64(4)) * k_factor
            value = load_float(v + source + u64(at) * u64(4)) * v_factor
            if not held:
                key = f32(float("nan"))
                value = f32(0.0)
            store_half(k_mirror + place, key)
            store_half(v_mirror + place, value)

    return mirror_rows, types.void(*(numba_type(spec) for _, spec in ARGUMENTS))


def source(overlap: bool) -> Source:
    """What to compile."""
    return Source(f"mirror_rows overlap={overlap}", functools.partial(build, overlap), THREADS)
