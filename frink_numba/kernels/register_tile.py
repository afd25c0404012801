"""Register tiles: a thread's block of a matrix product, held as one tuple of float32 that never leaves the registers.

The generators emit straight-line code, so that every index is a constant: an indexed array would live in local memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numba.cuda import types

from frink_numba.kernels.extension import (
    as_tuple,
    data_pointer,
    device_intrinsic,
    elements,
    f32,
    fused_multiply_add,
    global_address,
    i32,
    i64,
    in_simulator,
    multiply_wide,
)

_QUAD = 4
_vec4 = ir.VectorType(f32, _QUAD)


@dataclass(frozen=True, slots=True)
class RegisterTile:
    """The outputs of one thread: `rows` x `cols`, in quads of four neighbours.

    Quad q of the rows starts `q * row_step` after the thread's first row, and likewise for the columns: quads of one
    thread lie apart so that the quads of neighbouring threads lie together, and shared memory serves them at once.
    """

    rows: int
    cols: int
    row_step: int
    col_step: int

    @property
    def row_offsets(self) -> list[int]:
        """Offset of each row from the thread's first."""
        return [q * self.row_step + i for q in range(self.rows // _QUAD) for i in range(_QUAD)]

    @property
    def col_offsets(self) -> list[int]:
        """Offset of each column from the thread's first."""
        return [q * self.col_step + i for q in range(self.cols // _QUAD) for i in range(_QUAD)]

    @property
    def numba_type(self) -> Any:
        """The tuple that holds it, row by row."""
        return types.UniTuple(types.float32, self.rows * self.cols)


def _load_quads(builder: Any, pointer: Any, quads: int, step: int, offset: int) -> list[Any]:
    """`quads` vectors of four floats, `step` apart, from `pointer + offset` on: 16-byte aligned loads."""
    values = []
    for q in range(quads):
        place = builder.gep(pointer, [i64(offset + q * step)])
        vector = builder.load(builder.bitcast(place, _vec4.as_pointer(pointer.type.addrspace)), align=16)
        values += [builder.extract_element(vector, i32(i)) for i in range(_QUAD)]
    return values


def make_zeros(tile: RegisterTile) -> Any:
    """A function () -> the tile filled with zeros."""

    def simulated() -> np.ndarray:
        return np.zeros(tile.rows * tile.cols, np.float32)

    @device_intrinsic(simulated)
    def zeros(typing_context: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return as_tuple(builder, [f32(0.0)] * (tile.rows * tile.cols))

        return tile.numba_type(), generate

    return zeros


def make_row(tile: RegisterTile, row: int) -> Any:
    """A function (acc) -> the tuple of the tile's row number `row`."""
    first, last = row * tile.cols, (row + 1) * tile.cols
    row_type = types.UniTuple(types.float32, tile.cols)

    def simulated(acc: np.ndarray) -> np.ndarray:
        return acc[first:last]

    @device_intrinsic(simulated)
    def take_row(typing_context: Any, acc: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return as_tuple(builder, elements(builder, args[0])[first:last])

        return row_type(tile.numba_type), generate

    return take_row


def make_accumulate(tile: RegisterTile, depth: int, row_stride: int, col_stride: int) -> Any:
    """A function (acc, a, b, a_start, b_start) -> acc + A^T B over `depth` steps, in the order of the steps.

    `a` is a shared array: row r of step k stands at `a_start + k * row_stride + r`; `b` likewise with `col_stride`.
    """
    row_offsets, col_offsets = np.array(tile.row_offsets), np.array(tile.col_offsets)

    def simulated(acc: np.ndarray, a: Any, b: Any, a_start: int, b_start: int) -> np.ndarray:
        steps = np.arange(depth)[:, None]
        left = a[a_start + steps * row_stride + row_offsets]
        right = b[b_start + steps * col_stride + col_offsets]
        return acc + (left.T @ right).reshape(-1)

    @device_intrinsic(simulated)
    def accumulate(typing_context: Any, acc: Any, a: Any, b: Any, a_start: Any, b_start: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            sums = elements(builder, args[0])
            a_pointer = builder.gep(data_pointer(context, builder, signature.args[1], args[1]), [args[3]])
            b_pointer = builder.gep(data_pointer(context, builder, signature.args[2], args[2]), [args[4]])
            for k in range(depth):
                left = _load_quads(builder, a_pointer, tile.rows // _QUAD, tile.row_step, k * row_stride)
                right = _load_quads(builder, b_pointer, tile.cols // _QUAD, tile.col_step, k * col_stride)
                for i in range(tile.rows):
                    for j in range(tile.cols):
                        at = i * tile.cols + j
                        sums[at] = fused_multiply_add(builder, left[i], right[j], sums[at])
            return as_tuple(builder, sums)

        return tile.numba_type(tile.numba_type, a, b, types.int64, types.int64), generate

    return accumulate


def make_accumulate_rows(tile: RegisterTile, depth: int, row_stride: int, col_stride: int) -> Any:
    """As `make_accumulate`, but `a` lies row by row: element k of row r stands at `a_start + r * row_stride + k`.

    `depth` is a multiple of 4, and so is `a_start`: four steps of a row are one load.
    """
    row_offsets, col_offsets = np.array(tile.row_offsets), np.array(tile.col_offsets)

    def simulated(acc: np.ndarray, a: Any, b: Any, a_start: int, b_start: int) -> np.ndarray:
        steps = np.arange(depth)[:, None]
        left = a[a_start + steps + row_offsets * row_stride]
        right = b[b_start + steps * col_stride + col_offsets]
        return acc + (left.T @ right).reshape(-1)

    @device_intrinsic(simulated)
    def accumulate_rows(typing_context: Any, acc: Any, a: Any, b: Any, a_start: Any, b_start: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            sums = elements(builder, args[0])
            a_pointer = builder.gep(data_pointer(context, builder, signature.args[1], args[1]), [args[3]])
            b_pointer = builder.gep(data_pointer(context, builder, signature.args[2], args[2]), [args[4]])
            for first in range(0, depth, _QUAD):
                left = [_load_quads(builder, a_pointer, 1, 0, r * row_stride + first) for r in tile.row_offsets]
                for k in range(_QUAD):
                    offset = (first + k) * col_stride
                    right = _load_quads(builder, b_pointer, tile.cols // _QUAD, tile.col_step, offset)
                    for i in range(tile.rows):
                        for j in range(tile.cols):
                            at = i * tile.cols + j
                            sums[at] = fused_multiply_add(builder, left[i][k], right[j], sums[at])
            return as_tuple(builder, sums)

        return tile.numba_type(tile.numba_type, a, b, types.int64, types.int64), generate

    return accumulate_rows


def make_scale_rows(tile: RegisterTile) -> Any:
    """A function (acc, factors) -> acc with row i multiplied by factors[i]."""
    factors_type = types.UniTuple(types.float32, tile.rows)

    def simulated(acc: np.ndarray, factors: tuple[Any, ...]) -> np.ndarray:
        return acc * np.repeat(np.array(factors, np.float32), tile.cols)

    @device_intrinsic(simulated)
    def scale_rows(typing_context: Any, acc: Any, factors: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            factors = elements(builder, args[1])
            values = elements(builder, args[0])
            return as_tuple(builder, [builder.fmul(v, factors[i // tile.cols]) for i, v in enumerate(values)])

        return tile.numba_type(tile.numba_type, factors_type), generate

    return scale_rows


def make_store(tile: RegisterTile) -> Any:
    """A function (out, acc, row, col, rows, cols): the tile goes to `out` [rows, cols] from (row, col) on.

    What lies outside is not stored. Quads are stored whole where `cols` is a multiple of 4, else element by element.
    """

    def simulated(out: Any, acc: np.ndarray, row: int, col: int, rows: int, cols: int) -> None:
        target = in_simulator(out)
        for i, r in enumerate(tile.row_offsets):
            for j, c in enumerate(tile.col_offsets):
                if row + r < rows and col + c < cols:
                    target[row + r, col + c] = acc[i * tile.cols + j]

    @device_intrinsic(simulated)
    def store(typing_context: Any, out: Any, acc: Any, row: Any, col: Any, rows: Any, cols: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            sums = elements(builder, args[1])
            row, col, rows, cols = args[2:]
            first = global_address(context, builder, signature.args[0], args[0])
            row_bytes = builder.mul(cols, i32(4))
            whole_quads = builder.icmp_unsigned("==", builder.and_(cols, i32(_QUAD - 1)), i32(0))

            def each_quad(store_quad: Any) -> None:
                for i, r in enumerate(tile.row_offsets):
                    at_row = builder.add(row, i32(r))
                    with builder.if_then(builder.icmp_signed("<", at_row, rows)):
                        start = multiply_wide(builder, at_row, row_bytes, first)
                        for j in range(0, tile.cols, _QUAD):
                            at_col = builder.add(col, i32(tile.col_offsets[j]))
                            place = multiply_wide(builder, at_col, i32(4), start)
                            store_quad(place, at_col, sums[i * tile.cols + j : i * tile.cols + j + _QUAD])

            def as_vector(place: Any, at_col: Any, values: Any) -> None:
                with builder.if_then(builder.icmp_signed("<", at_col, cols)):
                    vector: Any = ir.Constant(_vec4, ir.Undefined)
                    for k, value in enumerate(values):
                        vector = builder.insert_element(vector, value, i32(k))
                    builder.store(vector, builder.inttoptr(place, _vec4.as_pointer(1)), align=16)

            def one_by_one(place: Any, at_col: Any, values: Any) -> None:
                for k, value in enumerate(values):
                    with builder.if_then(builder.icmp_signed("<", builder.add(at_col, i32(k)), cols)):
                        address = builder.add(place, i64(4 * k))
                        builder.store(value, builder.inttoptr(address, f32.as_pointer(1)), align=4)

            with builder.if_else(whole_quads) as (then, otherwise):
                with then:
                    each_quad(as_vector)
                with otherwise:
                    each_quad(one_by_one)
            return context.get_dummy_value()

        return types.void(out, tile.numba_type, *[types.int32] * 4), generate

    return store


def make_store_row(tile: RegisterTile) -> Any:
    """A function (out, values, start, col, cols): one row of a tile goes to flat `start + col` of `out` on.

    The row has `cols` columns, of which the tile covers some from `col` on; what lies beyond is not stored.
    """
    row_type = types.UniTuple(types.float32, tile.cols)

    def simulated(out: Any, values: Any, start: int, col: int, cols: int) -> None:
        flat = in_simulator(out).reshape(-1)
        for value, offset in zip(values, tile.col_offsets, strict=True):
            if col + offset < cols:
                flat[start + col + offset] = value

    @device_intrinsic(simulated)
    def store_row(typing_context: Any, out: Any, values: Any, start: Any, col: Any, cols: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            base = builder.gep(data_pointer(context, builder, signature.args[0], args[0]), [args[2]])
            for value, offset in zip(elements(builder, args[1]), tile.col_offsets, strict=True):
                place = builder.add(args[3], i64(offset))
                with builder.if_then(builder.icmp_signed("<", place, args[4])):
                    builder.store(value, builder.gep(base, [place]))
            return context.get_dummy_value()

        return types.void(out, row_type, *[types.int64] * 3), generate

    return store_row
