"""Small emitted expressions of the decode attention's kernel."""

from __future__ import annotations

from typing import Any

from frink_numba.kernels.ptx import Emitter, Register

NONE = 0xFF800000  # minus infinity


def flag(e: Emitter, bit: Any) -> Register:
    """A condition as 0 or 1."""
    return Register(e, "u32", e.builder.zext(bit, e.constant("u32", 0).value.type))


def select(e: Emitter, bit: Any, yes: Register, no: Register) -> Register:
    return Register(e, yes.kind, e.builder.select(bit, yes.value, no.value))


def float_bits(e: Emitter, bits: int) -> Register:
    """The float32 of these bits."""
    return e.asm("mov.b32 $0, $1;", "f32", [e.constant("u32", bits)], pure=True)


def exp2(e: Emitter, x: Register) -> Register:
    return e.asm("ex2.approx.ftz.f32 $0, $1;", "f32", [x], pure=True)


def larger(e: Emitter, a: Register, b: Register) -> Register:
    """The larger of two float32; a not-a-number loses."""
    return e.asm("max.f32 $0, $1, $2;", "f32", [a, b], pure=True)


def exchange(e: Emitter, x: Register, distance: int) -> Register:
    """What the lane `distance` away (exclusive or) has."""
    return e.asm(f"shfl.sync.bfly.b32 $0, $1, {distance}, 0x1f, 0xffffffff;", "f32", [x])


def score_base(e: Emitter, m: Register) -> Register:
    """What is subtracted from scores: the maximum, or 0 while no key was seen."""
    seen = e.builder.fcmp_ordered(">", m.value, float_bits(e, NONE).value)
    return select(e, seen, m, e.constant("f32", 0.0))
