"""Device code that the kernels over rows share: vector loads and stores, the sums of a block, powers of two.

A row is worked on by one block; thread i takes elements 4i .. 4i+3 of every span of 4 * threads.
"""

from __future__ import annotations

import functools
from typing import Any

from frink_numba.kernels.ptx import Emitter, Register, emitted, instruction

load4 = instruction("ld.global.v4.f32 {$0,$1,$2,$3}, [$4];", "f32x4", "u64")
store4 = instruction("st.global.v4.f32 [$0], {$1,$2,$3,$4};", None, "u64", "f32", "f32", "f32", "f32")
store_float = instruction("st.global.f32 [$0], $1;", None, "u64", "f32")
absolute = instruction("abs.f32 $0, $1;", "f32", "f32", pure=True)
larger = instruction("max.NaN.f32 $0, $1, $2;", "f32", "f32", "f32", pure=True)
root = instruction("sqrt.rn.f32 $0, $1;", "f32", "f32", pure=True)
reciprocal = instruction("rcp.rn.f32 $0, $1;", "f32", "f32", pure=True)
ballot = instruction(
    "{\n.reg .pred p;\nsetp.ne.u32 p, $1, 0;\nvote.sync.ballot.b32 $0, p, 0xffffffff;\n}", "u32", "u32"
)
# 0 where |x| < 65520, which rounds to a finite f16; not-a-number is not less.
beyond_half = instruction(
    "{\n.reg .pred p;\nsetp.lt.f32 p, $1, 0f477FF000;\nselp.u32 $0, 0, 1, p;\n}", "u32", "f32", pure=True
)
quotient = instruction("div.rn.f32 $0, $1, $2;", "f32", "f32", "f32", pure=True)


@emitted("f32x2", "f32")
def row_scales(e: Emitter, largest: Register) -> list[Register]:
    """(scale, 1 / scale) for a row's largest magnitude: it lands in [2**14, 2**15); both are normal numbers."""
    exponent = e.float_bits(largest) >> 23
    for name, bound in (("max", 16), ("min", 254)):
        exponent = e.asm(f"{name}.u32 $0, $1, $2;", "u32", [exponent, e.constant("u32", bound)], pure=True)
    bits = ((exponent - 14) << 23, (e.constant("u32", 254 + 14) - exponent) << 23)
    values = [e.asm("mov.b32 $0, $1;", "f32", [b], pure=True) for b in bits]
    zero = e.builder.fcmp_ordered("==", largest.value, e.constant("f32", 0.0).value)
    one = e.constant("f32", 1.0).value
    return [Register(e, "f32", e.builder.select(zero, one, v.value)) for v in values]


@emitted(None, "u64", "f32x4", "f32")
def store_half4(e: Emitter, address: Register, x: list[Register], factor: Register) -> None:
    """Four numbers times `factor`, rounded to f16, 8 bytes."""
    words = [
        e.asm("cvt.rn.f16x2.f32 $0, $2, $1;", "u32", [x[i] * factor, x[i + 1] * factor], pure=True) for i in (0, 2)
    ]
    e.asm("st.global.v2.u32 [$0], {$1,$2};", None, [address, *words])


@functools.cache
def block_reduce(operations: tuple[str, ...], threads: int) -> Any:
    """The op reduce(values..., scratch, thread) -> each value over the block: "add" or "max" (NaN wins).

    `scratch`: shared memory of 4 * len(operations) * threads / 32 bytes, used by no other call of the kernel. Every
    thread gets the same bits.
    """
    count, warps = len(operations), threads // 32
    names = {"add": "add.f32", "max": "max.NaN.f32"}

    @emitted(f"f32x{count}", *["f32"] * count, "u32", "u32")
    def reduce(e: Emitter, *inputs: Register) -> list[Register]:
        *values, scratch, thread = inputs

        def combine(i: int, a: Register, b: Register) -> Register:
            return e.asm(f"{names[operations[i]]} $0, $1, $2;", "f32", [a, b], pure=True)

        for distance in (16, 8, 4, 2, 1):
            shuffle = f"shfl.sync.bfly.b32 $0, $1, {distance}, 0x1f, 0xffffffff;"
            values = [combine(i, v, e.asm(shuffle, "f32", [v])) for i, v in enumerate(values)]
        lane = thread & 31
        first = Register(
            e, "u32", e.builder.zext(e.builder.icmp_unsigned("==", lane.value, lane._other(0)), lane.value.type)
        )
        with e.when(first):
            for i, value in enumerate(values):
                e.asm("st.shared.f32 [$0], $1;", None, [scratch + ((thread >> 5) << 2) + 4 * warps * i, value])
        e.asm("bar.sync 0;", None, [])
        for i in range(count):
            parts = [e.asm("ld.shared.f32 $0, [$1];", "f32", [scratch + 4 * (warps * i + w)]) for w in range(warps)]
            values[i] = functools.reduce(functools.partial(combine, i), parts)
        return values

    return reduce
