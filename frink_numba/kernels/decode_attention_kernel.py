"""The kernel of the decode attention: QK norm, RoPE, the new K/V rows and attention of few rows, in one launch.

A block serves 8 or 16 queries of one K/V head of one sequence (query i of a head is row i / group, head i mod group)
over one part of the keys. Its warps first make q in shared memory and those new rows of the mirrors that lie in the
block's part; then each warp walks through 16 keys at a time, with its own running softmax. The warps' sums meet in
shared memory. With more than one part, the sums go to the workspace, and the last block to arrive adds them up in the
parts' order. How many parts there are follows from the length, which the device reads: blocks without a part end. They
wait for all launches before to end first, so that blocks of the launch behind come where those of the one before were,
one on each multiprocessor.

Keys of earlier steps depend on nothing in this one. A block asks for the first of them before its wait, so that they
are in the L2 cache when q is there, and in the loop for those of the next turn. The record of the table is read before
the wait too: it was complete when the step began.
"""

from __future__ import annotations

import functools
from typing import Any

from frink_numba.kernels.decode_attention_variant import (
    ARGUMENTS,
    LEAST_KEYS,
    MOST_PARTS,
    PART_STEP,
    STEP,
    THREADS,
    WARPS,
    WHOLE_KEYS,
    DecodeKernel,
    q_row_bytes,
)


