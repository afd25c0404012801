"""The pieces of the decode attention's kernel, unrolled while it is compiled.

Everything is transposed, so that the queries are the narrow side of `mma.m16n8k16`:

    S^T [16 keys, 8 queries] = K Q^T         O^T [16 channels, 8 queries] += V^T P^T

With g = lane >> 2 and t = lane & 3. K: a lane loads channels 32c + 8t .. + 7 of keys g and g + 8 in one go; the order
of the channels within a product does not matter as long as q is read in the same order. V: a lane loads channels 64c +
8g .. + 7 of the keys 2t, 2t+1, 2t+8, 2t+9 and interleaves them by permutations; rows g and g + 8 of product i are the
channels 64c + 8g + 2i and + 1. So keys and values need no exchange between lanes on their way from memory to operands;
shared memory holds what is in flight, each lane's own.
"""

from __future__ import annotations

import functools
from typing import Any

from frink_numba.kernels.decode_attention_emit import NONE, exchange, exp2, flag, float_bits, larger, score_base, select
from frink_numba.kernels.ptx import Emitter, Register, emitted

LOAD_SHARED = "ld.shared.v4.u32 {$0,$1,$2,$3}, [$4];"
MMA = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$0,$1,$2,$3};"


def q_row_bytes(head_dim: int) -> int:
    """Bytes from query to query in shared memory: two rows' 64-byte pieces lie in different banks."""
    return 2 * head_dim + 64


def sums_row(head_dim: int) -> int:
    """float32 from query to query of a warp's sums in shared memory."""
    return head_dim + 4


# ---- the main loop ---------------------------------------------------------------------------------------------------


def stage_bytes(head_dim: int) -> int:
    """Bytes of 16 keys, or of their values, in a warp's ring."""
    return 32 * head_dim


