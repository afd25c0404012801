"""Many copies in one launch: a group's K/V rows from scratch into the caches of its sequences.

The table in device memory holds one record of 32 bytes a copy: where from, where to, how many bytes (a multiple of 4),
each uint64, and 8 bytes of no use. A warp takes a copy at a time. Where to may be page-locked memory of the host, whose
addresses are the device's too: few blocks fill the bus and leave the multiprocessors to the kernels beside them.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from frink_numba.kernels.cubins import Source

THREADS = 256
COPY = np.dtype([("source", "<u8"), ("target", "<u8"), ("nbytes", "<u8"), ("unused", "<u8")])
ARGUMENTS = (
    ("table", "u64"),
    ("count", "u32"),  # records
)


def build(overlap: bool) -> tuple[Any, Any]:
    """The kernel for numba, and its signature."""
    from numba import cuda, types

    from frink_numba.kernels.instructions import wait_for_predecessors
    from frink_numba.kernels.ptx import instruction, numba_type

    load_pair = instruction("ld.global.v2.u64 {$0,$1}, [$2];", "u64x2", "u64")
    load_long = instruction("ld.global.u64 $0, [$1];", "u64", "u64")
    load_word = instruction("ld.global.u32 $0, [$1];", "u32", "u64")
    store_word = instruction("st.global.u32 [$0], $1;", None, "u64", "u32")
    load_quad = instruction("ld.global.v4.u32 {$0,$1,$2,$3}, [$4];", "u32x4", "u64")
    store_quad = instruction("st.global.v4.u32 [$0], {$1,$2,$3,$4};", None, "u64", "u32", "u32", "u32", "u32")
    u32, u64 = types.uint32, types.uint64

    def scatter_bytes(table, count):
        if overlap:
            wait_for_predecessors()
        thread = u32(cuda.threadIdx.x)
        lane = u64(u32(thread & u32(31)))
        first = u32(u32(cuda.blockIdx.x) * u32(THREADS // 32) + (thread >> u32(5)))
        for entry in range(first, count, u32(u32(cuda.gridDim.x) * u32(THREADS // 32))):
            record = table + u64(entry) * u64(32)
            source, target = load_pair(record)
            nbytes = load_long(record + u64(16))
            if u64((source | target | nbytes) & u64(15)) == u64(0):
                at = u64(lane * u64(16))
                while at < nbytes:
                    a, b, c, d = load_quad(source + at)
                    store_quad(target + at, a, b, c, d)
                    at = u64(at + u64(512))
            else:
                at = u64(lane * u64(4))
                while at < nbytes:
                    store_word(target + at, load_word(source + at))
                    at = u64(at + u64(128))

    return scatter_bytes, types.void(*(numba_type(spec) for _, spec in ARGUMENTS))


def source(overlap: bool) -> Source:
    """What to compile."""
    return Source(f"scatter_bytes overlap={overlap}", functools.partial(build, overlap), THREADS)
