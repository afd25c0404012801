"""q, and the new rows of K and V, on their way from the projections: norm of a head, RoPE, stores.

A warp takes a head; a lane holds its channels lane, lane + 32, ...
"""

from __future__ import annotations

import functools
from typing import Any

from frink_numba.kernels.decode_attention_emit import exchange, flag, float_bits, select
from frink_numba.kernels.ptx import Emitter, Register, emitted
from frink_numba.layer import RopeLayout


@functools.cache
def prepare_head(head_dim: int, rot_dim: int, layout: RopeLayout, norm: bool) -> Any:
    """prepare(source, weight, cos, sin, eps, lane) -> channels lane, lane + 32, ... of a head, after norm and RoPE."""
    count = head_dim // 32
    half = rot_dim // 2

    @emitted(f"f32x{count}" if count > 1 else "f32", "u64", "u64", "u64", "u64", "f32", "u32")
    def prepare(
        e: Emitter, source: Register, weight: Register, cos: Register, sin: Register, eps: Register, lane: Register
    ) -> Any:
        b = e.builder

        def load(pointer: Register, index: Register) -> Register:
            return e.asm("ld.global.f32 $0, [$1];", "f32", [pointer + e.widen(index << 2)])

        def less(a: Register, limit: int) -> Any:
            return b.icmp_unsigned("<", a.value, e.constant("u32", limit).value)

        own, partners, angles, turning, negative = [], [], [], [], []
        for i in range(count):
            channel = lane + 32 * i
            own.append(load(source, channel))
            if 32 * i >= rot_dim:
                continue
            inside = less(channel, rot_dim)
            if layout is RopeLayout.NORM:
                partner, angle = channel ^ 1, channel >> 1
                first = b.icmp_unsigned("==", (channel & 1).value, e.constant("u32", 0).value)
            else:
                first = less(channel, half)
                partner = select(e, first, channel + half, channel - half)
                angle = select(e, first, channel, channel - half)
            partner = select(e, inside, partner, channel)
            angle = select(e, inside, angle, e.constant("u32", 0))
            partners.append((load(source, partner), partner))
            angles.append((load(cos, angle), load(sin, angle)))
            turning.append(inside)
            negative.append(first)
        others = [value for value, _ in partners]
        if norm:
            total = own[0] * own[0]
            for value in own[1:]:
                total = total + value * value
            for distance in (16, 8, 4, 2, 1):
                total = total + exchange(e, total, distance)
            mean = total * (1.0 / head_dim) + eps
            factor = e.asm("{\n.reg .f32 r;\nsqrt.rn.f32 r, $1;\nrcp.rn.f32 $0, r;\n}", "f32", [mean], pure=True)
            own = [value * factor * load(weight, lane + 32 * i) for i, value in enumerate(own)]
            others = [value * factor * load(weight, partner) for value, partner in partners]
        out = []
        for i, value in enumerate(own):
            if i < len(others):
                cosine, sine = angles[i]
                swing = others[i] * sine
                turned = value * cosine + select(e, negative[i], e.constant("f32", 0.0) - swing, swing)
                value = select(e, turning[i], turned, value)
            out.append(value)
        return out if count > 1 else out[0]

    return prepare


@functools.cache
def row_ops(head_dim: int) -> tuple[Any, Any, Any, Any]:
    """What happens to a head's channels lane, lane + 32, ...:

    load(source, lane) -> values; put_query(values, address, lane): f16 in shared memory, not-a-number for what f16
    cannot hold; put_rows(values, address, lane): float32; put_mirror(keys, values, k_factor, v_factor, k, v, lane):
    f16, and where anything is beyond f16 not-a-numbers for K and zeros for V, so that only who sees the row is spoilt.
    """
    count = head_dim // 32
    many = f"f32x{count}" if count > 1 else "f32"

    def listed(values: Any) -> list[Register]:
        return list(values) if count > 1 else [values]

    def held(e: Emitter, value: Register) -> Any:
        """Whether a value rounds to a finite f16."""
        magnitude = e.asm("abs.f32 $0, $1;", "f32", [value], pure=True)
        return e.builder.fcmp_ordered("<", magnitude.value, e.constant("f32", 65520.0).value)

    def put_half(e: Emitter, space: str, address: Register, value: Register) -> None:
        template = f"{{\n.reg .b16 h;\ncvt.rn.f16.f32 h, $1;\nst.{space}.b16 [$0], h;\n}}"
        e.asm(template, None, [address, value])

    @emitted(many, "u64", "u32")
    def load(e: Emitter, source: Register, lane: Register) -> Any:
        start = source + e.widen(lane << 2)
        out = [e.asm("ld.global.f32 $0, [$1];", "f32", [start + 128 * i]) for i in range(count)]
        return out if count > 1 else out[0]

    @emitted(None, many, "u32", "u32")
    def put_query(e: Emitter, values: Any, address: Register, lane: Register) -> None:
        for i, value in enumerate(listed(values)):
            kept = select(e, held(e, value), value, float_bits(e, 0x7FFFFFFF))
            put_half(e, "shared", address + (lane << 1) + 64 * i, kept)

    @emitted(None, many, "u64", "u32")
    def put_rows(e: Emitter, values: Any, address: Register, lane: Register) -> None:
        start = address + e.widen(lane << 2)
        for i, value in enumerate(listed(values)):
            e.asm("st.global.f32 [$0], $1;", None, [start + 128 * i, value])

    @emitted(None, many, many, "f32", "f32", "u64", "u64", "u32")
    def put_mirror(
        e: Emitter,
        keys: Any,
        values: Any,
        k_factor: Register,
        v_factor: Register,
        k: Register,
        v: Register,
        lane: Register,
    ) -> None:
        scaled = [[x * factor for x in listed(xs)] for xs, factor in ((keys, k_factor), (values, v_factor))]
        good = functools.reduce(e.builder.and_, [held(e, x) for xs in scaled for x in xs])
        vote = "{\n.reg .pred p;\nsetp.ne.u32 p, $1, 0;\nvote.sync.all.pred p, p, 0xffffffff;\nselp.u32 $0, 1, 0, p;\n}"
        sound = e.builder.icmp_unsigned("!=", e.asm(vote, "u32", [flag(e, good)]).value, e.constant("u32", 0).value)
        instead = (float_bits(e, 0x7FFFFFFF), e.constant("f32", 0.0))
        for xs, target, other in zip(scaled, (k, v), instead, strict=True):
            start = target + e.widen(lane << 1)
            for i, x in enumerate(xs):
                put_half(e, "global", start + 64 * i, select(e, sound, x, other))

    return load, put_query, put_rows, put_mirror
