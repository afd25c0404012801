"""Wide, aligned memory accesses for kernels: numba loads arrays element by element, the hardware 16 bytes at once."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.cuda import types

from frink_numba.kernels.extension import (
    Octet,
    as_tuple,
    data_pointer,
    device_intrinsic,
    elements,
    f32,
    fused_multiply_add,
    global_address,
    i8,
    i16,
    i32,
    i64,
    in_simulator,
    multiply_wide,
)
from frink_numba.kernels.kinds import OCTET, Plane

Quad = types.UniTuple(types.float32, 4)
_vec4 = ir.VectorType(f32, 4)


def _at(builder: Any, pointer: Any, index: Any, pointee: Any) -> Any:
    """`pointer + index` elements, as a pointer to `pointee`."""
    return builder.bitcast(builder.gep(pointer, [index]), pointee.as_pointer(pointer.type.addrspace))


def _load4_simulated(array: Any, index: int) -> tuple[Any, ...]:
    return tuple(in_simulator(array).reshape(-1)[index : index + 4])


@device_intrinsic(_load4_simulated)
def load4(typing_context: Any, array: Any, index: Any) -> Any:
    """Four float32 of a contiguous array (global or shared) from flat `index`, a multiple of 4, on: one load."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = data_pointer(context, builder, signature.args[0], args[0])
        vector = builder.load(_at(builder, pointer, args[1], _vec4), align=16)
        return as_tuple(builder, [builder.extract_element(vector, i32(i)) for i in range(4)])

    return Quad(array, types.int64), generate


def _store_quad(builder: Any, pointer: Any, index: Any, values: list[Any]) -> None:
    vector: Any = ir.Constant(_vec4, ir.Undefined)
    for i, value in enumerate(values):
        vector = builder.insert_element(vector, value, i32(i))
    builder.store(vector, _at(builder, pointer, index, _vec4), align=16)


def _store4_simulated(array: Any, index: int, quad: tuple[Any, ...]) -> None:
    in_simulator(array).reshape(-1)[index : index + 4] = quad


