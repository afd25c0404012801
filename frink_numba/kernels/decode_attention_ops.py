"""The pieces of the decode attention's kernel, unrolled while it is compiled.

Everything is transposed, so that the queries are the narrow side of `mma.m16n8k16`:

    S^T [16 keys, 8 queries] = K Q^T         O^T [16 channels, 8 queries] += V^T P^T

With g = lane >> 2 and t = lane & 3. K: a lane loads channels 32c + 8t .. + 7 of keys g and g + 8 in one go; the order
of the channels within a product does not matter as long as q is read in the same order. V: a lane loads channels 64c +
8g .. + 7 of the keys 2t, 2t+1, 2t+8, 2t+9 and interleaves them by permutations; rows g and g + 8 of product i are the
channels 64c + 8g + 2i and + 1. So keys and values go from memory to operands without shared memory.
"""

from __future__ import annotations

import functools
from typing import Any

from frink_numba.kernels.decode_attention_variant import q_row_bytes, sums_row
from frink_numba.kernels.ptx import Emitter, Register, emitted
from frink_numba.layer import RopeLayout

LOAD4 = "ld.global.cg.v4.u32 {$0,$1,$2,$3}, [$4];"
LOAD2 = "ld.global.cg.v2.u32 {$0,$1}, [$2];"
MMA = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$0,$1,$2,$3};"
PARTS_TOGETHER = 16  # whose sums are on their way to the block that adds them
NONE = 0xFF800000  # minus infinity


def _flag(e: Emitter, bit: Any) -> Register:
    return Register(e, "u32", e.builder.zext(bit, e.constant("u32", 0).value.type))


def _select(e: Emitter, bit: Any, yes: Register, no: Register) -> Register:
    return Register(e, yes.kind, e.builder.select(bit, yes.value, no.value))


def _float(e: Emitter, bits: int) -> Register:
    return e.asm("mov.b32 $0, $1;", "f32", [e.constant("u32", bits)], pure=True)


def _exp2(e: Emitter, x: Register) -> Register:
    return e.asm("ex2.approx.ftz.f32 $0, $1;", "f32", [x], pure=True)


def _larger(e: Emitter, a: Register, b: Register) -> Register:
    return e.asm("max.f32 $0, $1, $2;", "f32", [a, b], pure=True)


def _exchange(e: Emitter, x: Register, distance: int) -> Register:
    return e.asm(f"shfl.sync.bfly.b32 $0, $1, {distance}, 0x1f, 0xffffffff;", "f32", [x])


def _base(e: Emitter, m: Register) -> Register:
    """What is subtracted from scores: the maximum, or 0 while no key was seen."""
    seen = e.builder.fcmp_ordered(">", m.value, _float(e, NONE).value)
    return _select(e, seen, m, e.constant("f32", 0.0))


# ---- q, and the new rows of K and V ----------------------------------------------------------------------------------


@functools.cache
def prepare_head(head_dim: int, rot_dim: int, layout: RopeLayout, norm: bool, norm_last: bool) -> Any:
    """prepare(source, weight, cos, sin, eps, lane) -> channels lane, lane + 32, ... of a head, after norm and RoPE.

    norm_last: the norm comes after the rotation.
    """
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
                partner = _select(e, first, channel + half, channel - half)
                angle = _select(e, first, channel, channel - half)
            partner = _select(e, inside, partner, channel)
            angle = _select(e, inside, angle, e.constant("u32", 0))
            partners.append((load(source, partner), partner))
            angles.append((load(cos, angle), load(sin, angle)))
            turning.append(inside)
            negative.append(first)
        others = [value for value, _ in partners]

        def norm_factor(values: list[Register]) -> Register:
            total = values[0] * values[0]
            for value in values[1:]:
                total = total + value * value
            for distance in (16, 8, 4, 2, 1):
                total = total + _exchange(e, total, distance)
            mean = total * (1.0 / head_dim) + eps
            return e.asm("{\n.reg .f32 r;\nsqrt.rn.f32 r, $1;\nrcp.rn.f32 $0, r;\n}", "f32", [mean], pure=True)

        def weighed(values: list[Register], factor: Register) -> list[Register]:
            return [value * factor * load(weight, lane + 32 * i) for i, value in enumerate(values)]

        if norm and not norm_last:
            factor = norm_factor(own)
            own = weighed(own, factor)
            others = [value * factor * load(weight, partner) for value, partner in partners]
        out = []
        for i, value in enumerate(own):
            if i < len(others):
                cosine, sine = angles[i]
                swing = others[i] * sine
                turned = value * cosine + _select(e, negative[i], e.constant("f32", 0.0) - swing, swing)
                value = _select(e, turning[i], turned, value)
            out.append(value)
        if norm and norm_last:
            out = weighed(out, norm_factor(out))
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
            kept = _select(e, held(e, value), value, _float(e, 0x7FFFFFFF))
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
        sound = e.builder.icmp_unsigned("!=", e.asm(vote, "u32", [_flag(e, good)]).value, e.constant("u32", 0).value)
        instead = (_float(e, 0x7FFFFFFF), e.constant("f32", 0.0))
        for xs, target, other in zip(scaled, (k, v), instead, strict=True):
            start = target + e.widen(lane << 1)
            for i, x in enumerate(xs):
                put_half(e, "global", start + 64 * i, _select(e, sound, x, other))

    return load, put_query, put_rows, put_mirror


