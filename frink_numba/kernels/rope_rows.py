"""Cosines and sines of a step's rows, for positions that are read from device memory (R17).

    cos[row, pair] = scale * cos(position[row] * inverse_frequency[pair]), sin alike; the angle is float64

One block a row. Positions come from memory so that a captured step can be replayed further on.
"""

from __future__ import annotations

import functools
from typing import Any

from frink_numba.kernels.cubins import Source

THREADS = 64
ARGUMENTS = (
    ("positions", "u64"),  # int32 [rows]
    ("frequencies", "u64"),  # float64 [pairs]: radians per position
    ("cos", "u64"),  # float32 [rows, pairs]
    ("sin", "u64"),  # float32 [rows, pairs]
    ("pairs", "u32"),
    ("scale", "f32"),
)


def build(overlap: bool) -> tuple[Any, Any]:
    """The kernel for numba, and its signature."""
    import math

    from numba import cuda, types

    from frink_numba.kernels.instructions import launch_dependents, wait_for_predecessors
    from frink_numba.kernels.ptx import instruction, numba_type
    from frink_numba.kernels.row_operations import store_float

    load_position = instruction("ld.global.u32 $0, [$1];", "u32", "u64")
    load_double = instruction("ld.global.f64 $0, [$1];", "f64", "u64")
    u32, u64, f32, f64 = types.uint32, types.uint64, types.float32, types.float64

    def rope_rows(positions, frequencies, cos, sin, pairs, scale):
        if overlap:
            launch_dependents()
            wait_for_predecessors()
        row = u64(cuda.blockIdx.x)
        position = f64(load_position(positions + row * u64(4)))
        for pair in range(u32(cuda.threadIdx.x), pairs, u32(THREADS)):
            angle = position * load_double(frequencies + u64(pair) * u64(8))
            at = (row * u64(pairs) + u64(pair)) * u64(4)
            store_float(cos + at, f32(math.cos(angle)) * scale)
            store_float(sin + at, f32(math.sin(angle)) * scale)

    return rope_rows, types.void(*(numba_type(spec) for _, spec in ARGUMENTS))


def source(overlap: bool) -> Source:
    """What to compile."""
    return Source(f"rope_rows overlap={overlap}", functools.partial(build, overlap), THREADS)