@device_intrinsic(_store4_simulated)
def store4(typing_context: Any, array: Any, index: Any, quad: Any) -> Any:
    """Write four float32 to a contiguous array from flat `index` on, which is a multiple of 4: one store."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = data_pointer(context, builder, signature.args[0], args[0])
        _store_quad(builder, pointer, args[1], elements(builder, args[2]))
        return context.get_dummy_value()

    return types.void(array, types.int64, Quad), generate


def _load_quad_within(builder: Any, array: Any, start: Any, first: Any, limit: Any, granule: int) -> list[Any]:
    """Four float32 of the row that begins at element `start` of the array at global address `array`.

    They are elements `first` on of the row; from element `limit` on zeros are given. `granule` is how many elements
    from `first` on are known to lie on one side of the limit: 8 (inside), 4 or 1. What lies beyond is not read: its
    address is replaced, since a select is cheaper than a branch. Places are 32-bit: less than 2**32 elements.
    """
    if granule == 1:
        values = []
        for i in range(4):
            place = builder.add(first, i32(i))
            inside = builder.icmp_signed("<", place, limit)
            index = builder.add(start, builder.select(inside, place, i32(0)))
            address = multiply_wide(builder, index, i32(4), array)
            value = builder.load(builder.inttoptr(address, f32.as_pointer(1)), align=4)
            values.append(builder.select(inside, value, f32(0.0)))
        return values
    inside = builder.icmp_signed("<", first, limit) if granule == 4 else None
    place = first if inside is None else builder.select(inside, first, i32(0))
    address = multiply_wide(builder, builder.add(start, place), i32(4), array)
    vector = builder.load(builder.inttoptr(address, _vec4.as_pointer(1)), align=16)
    values = [builder.extract_element(vector, i32(i)) for i in range(4)]
    return values if inside is None else [builder.select(inside, v, f32(0.0)) for v in values]


def _take_within(flat: np.ndarray, start: int, first: int, limit: int, count: int) -> list[Any]:
    """Simulator: `count` values of a row that starts at `start`, from element `first` on, zeros from `limit` on."""
    held = max(0, min(count, int(limit) - int(first)))
    return [*flat[start + first : start + first + held], *[np.float32(0.0)] * (count - held)]


def make_load_run(count: int, granule: int) -> Any:
    """A function (array, start, first, limit) -> elements first .. first+count-1 of the row that starts at `start`.

    `count` is 4 or 8. Zeros from element `limit` on; `granule`: see `granule_of`.
    """
    run = types.UniTuple(types.float32, count)

    def simulated(array: Any, start: int, first: int, limit: int) -> tuple[Any, ...]:
        return tuple(_take_within(in_simulator(array).reshape(-1), start, first, limit, count))

    @device_intrinsic(simulated)
    def load_run(typing_context: Any, array: Any, start: Any, first: Any, limit: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            start, first, limit = args[1:]
            array = global_address(context, builder, signature.args[0], args[0])
            values = []
            for part in range(0, count, 4):
                values += _load_quad_within(builder, array, start, builder.add(first, i32(part)), limit, granule)
            return as_tuple(builder, values)

        return run(array, types.int32, types.int32, types.int32), generate

    return load_run


def make_add_products(rows: int, granule: int) -> Any:
    """A function (sums, weights, x, m, cols, octet) -> sums[i] + the product of an octet with x[i], for `rows` rows.

    Row i of x [m, cols] is row min(i, m - 1); its elements are 8 * octet on, zeros beyond its end (`granule_of`).
    """
    sums_type = types.UniTuple(types.float32, rows)

    def simulated(sums: np.ndarray, weights: Any, x: Any, m: int, cols: int, octet: int) -> np.ndarray:
        flat = in_simulator(x).reshape(-1)
        places = [min(i, int(m) - 1) * int(cols) for i in range(rows)]
        return sums + np.array([_take_within(flat, p, octet * OCTET, cols, OCTET) for p in places]) @ np.array(weights)

    @device_intrinsic(simulated)
    def add_products(typing_context: Any, sums: Any, weights: Any, x: Any, m: Any, cols: Any, octet: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            sums, weights = elements(builder, args[0]), elements(builder, args[1])
            m, cols, octet = args[3:]
            array = global_address(context, builder, signature.args[2], args[2])
            last = builder.sub(m, i32(1))
            first = builder.mul(octet, i32(OCTET))
            for i in range(rows):
                row = builder.select(builder.icmp_signed("<", i32(i), last), i32(i), last)
                start = builder.mul(row, cols)
                for part in range(0, OCTET, 4):
                    place = builder.add(first, i32(part))
                    values = _load_quad_within(builder, array, start, place, cols, granule)
                    for j, value in enumerate(values):
                        sums[i] = fused_multiply_add(builder, weights[part + j], value, sums[i])
            return as_tuple(builder, sums)

        return sums_type(sums_type, Octet, x, types.int32, types.int32, types.int32), generate

    return add_products


def granule_of(length: int, step: int) -> int:
    """How rows of `length` elements, read in steps of `step`, must be guarded: 8 (never), 4 (by quads) or 1."""
    return 8 if length % step == 0 else 4 if length % 4 == 0 else 1


def make_load_panel(rows: int, width: int, threads: int, granule: int) -> Any:
    """A function (array, thread, first, last, stride, start, limit) -> this thread's quads of a panel [rows, width].

    Panel row r is row min(first + r, last) of an array whose rows are `stride` elements apart, from flat `start` on;
    elements from `limit` on are zeros. The quads of the panel, row by row, are dealt to the threads in turn.
    """
    quads = rows * width // 4 // threads
    panel = types.UniTuple(types.float32, 4 * quads)
    across = width // 4

    def simulated(array: Any, thread: int, first: int, last: int, stride: int, start: int, limit: int) -> list[Any]:
        flat, values = in_simulator(array).reshape(-1), []
        for q in range(thread, rows * across, threads):
            row = min(first + q // across, last)
            values += _take_within(flat, start + row * stride, q % across * 4, limit, 4)
        return values

    @device_intrinsic(simulated)
    def load_panel(
        typing_context: Any, array: Any, thread: Any, first: Any, last: Any, stride: Any, start: Any, limit: Any
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            thread, first, last, stride, start, limit = args[1:]
            array = global_address(context, builder, signature.args[0], args[0])
            values = []
            for i in range(quads):
                quad = builder.add(thread, i32(i * threads))
                row = builder.add(first, builder.udiv(quad, i32(across)))
                row = builder.select(builder.icmp_signed("<", row, last), row, last)
                origin = builder.add(start, builder.mul(row, stride))
                place = builder.mul(builder.urem(quad, i32(across)), i32(4))
                values += _load_quad_within(builder, array, origin, place, limit, granule)
            return as_tuple(builder, values)

        return panel(array, *[types.int32] * 6), generate

    return load_panel


def make_store_panel(rows: int, width: int, threads: int) -> Any:
    """A function (array, index, thread, values): what `load_panel` gave goes to flat `index` on, row by row."""
    quads = rows * width // 4 // threads
    panel = types.UniTuple(types.float32, 4 * quads)

    def simulated(array: Any, index: int, thread: int, values: list[Any]) -> None:
        for i in range(quads):
            place = index + 4 * (thread + i * threads)
            array[place : place + 4] = values[4 * i : 4 * i + 4]

    @device_intrinsic(simulated)
    def store_panel(typing_context: Any, array: Any, index: Any, thread: Any, values: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = data_pointer(context, builder, signature.args[0], args[0])
            values = elements(builder, args[3])
            first = builder.add(args[1], builder.mul(args[2], i64(4)))
            for i in range(quads):
                place = builder.add(first, i64(4 * i * threads))
                _store_quad(builder, pointer, place, values[4 * i : 4 * i + 4])
            return context.get_dummy_value()

        return types.void(array, types.int64, types.int64, panel), generate

    return store_panel


def make_store_column(count: int, stride: int) -> Any:
    """A function (array, index, run): element i of a tuple of `count` goes to flat `index + i * stride`."""
    run = types.UniTuple(types.float32, count)

    def simulated(array: Any, index: int, run: tuple[Any, ...]) -> None:
        array[index : index + count * stride : stride] = run

    @device_intrinsic(simulated)
    def store_column(typing_context: Any, array: Any, index: Any, run_: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = builder.gep(data_pointer(context, builder, signature.args[0], args[0]), [args[1]])
            for i, value in enumerate(elements(builder, args[2])):
                builder.store(value, builder.gep(pointer, [i64(i * stride)]))
            return context.get_dummy_value()

        return types.void(array, types.int64, run), generate

    return store_column


def _load_bits(builder: Any, address: Any, size: int) -> list[Any]:
    """`size` bytes at a global address, read-only and aligned, as 32-bit words; one or two bytes widen with zeros."""
    kind = {1: i8, 2: i16, 4: i32}.get(size) or ir.VectorType(i32, size // 4)
    value = builder.load(builder.inttoptr(address, kind.as_pointer(1)), align=size)
    # The weights do not change while a kernel runs: the read-only data path may serve them.
    value.set_metadata("invariant.load", builder.module.add_metadata([]))
    if size < 4:
        return [builder.zext(value, i32)]
    return [value] if size == 4 else [builder.extract_element(value, i32(i)) for i in range(size // 4)]


def make_fetch(planes: tuple[Plane, ...]) -> Any:
    """A function (data, rows, cols, row, octet) -> the stored bits of elements 8*octet .. 8*octet+7 of one row.

    `data` is the uint8 array of a DeviceMatrix of `rows` x `cols` (padded). The answer is a tuple of uint32: each
    plane's part in the table's order, narrow entries in the low bits.
    """
    words = sum(plane.words for plane in planes)
    raw = types.UniTuple(types.uint32, words)
    # Bytes per 256 elements of the planes before each: whole, since every plane's entries per 256 elements are.
    before = [sum(p.entry_bytes * (256 // p.span) for p in planes[:i]) for i in range(len(planes))]

    def simulated(data: Any, rows: int, cols: int, row: int, octet: int) -> tuple[int, ...]:
        flat = in_simulator(data)
        out: list[int] = []
        for plane, skipped in zip(planes, before, strict=True):
            for part in range(max(1, OCTET // plane.span)):
                entry = int(octet) * OCTET // plane.span + part
                start = int(rows) * int(cols) * skipped // 256 + (entry * int(rows) + int(row)) * plane.entry_bytes
                piece = flat[start : start + plane.entry_bytes]
                out += piece.view(np.dtype(f"<u{min(4, plane.entry_bytes)}")).tolist()
        return tuple(out)

    @device_intrinsic(simulated)
    def fetch(typing_context: Any, data: Any, rows: Any, cols: Any, row: Any, octet: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = global_address(context, builder, signature.args[0], args[0])
            rows, cols, row, octet = args[1:]
            elements_before = builder.mul(builder.zext(rows, i64), builder.zext(cols, i64))
            out: list[Any] = []
            for plane, skipped in zip(planes, before, strict=True):
                base = builder.add(pointer, builder.lshr(builder.mul(elements_before, i64(skipped)), i64(8)))
                for part in range(max(1, OCTET // plane.span)):
                    if plane.span < OCTET:
                        entry = builder.add(builder.mul(octet, i32(OCTET // plane.span)), i32(part))
                    else:
                        entry = builder.lshr(octet, i32((plane.span // OCTET).bit_length() - 1))
                    index = builder.add(builder.mul(entry, rows), row)
                    out += _load_bits(
                        builder, multiply_wide(builder, index, i32(plane.entry_bytes), base), plane.entry_bytes
                    )
            return as_tuple(builder, out)

        return raw(data, types.int32, types.int32, types.int32, types.int32), generate

    return fetch
