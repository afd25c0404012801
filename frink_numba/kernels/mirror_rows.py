"""K/V rows of the host's cache into a layer's mirror on the device: float32 to f16, divided by powers of two.

One block a row, one warp a head. To the bit what `qkv_prepare.py` stores for the same float32 rows: a head with a
number of K or V that f16 cannot hold becomes zeros in V and not-a-number in K: who sees the row gets not-a-number, who
does not see it is untouched.
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
    from frink_numba.kernels.ptx import instruction, numba_type
    from frink_numba.kernels.row_operations import absolute, ballot, beyond_half, larger

    store_half = instruction(
        "{\n.reg .b16 half;\ncvt.rn.f16.f32 half, $1;\nst.global.b16 [$0], half;\n}", None, "u64", "f32"
    )
    u32, u64, f32 = types.uint32, types.uint64, types.float32
    warps = THREADS // 32

    def mirror_rows(k, v, k_mirror, v_mirror, k_factor, v_factor, width, head_dim, pitch):
        if overlap:
            launch_dependents()
            wait_for_predecessors()
        thread = u32(cuda.threadIdx.x)
        lane = u32(thread & u32(31))
        row = u64(cuda.blockIdx.x)
        heads = u32(width // head_dim)
        for head in range(thread >> u32(5), heads, u32(warps)):
            source = (row * u64(width) + u64(head) * u64(head_dim)) * u64(4)
            target = (row * u64(heads) + u64(head)) * u64(pitch) * u64(2)
            top = f32(0.0)
            for at in range(lane, head_dim, u32(32)):
                top = larger(top, absolute(load_float(k + source + u64(at) * u64(4)) * k_factor))
                top = larger(top, absolute(load_float(v + source + u64(at) * u64(4)) * v_factor))
            spoilt = ballot(beyond_half(top))
            for at in range(lane, head_dim, u32(32)):
                key = load_float(k + source + u64(at) * u64(4)) * k_factor
                value = load_float(v + source + u64(at) * u64(4)) * v_factor
                if spoilt != 0:
                    key = f32(float("nan"))
                    value = f32(0.0)
                store_half(k_mirror + target + u64(at) * u64(2), key)
                store_half(v_mirror + target + u64(at) * u64(2), value)

    return mirror_rows, types.void(*(numba_type(spec) for _, spec in ARGUMENTS))


def source(overlap: bool) -> Source:
    """What to compile."""
    return Source(f"mirror_rows overlap={overlap}", functools.partial(build, overlap), THREADS)
