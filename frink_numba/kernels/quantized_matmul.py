"""out = x W^T with a quantized W that is dequantized tile by tile inside the kernel, in float32 arithmetic.

A block computes a square tile of the output. Step by step along K, its threads load the next slice of x and the bits of
the next slice of W into registers while they multiply the current slices out of shared memory; then they dequantize the
bits and store both slices to the other half of the double buffer. Every sum runs over K in order: repeatable bitwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from numba import cuda
from numba.cuda import config, types

from frink_numba.errors import ShapeError
from frink_numba.kernels.checks import require, require_rank
from frink_numba.kernels.dequantize import dequantizer
from frink_numba.kernels.device_matrix import DeviceMatrix
from frink_numba.kernels.jit import kernel
from frink_numba.kernels.register_tile import RegisterTile, make_accumulate, make_store, make_zeros
from frink_numba.kernels.vector_memory import granule_of, make_load_octet, make_store_column

_DEPTH = 16  # elements of K in a slice: two octets, so that two threads a row fill it
_f32 = types.float32


@dataclass(frozen=True, slots=True)
class Tile:
    """A block's share: `side` x `side` outputs by 2 * side threads, each with `rows` x `cols` of them."""

    side: int
    rows: int
    cols: int
    blocks: int  # blocks on a multiprocessor that registers are kept for

    @property
    def threads(self) -> int:
        return 2 * self.side


# Larger tiles read x and W less often; smaller ones fill the machine when the output is small.
TILES = {tile.side: tile for tile in (Tile(128, 8, 8, 2), Tile(64, 4, 8, 4), Tile(32, 4, 4, 8))}


@lru_cache(maxsize=None)
def quantized_matmul_kernel(kind_name: str, side: int, granule: int) -> Any:
    """The kernel of one kind and tile; `granule` tells how the ends of x's rows are guarded (see `granule_of`).

    Arguments: x float32 [m, k], data uint8 (a DeviceMatrix's), out float32 [m, n], n, stored k. Grid: tiles of m, tiles
    of n. Shared memory: 2 slices each of x and W, 256 * side bytes.
    """
    tile = TILES[side]
    across = side // tile.cols  # threads along a row of the tile
    warps_across = across // 8
    registers = RegisterTile(tile.rows, tile.cols, side // (tile.rows // 4), side // (tile.cols // 4))
    zeros = make_zeros(registers)
    accumulate = make_accumulate(registers, _DEPTH, side, side)
    store = make_store(registers)
    store_column = make_store_column(side)
    fetch, decode = dequantizer(kind_name)
    load_octet = make_load_octet(granule)
    slice_size = _DEPTH * side
    buffer_size = 2 * slice_size

    @kernel(tile.threads, tile.blocks)
    def quantized_matmul_tiles(x, data, out, n, stored_cols):
        x_slices = cuda.shared.array(buffer_size, _f32)
        w_slices = cuda.shared.array(buffer_size, _f32)
        thread = cuda.threadIdx.x
        m, cols = x.shape
        first_row, first_col = cuda.blockIdx.x * side, cuda.blockIdx.y * side
        # Loading: two threads a row of each slice. Rows beyond the edge repeat the last; their outputs are not stored.
        lane_row, half = thread % side, thread // side
        x_row = min(first_row + lane_row, m - 1)
        w_row = min(first_col + lane_row, n - 1)
        column = half * 8 * side + lane_row
        # Multiplying: a warp covers 4 x 8 register tiles, so that its reads of shared memory are few and free of conflicts.
        warp, lane = thread // 32, thread % 32
        tile_row = (warp // warps_across * 4 + lane // 8) * 4
        tile_col = (warp % warps_across * 8 + lane % 8) * 4

        x_values = load_octet(x, x_row * cols, half * 8, cols)
        w_bits = fetch(data, n, stored_cols, w_row, half)
        store_column(x_slices, column, x_values)
        store_column(w_slices, column, decode(w_bits, half))
        cuda.syncthreads()
        acc = zeros()
        steps = stored_cols // _DEPTH
        current = 0
        for step in range(1, steps + 1):
            octet = step * 2 + half
            if step < steps:
                x_values = load_octet(x, x_row * cols, octet * 8, cols)
                w_bits = fetch(data, n, stored_cols, w_row, octet)
            acc = accumulate(acc, x_slices, w_slices, current + tile_row, current + tile_col)
            current = slice_size - current
            if step < steps:
                store_column(x_slices, current + column, x_values)
                store_column(w_slices, current + column, decode(w_bits, octet))
            cuda.syncthreads()
        store(out, acc, first_row + tile_row, first_col + tile_col, m, n)

    return quantized_matmul_tiles


def choose_tile(m: int, n: int, multiprocessors: int) -> int:
    """The side of the largest tile whose grid gives at least nine tenths of the multiprocessors a block."""
    for side in sorted(TILES, reverse=True):
        if -(-m // side) * -(-n // side) * 10 >= 9 * multiprocessors:
            return side
    return min(TILES)


@lru_cache(maxsize=None)
def _multiprocessors(device_id: int) -> int:
    return 132 if config.ENABLE_CUDASIM else int(cuda.gpus[device_id].MULTIPROCESSOR_COUNT)


def quantized_matmul(x: Any, weight: DeviceMatrix, out: Any, stream: Any = 0, *, side: int | None = None) -> None:
    """out[m, n] = x[m, k] W[n, k]^T; float32 device arrays, any m and n; `side` forces a tile (a key of TILES).

    ShapeError when the arrays do not fit the matrix.
    """
    m = require_rank("quantized_matmul", "x", x, 2)[0]
    require("quantized_matmul", "x", x, (m, weight.cols))
    require("quantized_matmul", "out", out, (m, weight.rows))
    if m == 0:
        return
    if side is None:
        side = choose_tile(m, weight.rows, _multiprocessors(cuda.get_current_device().id))
    elif side not in TILES:
        raise ShapeError(f"quantized_matmul: no tile has the side {side}; known: {sorted(TILES)}")
    run = quantized_matmul_kernel(weight.kind.name, side, granule_of(weight.cols, _DEPTH))
    grid = -(-m // side), -(-weight.rows // side)
    run[grid, TILES[side].threads, stream](x, weight.data, out, weight.rows, weight.stored_cols)
