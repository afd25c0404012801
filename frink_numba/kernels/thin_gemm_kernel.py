"""The kernel of the thin products: weights stream through shared memory, each warp for itself.

    y[M, N] = epilogue(f(x)[M, K] W[N, K]^T),   M = 1 .. 16

The packs are the A operand of `mma.m16n8k16` in memory order, x is B. A warp fetches its items of W with `cp.async`
into a ring of its own and waits for nobody: no barrier while K is walked through. x lies whole in shared memory, f16,
rows 16 bytes more than a multiple of 128 apart so that `ldmatrix` hits no bank twice. At the end of a unit the warps'
sums meet in shared memory, a few warps (others each time) add them and write the result, the rest go on.

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
    fixed_bytes,
    item_bytes,
    item_steps,
    partial_room,
    ring_slot,
    row_bytes,
    sum_registers,
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
    ("workspace", "u64"),
    ("eps", "f32"),
    ("c2", "f32"),
    ("c1", "f32"),
    ("c0", "f32"),
    ("m", "u32"),
    ("outputs", "u32"),
    ("pitch", "u32"),  # bytes from row to row of the result
    ("cols", "u32"),
    ("units", "u32"),
    ("k_parts", "u32"),
    ("part_items", "u32"),
    ("part_columns", "u32"),
    ("inverse", "u32"),  # 2**32 / pieces of 16 bytes of a row of x, rounded up
    ("add", "u32"),
)


@dataclass(frozen=True, slots=True)
class ThinGemm:
    """One compiled variant.

    tokens: 2, 8 or 16, the most rows of x; row_groups: quarters of a unit; slots: items of a warp's ring; norm: vectors
    of four columns that a thread normalizes, 0 for f16 operands; overlap: see launch.py.
    """

    kind: str
    tokens: int
    row_groups: int
    slots: int
    epilogue: Epilogue = PLAIN
    norm: int = 0
    overlap: bool = True

    @property
    def row(self) -> FragmentKind:
        return FRAGMENT_KINDS[self.kind]

    def shared(self, m: int, part_columns: int) -> int:
        """Bytes of shared memory with m rows of x."""
        return fixed_bytes(self.kind, self.tokens, self.slots) + m * row_bytes(part_columns)


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
    from frink_numba.kernels.thin_gemm_ops import (
        exchange_ops,
        fetch_item,
        multiply_item,
        partial_ops,
        store_quarter,
        token_values,
    )
    from frink_numba.kernels.thin_gemm_rows import copy_rows, norm_facts, norm_ops, out_power

    kind, T, R = gemm.row, gemm.tokens, gemm.row_groups
    SHIFT = R.bit_length() - 1
    PARTS, SLOTS, STEPS = WARPS // R, gemm.slots, item_steps(gemm.row)
    ITEM, RECORD, PER_RECORD = item_bytes(gemm.kind), kind.record_size, kind.group_steps
    ROOM, OVERLAP, NORM = partial_room(T), gemm.overlap, gemm.norm > 0
    HALF, GATED = gemm.epilogue.half, bool(gemm.epilogue.gate)
    PARTIAL_AT = SLOTS * ring_slot(gemm.kind)
    SUMS_AT = PARTIAL_AT + 2 * WARPS * ROOM  # of the norm: 16 bytes of each row and warp
    SCALES_AT = SUMS_AT + 16 * WARPS * 16  # scale, 1 / scale, norm of each row, 16 bytes
    X_AT = SCALES_AT + 16 * 16

    fetch, multiply = fetch_item(gemm.kind), multiply_item(gemm.kind, T)
    put_partial, add_partials = partial_ops(T, R)
    put_part, add_part = exchange_ops(T)
    store, copy = store_quarter(gemm.epilogue, T), copy_rows(THREADS)
    load_row, measure, convert = norm_ops(max(1, gemm.norm), THREADS)
    facts, power, values_of = norm_facts(WARPS), out_power(), token_values(T)
    no_sums, no_part = zeros(2 * sum_registers(T)), zeros(sum_registers(T))
    arrived = copies_pending(SLOTS - 1)
    commit = instruction("cp.async.commit_group;", None)
    store_pair = instruction("st.shared.v2.f32 [$0], {$1,$2};", None, "u32", "f32", "f32")
    load_pair = instruction("ld.shared.v2.f32 {$0,$1}, [$2];", "f32x2", "u32")
    store_float = instruction("st.global.f32 [$0], $1;", None, "u64", "f32")
    store_word = instruction("st.global.u32 [$0], $1;", None, "u64", "u32")
    fence = instruction("fence.acq_rel.gpu;", None)
    count_up = instruction("atom.acq_rel.gpu.global.add.u32 $0, [$1], $2;", "u32", "u64", "u32")
    from_first_lane = instruction("shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", "u32", "u32")
    store4 = instruction("st.shared.v4.f32 [$0], {$1,$2,$3,$4};", None, "u32", "f32", "f32", "f32", "f32")
    u32, u64, f32 = types.uint32, types.uint64, types.float32

    def thin_gemm(
        x, x_scale, x_norm, out, weights, row_scale, bias, out_scale, workspace, eps, c2, c1, c0, m, outputs, pitch,
        cols, units, k_parts, part_items, part_columns, inverse, add,
    ):  # fmt: skip
        if OVERLAP:
            launch_dependents()
        shared = cuda.shared.array(0, types.uint8, alignment=128)
        base = shared_address(shared)
        thread = u32(cuda.threadIdx.x)
        warp = thread >> u32(5)
        lane = thread & u32(31)
        block = u32(cuda.blockIdx.x)
        index = u32(block // k_parts)
        part = u32(block - index * k_parts)
        stride = u32(u32(cuda.gridDim.x) // k_parts)
        steps = u32(u32(cols + u32(63)) >> u32(6))
        slab_bytes = u64(steps >> u32(PER_RECORD >> 1)) * u64(RECORD)
        first_item = u32(part * part_items)
        items = u32(u32(steps + u32(STEPS - 1)) // u32(STEPS))
        count = u32(min(part_items, u32(items - first_item)))
        part_steps = u32(steps - first_item * u32(STEPS))
        first_column = u32(first_item * u32(64 * STEPS))
        group = warp & u32(R - 1)
        own = warp >> u32(SHIFT)
        place = warp & u32(3)
        ring = u32(base + (warp >> u32(2)) * u32(SLOTS * ITEM))
        ring_end = u32(ring + u32(SLOTS * ITEM))
        source = weights + u64(first_item) * u64(ITEM)

        # Weights do not depend on the kernels before: a ringful of them goes ahead of the wait.
        next_unit = u32(index)
        next_item = own
        if own >= count:
            next_unit = units
        slot = ring
        for _ in range(SLOTS):
            if next_unit < units:
                quarter = u32(next_unit * u32(R) + group)
                fetch(
                    source + u64(quarter >> u32(2)) * slab_bytes + u64(next_item) * u64(ITEM), quarter & u32(3), slot,
                    place, lane, u32(part_steps - next_item * u32(STEPS)),
                )  # fmt: skip
                next_item = u32(next_item + u32(PARTS))
                if next_item >= count:
                    next_item = own
                    next_unit = u32(next_unit + stride)
            commit()
            slot = u32(slot + u32(ITEM))

        x_at = u32(base + u32(X_AT))
        x_row = u32(part_columns + part_columns + u32(16))
        scales = u32(base + u32(SCALES_AT))
        if NORM:
            norm_weight = load_row(x_scale, thread, cols)
            if OVERLAP:
                wait_for_predecessors()
            sums_at = u32(base + u32(SUMS_AT))
            row_length = u64(cols) * u64(4)
            values = load_row(x, thread, cols)
            for r in range(m):
                if r > 0:
                    values = load_row(x + u64(r) * row_length, thread, cols)
                total, weighted, top = measure(values, norm_weight)
                if lane == 0:
                    store4(sums_at + u32(u32(r) * u32(WARPS) + warp) * u32(16), total, weighted, top, top)
            cuda.syncthreads()
            for r in range(m):
                if m > 1:
                    values = load_row(x + u64(r) * row_length, thread, cols)
                rms, norm, inverse_scale, scale = facts(u32(sums_at + u32(r) * u32(16 * WARPS)), cols, eps)
                convert(
                    values, norm_weight, rms, inverse_scale, thread, first_column, u32(first_column + part_columns),
                    u32(x_at + u32(r) * x_row),
                )  # fmt: skip
                if thread == 0:
                    store_pair(scales + u32(r) * u32(16), scale, norm)
        else:
            if OVERLAP:
                wait_for_predecessors()
            if thread < m:
                mine = u64(thread) * u64(4)
                norm = f32(0.0)
                if HALF:
                    norm = load_float(x_norm + mine)
                store_pair(scales + thread * u32(16), load_float(x_scale + mine), norm)
            pieces = u32(part_columns >> u32(3))
            total_pieces = u32(pieces * m)
            first = u32(thread)
            while first < total_pieces:
                copy(x, first, total_pieces, pieces, inverse, cols, first_column, x_at, x_row)
                first = u32(first + u32(8 * THREADS))
        cuda.syncthreads()

        token_facts = values_of(scales, lane, m, c2, c1, c0)
        if HALF and block == 0 and thread < m:
            pair = load_pair(scales + thread * u32(16))
            store_float(out_scale + u64(thread) * u64(4), power(pair[1], c2, c1, c0))

        token = lane & u32(7)
        low = u32(x_at + (lane >> u32(3)) * u32(16))
        x_low = u32(low + min(token, u32(m - u32(1))) * x_row)
        x_high = u32(low + min(token + u32(8), u32(m - u32(1))) * x_row)
        partial = u32(base + u32(PARTIAL_AT))
        mine_at = u32(lane << u32(4))
        if T == 2:
            mine_at = u32((lane >> u32(2)) << u32(4))
        slot = ring
        unit = u32(index)
        buffer = u32(0)
        turn = u32(warp)  # a warp below R adds this unit's sums
        while unit < units:
            scale_a = f32(0.0)
            scale_b = f32(0.0)
            bias_a = f32(0.0)
            bias_b = f32(0.0)
            sum_quarter = u32(unit * u32(R) + turn)
            if turn < u32(R):
                # On their way from memory while the products run.
                n = u64(sum_quarter * u32(16) + (lane >> u32(2))) * u64(4)
                scale_a = load_float(row_scale + n)
                scale_b = load_float(row_scale + n + u64(32))
                if not GATED and bias != 0:
                    bias_a = load_float(bias + n)
                    bias_b = load_float(bias + n + u64(32))
            acc = no_sums()
            item = own
            while item < count:
                arrived()
                cuda.syncwarp()
                offset = u32(item * u32(128 * STEPS))
                left = u32(part_steps - item * u32(STEPS))
                acc = multiply(acc, slot, place, lane, u32(x_low + offset), u32(x_high + offset), left)
                cuda.syncwarp()
                if next_unit < units:
                    quarter = u32(next_unit * u32(R) + group)
                    fetch(
                        source + u64(quarter >> u32(2)) * slab_bytes + u64(next_item) * u64(ITEM), quarter & u32(3),
                        slot, place, lane, u32(part_steps - next_item * u32(STEPS)),
                    )  # fmt: skip
                    next_item = u32(next_item + u32(PARTS))
                    if next_item >= count:
                        next_item = own
                        next_unit = u32(next_unit + stride)
                commit()
                slot = u32(slot + u32(ITEM))
                if slot == ring_end:
                    slot = ring
                item = u32(item + u32(PARTS))
            put_partial(acc, u32(partial + buffer + warp * u32(ROOM) + mine_at), lane)
            cuda.syncthreads()
            if turn < u32(R):
                sums = add_partials(u32(partial + buffer + turn * u32(ROOM) + mine_at))
                finished = u32(1)
                if k_parts > u32(1):
                    quarters = u32(units * u32(R))
                    counters = u64(u32(u32(quarters * u32(4) + u32(255)) // u32(256)) * u32(256))
                    parts_at = workspace + counters + u64(sum_quarter) * u64(ROOM) + u64(mine_at)
                    part_stride = u64(quarters) * u64(ROOM)
                    put_part(sums, parts_at + u64(part) * part_stride, lane)
                    fence()
                    cuda.syncwarp()
                    counter = workspace + u64(sum_quarter) * u64(4)
                    before = u32(0)
                    if lane == 0:
                        before = count_up(counter, u32(1))
                    before = from_first_lane(before)
                    finished = u32(before == u32(k_parts - u32(1)))
                    if finished != u32(0):
                        fence()
                        sums = no_part()
                        for p in range(k_parts):
                            sums = add_part(sums, parts_at + u64(p) * part_stride)
                        if lane == 0:
                            store_word(counter, u32(0))
                if finished != u32(0):
                    store(
                        sums, (scale_a, scale_b, bias_a, bias_b), token_facts, sum_quarter, lane, out, m, outputs,
                        pitch, add,
                    )  # fmt: skip
            turn = u32(u32(turn + u32(WARPS - R)) & u32(WARPS - 1))
            buffer = u32(u32(WARPS * ROOM) - buffer)
            unit = u32(unit + stride)

    return thin_gemm, types.void(*(numba_type(spec) for _, spec in ARGUMENTS))
