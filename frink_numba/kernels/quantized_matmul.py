"""out = x W^T with a quantized W that is dequantized tile by tile inside the kernel, in float32 arithmetic.

A block computes a square tile of the output. Step by step along K, its threads load the next slice of x and the bits of
the next slice of W into registers while they multiply the current slices out of shared memory; then they dequantize the
bits and store both slices to the other half of the double buffer. Every sum runs over K in order: repeatable bitwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import config, types

from frink_numba.errors import ShapeError
from frink_numba.kernels.checks import require, require_rank
from frink_numba.kernels.dequantize import dequantizer
from frink_numba.kernels.device_matrix import DeviceMatrix
from frink_numba.kernels.jit import kernel
from frink_numba.kernels.register_tile import RegisterTile, make_accumulate, make_store, make_zeros
from frink_numba.kernels.thin_matmul import MOST_ROWS, thin_matmul
from frink_numba.kernels.vector_memory import granule_of, make_load_run, make_store_column

_DEPTH = 16  # elements of K in a slice: two octets, so that two threads a row fill it
_f32, _i32 = types.float32, types.int32


@dataclass(frozen=True, slots=True)
class Tile:
    """A block's share, `height` x `width` outputs by 2 * width threads, each with `rows` x `cols` of them."""

    height: int
    width: int
    rows: int
    cols: int
    blocks: int  # blocks on a multiprocessor that registers are kept for
    issue: float  # instructions of the inner loop for each multiply-add, in the machine code for sm_90 and Q4_K

    @property
    def threads(self) -> int:
        return 2 * self.width

    def __str__(self) -> str:
        return f"{self.height}x{self.width}"


# Larger tiles read x and W less often; smaller ones fill the machine when the output is small.
TILES = (Tile(128, 64, 8, 8, 3, 1.2), Tile(64, 64, 4, 8, 4, 1.33), Tile(32, 32, 4, 4, 8, 1.6))


