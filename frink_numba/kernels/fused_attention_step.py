"""One step of the `wgmma` attention: scores of a block of keys while the values of the block before are summed.

What a thread of a compute group carries from step to step is one tuple of float32, in this order: the value sums O, the
weights P of the block before as pairs of f16, and of its two rows the maxima and the sums of weights (`Layout`).

The tensor cores read P from registers while the softmax of the next block runs. `_hold` uses them once more after their
wait: without that ptxas takes them for free as soon as the multiplication is issued (see gemm_emit.keep).
"""

from __future__ import annotations

import functools
from typing import Any

from frink_numba.kernels.fused_attention_emit import (
    bits_of,
    cap,
    finish,
    halves,
    mask,
    select,
    softmax,
    store_rows,
    thread_of,
)
from frink_numba.kernels.fused_attention_plan import Layout
from frink_numba.kernels.ptx import Emitter, Register, emitted

# 128-byte swizzle, groups of eight rows 1024 bytes apart; the leading offset is used by transposed operands alone.
_K_MAJOR = (1 << 62) | (64 << 32) | (1 << 16)


def _wait(e: Emitter, barrier: Register, phase: Register) -> None:
    e.asm(
        "{\n.reg .pred done;\nWAIT_${:uid}:\nmbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1;\n"
        "@done bra DONE_${:uid};\nbra WAIT_${:uid};\nDONE_${:uid}:\n}",
        None,
        [barrier, phase],
    )


def _release(e: Emitter, barrier: Register, lane: Register) -> None:
    """The warp is done with what the barrier guards."""
    e.asm(
        "{\n.reg .pred p;\nsetp.eq.u32 p, $1, 0;\n@p mbarrier.arrive.shared::cta.b64 _, [$0];\n}", None, [barrier, lane]
    )


