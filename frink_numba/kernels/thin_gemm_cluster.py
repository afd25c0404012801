"""The kernel of the thin products for several rows: a cluster of blocks shares K, so that each holds little of x.

    y[M, N] = epilogue(f(x)[M, K] W[N, K]^T),   M = 2 .. 32

Warp w of each block of a cluster works on quarter w of the same unit of eight; block c of C takes each C-th of K's
items, from item c on, and has those columns of x alone in shared memory, for all of the launch. The sums meet in the
block that writes a quarter, which the others reach through the cluster's shared memory; they are added in the order in
which `thin_gemm_kernel.py` adds those of a block's warps, so that both give the same bits. While a unit's sums travel,
the next unit's products run: one barrier of the cluster a unit, which nobody waits for long.

A fused norm is measured once a row, by the blocks in turns, and told to all.
"""

from __future__ import annotations

import functools
from typing import Any

from frink_numba.kernels.thin_gemm_kernel import ARGUMENTS, THREADS, ThinGemm
from frink_numba.kernels.thin_gemm_plan import (
    WARPS,
    item_bytes,
    item_steps,
    partial_room,
    ring_slot,
    sum_columns,
)


@functools.cache
def build(gemm: ThinGemm) -> Any:
    """The kernel as a Python function for numba, and its signature. Grid: clusters of `gemm.cluster` blocks."""
    from numba import cuda, types

    from frink_numba.kernels.gemm_emit import zeros
    from frink_numba.kernels.instructions import (
        cluster_rank,
        copies_pending,
        launch_dependents,
        load_float,
        peer_address,
        wait_for_predecessors,
    )
    from frink_numba.kernels.ptx import instruction, numba_type, shared_address
    from frink_numba.kernels.thin_gemm_ends import partial_ops, store_quarter, token_values
    from frink_numba.kernels.thin_gemm_ops import (
        acc_registers,
        fetch_item,
        multiply_rows,
        rows_of_lane,
    )
    from frink_numba.kernels.thin_gemm_rows import Share, copy_rows, norm_facts, norm_ops, norm_share_ops, out_power

    kind, T, C = gemm.row, gemm.tokens, gemm.cluster
    SLOTS, STEPS, COLUMNS = gemm.slots, item_steps(gemm.row), sum_columns(gemm.kind)
    ITEM, RECORD, PER_RECORD = item_bytes(gemm.kind), kind.record_size, kind.group_steps
    ITEM_SUMS = 256 * STEPS // COLUMNS if COLUMNS else 0  # bytes of a row's sums of an item: 4 a block
    ROOM, OVERLAP, NORM = partial_room(T), gemm.overlap, gemm.norm > 0
    OWN = WARPS // C  # quarters of a unit that a block writes
    SHIFT = C.bit_length() - 1
    HALF, GATED, PIECES = gemm.epilogue.half, bool(gemm.epilogue.gate), gemm.pieces
    PARTIAL_AT = SLOTS * ring_slot(gemm.kind)
    SCALES_AT = PARTIAL_AT + 2 * WARPS * ROOM  # of each row: scale, norm, and with a fused norm 1 / rms and 1 / scale
    X_AT = SCALES_AT + 16 * max(16, T)

    share = Share(C, 64 * STEPS)
    TOGETHER = max(1, min(T, 8) // PIECES)  # rows whose share a thread has on its way at a time
    fetch, multiply = fetch_item(gemm.kind), multiply_rows(gemm.kind, T)
    put_partial, add_partials = partial_ops(gemm.kind, T, C, ROOM, remote=True)
    lane_rows = rows_of_lane(T)
    store, copy = store_quarter(gemm.epilogue, T), copy_rows(THREADS, COLUMNS, PIECES, share)
    load_row, measure, _ = norm_ops(max(1, gemm.norm), THREADS, COLUMNS)
    load_weight, load_share, convert = norm_share_ops(PIECES, TOGETHER, THREADS, COLUMNS, share)
    facts, power, values_of = norm_facts(WARPS), out_power(), token_values(T)
    no_sums = zeros(acc_registers(gemm.kind, T))
    arrived = copies_pending(SLOTS - 1)
    commit = instruction("cp.async.commit_group;", None)
    arrive = instruction("barrier.cluster.arrive.release.aligned;", None)
    wait = instruction("barrier.cluster.wait.acquire.aligned;", None)
    store_pair = instruction("st.shared.v2.f32 [$0], {$1,$2};", None, "u32", "f32", "f32")
    load_pair = instruction("ld.shared.v2.f32 {$0,$1}, [$2];", "f32x2", "u32")
    store_float = instruction("st.global.f32 [$0], $1;", None, "u64", "f32")
    store4 = instruction("st.shared.v4.f32 [$0], {$1,$2,$3,$4};", None, "u32", "f32", "f32", "f32", "f32")
    tell4 = instruction("st.shared::cluster.v4.f32 [$0], {$1,$2,$3,$4};", None, "u32", "f32", "f32", "f32", "f32")
    u32, u64, f32 = types.uint32, types.uint64, types.float32

    def thin_gemm_cluster(
        x, x_scale, x_norm, out, weights, row_scale, bias, out_scale, eps, c2, c1, c0, m, outputs, pitch, cols,
        quarters, units, parts, part_items, part_columns, sums_row, inverse, add, second_weights, second_scale,
        second_bias, second_out, second_outputs, second_sums_row, bound,
    ):  # fmt: skip
        if OVERLAP:
            launch_dependents()
        arrive()  # whoever waits for it knows that all blocks of the cluster are there
        shared = cuda.shared.array(0, types.uint8, alignment=128)
        base = shared_address(shared)
        thread = u32(cuda.threadIdx.x)
        warp = thread >> u32(5)
        lane = thread & u32(31)
        rank = cluster_rank()
        cluster = u32(u32(cuda.blockIdx.x) >> u32(SHIFT))
        stride = u32(u32(cuda.gridDim.x) >> u32(SHIFT))
        steps = u32(u32(cols + u32(63)) >> u32(6))
        slab_bytes = u64(steps >> u32(PER_RECORD >> 1)) * u64(RECORD)
        items = u32(u32(steps + u32(STEPS - 1)) // u32(STEPS))
        last_quarter = u32(quarters - u32(1))  # the last unit may be wider than W
        place = warp & u32(3)
        ring = u32(base + (warp >> u32(2)) * u32(SLOTS * ITEM))
        ring_end = u32(ring + u32(SLOTS * ITEM))

        # Weights do not depend on the kernels before: a ringful of them goes ahead of the wait.
        first_unit = u32(cluster % units)  # those without a unit of their own do another's and write nothing
        next_unit = u32(first_unit)
        next_item = rank
        if rank >= items:
            next_unit = units
        quarter = u32(min(u32(next_unit * u32(WARPS) + warp), last_quarter))
        first_source = weights + u64(rank) * u64(ITEM) + u64(lane << u32(4))
        source = first_source + u64(quarter >> u32(2)) * slab_bytes
        in_slab = quarter & u32(3)
        slot = ring
        for _ in range(SLOTS):
            if next_unit < units:
                fetch(source, in_slab, slot, place, lane, u32(steps - next_item * u32(STEPS)))
                source = source + u64(C * ITEM)
                next_item = u32(next_item + u32(C))
                if next_item >= items:
                    next_item = rank
                    next_unit = u32(next_unit + stride)
                    quarter = u32(min(u32(next_unit * u32(WARPS) + warp), last_quarter))
                    source = first_source + u64(quarter >> u32(2)) * slab_bytes
                    in_slab = quarter & u32(3)
            commit()
            slot = u32(slot + u32(ITEM))

        x_at = u32(base + u32(X_AT))
        x_row = u32(part_columns + part_columns + u32(16))
        x_sums = u32(x_at + m * x_row)
        scales = u32(base + u32(SCALES_AT))
        sums_at = u32(base + u32(PARTIAL_AT))  # of the norm, 16 bytes of each row and warp, before there are others
        last_row = u32(m - u32(1))
        if NORM:
            row_weight = load_row(x_scale, thread, cols)
            share_weight = load_weight(x_scale, thread, cols, rank, part_columns)
            if OVERLAP:
                wait_for_predecessors()
            row_length = u64(cols) * u64(4)
            # The share of the first rows is on its way while the block's own rows are measured.
            values = load_share(x, u32(0), last_row, thread, cols, rank, part_columns)
            row = load_row(x + u64(min(rank, last_row)) * row_length, thread, cols)
            r = rank
            while r < m:
                next_row = load_row(x + u64(min(u32(r + u32(C)), last_row)) * row_length, thread, cols)
                total, weighted, top = measure(row, row_weight)
                if lane == 0:
                    store4(sums_at + u32(r * u32(WARPS) + warp) * u32(16), total, weighted, top, top)
                row = next_row
                r = u32(r + u32(C))
            cuda.syncthreads()
            wait()
            r = u32(rank + warp * u32(C))
            if r < m:
                rms, norm, inverse_scale, scale = facts(u32(sums_at + r * u32(16 * WARPS)), cols, eps)
                if lane < u32(C):
                    tell4(peer_address(u32(scales + r * u32(16)), lane), scale, norm, rms, inverse_scale)
            arrive()
            wait()
            r = u32(0)
            while r < m:
                next_values = values
                if T > TOGETHER:
                    next_values = load_share(x, u32(r + u32(TOGETHER)), last_row, thread, cols, rank, part_columns)
                convert(values, share_weight, scales, r, m, thread, part_columns, x_at, x_row, x_sums, sums_row)
                values = next_values
                r = u32(r + u32(TOGETHER))
            arrive()
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
            while u32(first - lane) < total_pieces:
                copy(x, first, total_pieces, pieces, inverse, cols, rank, x_at, x_row, x_sums, sums_row)
                first = u32(first + u32(PIECES * THREADS))
        cuda.syncthreads()

        if HALF and cuda.blockIdx.x == 0 and thread < m:
            pair = load_pair(scales + thread * u32(16))
            store_float(out_scale + u64(thread) * u64(4), power(pair[1], c2, c1, c0))

        # The lane's rows of x, one of each eight, and of the sums of x its words: both of pair t, or one of four.
        at = u32(x_at + (lane >> u32(3)) * u32(16))
        xs = lane_rows(at, lane & u32(7), last_row, x_row)
        at = u32(x_sums + ((lane & u32(3)) << u32(3)))
        if PER_RECORD == 1:
            at = u32(x_sums + ((lane & u32(1)) << u32(3)) + ((lane & u32(2)) << u32(1)))
        sums = lane_rows(at, lane >> u32(2), last_row, sums_row)
        partial = u32(base + u32(PARTIAL_AT) + (lane << u32(4)))
        # Where this warp's sums go: to the block that writes its quarter, into the room of this block.
        target = peer_address(u32(partial + ((warp >> u32(SHIFT)) * u32(C) + rank) * u32(ROOM)), warp & u32(C - 1))
        slot = ring
        buffer = u32(0)
        turn = u32(warp)  # a warp below OWN adds one of the unit's quarters
        unit = u32(first_unit)
        added = u32(turn)  # the same of the unit before
        quarter_before = u32(quarters)
        before_a = f32(0.0)
        before_b = f32(0.0)
        more = u32(1)
        started = u32(0)
        while more != u32(0):
            more = u32(unit < units)
            scale_a = f32(0.0)
            scale_b = f32(0.0)
            own_quarter = u32(unit * u32(WARPS) + rank + turn * u32(C))
            acc = no_sums()
            if more != u32(0):
                if turn < u32(OWN) and own_quarter < quarters:
                    # On their way from memory while the products run.
                    n = u64(own_quarter * u32(16) + (lane >> u32(2))) * u64(4)
                    scale_a = load_float(row_scale + n)
                    scale_b = load_float(row_scale + n + u64(32))
                item = rank
                offset = u32(0)
                sums_offset = u32(0)
                while item < items:
                    arrived()
                    cuda.syncwarp()
                    acc = multiply(
                        acc, slot, place, lane, xs, offset, sums, sums_offset, u32(steps - item * u32(STEPS))
                    )
                    cuda.syncwarp()
                    if next_unit < units:
                        fetch(source, in_slab, slot, place, lane, u32(steps - next_item * u32(STEPS)))
                        source = source + u64(C * ITEM)
                        next_item = u32(next_item + u32(C))
                        if next_item >= items:
                            next_item = rank
                            next_unit = u32(next_unit + stride)
                            quarter = u32(min(u32(next_unit * u32(WARPS) + warp), last_quarter))
                            source = first_source + u64(quarter >> u32(2)) * slab_bytes
                            in_slab = quarter & u32(3)
                    commit()
                    slot = u32(slot + u32(ITEM))
                    if slot == ring_end:
                        slot = ring
                    item = u32(item + u32(C))
                    offset = u32(offset + u32(128 * STEPS))
                    sums_offset = u32(sums_offset + u32(ITEM_SUMS))
            # All sums of the unit before have come, and those of the one before that have been added.
            wait()
            if started != u32(0) and added < u32(OWN):
                sums_of_unit = add_partials(u32(partial + u32(WARPS * ROOM) - buffer + added * u32(C * ROOM)))
                bias_a = f32(0.0)
                bias_b = f32(0.0)
                if not GATED and bias != 0 and quarter_before < quarters:
                    n = u64(quarter_before * u32(16) + (lane >> u32(2))) * u64(4)
                    bias_a = load_float(bias + n)
                    bias_b = load_float(bias + n + u64(32))
                if cluster < units:
                    store(
                        sums_of_unit, (before_a, before_b, bias_a, bias_b), values_of(scales, lane, m, c2, c1, c0),
                        quarter_before, lane, out, m, outputs, pitch, add,
                    )  # fmt: skip
            if more != u32(0):
                put_partial(acc, u32(target + buffer), lane)
                arrive()
            started = u32(1)
            added = turn
            quarter_before = own_quarter
            before_a = scale_a
            before_b = scale_b
            # Others add the next unit's sums.
            turn = u32(turn + u32(WARPS - OWN)) & u32(WARPS - 1)
            buffer = u32(u32(WARPS * ROOM) - buffer)
            unit = u32(unit + stride)

    return thin_gemm_cluster, types.void(*(numba_type(spec) for _, spec in ARGUMENTS))
