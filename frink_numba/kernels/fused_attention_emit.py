"""What the fused attention of both tiers does with a thread's scores: mask, softmax, result rows. PTX from Python.

Registers of a tile of 16 rows a warp, as `mma` and `wgmma` have them: number 4j + 2h + v is row g + 8h, column
8j + 2t + v, with g = lane / 4 and t = lane % 4. A thread has parts of two rows, its quad of four lanes has them whole.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from frink_numba.kernels.ptx import Emitter, Register

_NONE = float("-inf")


def larger(e: Emitter, a: Register, b: Register) -> Register:
    return e.asm("max.f32 $0, $1, $2;", "f32", [a, b], pure=True)


def fused(e: Emitter, a: Register, b: Register, c: Register) -> Register:
    return e.asm("fma.rn.f32 $0, $1, $2, $3;", "f32", [a, b, c], pure=True)


def power_of_two(e: Emitter, x: Register) -> Register:
    return e.asm("ex2.approx.ftz.f32 $0, $1;", "f32", [x], pure=True)


def reciprocal(e: Emitter, x: Register) -> Register:
    return e.asm("rcp.approx.ftz.f32 $0, $1;", "f32", [x], pure=True)


def negative(e: Emitter, x: Register) -> Register:
    return e.asm("neg.f32 $0, $1;", "f32", [x], pure=True)


def bits_of(e: Emitter, x: Register) -> Register:
    """A u32 in a float32's clothes: so that one tuple type carries both."""
    return Register(e, "f32", e.builder.bitcast(x.value, e.constant("f32", 0.0).value.type))


def thread_of(e: Emitter) -> Register:
    """The thread's number, read anew: it holds no register across a loop."""
    return e.asm("mov.u32 $0, %tid.x;", "u32", [])


def exchange(e: Emitter, x: Register, distance: int) -> Register:
    """The value of the lane `distance` (by exclusive or) away."""
    constraint = x.kind
    return e.asm(f"shfl.sync.bfly.b32 $0, $1, {distance}, 0x1f, 0xffffffff;", constraint, [x], memory=False)


def select(e: Emitter, flag: Any, yes: Register, no: Register) -> Register:
    return Register(e, yes.kind, e.builder.select(flag, yes.value, no.value))


def _partial(e: Emitter, values: Sequence[Register], combine: Any) -> Register:
    """Combine in four chains, then the chains: a fixed order that leaves the scheduler something to do."""
    chains = list(values[:4])
    for i, value in enumerate(values[4:]):
        chains[i % 4] = combine(chains[i % 4], value)
    while len(chains) > 1:
        chains = [combine(chains[i], chains[i + 1]) for i in range(0, len(chains) - 1, 2)] + (
            chains[-1:] if len(chains) % 2 else []
        )
    return chains[0]


