"""Tensor maps: the 128-byte descriptions of matrices that the bulk copy engine works from."""

from __future__ import annotations

from frink_numba.errors import ShapeError
from frink_numba.kernels.launch import check

MAP_BYTES = 128  # a map in device memory lies at a multiple of 64


def tensor_map(
    address: int, rows: int, cols: int, pitch: int, box_rows: int, box_cols: int, item: int, swizzle: int
) -> bytes:
    """The map of a row-major matrix [rows, cols] at device `address`, `pitch` bytes from row to row.

    item: bytes of an element, 2 (f16) or 4 (float32). swizzle: 64 or 128 bytes, the width of a box. A load beyond the
    matrix gives zeros, a store there is dropped.
    """
    from cuda.bindings import driver

    if address % 16 or pitch % 16:
        raise ShapeError(f"a tensor map needs 16-byte aligned rows: address {address:#x}, pitch {pitch} bytes")
    types = driver.CUtensorMapDataType
    element = {2: types.CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4: types.CU_TENSOR_MAP_DATA_TYPE_FLOAT32}[item]
    swizzles = driver.CUtensorMapSwizzle
    pattern = {64: swizzles.CU_TENSOR_MAP_SWIZZLE_64B, 128: swizzles.CU_TENSOR_MAP_SWIZZLE_128B}[swizzle]
    long, word = driver.cuuint64_t, driver.cuuint32_t
    made = check(
        driver.cuTensorMapEncodeTiled(
            element,
            2,
            address,
            [long(cols), long(rows)],
            [long(pitch)],
            [word(box_cols), word(box_rows)],
            [word(1), word(1)],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            pattern,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        ),
        f"describing a matrix of {rows} x {cols}",
    )
    return b"".join(int(word).to_bytes(8, "little") for word in made.opaque)
