"""Tensor maps: the 128-byte descriptions of matrices that the bulk copy engine works from."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from frink_numba.errors import ShapeError
from frink_numba.kernels.launch import check

MAP_BYTES = 128  # a map in device memory lies at a multiple of 64


def heads_map(address: int, positions: int, heads: int, head_dim: int, box_positions: int) -> bytes:
    """The map of dense f16 [positions, heads, head_dim]: boxes of 64 channels of one head at `box_positions` positions.

    128-byte swizzle; zeros beyond a head's channels and beyond the last position. head_dim a multiple of 8.
    """
    if address % 16 or head_dim % 8:
        raise ShapeError(
            f"a tensor map needs 16-byte aligned rows: address {address:#x}, {head_dim} channels of 2 bytes"
        )
    sizes, strides = (head_dim, heads, positions), (head_dim * 2, heads * head_dim * 2)
    return _encode(2, address, sizes, strides, (64, 1, box_positions), 128)


def heads_maps(addresses: np.ndarray, positions: int, heads: int, head_dim: int, box_positions: int) -> np.ndarray:
    """`heads_map` of many tensors that differ in their address alone, uint64 [n]: uint64 [n, 16], a map a row."""
    sizes = (positions, heads, head_dim, box_positions)
    if np.bitwise_or.reduce(addresses) % 16:
        raise ShapeError("a tensor map needs 16-byte aligned rows: one of the addresses is not a multiple of 16")
    template = _template(*sizes)
    if template is None:
        maps = b"".join(heads_map(int(address), *sizes) for address in addresses)
        return np.frombuffer(maps, np.uint64).reshape(-1, MAP_BYTES // 8)
    made = np.empty((len(addresses), MAP_BYTES // 8), np.uint64)
    made[:] = template
    made[:, 0] = addresses
    return made


@functools.lru_cache(maxsize=256)
def _template(*sizes: int) -> np.ndarray | None:
    """The words of a map of which the first is the address; None where a map is not made like this.

    The format is nobody's promise, so that each kind of map is looked at before it is relied on.
    """
    places = (0x7F12_3456_7890, 0x10_0000)
    one, other = (np.frombuffer(heads_map(place, *sizes), np.uint64) for place in places)
    alike = (one[0], other[0]) == places and np.array_equal(one[1:], other[1:])
    return one if alike else None


def tensor_map(
    address: int, rows: int, cols: int, pitch: int, box_rows: int, box_cols: int, item: int, swizzle: int
) -> bytes:
    """The map of a row-major matrix [rows, cols] at device `address`, `pitch` bytes from row to row.

    item: bytes of an element, 2 (f16) or 4 (float32). swizzle: 64 or 128 bytes, the width of a box. A load beyond the
    matrix gives zeros, a store there is dropped.
    """
    if address % 16 or pitch % 16:
        raise ShapeError(f"a tensor map needs 16-byte aligned rows: address {address:#x}, pitch {pitch} bytes")
    return _encode(item, address, (cols, rows), (pitch,), (box_cols, box_rows), swizzle)


def _encode(
    item: int, address: int, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int], swizzle: int
) -> bytes:
    """The map; sizes, strides in bytes and box from the innermost dimension out, whose stride is the element."""
    from cuda.bindings import driver

    types = driver.CUtensorMapDataType
    element = {2: types.CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4: types.CU_TENSOR_MAP_DATA_TYPE_FLOAT32}[item]
    swizzles = driver.CUtensorMapSwizzle
    pattern = {64: swizzles.CU_TENSOR_MAP_SWIZZLE_64B, 128: swizzles.CU_TENSOR_MAP_SWIZZLE_128B}[swizzle]
    long, word = driver.cuuint64_t, driver.cuuint32_t
    made = check(
        driver.cuTensorMapEncodeTiled(
            element,
            len(sizes),
            address,
            [long(size) for size in sizes],
            [long(stride) for stride in strides],
            [word(size) for size in box],
            [word(1)] * len(sizes),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            pattern,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        ),
        f"describing a tensor of {tuple(reversed(sizes))}",
    )
    return b"".join(int(word).to_bytes(8, "little") for word in made.opaque)
