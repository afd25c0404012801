"""The kernel of the thin products: weights stream through shared memory, each warp for itself.

    y[M, N] = epilogue(f(x)[M, K] W[N, K]^T),   M = 1 .. 16

The packs are the A operand of `mma.m16n8k16` in memory order, x is B. A warp fetches its items of W with `cp.async`
into a ring of its own and waits for nobody: no barrier while K is walked through. x lies in shared memory, f16, rows 16
bytes more than a multiple of 128 apart so that `ldmatrix` hits no bank twice; where it is too large, one part after the
other. At the end of a unit the warps' sums meet in shared memory, a few warps (others each time) add them and write the
result, the rest go on.

On sm_90 the launch begins while its predecessor still runs: rings are filled before the wait, so that memory stays busy
between kernels. Rings, x and sums fit half a multiprocessor for that reason.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from frink_numba.kernels.gemm_epilogue import PLAIN, Epilogue
from frink_numba.kernels.gemm_kinds import FRAGMENT_KINDS, FragmentKind
from frink_numba.kernels.thin_gemm_plan import (
    WARPS,
    ThinPlan,
    fixed_bytes,
    item_bytes,
    item_steps,
    partial_room,
    ring_slot,
    sum_columns,
    x_bytes,
)

THREADS = 32 * WARPS
MOST_NORM_COLUMNS = 8192

ARGUMENTS = (
    # name, type
    ("x", "u64"),  # f16 [m, cols]; float32 with a fused norm
    ("x_scale", "u64"),  # float32 [m]; the norm's weight [cols] with a fused norm
    ("x_norm", "u64"),  # float32 [m], f16 results only, else 0
    ("out", "u64"),
    ("weights", "u64"),
    ("row_scale", "u64"),
    ("bias", "u64"),  # float32 [slabs * 64], or 0
    ("out_scale", "u64"),  # f16 results only, else 0
    ("eps", "f32"),
    ("c2", "f32"),
    ("c1", "f32"),
    ("c0", "f32"),
    ("m", "u32"),
    ("outputs", "u32"),
    ("pitch", "u32"),  # bytes from row to row of the result
    ("cols", "u32"),
    ("quarters", "u32"),
    ("units", "u32"),
    ("parts", "u32"),
    ("part_items", "u32"),
    ("part_columns", "u32"),
    ("sums_row", "u32"),  # bytes from row to row of the sums of x
    ("inverse", "u32"),  # 2**32 / pieces of 16 bytes of a row of x, rounded up
    ("add", "u32"),
    # With weights of another kind behind the first, for blocks from `bound` on: plain float32 results.
    ("second_weights", "u64"),
    ("second_scale", "u64"),  # row scales
    ("second_bias", "u64"),
    ("second_out", "u64"),
    ("second_outputs", "u32"),
    ("second_sums_row", "u32"),
    ("bound", "u32"),
)


@dataclass(frozen=True, slots=True)
class ThinGemm:
    """One compiled variant.

    tokens: 1, 8 or 16, the most rows of x; row_groups: quarters of a unit; slots: items of a warp's ring; norm: vectors
    of four columns that a thread normalizes, 0 for f16 operands; pieces: 16 bytes of f16 operands that a thread has on
    their way at a time; overlap: see launch.py; parts: whether x comes in parts.

    other, other_slots: the kind of the second weights and its ring, where some blocks have such (`thin_gemm_pair.py`).
    """

    kind: str
    tokens: int
    row_groups: int
    slots: int
    epilogue: Epilogue = PLAIN
    norm: int = 0
    pieces: int = 8
    overlap: bool = True
    parts: bool = False
    other: str = ""
    other_slots: int = 0

    @property
    def row(self) -> FragmentKind:
        return FRAGMENT_KINDS[self.kind]

    @property
    def rings(self) -> list[tuple[str, int]]:
        """Kinds and their slots, of which a block has the one or the other."""
        return [(self.kind, self.slots), *([(self.other, self.other_slots)] if self.other else [])]

    @property
    def ring_bytes(self) -> int:
        """Bytes of shared memory for rings."""
        return max(slots * ring_slot(name) for name, slots in self.rings)

    def shared(self, m: int, plan: ThinPlan) -> int:
        """Bytes of shared memory with m rows of x."""
        rows = m * max(x_bytes(name, plan.part_columns) for name, _ in self.rings)
        return self.ring_bytes + fixed_bytes(self.kind, self.tokens, 0) + rows


@functools.cache
def build(gemm: ThinGemm) -> Any:
    """The kernel as a Python function for numba, and its signature. Grid: k_parts * blocks a part."""
    from numba import cuda, types

    from frink_numba.kernels.gemm_emit import zeros
    from frink_numba.kernels.instructions import (
        copies_pending,
        launch_dependents,
        load_float,
        wait_for_predecessors,
    )
    from frink_numba.kernels.ptx import instruction, numba_type, shared_address
    from frink_numba.kernels.thin_gemm_ends import partial_ops, store_quarter, token_values
    from frink_numba.kernels.thin_gemm_ops import (
        acc_registers,
        fetch_item,
        multiply_item,
    )
    from frink_numba.kernels.thin_gemm_rows import copy_rows, norm_facts, norm_ops, out_power

    kind, T, R, P, PIECES = gemm.row, gemm.tokens, gemm.row_groups, WARPS // gemm.row_groups, gemm.pieces
    SHIFT = R.bit_length() - 1
    SLOTS, STEPS, COLUMNS = gemm.slots, item_steps(gemm.row), sum_columns(gemm.kind)
    ITEM, RECORD, PER_RECORD = item_bytes(gemm.kind), kind.record_size, kind.group_steps
    ITEM_SUMS = 256 * STEPS // COLUMNS if COLUMNS else 0  # bytes of a row's sums of an item: 4 a block
    PAIR, OTHER = bool(gemm.other), gemm.other or gemm.kind
    OTHER_ITEM, OTHER_RECORD = item_bytes(OTHER), FRAGMENT_KINDS[OTHER].record_size
    OTHER_SLOTS, OTHER_COLUMNS = gemm.other_slots, sum_columns(OTHER)
    OTHER_SUMS = 256 * STEPS // OTHER_COLUMNS if OTHER_COLUMNS else 0
    ROOM, OVERLAP, NORM, IN_PARTS = partial_room(T), gemm.overlap, gemm.norm > 0, gemm.parts
    AHEAD = T > 1 and gemm.norm <= 4  # registers for two more rows
    HALF, GATED = gemm.epilogue.half, bool(gemm.epilogue.gate)
    PARTIAL_AT = gemm.ring_bytes
    SCALES_AT = PARTIAL_AT + 2 * WARPS * ROOM  # of each row: scale, norm, and with a fused norm 1 / rms and 1 / scale
    X_AT = SCALES_AT + 16 * 16

    fetch, multiply = fetch_item(gemm.kind), multiply_item(gemm.kind, T)
    fetch_other, multiply_other = fetch_item(OTHER), multiply_item(OTHER, T)
    put_partial, add_partials = partial_ops(gemm.kind, T, P, R * ROOM)
    store, copy = store_quarter(gemm.epilogue, T), copy_rows(THREADS, COLUMNS, PIECES)
    load_row, measure, convert = norm_ops(max(1, gemm.norm), THREADS, COLUMNS)
    convert_other = norm_ops(max(1, gemm.norm), THREADS, OTHER_COLUMNS)[2]
    facts, power, values_of = norm_facts(WARPS), out_power(), token_values(T)
    no_sums = zeros(acc_registers(gemm.kind, T))
    arrived, arrived_other = copies_pending(SLOTS - 1), copies_pending(OTHER_SLOTS - 1)
    commit = instruction("cp.async.commit_group;", None)
    store_pair = instruction("st.shared.v2.f32 [$0], {$1,$2};", None, "u32", "f32", "f32")
    load4 = instruction("ld.shared.v4.f32 {$0,$1,$2,$3}, [$4];", "f32x4", "u32")
    load_pair = instruction("ld.shared.v2.f32 {$0,$1}, [$2];", "f32x2", "u32")
    store_float = instruction("st.global.f32 [$0], $1;", None, "u64", "f32")
    store4 = instruction("st.shared.v4.f32 [$0], {$1,$2,$3,$4};", None, "u32", "f32", "f32", "f32", "f32")
    u32, u64, f32 = types.uint32, types.uint64, types.float32

    def thin_gemm(
        x, x_scale, x_norm, out, weights, row_scale, bias, out_scale, eps, c2, c1, c0, m, outputs, pitch, cols,
        quarters, units, parts, part_items, part_columns, sums_row, inverse, add, second_weights, second_scale,
        second_bias, second_out, second_outputs, second_sums_row, bound,
    ):  # fmt: skip
        if OVERLAP:
            launch_dependents()
        shared = cuda.shared.array(0, types.uint8, alignment=128)
        base = shared_address(shared)
        thread = u32(cuda.threadIdx.x)
        warp = thread >> u32(5)
        lane = thread & u32(31)
        block = u32(cuda.blockIdx.x)
        stride = u32(cuda.gridDim.x)
        item_size = u32(ITEM)
        record = u64(RECORD)
        item_sums = u32(ITEM_SUMS)
        slots = u32(SLOTS)
        second = False
        if PAIR:
            if block >= bound:
                second = True
                item_size = u32(OTHER_ITEM)
                record = u64(OTHER_RECORD)
                item_sums = u32(OTHER_SUMS)
                slots = u32(OTHER_SLOTS)
                block = u32(block - bound)
                stride = u32(stride - bound)
                weights = second_weights
                row_scale = second_scale
                bias = second_bias
                out = second_out
                outputs = second_outputs
                sums_row = second_sums_row
                quarters = u32(u32(outputs + u32(15)) >> u32(4))
                units = u32(u32(quarters + u32(R - 1)) >> u32(SHIFT))
            else:
                stride = bound
        steps = u32(u32(cols + u32(63)) >> u32(6))
        slab_bytes = u64(steps >> u32(PER_RECORD >> 1)) * record
        items = u32(u32(steps + u32(STEPS - 1)) // u32(STEPS))
        last_quarter = u32(quarters - u32(1))  # the last unit may be wider than W
        own = warp >> u32(SHIFT)
        group = warp & u32(R - 1)
        place = warp & u32(3)
        ring_bytes = u32(slots * item_size)
        ring = u32(base + (warp >> u32(2)) * ring_bytes)
        ring_end = u32(ring + ring_bytes)

        # Weights do not depend on the kernels before: a ringful of them goes ahead of the wait.
        first_unit = u32(block % units)  # see thin_gemm_plan.ThinPlan.blocks
        next_unit = u32(first_unit)
        next_item = own
        if own >= items:
            next_unit = units
        quarter = u32(min(u32(next_unit * u32(R) + group), last_quarter))
        first_source = weights + u64(own) * u64(item_size) + u64(lane << u32(4))
        source = first_source + u64(quarter >> u32(2)) * slab_bytes
        in_slab = quarter & u32(3)
        slot = ring
        for _ in range(slots):
            if next_unit < units:
                if PAIR and second:
                    fetch_other(source, in_slab, slot, place, lane, u32(steps - next_item * u32(STEPS)))
                else:
                    fetch(source, in_slab, slot, place, lane, u32(steps - next_item * u32(STEPS)))
                source = source + u64(item_size * u32(P))
                next_item = u32(next_item + u32(P))
                if next_item >= items:
                    next_item = own
                    next_unit = u32(next_unit + stride)
                    quarter = u32(min(u32(next_unit * u32(R) + group), last_quarter))
                    source = first_source + u64(quarter >> u32(2)) * slab_bytes
                    in_slab = quarter & u32(3)
            commit()
            slot = u32(slot + item_size)

        x_at = u32(base + u32(X_AT))
        x_row = u32(part_columns + part_columns + u32(16))
        x_sums = u32(x_at + m * x_row)
        scales = u32(base + u32(SCALES_AT))
        sums_at = u32(base + u32(PARTIAL_AT))  # of the norm, 16 bytes of each row and warp, before there are others
        row_length = u64(cols) * u64(4)
        pieces = u32(part_columns >> u32(3))
        total_pieces = u32(pieces * m)
        if NORM:
            norm_weight = load_row(x_scale, thread, cols)
            if OVERLAP:
                wait_for_predecessors()
            # Rows are on their way while others are measured.
            values = load_row(x, thread, cols)
            ahead = values
            later = values
            if AHEAD:
                ahead = load_row(x + u64(min(u32(1), u32(m - u32(1)))) * row_length, thread, cols)
            for r in range(m):
                if AHEAD:
                    later = load_row(x + u64(min(u32(u32(r) + u32(2)), u32(m - u32(1)))) * row_length, thread, cols)
                elif r > 0:
                    values = load_row(x + u64(r) * row_length, thread, cols)
                total, weighted, top = measure(values, norm_weight)
                if lane == 0:
                    store4(sums_at + u32(u32(r) * u32(WARPS) + warp) * u32(16), total, weighted, top, top)
                if AHEAD:
                    values = ahead
                    ahead = later
            cuda.syncthreads()
            if AHEAD:
                values = load_row(x, thread, cols)
                ahead = load_row(x + u64(min(u32(1), u32(m - u32(1)))) * row_length, thread, cols)
            for r in range(m):
                if AHEAD:
                    later = load_row(x + u64(min(u32(u32(r) + u32(2)), u32(m - u32(1)))) * row_length, thread, cols)
                elif T > 1:
                    values = load_row(x + u64(r) * row_length, thread, cols)
                rms, norm, inverse_scale, scale = facts(u32(sums_at + u32(r) * u32(16 * WARPS)), cols, eps)
                if PAIR and second:
                    convert_other(
                        values, norm_weight, rms, inverse_scale, thread, u32(0), part_columns,
                        u32(x_at + u32(r) * x_row), u32(x_sums + u32(r) * sums_row),
                    )  # fmt: skip
                else:
                    convert(
                        values, norm_weight, rms, inverse_scale, thread, u32(0), part_columns,
                        u32(x_at + u32(r) * x_row), u32(x_sums + u32(r) * sums_row),
                    )  # fmt: skip
                if thread == 0:
                    store4(scales + u32(r) * u32(16), scale, norm, rms, inverse_scale)
                if AHEAD:
                    values = ahead
                    ahead = later
        else:
            if OVERLAP:
                wait_for_predecessors()
            if thread < m:
                mine = u64(thread) * u64(4)
                norm = f32(0.0)
                if HALF:
                    norm = load_float(x_norm + mine)
                store_pair(scales + thread * u32(16), load_float(x_scale + mine), norm)
            first = u32(thread)
            while u32(first - lane) < total_pieces:
                copy(x, first, total_pieces, pieces, inverse, cols, u32(0), x_at, x_row, x_sums, sums_row)
                first = u32(first + u32(PIECES * THREADS))
        cuda.syncthreads()

        if HALF and block == 0 and thread < m:
            pair = load_pair(scales + thread * u32(16))
            store_float(out_scale + u64(thread) * u64(4), power(pair[1], c2, c1, c0))

        token = lane & u32(7)
        low = u32(x_at + (lane >> u32(3)) * u32(16))
        x_low = u32(low + min(token, u32(m - u32(1))) * x_row)
        x_high = u32(low + min(token + u32(8), u32(m - u32(1))) * x_row)
        token = lane >> u32(2)
        # The lane's words of the sums: both of pair t, or one of four.
        low = u32(x_sums + ((lane & u32(3)) << u32(3)))
        if PER_RECORD == 1:
            low = u32(x_sums + ((lane & u32(1)) << u32(3)) + ((lane & u32(2)) << u32(1)))
        s_low = u32(low + min(token, u32(m - u32(1))) * sums_row)
        s_high = u32(low + min(token + u32(8), u32(m - u32(1))) * sums_row)
        partial = u32(base + u32(PARTIAL_AT))
        mine_at = u32(lane << u32(4))
        if T == 1:
            mine_at = u32((lane >> u32(2)) << u32(3))
        slot = ring
        unit = u32(first_unit)
        buffer = u32(0)
        held = u32(0)  # the part of x in shared memory
        turn = u32(warp)  # a warp below R adds this unit's sums
        while unit < units:
            scale_a = f32(0.0)
            scale_b = f32(0.0)
            sum_quarter = u32(unit * u32(R) + turn)
            if turn < u32(R):
                # On their way from memory while the products run.
                n = u64(sum_quarter * u32(16) + (lane >> u32(2))) * u64(4)
                if sum_quarter < quarters:
                    scale_a = load_float(row_scale + n)
                    scale_b = load_float(row_scale + n + u64(32))
            acc = no_sums()
            item = own
            first_item = u32(0)
            end = items
            part = u32(0)
            while part < parts:
                if IN_PARTS:
                    first_item = u32(part * part_items)
                    end = u32(min(items, u32(first_item + part_items)))
                    if part != held:
                        held = part
                        first_column = u32(first_item * u32(64 * STEPS))
                        cuda.syncthreads()
                        if NORM:
                            norm_weight = load_row(x_scale, thread, cols)
                            for r in range(m):
                                values = load_row(x + u64(r) * row_length, thread, cols)
                                known = load4(scales + u32(r) * u32(16))
                                convert(
                                    values, norm_weight, known[2], known[3], thread, first_column,
                                    u32(first_column + part_columns), u32(x_at + u32(r) * x_row),
                                    u32(x_sums + u32(r) * sums_row),
                                )  # fmt: skip
                        else:
                            first = u32(thread)
                            while u32(first - lane) < total_pieces:
                                copy(
                                    x, first, total_pieces, pieces, inverse, cols, first_column, x_at, x_row, x_sums,
                                    sums_row,
                                )  # fmt: skip
                                first = u32(first + u32(PIECES * THREADS))
                        cuda.syncthreads()
                while item < end:
                    within = u32(item - first_item)
                    offset = u32(within * u32(128 * STEPS))
                    sums = u32(within * item_sums)
                    if PAIR and second:
                        arrived_other()
                        cuda.syncwarp()
                        acc = multiply_other(
                            acc, slot, place, lane, u32(x_low + offset), u32(x_high + offset), u32(s_low + sums),
                            u32(s_high + sums), u32(steps - item * u32(STEPS)),
                        )  # fmt: skip
                    else:
                        arrived()
                        cuda.syncwarp()
                        acc = multiply(
                            acc, slot, place, lane, u32(x_low + offset), u32(x_high + offset), u32(s_low + sums),
                            u32(s_high + sums), u32(steps - item * u32(STEPS)),
                        )  # fmt: skip
                    cuda.syncwarp()
                    if next_unit < units:
                        if PAIR and second:
                            fetch_other(source, in_slab, slot, place, lane, u32(steps - next_item * u32(STEPS)))
                        else:
                            fetch(source, in_slab, slot, place, lane, u32(steps - next_item * u32(STEPS)))
                        source = source + u64(item_size * u32(P))
                        next_item = u32(next_item + u32(P))
                        if next_item >= items:
                            next_item = own
                            next_unit = u32(next_unit + stride)
                            quarter = u32(min(u32(next_unit * u32(R) + group), last_quarter))
                            source = first_source + u64(quarter >> u32(2)) * slab_bytes
                            in_slab = quarter & u32(3)
                    commit()
                    slot = u32(slot + item_size)
                    if slot == ring_end:
                        slot = ring
                    item = u32(item + u32(P))
                part = u32(part + u32(1))
            put_partial(acc, u32(partial + buffer + warp * u32(ROOM) + mine_at), lane)
            if P > 1:
                cuda.syncthreads()
            else:
                cuda.syncwarp()
            if turn < u32(R):
                sums_of_unit = add_partials(u32(partial + buffer + turn * u32(ROOM) + mine_at))
                bias_a = f32(0.0)
                bias_b = f32(0.0)
                if not GATED and bias != 0 and sum_quarter < quarters:
                    n = u64(sum_quarter * u32(16) + (lane >> u32(2))) * u64(4)
                    bias_a = load_float(bias + n)
                    bias_b = load_float(bias + n + u64(32))
                if block < units:
                    store(
                        sums_of_unit, (scale_a, scale_b, bias_a, bias_b), values_of(scales, lane, m, c2, c1, c0),
                        sum_quarter, lane, out, m, outputs, pitch, add,
                    )  # fmt: skip
            # Others add the next unit's sums.
            turn = u32(turn + u32(WARPS - R)) & u32(WARPS - 1)
            buffer = u32(u32(WARPS * ROOM) - buffer)
            unit = u32(unit + stride)

    return thin_gemm, types.void(*(numba_type(spec) for _, spec in ARGUMENTS))
