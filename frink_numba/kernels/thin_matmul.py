"""out = x W^T for a few rows of x: bound by the bytes of W, so every weight is read and dequantized once, in registers.

A thread stays with one row of W and takes octets of it in strides; the threads of a block that share a row split its
octets. Four octets are on their way at a time, since a launch is short against the latency of memory. The partial sums
meet in shared memory and are added in the order of the threads: repeatable bitwise.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from frink_numba.kernels.dequantize import dequantizer
from frink_numba.kernels.device_matrix import DeviceMatrix
from frink_numba.kernels.jit import kernel
from frink_numba.kernels.register_tile import RegisterTile, make_zeros
from frink_numba.kernels.vector_memory import granule_of, make_add_products, make_store_column

MOST_ROWS = 8  # of x; beyond, tiles that share dequantized weights are faster
# Rows of x that kernels are compiled for: threads a block, and blocks that registers are kept for on a multiprocessor.
_HEIGHTS = {1: (256, 2), 2: (256, 2), 4: (128, 3), 8: (128, 2)}
_W_ROWS = 8  # rows of W a block: their fields are neighbours in memory, a sector of 32 bytes for the 4-bit kinds
_f32, _i32 = types.float32, types.int32


@cache
def thin_matmul_kernel(kind_name: str, height: int, granule: int) -> Any:
    """The kernel of one kind for at most `height` rows of x, their ends guarded by `granule` (see `granule_of`).

    Arguments: x float32 [m, k], data uint8 (a DeviceMatrix's), out float32 [m, n], n, stored k. Grid: groups of 8 rows
    of W. Shared memory: a float for each thread and row of x.
    """
    threads, blocks = _HEIGHTS[height]
    split = threads // _W_ROWS  # threads that share a row of W
    partial_size, outputs = height * threads, height * _W_ROWS
    registers = RegisterTile(height, 1, 1, 1)
    zeros = make_zeros(registers)
    add_products = make_add_products(height, granule)
    store_sums = make_store_column(height, threads)
    fetch, decode = dequantizer(kind_name)

    @kernel(threads, blocks)
    def thin_matmul_rows(x, data, out, n, stored_cols):
        partial = cuda.shared.array(partial_size, _f32)
        thread = _i32(cuda.threadIdx.x)
        m, cols = _i32(x.shape[0]), _i32(x.shape[1])
        first = _i32(cuda.blockIdx.x * _W_ROWS)
        row = _i32(min(first + thread % _W_ROWS, n - 1))
        last = _i32(stored_cols // 8 - 1)
        octet = _i32(thread // _W_ROWS)
        sums = zeros()
        while octet <= last:
            octet1, octet2, octet3 = _i32(octet + split), _i32(octet + 2 * split), _i32(octet + 3 * split)
            # All loads first, and no condition that they could be moved behind: beyond the end the last octet of W
            # comes again, and meets zeros in place of x.
            bits0 = fetch(data, n, stored_cols, row, octet)
            bits1 = fetch(data, n, stored_cols, row, _i32(min(octet1, last)))
            bits2 = fetch(data, n, stored_cols, row, _i32(min(octet2, last)))
            bits3 = fetch(data, n, stored_cols, row, _i32(min(octet3, last)))
            sums = add_products(sums, decode(bits0, octet), x, m, cols, octet)
            sums = add_products(sums, decode(bits1, octet1), x, m, cols, octet1)
            sums = add_products(sums, decode(bits2, octet2), x, m, cols, octet2)
            sums = add_products(sums, decode(bits3, octet3), x, m, cols, octet3)
            octet = _i32(octet + 4 * split)
        store_sums(partial, thread, sums)
        cuda.syncthreads()
        for index in range(thread, outputs, threads):
            x_row, w_row = index // _W_ROWS, index % _W_ROWS
            total = _f32(0.0)
            for part in range(split):
                total += partial[x_row * threads + part * _W_ROWS + w_row]
            if x_row < m and first + w_row < n:
                out[x_row, first + w_row] = total

    return thin_matmul_rows


def thin_matmul(x: Any, weight: DeviceMatrix, out: Any, stream: Any = 0) -> None:
    """out[m, n] = x[m, k] W[n, k]^T of at most 8 rows. Called by `quantized_matmul`, which has checked the arrays."""
    height = next(h for h in _HEIGHTS if x.shape[0] <= h)
    run = thin_matmul_kernel(weight.kind.name, height, min(4, granule_of(weight.cols, 4)))
    grid = -(-weight.rows // _W_ROWS)
    run[grid, _HEIGHTS[height][0], stream](x, weight.data, out, np.int32(weight.rows), np.int32(weight.stored_cols))