@functools.cache
def fetch_ops(head_dim: int) -> tuple[Any, Any]:
    """Copies of 16 keys and values, each lane its own operands: nothing has to be exchanged, or waited for by others.

    fetch_keys(k, k_8, slot, lane): where this lane's part of keys g and g + 8 lies (channels 8t on); fetch_values(v of
    keys 2t, 2t+1, 2t+8, 2t+9, rest, slot, lane): channels 8g on, and 4g on, `rest` bytes further, behind the last whole
    64 channels.
    """
    whole, rest_channels = divmod(head_dim, 64)

    @emitted(None, "u64", "u64", "u32", "u32")
    def fetch_keys(e: Emitter, k: Register, k_8: Register, slot: Register, lane: Register) -> None:
        at = slot + (lane << 4)
        for c in range(head_dim // 32):
            for i, source in enumerate((k, k_8)):
                e.asm("cp.async.cg.shared.global [$0], [$1], 16;", None, [at + 512 * (2 * c + i), source + 64 * c])

    @emitted(None, "u64", "u64", "u64", "u64", "u64", "u32", "u32")
    def fetch_values(
        e: Emitter,
        v0: Register,
        v1: Register,
        v2: Register,
        v3: Register,
        rest: Register,
        slot: Register,
        lane: Register,
    ) -> None:
        at = slot + (lane << 4)
        for c in range(whole):
            for i, source in enumerate((v0, v1, v2, v3)):
                e.asm("cp.async.cg.shared.global [$0], [$1], 16;", None, [at + 512 * (4 * c + i), source + 128 * c])
        if rest_channels:
            at = slot + (lane << 3) + 2048 * whole
            for i, source in enumerate((v0, v1, v2, v3)):
                e.asm("cp.async.ca.shared.global [$0], [$1], 8;", None, [at + 256 * i, source + rest])

    return fetch_keys, fetch_values


@functools.cache
def score_keys(head_dim: int, query_tiles: int, capped: bool) -> Any:
    """score(state, slot, q, key, lane, lasts, firsts, scale, cap) -> state, what sums shrink by, P^T as operands.

    16 keys from `key` on. slot: the warp's copy of them. q: shared memory, row g, channel 8t. lasts, firsts: the keys
    that the lane's queries see (2t and 2t + 1 of each eight). state: maxima, then sums of weights. scale: makes
    powers of two of products (with a cap: scores / cap; `cap` then makes powers of two of them).
    """
    pair = f"u32x{2 * query_tiles}"

    @emitted(
        f"f32x{8 * query_tiles}", f"f32x{4 * query_tiles}", "u32", "u32", "u32", "u32", pair, pair, "f32", "f32"
    )  # fmt: skip
    def score(
        e: Emitter,
        state: list[Register],
        slot: Register,
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
        maxima, totals = list(state[: 2 * query_tiles]), list(state[2 * query_tiles :])
        shrink, weights = [], []
        none = float_bits(e, NONE)
        products = [[e.constant("f32", 0.0)] * 4 for _ in range(query_tiles)]
        start = slot + (lane << 4)
        for c in range(head_dim // 32):
            low, high = (e.asm(LOAD_SHARED, "u32x4", [start + 512 * (2 * c + i)]) for i in range(2))
            for tile in range(query_tiles):
                at = q + (8 * tile * q_row_bytes(head_dim) + 64 * c)
                words = e.asm(LOAD_SHARED, "u32x4", [at])
                for j in range(2):
                    a = [low[2 * j], high[2 * j], low[2 * j + 1], high[2 * j + 1]]
                    operands = [*a, words[2 * j], words[2 * j + 1]]
                    products[tile] = e.asm(MMA, "f32x4", operands, tied=products[tile], pure=True)
        for tile, s in enumerate(products):
            for i in range(4):  # key g or g + 8, query 2t or 2t + 1
                value = s[i] * scale
                if capped:
                    # cap * tanh(x) = cap * (1 - 2 / (1 + e^2x))
                    power = exp2(e, value * 2.8853900817779268)
                    inverse = e.asm("rcp.approx.ftz.f32 $0, $1;", "f32", [power + 1.0], pure=True)
                    value = (e.constant("f32", 1.0) - inverse * 2.0) * cap
                position = key + g + 8 if i >= 2 else key + g
                last, first = lasts[2 * tile + (i & 1)], firsts[2 * tile + (i & 1)]
                seen = b.and_(
                    b.icmp_signed("<=", position.value, last.value), b.icmp_signed(">=", position.value, first.value)
                )
                s[i] = select(e, seen, value, none)
            for v in range(2):
                at = 2 * tile + v
                top = larger(e, s[v], s[v + 2])
                for distance in (4, 8, 16):
                    top = larger(e, top, exchange(e, top, distance))
                new = larger(e, maxima[at], top)
                base = score_base(e, new)
                shrink.append(exp2(e, maxima[at] - base))
                maxima[at] = new
                s[v], s[v + 2] = exp2(e, s[v] - base), exp2(e, s[v + 2] - base)
                totals[at] = totals[at] * shrink[at] + (s[v] + s[v + 2])
            for i in (0, 2):
                packed = e.asm("cvt.rn.f16x2.f32 $0, $2, $1;", "u32", [s[i], s[i + 1]], pure=True)
                turned = e.asm("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "u32", [packed])
                weights.append(e.asm("mov.b32 $0, $1;", "f32", [turned], pure=True))
        return [*maxima, *totals, *shrink, *weights]

    return score


@functools.cache
def add_values(head_dim: int, query_tiles: int) -> Any:
    """add(sums, scored, slot, lane) -> O^T: shrunk, plus V^T P^T of the warp's copy of 16 values."""
    channels = head_dim // 4  # registers of O^T for eight queries
    whole, rest = divmod(head_dim, 64)
    size = f"f32x{channels * query_tiles}"

    @emitted(size, size, f"f32x{8 * query_tiles}", "u32", "u32")
    def add(e: Emitter, sums: list[Register], scored: list[Register], slot: Register, lane: Register) -> list[Register]:
        shrink = scored[4 * query_tiles : 6 * query_tiles]
        weights = [e.float_bits(x) for x in scored[6 * query_tiles :]]
        out = [x * shrink[2 * (i // channels) + (i & 1)] for i, x in enumerate(sums)]
        for c in range(whole + bool(rest)):
            if c < whole:
                start = slot + (lane << 4) + 2048 * c
                parts = [e.asm(LOAD_SHARED, "u32x4", [start + 512 * i]) for i in range(4)]
            else:
                start = slot + (lane << 3) + 2048 * c
                parts = [e.asm("ld.shared.v2.u32 {$0,$1}, [$2];", "u32x2", [start + 256 * i]) for i in range(4)]
            for i in range(len(parts[0])):
                a = []
                for first in (0, 2):
                    for selector in (0x5410, 0x7632):
                        words = [parts[first][i], parts[first + 1][i]]
                        a.append(e.asm(f"prmt.b32 $0, $1, $2, {selector:#x};", "u32", words, pure=True))
                for tile in range(query_tiles):
                    at = tile * channels + 16 * c + 4 * i
                    operands = [*a, *weights[2 * tile : 2 * tile + 2]]
                    out[at : at + 4] = e.asm(MMA, "f32x4", operands, tied=out[at : at + 4], pure=True)
        return out

    return add


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
        return pairs, functools.reduce(functools.partial(larger, e), [m for m, _ in pairs])

    @emitted(None, f"f32x{4 * query_tiles}", "u32", "u32", "u32")
    def put_state(e: Emitter, state: list[Register], address: Register, lane: Register, warp: Register) -> None:
        for i in range(2 * query_tiles):
            total = state[2 * query_tiles + i]
            for distance in (4, 8, 16):
                total = total + exchange(e, total, distance)
            query = ((lane & 3) << 1) + (8 * (i >> 1) + (i & 1))
            at = address + query * (8 * warps) + (warp << 3)
            with e.when(flag(e, e.builder.icmp_unsigned("<", lane.value, e.constant("u32", 4).value))):
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
                factor = exp2(e, state[2 * tile + v] - score_base(e, top))
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
        base = score_base(e, top)
        total = e.constant("f32", 0.0)
        for m, part in pairs:
            total = total + part * exp2(e, m - base)
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
    highest = score_base(e, larger(e, power, top))
    lower = exp2(e, top - highest)
    return [total * lower + exp2(e, power - highest), lower]


@emitted(None, "u64", "f32x4", "f32")
def store_result(e: Emitter, address: Register, values: list[Register], factor: Register) -> None:
    """Four channels as f16."""
    words = [
        e.asm("cvt.rn.f16x2.f32 $0, $2, $1;", "u32", [values[i] * factor, values[i + 1] * factor], pure=True)
        for i in (0, 2)
    ]
    e.asm("st.global.v2.u32 [$0], {$1,$2};", None, [address, *words])


@emitted("f32x6", "f32x6", "u64", "u32", "u64", "u32", "u32", "u32")
def add_parts(
    e: Emitter,
    so_far: list[Register],
    sums: Register,
    sums_stride: Register,
    states: Register,
    states_stride: Register,
    first: Register,
    count: Register,
) -> list[Register]:
    """Eight parts from `first` on, as far as `count` goes: four channels of a query, its maximum and sum of weights."""
    values, pairs = [], []
    for i in range(8):
        inside = flag(e, e.builder.icmp_unsigned("<", (first + i).value, count.value))
        index = e.widen(first + i)
        values.append(
            e.asm(
                "{\n.reg .pred p;\n.reg .f32 a, b, c, d;\nsetp.ne.u32 p, $5, 0;\nmov.f32 a, 0f00000000;\n"
                "mov.f32 b, 0f00000000;\nmov.f32 c, 0f00000000;\nmov.f32 d, 0f00000000;\n"
                "@p ld.global.cg.v4.f32 {a,b,c,d}, [$4];\nmov.f32 $0, a;\nmov.f32 $1, b;\nmov.f32 $2, c;\n"
                "mov.f32 $3, d;\n}",
                "f32x4",
                [sums + index * e.widen(sums_stride), inside],
            )
        )
        pairs.append(
            e.asm(
                "{\n.reg .pred p;\n.reg .f32 a, b;\nsetp.ne.u32 p, $3, 0;\nmov.f32 a, 0fFF800000;\n"
                "mov.f32 b, 0f00000000;\n@p ld.global.cg.v2.f32 {a,b}, [$2];\nmov.f32 $0, a;\nmov.f32 $1, b;\n}",
                "f32x2",
                [states + index * e.widen(states_stride), inside],
            )
        )
    top = functools.reduce(functools.partial(larger, e), [so_far[4], *(m for m, _ in pairs)])
    base = score_base(e, top)
    shrink = exp2(e, so_far[4] - base)
    out, total = [x * shrink for x in so_far[:4]], so_far[5] * shrink
    for four, (m, part) in zip(values, pairs, strict=True):
        factor = exp2(e, m - base)
        total = total + part * factor
        out = [a + x * factor for a, x in zip(out, four, strict=True)]
    return [*out, top, total]