def row_registers(count: int, h: int) -> list[int]:
    """The registers of row g + 8h among `count`."""
    return [4 * j + 2 * h + v for j in range(count // 4) for v in range(2)]


def mask(e: Emitter, scores: list[Register], limits: Sequence[Register], window: Register | None) -> list[Register]:
    """Minus infinity in place of what a row does not see.

    limits: of each row, its last visible key less the thread's first (as signed numbers): column 8j + v of the thread
    is visible up to it, and beyond it less `window`.
    """
    b, none = e.builder, e.constant("f32", _NONE)
    out = list(scores)
    for h in range(2):
        lowest = limits[h] - window if window is not None else None
        for i in row_registers(len(scores), h):
            column = e.constant("u32", 8 * (i // 4) + i % 2)
            visible = b.icmp_signed(">=", limits[h].value, column.value)
            if lowest is not None:
                visible = b.and_(visible, b.icmp_signed("<", lowest.value, column.value))
            out[i] = select(e, visible, scores[i], none)
    return out


def cap(e: Emitter, scores: list[Register], inner: Register) -> list[Register]:
    """tanh(score * scale / cap): 1 - 2 / (1 + 2^(inner * score)) with inner = 2 log2(e) scale / cap.

    The instruction `tanh.approx` is too coarse: an error of 5e-4 of a cap of 50 is 2.5 % of a weight.
    """
    one, two = e.constant("f32", 1.0), e.constant("f32", -2.0)
    return [fused(e, reciprocal(e, power_of_two(e, score * inner) + 1.0), two, one) for score in scores]


def softmax(
    e: Emitter, scores: list[Register], maxima: Sequence[Register] | None, factor: Register, guard: bool
) -> tuple[list[Register], list[Register], list[Register], list[Register]]:
    """(weights, maxima, sums, rescale) of a thread's two rows after a block of scores.

    weights = 2^(factor * (score - maximum)); sums: of the thread's own weights alone; rescale: what earlier sums are
    multiplied by. maxima None: no block came before (rescale is empty). guard: a row may have seen no key yet.
    """
    weights: list[Any] = [None] * len(scores)
    new, sums, rescale = [], [], []
    zero, none = e.constant("f32", 0.0), e.constant("f32", _NONE)
    for h in range(2):
        own = row_registers(len(scores), h)
        top = _partial(e, [scores[i] for i in own], functools.partial(larger, e))
        top = larger(e, top, exchange(e, top, 1))
        top = larger(e, top, exchange(e, top, 2))
        if maxima is not None:
            top = larger(e, top, maxima[h])
        base = top
        if guard:
            seen = e.builder.fcmp_unordered("!=", top.value, none.value)
            base = select(e, seen, top, zero)
        offset = negative(e, base * factor)
        if maxima is not None:
            # Exactly 1 where the maximum stays what it was: a block that the row does not see must leave no trace, as
            # it depends on the tile's other rows which of those are walked over. A fused product keeps its rounding.
            rescale.append(power_of_two(e, (maxima[h] - base) * factor))
        for i in own:
            weights[i] = power_of_two(e, fused(e, scores[i], factor, offset))
        sums.append(_partial(e, [weights[i] for i in own], lambda x, y: x + y))
        new.append(top)
    return weights, new, sums, rescale


def halves(e: Emitter, values: Sequence[Register], pure: bool) -> list[Register]:
    """Pairs of float32 as f16x2. Not `pure`: stays behind the statements before it."""
    return [
        e.asm("cvt.rn.f16x2.f32 $0, $2, $1;", "u32", values[i : i + 2], pure=pure, memory=False)
        for i in range(0, len(values), 2)
    ]


def finish(
    e: Emitter,
    values: list[Register],
    maxima: Sequence[Register],
    sums: Sequence[Register],
    factor: Register,
    sinks: Sequence[Register],
) -> list[Register]:
    """The rows' results: value sums over sums of weights, which have the sink's share (minus infinity: none)."""
    out = list(values)
    for h in range(2):
        total = sums[h] + exchange(e, sums[h], 1)
        total = total + exchange(e, total, 2)
        base = maxima[h] * factor
        top = larger(e, base, sinks[h])
        share = power_of_two(e, base - top)
        total = fused(e, total, share, power_of_two(e, sinks[h] - top))
        scale = share * reciprocal(e, total)
        for i in row_registers(len(values), h):
            out[i] = values[i] * scale
    return out


def store_rows(
    e: Emitter,
    values: list[Register],
    addresses: Sequence[Register],
    flags: Sequence[Any],
    lane: Register,
    head_dim: int,
) -> None:
    """The two rows as f16 at their addresses (where their flag is set), 16 bytes a lane where head_dim allows."""
    words = halves(e, values, pure=True)
    t = lane & 3
    b = e.builder
    odd = b.icmp_unsigned("!=", (t & 1).value, e.constant("u32", 0).value)
    upper = b.icmp_unsigned("!=", (t & 2).value, e.constant("u32", 0).value)
    blocks = -(-head_dim // 8)
    whole = blocks // 4 if head_dim % 8 == 0 else 0
    for h in range(2):
        own = [words[2 * j + h] for j in range(blocks)]
        moved = []
        for a in range(whole):
            moved.append(_transpose(e, own[4 * a : 4 * a + 4], odd, upper))
        with b.if_then(flags[h]):
            for a in range(whole):
                address = addresses[h] + e.widen(t << 4) + 64 * a
                e.asm("st.global.v4.u32 [$0], {$1,$2,$3,$4};", None, [address, *moved[a]])
            for j in range(4 * whole, blocks):
                address = addresses[h] + e.widen(t << 2) + 16 * j
                if 8 * (j + 1) <= head_dim:
                    e.asm("st.global.u32 [$0], $1;", None, [address, own[j]])
                else:
                    with b.if_then(b.icmp_unsigned("<", t.value, e.constant("u32", (head_dim - 8 * j) // 2).value)):
                        e.asm("st.global.u32 [$0], $1;", None, [address, own[j]])


def _transpose(e: Emitter, words: list[Register], odd: Any, upper: Any) -> list[Register]:
    """Lane t of a quad gives word k to lane k and gets word t of each: 4 x 4."""
    a, b, c, d = words
    p, q = exchange(e, select(e, odd, a, b), 1), exchange(e, select(e, odd, c, d), 1)
    a, b = select(e, odd, p, a), select(e, odd, b, p)
    c, d = select(e, odd, q, c), select(e, odd, d, q)
    p, q = exchange(e, select(e, upper, a, c), 2), exchange(e, select(e, upper, b, d), 2)
    a, c = select(e, upper, p, a), select(e, upper, c, p)
    b, d = select(e, upper, q, b), select(e, upper, d, q)
    return [a, b, c, d]