@cache
def quantized_matmul_kernel(kind_name: str, tile: Tile, granule: int) -> Any:
    """The kernel of one kind and tile; `granule` tells how the ends of x's rows are guarded (see `granule_of`).

    Arguments: x float32 [m, k], data uint8 (a DeviceMatrix's), out float32 [m, n], n, stored k. Grid: tiles of m, tiles
    of n. Shared memory: two slices each of x and W, 128 * (height + width) bytes.
    """
    height, width = tile.height, tile.width
    warps_across = width // tile.cols // 8
    registers = RegisterTile(tile.rows, tile.cols, height * 4 // tile.rows, width * 4 // tile.cols)
    zeros, store = make_zeros(registers), make_store(registers)
    accumulate = make_accumulate(registers, _DEPTH // 2, height, width)
    # Of a slice of x, a thread takes two runs; of W an octet.
    run = _DEPTH // 2 * height // tile.threads
    load_run, store_run = make_load_run(run, granule), make_store_column(run, height)
    second_run = run * height
    fetch, decode = dequantizer(kind_name)
    store_octet = make_store_column(8, width)
    # Slices have the size of a power of two: adding it to a place in the first of two slices is a flip of one bit.
    x_slice, w_slice = _DEPTH * height, _DEPTH * width
    x_buffer, w_buffer, x_middle, w_middle = 2 * x_slice, 2 * w_slice, x_slice // 2, w_slice // 2

    @kernel(tile.threads, tile.blocks)
    def quantized_matmul_tiles(x, data, out, n, stored_cols):
        x_slices = cuda.shared.array(x_buffer, _f32)
        w_slices = cuda.shared.array(w_buffer, _f32)
        # 32-bit integers throughout: numba would widen them, and the register file is full.
        thread = cuda.threadIdx.x
        m, cols = _i32(x.shape[0]), _i32(x.shape[1])
        first_row, first_col = _i32(cuda.blockIdx.x * height), _i32(cuda.blockIdx.y * width)
        # Loading: rows beyond the edge repeat the last one; their outputs are not stored.
        x_row, x_first = _i32(thread % height), _i32(thread // height * 2 * run)
        x_start = _i32(min(first_row + x_row, m - 1) * cols)
        x_at = _i32(x_first * height + x_row)
        w_row, half = _i32(thread % width), _i32(thread // width)
        w_at = _i32(half * 8 * width + w_row)
        w_row = _i32(min(first_col + w_row, n - 1))
        # Multiplying: a warp covers 4 x 8 register tiles: few reads of shared memory serve it, without conflicts.
        warp, lane = thread // 32, thread % 32
        tile_row = _i32((warp // warps_across * 4 + lane // 8) * 4)
        tile_col = _i32((warp % warps_across * 8 + lane % 8) * 4)

        w_bits = fetch(data, n, stored_cols, w_row, half)
        store_run(x_slices, x_at, load_run(x, x_start, x_first, cols))
        store_run(x_slices, x_at + second_run, load_run(x, x_start, x_first + run, cols))
        store_octet(w_slices, w_at, decode(w_bits, half))
        cuda.syncthreads()
        acc = zeros()
        last = _i32(stored_cols - _DEPTH)
        column = _i32(0)
        while column <= last:
            column = _i32(column + _DEPTH)
            # The last round loads a slice in vain: behind a condition the compiler would move the loads down to where
            # their values are stored, and every round would wait for memory. x comes in two runs to spare registers.
            following = _i32(min(column, last))
            octet = _i32(following // 8 + half)
            w_bits = fetch(data, n, stored_cols, w_row, octet)
            x_values = load_run(x, x_start, following + x_first, cols)
            acc = accumulate(acc, x_slices, w_slices, tile_row, tile_col)
            x_at, w_at = _i32(x_at ^ x_slice), _i32(w_at ^ w_slice)
            store_run(x_slices, x_at, x_values)
            x_values = load_run(x, x_start, following + x_first + run, cols)
            acc = accumulate(acc, x_slices, w_slices, tile_row + x_middle, tile_col + w_middle)
            tile_row, tile_col = _i32(tile_row ^ x_slice), _i32(tile_col ^ w_slice)
            store_run(x_slices, x_at + second_run, x_values)
            store_octet(w_slices, w_at, decode(w_bits, octet))
            cuda.syncthreads()
        store(out, acc, first_row + tile_row % x_slice, first_col + tile_col % w_slice, m, n)

    return quantized_matmul_tiles


def choose_tile(m: int, n: int, multiprocessors: int) -> Tile:
    """The tile that gives the busiest multiprocessor the fewest instructions; the larger one when equal."""

    def busiest(tile: Tile) -> float:
        tiles = -(-m // tile.height) * -(-n // tile.width)
        return -(-tiles // multiprocessors) * tile.height * tile.width * tile.issue

    return min(TILES, key=busiest)


_SIMULATED_MULTIPROCESSORS = 132  # of an H200


def _multiprocessors() -> int:
    """Of the current device; numba keeps the answer."""
    if config.ENABLE_CUDASIM:
        return _SIMULATED_MULTIPROCESSORS
    return int(cuda.get_current_device().MULTIPROCESSOR_COUNT)


def quantized_matmul(
    x: Any, weight: DeviceMatrix, out: Any, stream: Any = 0, *, tile: Tile | None = None, thin: bool = True
) -> None:
    """out[m, n] = x[m, k] W[n, k]^T; float32 device arrays, any m and n.

    Few rows go to `thin_matmul`, unless `thin` is False: all tiles sum along k from first to last, so that a row's bits
    depend on that row alone. `tile` forces one of TILES. ShapeError when the arrays do not fit the matrix, or x has
    2**31 elements or more.
    """
    m = require_rank("quantized_matmul", "x", x, 2)[0]
    require("quantized_matmul", "x", x, (m, weight.cols))
    require("quantized_matmul", "out", out, (m, weight.rows))
    if m * weight.cols >= 1 << 31:
        raise ShapeError(f"quantized_matmul: x of {m} x {weight.cols} is too large; take fewer rows at a time")
    if m == 0:
        return
    if thin and tile is None and m <= MOST_ROWS:
        thin_matmul(x, weight, out, stream)
        return
    if tile is None:
        tile = choose_tile(m, weight.rows, _multiprocessors())
    run = quantized_matmul_kernel(weight.kind.name, tile, granule_of(weight.cols, _DEPTH))
    grid = -(-m // tile.height), -(-weight.rows // tile.width)
    run[grid, tile.threads, stream](x, weight.data, out, np.int32(weight.rows), np.int32(weight.stored_cols))