def _scores(e: Emitter, layout: Layout, q: Register, k: Register) -> list[Register]:
    """Issue Q K^T of 64 rows: descriptors of both tiles -> the scores, once waited for."""
    count = layout.keys // 2
    names = ",".join(f"${i}" for i in range(count))
    scores: list[Register] = []
    for step in range(layout.width // 16):
        chunk, inner = divmod(step, 4)
        a, b = q + (chunk * 512 + 2 * inner), k + (chunk * layout.keys * 8 + 2 * inner)
        template = (
            f"{{\n.reg .pred p;\nsetp.ne.b32 p, {int(step > 0)}, 0;\n"
            f"wgmma.mma_async.sync.aligned.m64n{layout.keys}k16.f32.f16.f16 {{{names}}}, ${count}, ${count + 1}, "
            "p, 1, 1, 0, 0;\n}"
        )
        scores = e.asm(template, f"f32x{count}", [a, b], tied=scores)
    e.asm("wgmma.commit_group.sync.aligned;", None, [])
    return scores


def _values(e: Emitter, layout: Layout, sums: list[Register], p: list[Register], v: Register) -> list[Register]:
    """Issue O += P V: P from registers, V's tile with the keys as rows (transposed for the tensor cores)."""
    count = layout.sums
    names = ",".join(f"${i}" for i in range(count))
    a = ",".join(f"${count + i}" for i in range(4))
    template = (
        f"wgmma.mma_async.sync.aligned.m64n{layout.width}k16.f32.f16.f16 {{{names}}}, {{{a}}}, ${count + 4}, "
        "1, 1, 1, 1;"
    )
    for step in range(layout.keys // 16):
        sums = e.asm(template, f"f32x{count}", [*p[4 * step : 4 * step + 4], v + 128 * step], tied=sums)
    e.asm("wgmma.commit_group.sync.aligned;", None, [])
    return sums


def _pin(e: Emitter, values: list[Register]) -> list[Register]:
    """No arithmetic on the values slides behind this place."""
    return e.asm("", f"{values[0].kind}x{len(values)}", [], tied=values)


def _settled(e: Emitter, pending: int, values: list[Register]) -> list[Register]:
    """Wait until at most `pending` groups are in flight; the values are there then."""
    return e.asm(f"wgmma.wait_group.sync.aligned {pending};", f"f32x{len(values)}", [], tied=values)


def _hold(e: Emitter, p: list[Register], nonzero: Register, address: Register) -> None:
    """Use the weights after their wait: a store that never happens, as `nonzero` is not 0."""
    for at in range(0, len(p), 16):
        part = p[at : at + 16]
        count = len(part)
        stores = "".join(
            f"@p st.shared.v4.b32 [${count + 1}], {{${j},${j + 1},${j + 2},${j + 3}}};\n" for j in range(0, count, 4)
        )
        e.asm(f"{{\n.reg .pred p;\nsetp.eq.u32 p, ${count}, 0;\n{stores}}}", None, [*part, nonzero, address])


def _descriptor(e: Emitter, address: Register, constant: int) -> Register:
    return e.widen(address >> 4) | constant


def _join(e: Emitter, layout: Layout, sums: Any, p: Any, maxima: Any, totals: Any) -> list[Register]:
    return [*sums, *(bits_of(e, word) for word in p), *maxima, *totals]


def _split(e: Emitter, layout: Layout, carried: list[Register]) -> tuple[list[Register], ...]:
    a, b = layout.sums, layout.sums + layout.keys // 4
    return carried[:a], [e.float_bits(word) for word in carried[a:b]], carried[b : b + 2], carried[b + 2 :]


class _Places:
    """Where a step finds its stage of K and of V, and the barriers around them."""

    def __init__(self, e: Emitter, layout: Layout, base: Register, used: Register) -> None:
        self.layout, self.base = layout, base
        self.stage = used & (layout.stages - 1)
        self.phase = (used >> (layout.stages.bit_length() - 1)) & 1

    def block(self, at: int) -> Register:
        return self.base + self.stage * self.layout.block + at

    def barrier(self, at: int) -> Register:
        return self.base + (self.stage << 3) + at


@functools.cache
def step_ops(layout: Layout) -> tuple[Any, Any, Any, Any]:
    """(first, masked step, free step, last): the four kinds of steps of a tile.

    first(base, queries, used, limit_0, limit_1, window, inner, factor) -> carried;
    step(carried, base, queries, used, limit_0, limit_1, window, inner, factor, nonzero) -> carried;
    last(carried, base, used, nonzero) -> carried.

    base: of shared memory; queries: the group's rows of Q there; used: blocks of K that were used before, since the
    kernel began (the ring of V is one behind). limit: the row's last visible key less the first of the block and of
    the thread. The compute groups take turns at the tensor cores by named barriers, so that one multiplies while the
    other is at its softmax.
    """
    carried = f"f32x{layout.carried}"
    v_major = (1 << 62) | (64 << 32) | ((layout.keys * 8) << 16)
    turns = layout.groups > 1

    def take_turn(e: Emitter) -> None:
        if turns:
            e.asm("bar.sync $0, 256;", None, [thread_of(e) >> 7])

    def pass_turn(e: Emitter) -> None:
        if turns:
            own = thread_of(e) >> 7
            is_last = e.builder.icmp_unsigned("==", own.value, e.constant("u32", layout.groups).value)
            e.asm("bar.arrive $0, 256;", None, [select(e, is_last, e.constant("u32", 1), own + 1)])

    def release(e: Emitter, barrier: Register) -> None:
        _release(e, barrier, thread_of(e) & 31)

    def weigh(e: Emitter, scores: Any, maxima: Any, limits: Any, window: Any, inner: Any, factor: Any) -> Any:
        if layout.capped:
            scores = cap(e, scores, inner)
        if limits is not None:
            scores = mask(e, scores, limits, window if layout.windowed else None)
        return softmax(e, scores, maxima, factor, guard=limits is not None)

    @emitted(carried, "u32", "u32", "u32", "u32", "u32", "u32", "f32", "f32")
    def first(
        e: Emitter, base: Register, queries: Register, used: Register, limit_0: Register, limit_1: Register,
        window: Register, inner: Register, factor: Register,
    ) -> list[Register]:  # fmt: skip
        k = _Places(e, layout, base, used)
        _wait(e, k.barrier(layout.k_full), k.phase)
        take_turn(e)
        e.asm("wgmma.fence.sync.aligned;", None, [])
        scores = _scores(e, layout, _descriptor(e, queries, _K_MAJOR), _descriptor(e, k.block(layout.k_at), _K_MAJOR))
        pass_turn(e)
        scores = _settled(e, 0, scores)
        release(e, k.barrier(layout.k_free))
        weights, maxima, totals, _ = weigh(e, scores, None, (limit_0, limit_1), window, inner, factor)
        zeros = [e.constant("f32", 0.0)] * layout.sums
        return _join(e, layout, zeros, halves(e, weights, pure=False), maxima, totals)

    def make(masked: bool) -> Any:
        @emitted(carried, carried, "u32", "u32", "u32", "u32", "u32", "u32", "f32", "f32", "u32")
        def step(
            e: Emitter, before: list[Register], base: Register, queries: Register, used: Register, limit_0: Register,
            limit_1: Register, window: Register, inner: Register, factor: Register, nonzero: Register,
        ) -> list[Register]:  # fmt: skip
            sums, p, maxima, totals = _split(e, layout, before)
            k, v = _Places(e, layout, base, used), _Places(e, layout, base, used - 1)
            _wait(e, k.barrier(layout.k_full), k.phase)
            take_turn(e)
            sums, p = _pin(e, sums), _pin(e, p)
            e.asm("wgmma.fence.sync.aligned;", None, [])
            at = _descriptor(e, k.block(layout.k_at), _K_MAJOR)
            scores = _scores(e, layout, _descriptor(e, queries, _K_MAJOR), at)
            _wait(e, v.barrier(layout.v_full), v.phase)
            sums = _values(e, layout, sums, p, _descriptor(e, v.block(layout.v_at), v_major))
            pass_turn(e)
            scores = _settled(e, 1, scores)
            release(e, k.barrier(layout.k_free))
            limits = (limit_0, limit_1) if masked else None
            weights, maxima, added, rescale = weigh(e, scores, maxima, limits, window, inner, factor)
            sums = _settled(e, 0, sums)
            _hold(e, p, nonzero, base)
            release(e, v.barrier(layout.v_free))
            totals = [totals[h] * rescale[h] + added[h] for h in range(2)]
            sums = [value * rescale[(i >> 1) & 1] for i, value in enumerate(sums)]
            return _join(e, layout, sums, halves(e, weights, pure=False), maxima, totals)

        return step

    @emitted(carried, carried, "u32", "u32", "u32")
    def last(e: Emitter, before: list[Register], base: Register, used: Register, nonzero: Register) -> list[Register]:
        sums, p, maxima, totals = _split(e, layout, before)
        v = _Places(e, layout, base, used - 1)
        _wait(e, v.barrier(layout.v_full), v.phase)
        sums, p = _pin(e, sums), _pin(e, p)
        e.asm("wgmma.fence.sync.aligned;", None, [])
        sums = _values(e, layout, sums, p, _descriptor(e, v.block(layout.v_at), v_major))
        sums = _settled(e, 0, sums)
        _hold(e, p, nonzero, base)
        release(e, v.barrier(layout.v_free))
        return _join(e, layout, sums, p, maxima, totals)

    return first, make(True), make(False), last


@functools.cache
def store_op(layout: Layout) -> Any:
    """store(carried, out_0, out_1, valid_0, valid_1, sink_0, sink_1, factor, lane): a thread's two rows to memory.

    sink: the row's extra logit in the scores' units of log2, minus infinity for none.
    """

    @emitted(None, f"f32x{layout.carried}", "u64", "u64", "u32", "u32", "f32", "f32", "f32", "u32")
    def store(
        e: Emitter, carried: list[Register], out_0: Register, out_1: Register, valid_0: Register, valid_1: Register,
        sink_0: Register, sink_1: Register, factor: Register, lane: Register,
    ) -> None:  # fmt: skip
        sums, _, maxima, totals = _split(e, layout, carried)
        values = finish(e, sums, maxima, totals, factor, (sink_0, sink_1))
        zero = e.constant("u32", 0).value
        flags = [e.builder.icmp_unsigned("!=", valid.value, zero) for valid in (valid_0, valid_1)]
        store_rows(e, values, (out_0, out_1), flags, lane, layout.head_dim)

    return store


@functools.cache
def load_block(layout: Layout, at: int, full: int) -> Any:
    """load(base, map, head, block, number): fetch a block of keys' K or V, the `number`th since the kernel began.

    at: where the ring's stages are in shared memory; full: where its barriers are, those for free stages behind them.
    """

    @emitted(None, "u32", "u64", "u32", "u32", "u32")
    def load(
        e: Emitter, base: Register, tensor_map: Register, head: Register, block: Register, number: Register
    ) -> None:
        place = _Places(e, layout, base, number)
        barrier = place.barrier(full)
        _wait(e, place.barrier(full + 8 * layout.stages), place.phase ^ 1)
        size = e.constant("u32", layout.block)
        e.asm("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", None, [barrier, size])
        for chunk in range(layout.chunks):
            e.asm(
                "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
                f"[$0], [$1, {{{64 * chunk}, $3, $4}}], [$2];",
                None,
                [place.block(at) + chunk * layout.keys * 128, tensor_map, barrier, head, block * layout.keys],
            )

    return load


@functools.cache
def load_queries(layout: Layout) -> Any:
    """load(q, target, thread, first, last, group, head_stride, row_stride): 64 packed rows of Q, by three warps.

    Row r of the K/V head's queries is position r / group, query head r % group: at q + position * row_stride +
    head * head_stride. `first` is the tile's first row; rows past `last` repeat it. The lane's copies are complete and
    visible to the tensor cores afterwards.
    """
    pieces = layout.chunks * 8  # 16 bytes each, of a row
    stored = -(-layout.head_dim // 8)
    lanes = 96

    @emitted(None, "u64", "u32", "u32", "u32", "u32", "u32", "u64", "u64")
    def load(
        e: Emitter, q: Register, target: Register, thread: Register, first: Register, last: Register,
        group: Register, head_stride: Register, row_stride: Register,
    ) -> None:  # fmt: skip
        b = e.builder

        def piece(index: Register) -> None:
            row = Register(e, "u32", b.udiv(index.value, e.constant("u32", pieces).value))
            part = index - row * pieces
            packed = e.asm("min.u32 $0, $1, $2;", "u32", [first + row, last], pure=True)
            position = Register(e, "u32", b.udiv(packed.value, group.value))
            head = packed - position * group
            source = q + e.widen(position) * row_stride + e.widen(head) * head_stride + e.widen(part << 4)
            inside = b.icmp_unsigned("<", part.value, e.constant("u32", stored).value)
            size = Register(e, "u32", b.select(inside, e.constant("u32", 16).value, e.constant("u32", 0).value))
            source = Register(e, "u64", b.select(inside, source.value, q.value))
            place = target + ((part >> 3) << 13) + (row << 7) + (((part & 7) ^ (row & 7)) << 4)
            e.asm("cp.async.cg.shared.global [$0], [$1], 16, $2;", None, [place, source, size])

        with _counted(e, thread, 64 * pieces, lanes) as index:
            piece(index)
        e.asm("cp.async.wait_all;", None, [])
        e.asm("fence.proxy.async.shared::cta;", None, [])

    return load


class _counted:
    """A loop of the emitted code: index = start, start + step, ... below `end`."""

    def __init__(self, e: Emitter, start: Register, end: int, step: int) -> None:
        self.e, self.start, self.end, self.step = e, start, end, step

    def __enter__(self) -> Register:
        b = self.e.builder
        entry = b.block
        self.body = b.append_basic_block("copies")
        self.after = b.append_basic_block("copied")
        b.branch(self.body)
        b.position_at_end(self.body)
        self.phi = b.phi(self.start.value.type)
        self.phi.add_incoming(self.start.value, entry)
        return Register(self.e, "u32", self.phi)

    def __exit__(self, *_: Any) -> None:
        e, b = self.e, self.e.builder
        following = b.add(self.phi, e.constant("u32", self.step).value)
        self.phi.add_incoming(following, b.block)
        b.cbranch(b.icmp_unsigned("<", following, e.constant("u32", self.end).value), self.body, self.after)
        b.position_at_end(self.after)
