"""Wide, aligned memory accesses for kernels: numba loads arrays element by element, the hardware moves 16 bytes at once."""

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
    i8,
    i16,
    i32,
    i64,
    in_simulator,
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
    """Four float32 of a contiguous array (global or shared) from flat `index` on, which is a multiple of 4: one load."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = data_pointer(context, builder, signature.args[0], args[0])
        vector = builder.load(_at(builder, pointer, args[1], _vec4), align=16)
        return as_tuple(builder, [builder.extract_element(vector, i32(i)) for i in range(4)])

    return Quad(array, types.int64), generate


def _store4_simulated(array: Any, index: int, quad: tuple[Any, ...]) -> None:
    in_simulator(array).reshape(-1)[index : index + 4] = quad


@device_intrinsic(_store4_simulated)
def store4(typing_context: Any, array: Any, index: Any, quad: Any) -> Any:
    """Write four float32 to a contiguous array from flat `index` on, which is a multiple of 4: one store."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = data_pointer(context, builder, signature.args[0], args[0])
        vector: Any = ir.Constant(_vec4, ir.Undefined)
        for i, value in enumerate(elements(builder, args[2])):
            vector = builder.insert_element(vector, value, i32(i))
        builder.store(vector, _at(builder, pointer, args[1], _vec4), align=16)
        return context.get_dummy_value()

    return types.void(array, types.int64, Quad), generate


def make_store_column(stride: int) -> Any:
    """A function (array, index, octet): element i of the octet goes to flat `index + i * stride`."""

    def simulated(array: Any, index: int, octet: tuple[Any, ...]) -> None:
        in_simulator(array)[index : index + OCTET * stride : stride] = octet

    @device_intrinsic(simulated)
    def store_column(typing_context: Any, array: Any, index: Any, octet: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = builder.gep(data_pointer(context, builder, signature.args[0], args[0]), [args[1]])
            for i, value in enumerate(elements(builder, args[2])):
                builder.store(value, builder.gep(pointer, [i64(i * stride)]))
            return context.get_dummy_value()

        return types.void(array, types.int64, Octet), generate

    return store_column


def _load_bits(builder: Any, data: Any, offset: Any, size: int) -> list[Any]:
    """`size` bytes at `data + offset`, read-only and aligned, as 32-bit words; one or two bytes are widened with zeros."""
    if size <= 4:
        kind = {1: i8, 2: i16, 4: i32}[size]
    else:
        kind = ir.VectorType(i32, size // 4)
    value = builder.load(_at(builder, data, offset, kind), align=size)
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
            pointer = data_pointer(context, builder, signature.args[0], args[0])
            rows, cols, row, octet = args[1:]
            out: list[Any] = []
            for plane, skipped in zip(planes, before, strict=True):
                base = builder.lshr(builder.mul(builder.mul(rows, cols), i64(skipped)), i64(8))
                for part in range(max(1, OCTET // plane.span)):
                    if plane.span < OCTET:
                        entry = builder.add(builder.mul(octet, i64(OCTET // plane.span)), i64(part))
                    else:
                        entry = builder.lshr(octet, i64((plane.span // OCTET).bit_length() - 1))
                    index = builder.add(builder.mul(entry, rows), row)
                    offset = builder.add(base, builder.mul(index, i64(plane.entry_bytes)))
                    out += _load_bits(builder, pointer, offset, plane.entry_bytes)
            return as_tuple(builder, out)

        return raw(data, types.int64, types.int64, types.int64, types.int64), generate

    return fetch
