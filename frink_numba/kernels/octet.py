"""Eight values in registers: unpacking bit fields into float32, and scaling them with the host's exact rounding.

An octet is a tuple of eight float32. Products are rounded before they are added (never contracted), so that a weight
dequantized on the device is bit for bit the weight that the host dequantizes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.cuda import types

from frink_numba.kernels.extension import (
    Octet,
    as_tuple,
    device_intrinsic,
    elements,
    f32,
    i8,
    i16,
    i32,
    multiply_rounded,
)

_u32, _f32 = types.uint32, types.float32


def make_unpack(low_bits: int, high_bits: int = 0, offset: int = 0) -> Any:
    """A function (low, high) of two uint32: value i is field i of `low`, field i of `high` above it, plus `offset`.

    Fields are `low_bits` (1, 2 or 4) and `high_bits` wide, the first in the lowest bits; the sum is exact.
    """

    def simulated(low: int, high: int) -> tuple[Any, ...]:
        low, high = int(low), int(high)
        return tuple(
            np.float32(
                ((low >> low_bits * i) & ((1 << low_bits) - 1))
                + (((high >> high_bits * i) & ((1 << high_bits) - 1)) << low_bits)
                + offset
            )
            for i in range(8)
        )

    @device_intrinsic(simulated)
    def unpack(typing_context: Any, low: Any, high: Any) -> Any:
        def field(builder: Any, word: Any, bits: int, i: int) -> Any:
            return builder.and_(builder.lshr(word, i32(bits * i)), i32((1 << bits) - 1))

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            low, high = args
            out = []
            for i in range(8):
                value = field(builder, low, low_bits, i)
                if high_bits:
                    value = builder.or_(value, builder.shl(field(builder, high, high_bits, i), i32(low_bits)))
                out.append(builder.sitofp(builder.add(value, i32(offset)), f32))
            return as_tuple(builder, out)

        return Octet(_u32, _u32), generate

    return unpack


def _signed_bytes_simulated(low: int, high: int) -> tuple[Any, ...]:
    return tuple(np.array([low, high], np.uint32).view(np.int8).astype(np.float32))


@device_intrinsic(_signed_bytes_simulated)
def signed_bytes(typing_context: Any, low: Any, high: Any) -> Any:
    """The eight int8 of two words as float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        out = []
        for i in range(8):
            byte = builder.trunc(builder.lshr(args[i // 4], i32(8 * (i % 4))), i8)
            out.append(builder.sitofp(byte, f32))
        return as_tuple(builder, out)

    return Octet(_u32, _u32), generate


def make_lookup(table: tuple[int, ...]) -> Any:
    """A function (word) -> the int8 `table` entries that the word's eight 4-bit fields name, as float32.

    Byte permutes pick four entries at a time from either half of the table, and then between the two.
    """
    words = np.array(table, np.int8).view(np.uint32).tolist()

    def simulated(word: int) -> tuple[Any, ...]:
        return tuple(np.float32(table[(int(word) >> 4 * i) & 15]) for i in range(8))

    @device_intrinsic(simulated)
    def lookup(typing_context: Any, word: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            permute = ir.InlineAsm(
                ir.FunctionType(i32, [i32, i32, i32]), "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", side_effect=False
            )
            out = []
            for half in range(2):
                fields = builder.lshr(args[0], i32(16 * half))
                places = builder.and_(fields, i32(0x7777))
                lower = builder.call(permute, [i32(words[0]), i32(words[1]), places])
                upper = builder.call(permute, [i32(words[2]), i32(words[3]), places])
                # Byte j of the answer is byte j of `lower`, or of `upper` where the field's high bit is set.
                choice = builder.or_(builder.lshr(builder.and_(fields, i32(0x8888)), i32(1)), i32(0x3210))
                chosen = builder.call(permute, [lower, upper, choice])
                for j in range(4):
                    out.append(builder.sitofp(builder.trunc(builder.lshr(chosen, i32(8 * j)), i8), f32))
            return as_tuple(builder, out)

        return Octet(_u32), generate

    return lookup


def _scale_simulated(octet: tuple[Any, ...], factor: Any) -> tuple[Any, ...]:
    return tuple(np.array(octet, np.float32) * np.float32(factor))


@device_intrinsic(_scale_simulated)
def scale(typing_context: Any, octet: Any, factor: Any) -> Any:
    """octet * factor."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return as_tuple(builder, [multiply_rounded(builder, v, args[1]) for v in elements(builder, args[0])])

    return Octet(Octet, _f32), generate


def _scale_add_simulated(octet: tuple[Any, ...], factor: Any, addend: Any) -> tuple[Any, ...]:
    return tuple(np.array(octet, np.float32) * np.float32(factor) + np.float32(addend))


@device_intrinsic(_scale_add_simulated)
def scale_add(typing_context: Any, octet: Any, factor: Any, addend: Any) -> Any:
    """octet * factor + addend, the product rounded first."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values = elements(builder, args[0])
        return as_tuple(builder, [builder.fadd(multiply_rounded(builder, v, args[1]), args[2]) for v in values])

    return Octet(Octet, _f32, _f32), generate


def _multiply_simulated(a: Any, b: Any) -> Any:
    return np.float32(a) * np.float32(b)


@device_intrinsic(_multiply_simulated)
def multiply(typing_context: Any, a: Any, b: Any) -> Any:
    """float32 a * b, rounded, also where an addition follows."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return multiply_rounded(builder, args[0], args[1])

    return _f32(_f32, _f32), generate


def _half_simulated(word: int) -> Any:
    return np.array([int(word) & 0xFFFF], np.uint16).view(np.float16).astype(np.float32)[0]


@device_intrinsic(_half_simulated)
def half(typing_context: Any, word: Any) -> Any:
    """The float16 in the low half of a word, as float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.trunc(args[0], i16)
        return builder.fpext(builder.bitcast(bits, ir.HalfType()), f32)

    return _f32(_u32), generate


def _bits_simulated(word: int) -> Any:
    return np.array([int(word) & 0xFFFFFFFF], np.uint32).view(np.float32)[0]


@device_intrinsic(_bits_simulated)
def float_bits(typing_context: Any, word: Any) -> Any:
    """The float32 whose bits are `word`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], f32)

    return _f32(_u32), generate