@functools.cache
def build(variant: DecodeKernel) -> tuple[Any, Any]:
    """The kernel for numba, and its signature. Grid: parts x tiles x K/V heads x sequences."""
    from numba import cuda, types

    from frink_numba.kernels.decode_attention_ops import (
        PARTS_TOGETHER,
        add_parts,
        attend,
        meet_ops,
        prepare_head,
        row_ops,
        store_result,
        with_sink,
    )
    from frink_numba.kernels.gemm_emit import zeros
    from frink_numba.kernels.instructions import launch_dependents, load_float, wait_for_predecessors
    from frink_numba.kernels.ptx import Emitter, Register, emitted, instruction, numba_type, shared_address

    D, TILES, QUERIES = variant.head_dim, variant.query_tiles, variant.queries
    Q_ROW, OVERLAP = q_row_bytes(D), variant.overlap
    STATES_AT, FACTORS_AT, SUMS_AT = variant.states_at, variant.factors_at, variant.sums_at
    ROT, QUADS = variant.rot_dim, D // 4
    prepare_q = prepare_head(D, variant.rot_dim, variant.layout, variant.q_norm, variant.norm_last)
    prepare_k = prepare_head(D, variant.rot_dim, variant.layout, variant.k_norm, variant.norm_last)
    load_row, put_query, put_rows, put_mirror = row_ops(D)
    step = attend(D, TILES, variant.capped)
    put_state, put_sums, add_up = meet_ops(D, TILES, WARPS)
    no_sums, nothing4 = zeros(D // 4 * TILES), zeros(4)
    load_word = instruction("ld.global.u32 $0, [$1];", "u32", "u64")
    load_address = instruction("ld.global.u64 $0, [$1];", "u64", "u64")
    fence = instruction("fence.acq_rel.gpu;", None)
    count_up = instruction("atom.acq_rel.gpu.global.add.u32 $0, [$1], $2;", "u32", "u64", "u32")
    store_word = instruction("st.global.u32 [$0], $1;", None, "u64", "u32")
    store_shared_word = instruction("st.shared.u32 [$0], $1;", None, "u32", "u32")
    load_shared_word = instruction("ld.shared.u32 $0, [$1];", "u32", "u32")
    store_shared = instruction("st.shared.f32 [$0], $1;", None, "u32", "f32")
    store_pair = instruction("st.global.cg.v2.f32 [$0], {$1,$2};", None, "u64", "f32", "f32")
    load_pair = instruction("ld.global.cg.v2.f32 {$0,$1}, [$2];", "f32x2", "u64")
    store4 = instruction("st.global.cg.v4.f32 [$0], {$1,$2,$3,$4};", None, "u64", "f32", "f32", "f32", "f32")
    exp2 = instruction("ex2.approx.ftz.f32 $0, $1;", "f32", "f32", pure=True)
    reciprocal = instruction("rcp.rn.f32 $0, $1;", "f32", "f32", pure=True)
    larger = instruction("max.f32 $0, $1, $2;", "f32", "f32", "f32", pure=True)
    none = instruction("mov.b32 $0, 0xff800000;", "f32", pure=True)
    exchange = instruction("shfl.sync.bfly.b32 $0, $1, $2, 0x1f, 0xffffffff;", "f32", "f32", "u32")
    u32, u64, f32 = types.uint32, types.uint64, types.float32

    @emitted(None, "u64", "u64", "u64", "u32", "u32", "u32")
    def bring(
        e: Emitter, k: Register, v: Register, pitch: Register, key: Register, end: Register, lane: Register
    ) -> None:
        """A warp asks for its 16 keys from `key` on, as far as `end`: half a row a lane, lines of 128 bytes."""
        mine = key + (lane >> 1)
        inside = e.builder.icmp_unsigned("<", mine.value, end.value)
        with e.builder.if_then(inside):
            offset = e.widen(mine) * pitch + e.widen(lane & 1) * D
            for base in (k, v):
                for line in range(0, D, 128):
                    e.asm("prefetch.global.L2 [$0];", None, [base + offset + line])

    @emitted(f"f32x{4 * TILES}", "f32")
    def no_state(e: Emitter, least: Register) -> list[Register]:
        return [least] * (2 * TILES) + [e.constant("f32", 0.0)] * (2 * TILES)

    @emitted(f"u32x{2 * TILES}", *["u32"] * 5)
    def seen(
        e: Emitter, query: Register, count: Register, group: Register, position: Register, before: Register
    ) -> list[Register]:
        """The last key that each of the lane's queries sees; -1 where there is no query."""
        out = []
        for i in range(2 * TILES):
            index = query + (8 * (i >> 1) + (i & 1))
            row = Register(e, "u32", e.builder.udiv((before + index).value, group.value))
            inside = e.builder.icmp_unsigned("<", index.value, count.value)
            nothing = e.constant("u32", 0xFFFFFFFF)
            out.append(Register(e, "u32", e.builder.select(inside, (position + row).value, nothing.value)))
        return out

    @emitted(f"u32x{2 * TILES}", f"u32x{2 * TILES}", "u32")
    def first_seen(e: Emitter, lasts: list[Register], window: Register) -> list[Register]:
        """The first key that they see."""
        zero = e.constant("u32", 0)
        every = e.builder.icmp_unsigned("==", window.value, zero.value)
        return [Register(e, "u32", e.builder.select(every, zero.value, (last + 1 - window).value)) for last in lasts]

    @emitted(f"f32x{D // 4 * TILES}", f"f32x{(D // 4 + 4) * TILES}")
    def sums_of(e: Emitter, both: list[Register]) -> list[Register]:
        return both[: D // 4 * TILES]

    @emitted(f"f32x{4 * TILES}", f"f32x{(D // 4 + 4) * TILES}")
    def state_of(e: Emitter, both: list[Register]) -> list[Register]:
        return both[D // 4 * TILES :]

    def decode_attention(
        qkv, out, table, workspace, cos, sin, q_norm, k_norm, sinks, k_rows, v_rows, eps, scale, cap, k_factor,
        v_factor, n_heads, n_kv_heads, parts, tiles, window, sums_at, states_at, tasks,
    ):  # fmt: skip
        if OVERLAP:
            launch_dependents()
        shared = cuda.shared.array(0, types.uint8, alignment=128)
        base = shared_address(shared)
        thread = u32(cuda.threadIdx.x)
        warp = u32(thread >> u32(5))
        lane = u32(thread & u32(31))
        g = u32(lane >> u32(2))
        t = u32(lane & u32(3))
        block = u32(cuda.blockIdx.x)
        task = u32(block // parts)  # of those whose parts meet
        part = u32(block - task * parts)
        if task >= tasks:
            if OVERLAP:
                wait_for_predecessors()
            return
        head_task = u32(task // tiles)
        tile = u32(task - head_task * tiles)
        sequence = u32(head_task // n_kv_heads)
        kv_head = u32(head_task - sequence * n_kv_heads)
        entry = table + u64(sequence) * u64(32)
        first_row = load_word(entry)
        rows = load_word(entry + u64(4))
        start = load_word(entry + u64(8))
        group = u32(n_heads // n_kv_heads)
        first_query = u32(tile * u32(QUERIES))
        count = u32(rows * group)
        if first_query >= count:
            if OVERLAP:
                wait_for_predecessors()
            return
        count = u32(min(u32(count - first_query), u32(QUERIES)))
        low_row = u32(first_query // group)
        high_row = u32(u32(first_query + count - u32(1)) // group)
        keys = u32(start + high_row + u32(1))
        begin = u32(0)
        if window > 0 and u32(start + low_row + u32(1)) > window:
            begin = u32(u32(start + low_row + u32(1) - window) & u32(0xFFFFFFFF ^ (STEP - 1)))
        span = u32(keys - begin)
        per = u32(u32(u32(span + parts - u32(1)) // parts + u32(PART_STEP - 1)) & u32(0xFFFFFFFF ^ (PART_STEP - 1)))
        per = u32(max(per, u32(LEAST_KEYS)))
        if span <= u32(WHOLE_KEYS):
            per = u32(WHOLE_KEYS)
        active = u32(u32(span + per - u32(1)) // per)
        if part >= active:
            if OVERLAP:
                wait_for_predecessors()
            return
        first_key = u32(begin + part * per)
        end_key = u32(min(u32(first_key + per), keys))

        row_pitch = u64(n_kv_heads) * u64(2 * D)
        k_base = load_address(entry + u64(16)) + u64(kv_head) * u64(2 * D)
        v_base = load_address(entry + u64(24)) + u64(kv_head) * u64(2 * D)
        key = u32(first_key + warp * u32(16))
        bring(k_base, v_base, row_pitch, key, end_key, lane)
        if OVERLAP:
            wait_for_predecessors()

        # q of each query, then the new rows of K and V among the part's keys.
        new_from = u32(0)
        if first_key > start:
            new_from = u32(first_key - start)
        new_to = new_from
        if end_key > u32(start + new_from):
            new_to = u32(end_key - start)
        heads = u32(n_heads + n_kv_heads + n_kv_heads)
        for job in range(warp, u32(count + new_to - new_from), u32(WARPS)):
            if job < count:
                query = u32(first_query + u32(job))
                r = u32(query // group)
                head = u32(kv_head * group + query - r * group)
                row = u64(first_row + r)
                values = prepare_q(
                    qkv + (row * u64(heads) + u64(head)) * u64(4 * D), q_norm, cos + row * u64(2 * ROT),
                    sin + row * u64(2 * ROT), eps, lane,
                )  # fmt: skip
                put_query(values, u32(base + u32(job) * u32(Q_ROW)), lane)
            else:
                r = u32(new_from + u32(job) - count)
                row = u64(first_row + r)
                head = u32(n_heads + kv_head)
                source = qkv + (row * u64(heads) + u64(head)) * u64(4 * D)
                values = prepare_k(source, k_norm, cos + row * u64(2 * ROT), sin + row * u64(2 * ROT), eps, lane)
                others = load_row(source + u64(n_kv_heads) * u64(4 * D), lane)
                place = u64(start + r) * row_pitch
                put_mirror(values, others, k_factor, v_factor, k_base + place, v_base + place, lane)
                if k_rows != 0:
                    kept = row + u64(load_word(entry + u64(12)))
                    place = (kept * u64(n_kv_heads) + u64(kv_head)) * u64(4 * D)
                    put_rows(values, k_rows + place, lane)
                    put_rows(others, v_rows + place, lane)
        cuda.syncthreads()

        lasts = seen(u32(t << u32(1)), count, group, start, first_query)
        firsts = first_seen(lasts, window)
        q_at = u32(base + g * u32(Q_ROW) + (t << u32(4)))
        rest = u64(D // 64 * 128) + u64(g << u32(3)) - u64(g << u32(4))
        sums = no_sums()
        state = no_state(none())
        top_key = u32(keys - u32(1))
        k_lane = k_base + u64(t << u32(4))
        v_lane = v_base + u64(g << u32(4))
        while key < end_key:
            bring(k_base, v_base, row_pitch, u32(key + u32(STEP)), end_key, lane)
            two = u32(key + (t << u32(1)))
            both = step(
                sums, state, k_lane + u64(min(u32(key + g), top_key)) * row_pitch,
                k_lane + u64(min(u32(key + g + u32(8)), top_key)) * row_pitch,
                v_lane + u64(min(two, top_key)) * row_pitch, v_lane + u64(min(u32(two + u32(1)), top_key)) * row_pitch,
                v_lane + u64(min(u32(two + u32(8)), top_key)) * row_pitch,
                v_lane + u64(min(u32(two + u32(9)), top_key)) * row_pitch, rest, q_at, key, lane, lasts, firsts, scale,
                cap,
            )  # fmt: skip
            sums = sums_of(both)
            state = state_of(both)
            key = u32(key + u32(STEP))

        states = u32(base + u32(STATES_AT))
        factors = u32(base + u32(FACTORS_AT))
        sums_room = u32(base + u32(SUMS_AT))
        put_state(state, states, lane, warp)
        cuda.syncthreads()
        put_sums(sums, state, sums_room, states, lane, warp)
        cuda.syncthreads()
        part_bytes = u64(QUERIES * 4 * D)
        task_sums = workspace + u64(sums_at) + u64(task) * u64(parts) * part_bytes
        task_states = workspace + u64(states_at) + u64(task) * u64(parts) * u64(QUERIES * 8)
        for item in range(thread, u32(count * u32(QUADS)), u32(THREADS)):
            query = u32(u32(item) // u32(QUADS))
            quad = u32(u32(item) - query * u32(QUADS))
            a, b, c, d, top, total = add_up(sums_room, states, query, quad)
            if active == 1:
                index = u32(first_query + query)
                r = u32(index // group)
                head = u32(kv_head * group + index - r * group)
                if sinks != 0:
                    total, lower = with_sink(load_float(sinks + u64(head) * u64(4)), top, total)
                    a, b, c, d = a * lower, b * lower, c * lower, d * lower
                place = (u64(first_row + r) * u64(n_heads) + u64(head)) * u64(D) + u64(quad << u32(2))
                store_result(out + place * u64(2), (a, b, c, d), reciprocal(total))
            else:
                place = u64(part) * part_bytes + u64(query * u32(D) + (quad << u32(2))) * u64(4)
                store4(task_sums + place, a, b, c, d)
                if quad == 0:
                    store_pair(task_states + u64(part * u32(QUERIES) + query) * u64(8), top, total)
        if active == 1:
            return
        fence()
        cuda.syncthreads()
        if thread == 0:
            store_shared_word(states, count_up(workspace + u64(task) * u64(4), u32(1)))
        cuda.syncthreads()
        if load_shared_word(states) != u32(active - u32(1)):
            return
        fence()
        # The last block: a warp finds the factors of a query's parts, a lane a part.
        for query in range(warp, count, u32(WARPS)):
            top = none()
            total = f32(0.0)
            if lane < active:
                pair = load_pair(task_states + u64(lane * u32(QUERIES) + u32(query)) * u64(8))
                top = pair[0]
                total = pair[1]
            index = u32(first_query + u32(query))
            r = u32(index // group)
            sink = none()
            if sinks != 0:
                sink = load_float(sinks + u64(kv_head * group + index - r * group) * u64(4)) * f32(1.4426950408889634)
            highest = larger(top, sink)
            for distance in (16, 8, 4, 2, 1):
                highest = larger(highest, exchange(highest, u32(distance)))
            bottom = f32(0.0)
            if highest > none():
                bottom = highest
            factor = exp2(top - bottom)
            total = total * factor
            for distance in (16, 8, 4, 2, 1):
                total = total + exchange(total, u32(distance))
            total = total + exp2(sink - bottom)
            store_shared(factors + u32(u32(query) * u32(MOST_PARTS) + lane) * u32(4), factor * reciprocal(total))
        cuda.syncthreads()
        for item in range(thread, u32(count * u32(QUADS)), u32(THREADS)):
            query = u32(u32(item) // u32(QUADS))
            quad = u32(u32(item) - query * u32(QUADS))
            index = u32(first_query + query)
            r = u32(index // group)
            head = u32(kv_head * group + index - r * group)
            added = nothing4()
            source = task_sums + u64(query * u32(D) + (quad << u32(2))) * u64(4)
            for first in range(u32(0), active, u32(PARTS_TOGETHER)):
                added = add_parts(
                    added, source, u32(QUERIES * 4 * D), u32(first), active, u32(factors + query * u32(4 * MOST_PARTS))
                )
            place = (u64(first_row + r) * u64(n_heads) + u64(head)) * u64(D) + u64(quad << u32(2))
            store_result(out + place * u64(2), added, f32(1.0))
        if thread == 0:
            store_word(workspace + u64(task) * u64(4), u32(0))

    return decode_attention, types.void(*(numba_type(spec) for _, spec in ARGUMENTS))