# ---- the main loop ---------------------------------------------------------------------------------------------------


@functools.cache
def attend(head_dim: int, query_tiles: int, capped: bool) -> Any:
    """attend(sums, state, k, k_8, v x 4, rest, q, key, lane, lasts, firsts, scale, cap) -> sums and state.

    One step of a warp: 16 keys from `key` on. k, k_8: where this lane's part of keys g and g + 8 lies (channels 8t on);
    v: of keys 2t, 2t+1, 2t+8, 2t+9 (channels 8g on; 4g on, `rest` bytes further, behind the last whole 64). q: shared
    memory, row g, channel 8t. lasts, firsts: the keys that the lane's queries see (2t and 2t + 1 of each eight). state:
    maxima, then sums of weights. scale: makes products into powers of two (with a cap: into scores / cap; `cap` then
    into powers of two).
    """
    channels = head_dim // 4  # registers of O^T for eight queries
    whole, rest = divmod(head_dim, 64)
    sizes = f"f32x{channels * query_tiles}", f"f32x{4 * query_tiles}"
    out_size = f"f32x{(channels + 4) * query_tiles}"
    pair = f"u32x{2 * query_tiles}"

    @emitted(
        out_size, *sizes, "u64", "u64", "u64", "u64", "u64", "u64", "u64", "u32", "u32", "u32", pair, pair, "f32",
        "f32",
    )  # fmt: skip
    def op(
        e: Emitter,
        sums: list[Register],
        state: list[Register],
        k: Register,
        k_8: Register,
        v0: Register,
        v1: Register,
        v2: Register,
        v3: Register,
        rest_offset: Register,
        q: Register,
        key: Register,
        lane: Register,
        lasts: list[Register],
        firsts: list[Register],
        scale: Register,
        cap: Register,
    ) -> list[Register]:
        b = e.builder
        g = lane >> 2
        keys = [
            (e.asm(LOAD4, "u32x4", [k + 64 * c]), e.asm(LOAD4, "u32x4", [k_8 + 64 * c])) for c in range(head_dim // 32)
        ]
        values = [[e.asm(LOAD4, "u32x4", [v + 128 * c]) for v in (v0, v1, v2, v3)] for c in range(whole)]
        if rest:
            values.append([e.asm(LOAD2, "u32x2", [v + rest_offset]) for v in (v0, v1, v2, v3)])
        maxima, totals = list(state[: 2 * query_tiles]), list(state[2 * query_tiles :])
        out = list(sums)
        weights = []
        none = _float(e, NONE)
        for tile in range(query_tiles):
            s = [e.constant("f32", 0.0)] * 4
            for c, (low, high) in enumerate(keys):
                place = q + (8 * tile * q_row_bytes(head_dim) + 64 * c)
                words = e.asm("ld.shared.v4.u32 {$0,$1,$2,$3}, [$4];", "u32x4", [place])
                for j in range(2):
                    a = [low[2 * j], high[2 * j], low[2 * j + 1], high[2 * j + 1]]
                    s = e.asm(MMA, "f32x4", [*a, words[2 * j], words[2 * j + 1]], tied=s, pure=True)
            for i in range(4):  # key g or g + 8, query 2t or 2t + 1
                score = s[i] * scale
                if capped:
                    # cap * tanh(x) = cap * (1 - 2 / (1 + e^2x))
                    power = _exp2(e, score * 2.8853900817779268)
                    inverse = e.asm("rcp.approx.ftz.f32 $0, $1;", "f32", [power + 1.0], pure=True)
                    score = (e.constant("f32", 1.0) - inverse * 2.0) * cap
                position = key + g + 8 if i >= 2 else key + g
                last, first = lasts[2 * tile + (i & 1)], firsts[2 * tile + (i & 1)]
                seen = b.and_(
                    b.icmp_signed("<=", position.value, last.value), b.icmp_signed(">=", position.value, first.value)
                )
                s[i] = _select(e, seen, score, none)
            alphas = []
            for v in range(2):
                at = 2 * tile + v
                top = _larger(e, s[v], s[v + 2])
                for distance in (4, 8, 16):
                    top = _larger(e, top, _exchange(e, top, distance))
                new = _larger(e, maxima[at], top)
                base = _base(e, new)
                alphas.append(_exp2(e, maxima[at] - base))
                maxima[at] = new
                s[v], s[v + 2] = _exp2(e, s[v] - base), _exp2(e, s[v + 2] - base)
                totals[at] = totals[at] * alphas[v] + (s[v] + s[v + 2])
            p = []
            for i in (0, 2):
                packed = e.asm("cvt.rn.f16x2.f32 $0, $2, $1;", "u32", [s[i], s[i + 1]], pure=True)
                p.append(e.asm("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "u32", [packed]))
            weights.append(p)
            for i in range(channels):
                at = tile * channels + i
                out[at] = out[at] * alphas[i & 1]
        for c, parts in enumerate(values):
            for i in range(len(parts[0])):
                a = []
                for upper in (0, 2):
                    words = [parts[upper][i], parts[upper + 1][i]]
                    for selector in (0x5410, 0x7632):
                        a.append(e.asm(f"prmt.b32 $0, $1, $2, {selector:#x};", "u32", words, pure=True))
                for tile in range(query_tiles):
                    at = tile * channels + 16 * c + 4 * i
                    out[at : at + 4] = e.asm(MMA, "f32x4", [*a, *weights[tile]], tied=out[at : at + 4], pure=True)
        return [*out, *maxima, *totals]

    return op


# ---- sums of the warps, and of the blocks ----------------------------------------------------------------------------


@functools.cache
def meet_ops(head_dim: int, query_tiles: int, warps: int) -> tuple[Any, Any, Any]:
    """The sums of a block's warps meet in shared memory:

    put_state(state, address, lane, warp): each query's maximum and sum of weights, [query][warp] pairs;
    put_sums(sums, address, states, lane, warp): the warp's sums, scaled to the block's maximum;
    add_up(sums, states, query, quad) -> four channels of a query (not divided), its maximum and sum of weights.
    """
    channels = head_dim // 4
    whole, rest = divmod(head_dim, 64)
    row = 4 * sums_row(head_dim)
    queries = 8 * query_tiles

    def facts(e: Emitter, states: Register, query: Register) -> tuple[list[list[Register]], Register]:
        """(maximum, sum) of every warp, and the base of all."""
        pairs = []
        for w in range(0, warps, 2):
            four = e.asm("ld.shared.v4.f32 {$0,$1,$2,$3}, [$4];", "f32x4", [states + query * (8 * warps) + 8 * w])
            pairs += [four[:2], four[2:]]
        return pairs, functools.reduce(functools.partial(_larger, e), [m for m, _ in pairs])

    @emitted(None, f"f32x{4 * query_tiles}", "u32", "u32", "u32")
    def put_state(e: Emitter, state: list[Register], address: Register, lane: Register, warp: Register) -> None:
        for i in range(2 * query_tiles):
            total = state[2 * query_tiles + i]
            for distance in (4, 8, 16):
                total = total + _exchange(e, total, distance)
            query = ((lane & 3) << 1) + (8 * (i >> 1) + (i & 1))
            at = address + query * (8 * warps) + (warp << 3)
            with e.when(_flag(e, e.builder.icmp_unsigned("<", lane.value, e.constant("u32", 4).value))):
                e.asm("st.shared.v2.f32 [$0], {$1,$2};", None, [at, state[i], total])

    @emitted(None, f"f32x{channels * query_tiles}", f"f32x{4 * query_tiles}", "u32", "u32", "u32", "u32")
    def put_sums(
        e: Emitter,
        sums: list[Register],
        state: list[Register],
        address: Register,
        states: Register,
        lane: Register,
        warp: Register,
    ) -> None:
        g, t = lane >> 2, lane & 3
        for tile in range(query_tiles):
            for v in range(2):
                query = (t << 1) + (8 * tile + v)
                _, top = facts(e, states, query)
                factor = _exp2(e, state[2 * tile + v] - _base(e, top))
                start = address + (warp * queries + query) * row
                for c in range(whole + bool(rest)):
                    count = 4 if c < whole else 2
                    part = [
                        sums[tile * channels + 16 * c + 4 * i + v + 2 * h] * factor
                        for i in range(count)
                        for h in range(2)
                    ]
                    at = start + 256 * c + (g << (5 if c < whole else 4))
                    for k in range(0, len(part), 4):
                        e.asm("st.shared.v4.f32 [$0], {$1,$2,$3,$4};", None, [at + 4 * k, *part[k : k + 4]])

    @emitted("f32x6", "u32", "u32", "u32", "u32")
    def add_up(e: Emitter, address: Register, states: Register, query: Register, quad: Register) -> list[Register]:
        pairs, top = facts(e, states, query)
        base = _base(e, top)
        total = e.constant("f32", 0.0)
        for m, part in pairs:
            total = total + part * _exp2(e, m - base)
        out = [e.constant("f32", 0.0)] * 4
        for w in range(warps):
            at = address + query * row + (quad << 4) + w * queries * row
            four = e.asm("ld.shared.v4.f32 {$0,$1,$2,$3}, [$4];", "f32x4", [at])
            out = [a + x for a, x in zip(out, four, strict=True)]
        return [*out, top, total]

    return put_state, put_sums, add_up


@emitted("f32x2", "f32", "f32", "f32")
def with_sink(e: Emitter, sink: Register, top: Register, total: Register) -> list[Register]:
    """(sum of weights with the sink's, what the sums shrink by), for the sums' maximum `top` (as powers of two)."""
    power = sink * 1.4426950408889634
    highest = _base(e, _larger(e, power, top))
    lower = _exp2(e, top - highest)
    return [total * lower + _exp2(e, power - highest), lower]


@emitted(None, "u64", "f32x4", "f32")
def store_result(e: Emitter, address: Register, values: list[Register], factor: Register) -> None:
    """Four channels as f16."""
    words = [
        e.asm("cvt.rn.f16x2.f32 $0, $2, $1;", "u32", [values[i] * factor, values[i + 1] * factor], pure=True)
        for i in (0, 2)
    ]
    e.asm("st.global.v2.u32 [$0], {$1,$2};", None, [address, *words])


@emitted("f32x4", "f32x4", "u64", "u32", "u32", "u32", "u32")
def add_parts(
    e: Emitter,
    sums: list[Register],
    address: Register,
    stride: Register,
    first: Register,
    count: Register,
    factors: Register,
) -> list[Register]:
    """Sixteen parts from `first` on, as far as `count` goes: part s times the float32 at factors + 4 s (shared)."""
    out = list(sums)
    loaded = []
    for i in range(PARTS_TOGETHER):
        inside = _flag(e, e.builder.icmp_unsigned("<", (first + i).value, count.value))
        part = e.asm(
            "{\n.reg .pred p;\n.reg .f32 a, b, c, d;\nsetp.ne.u32 p, $5, 0;\nmov.f32 a, 0f00000000;\n"
            "mov.f32 b, 0f00000000;\nmov.f32 c, 0f00000000;\nmov.f32 d, 0f00000000;\n"
            "@p ld.global.cg.v4.f32 {a,b,c,d}, [$4];\nmov.f32 $0, a;\nmov.f32 $1, b;\nmov.f32 $2, c;\n"
            "mov.f32 $3, d;\n}",
            "f32x4",
            [address + e.widen(first + i) * e.widen(stride), inside],
        )
        loaded.append(part)
    for i, part in enumerate(loaded):
        factor = e.asm("ld.shared.f32 $0, [$1];", "f32", [factors + ((first + i) << 2)])
        out = [a + x * factor for a, x in zip(out, part, strict=True)]
    return out
