"""The `wgmma` tier: quantized W times f16 tokens on Hopper's tensor cores, one persistent kernel (sm_90a).

    y[M, N] = x[M, K] W[N, K]^T

Up to four warp groups share a block. Group 0 is the producer: one thread of it keeps a ring of stages full with bulk
copies. The others are consumers, each with its slab of 64 weight rows against the same tokens: they turn the codes of a
step (64 columns) into f16 operands in registers while the tensor cores still work on the step before, and release a
stage once per warp. A stage holds the tokens' tile [T, 64] f16, 128-byte swizzled, and the slabs' bytes of the step.
Weights that are f16 already go to the tensor cores from shared memory, as the tokens do.

Blocks are persistent. The first `split_tiles` tiles are cut, along K too, into equal ranges of groups of four steps,
one range for each of the first `workers` clusters; the remaining tiles go to all clusters whole. A cluster whose range
begins inside a tile writes its sums to the workspace; the one that has the tile's first group adds them up, in order,
so that results repeat bit by bit. Flags in the workspace are back at zero at the end. The first cluster has the last
range: who adds up waits for clusters before it alone. Blocks begin in their order, so a grid of which only a part
is on the device, beside other work, gets through.

The weights may be of two kinds, one behind the other (gemm_mixed.py). A tile is of one kind, and each kind has a main
loop of its own (gemm_loop.py).

With a norm in front (gemm_norm.py) the consumers first make the operands: they norm rows by tickets until there are
none, and then begin their tiles, each when its tokens' rows are there. That cannot hang either: see row_tickets.py.

Registers: the accumulators take T/2, two sets of 16 fragments alternate. See `gemm_emit.keep` for the hazard that
decides the shape of the main loop, and docs/kernels/gemm.md for the picture.
"""

from __future__ import annotations

import functools
from typing import Any

from frink_numba.kernels.gemm_variant import ARGUMENTS, FLAG_BYTES, LEFT_AT, NORMED_AT, WgmmaGemm


@functools.cache
def build(gemm: WgmmaGemm, norm_ops: Any = None) -> Any:
    """The kernel as a Python function for numba, and its signature. `norm_ops`: gemm_norm.NormOps, where it norms."""
    from numba import cuda, types

    from frink_numba.kernels.gemm_emit import (
        locate,
        next_segment,
        next_stage,
        parts_after,
        range_start,
        worker_of,
    )
    from frink_numba.kernels.gemm_loop import main_loop
    from frink_numba.kernels.gemm_mixed import slab_sets, slab_source
    from frink_numba.kernels.gemm_stage import load_weights_step
    from frink_numba.kernels.gemm_store import partial_ops, store_tile
    from frink_numba.kernels.instructions import (
        bulk_wait_read,
        cluster_rank,
        cluster_sync,
        fence_barrier_init,
        launch_dependents,
        load_acquire,
        load_float,
        mbarrier_init,
        mbarrier_wait,
        named_barrier,
        peer_address,
        prefetch_map,
        set_registers,
        store_release,
        tma_load_2d,
        tma_multicast_2d,
        tma_prefetch_2d,
        wait_for_predecessors,
    )
    from frink_numba.kernels.ptx import numba_type, shared_address
    from frink_numba.kernels.row_operations import quotient, reciprocal, root, row_scales, store_float
    from frink_numba.kernels.row_tickets import (
        arrive,
        fence_proxy_async_global,
        get_number,
        leave,
        mark,
        put_number,
        take,
        thread_index,
    )

    TOKENS, STAGES, SLOT, GROUPS = gemm.tokens, gemm.stages, gemm.slot, gemm.groups
    X_STAGE, W_STAGE = TOKENS * 128, GROUPS * SLOT
    BUFFERS = gemm.buffers * gemm.epilogue.buffer_size(TOKENS)
    COLUMNS = gemm.epilogue.columns
    CLUSTER, SIDES = gemm.cluster, gemm.sides
    PARTIAL = gemm.partial // SIDES
    X_PART = X_STAGE // CLUSTER
    HALF = gemm.epilogue.half
    STAGING_AT = STAGES * X_STAGE
    WEIGHTS_AT = STAGING_AT + GROUPS * BUFFERS
    SCALES_AT = WEIGHTS_AT + STAGES * W_STAGE
    SCALES = gemm.epilogue.scale_size(TOKENS)
    BARRIERS_AT = SCALES_AT + GROUPS * SCALES
    OWN = -(-TOKENS // 128)
    NORM = norm_ops is not None
    no_op: Any = None
    load_row, measure_row, put_row, AHEAD, ROW_SCRATCH = norm_ops or (no_op, no_op, no_op, False, 0)

    # Where codes are converted, each group begins a stage behind the one before. Its tile then ends beside the products
    # of the others, not beside their ends. Groups that only multiply are faster in step.
    STAGGERED = GROUPS > 1 and all(kind.scales is not None for kind in gemm.kinds)

    multiply_segment = main_loop(gemm)
    advance = next_stage(STAGES)
    write_partial, add_partials, TOGETHER = partial_ops(TOKENS, SIDES * PARTIAL)
    store = store_tile(TOKENS, gemm.epilogue, gemm.buffers)
    fewer_registers, more_registers = (
        set_registers(count, more=more) for count, more in zip(gemm.registers, (False, True), strict=True)
    )
    count_sets, find_set = slab_sets(SIDES, bool(gemm.second))
    find_weights, load_weights = slab_source(gemm.kinds), load_weights_step(gemm.kinds, GROUPS, TOKENS * 128, SLOT)
    u32, u64, f32 = types.uint32, types.uint64, types.float32

    def gemm_wgmma(
        x_map, out_map, weights, behind, row_scale, token_scale, bias, token_norm, out_scale, workspace, c2, c1, c0, m,
        token_tiles, slabs, border, steps, swath, split_tiles, workers, add, hidden, norm_weight, half, tickets, cols,
        turn_rows, tile_turns, turns, eps,
    ):  # fmt: skip
        shared = cuda.shared.array(0, types.uint8, alignment=1024)
        base = shared_address(shared)
        full = u32(base + u32(BARRIERS_AT))
        empty = u32(full + u32(8 * STAGES))
        tickets_out = u32(empty + u32(8 * STAGES))
        all_normed = u32(tickets_out + u32(8))
        thread = u32(cuda.threadIdx.x)
        group = thread >> u32(7)
        rank = u32(0)
        if CLUSTER > 1:
            rank = cluster_rank()
        block = u32(u32(cuda.blockIdx.x) >> u32(CLUSTER - 1))
        blocks = u32(u32(cuda.gridDim.x) >> u32(CLUSTER - 1))
        sets = count_sets(border, slabs)
        tiles = u32(token_tiles * sets)
        groups = u32((steps + u32(3)) >> u32(2))
        if thread == 0:
            prefetch_map(x_map)
            prefetch_map(out_map)
            for s in range(STAGES):
                mbarrier_init(full + u32(8 * s), u32(1))
                mbarrier_init(empty + u32(8 * s), u32(4 * SIDES))
            if NORM:
                mbarrier_init(tickets_out, u32(GROUPS))
                mbarrier_init(all_normed, u32(GROUPS))
            fence_barrier_init()
        if CLUSTER > 1:
            cluster_sync()
        else:
            cuda.syncthreads()

        # The kernel after this one gets room only when every block of this one has got there, so that it does not take
        # the room of a block that others wait for.
        if not NORM:
            launch_dependents()

        normed = workspace + u64(NORMED_AT)
        split = u32(split_tiles * groups)
        if group == 0:
            fewer_registers()
            if thread == 0:
                worker = worker_of(block, workers)
                first = range_start(worker, split, workers)
                last = range_start(worker + u32(1), split, workers)
                whole = u32(split_tiles + block)
                stage = u32(0)
                phase = u32(0)
                # The weights do not depend on the kernels before: a ringful of them goes ahead of the wait. Rows of x
                # that nobody has read or written lately come as near as the L2 cache.
                tile, g0, g1, _, _ = next_segment(first, last, whole, groups, blocks)
                token_tile, slab_set = locate(tile, swath, sets, token_tiles)
                token = token_tile * u32(TOKENS) + rank * u32(TOKENS // CLUSTER)
                begin = u32(g0 << u32(2))
                ahead = u32(0)
                if first < last or whole < tiles:
                    ahead = u32(min(u32(min(u32(g1 << u32(2)), steps) - begin), u32(STAGES)))
                slab, end, second = find_set(slab_set, border, slabs)
                slab = u32(slab + rank * u32(GROUPS))
                source, slab_bytes = find_weights(weights, behind, slab, border, second, steps)
                for i in range(ahead):
                    w_slot = base + u32(WEIGHTS_AT) + u32(i) * u32(W_STAGE)
                    barrier = full + u32(i) * u32(8)
                    load_weights(source, slab_bytes, second, u32(begin + u32(i)), slab, end, w_slot, barrier)
                    if not NORM and i == 0:
                        tma_prefetch_2d(x_map, begin << u32(6), token)
                wait_for_predecessors()
                known = u32(0)  # of the first tiles of tokens: those whose rows were seen to be there
                if NORM:
                    mbarrier_wait(tickets_out, u32(0))
                    launch_dependents()
                    mbarrier_wait(all_normed, u32(0))
                while first < last or whole < tiles:
                    tile, g0, g1, first, whole = next_segment(first, last, whole, groups, blocks)
                    token_tile, slab_set = locate(tile, swath, sets, token_tiles)
                    token = token_tile * u32(TOKENS) + rank * u32(TOKENS // CLUSTER)
                    slab, end, second = find_set(slab_set, border, slabs)
                    slab = u32(slab + rank * u32(GROUPS))
                    source, slab_bytes = find_weights(weights, behind, slab, border, second, steps)
                    if NORM:
                        bit = u32(0)
                        if token_tile < u32(32):
                            bit = u32(u32(1) << token_tile)
                        if (known & bit) == u32(0):
                            wanted = min(tile_turns, u32(turns - token_tile * tile_turns))
                            while load_acquire(normed + u64(token_tile) * u64(4)) < wanted:
                                pass
                            fence_proxy_async_global()
                            known = u32(known | bit)
                    for k in range(u32(g0 << u32(2)), min(u32(g1 << u32(2)), steps)):
                        barrier = full + stage * u32(8)
                        if ahead > 0:
                            ahead = u32(ahead - u32(1))
                        else:
                            mbarrier_wait(empty + stage * u32(8), phase ^ u32(1))
                            w_slot = base + u32(WEIGHTS_AT) + stage * u32(W_STAGE)
                            load_weights(source, slab_bytes, second, u32(k), slab, end, w_slot, barrier)
                        x_slot = base + stage * u32(X_STAGE)
                        if CLUSTER > 1:
                            tma_multicast_2d(
                                x_slot + rank * u32(X_PART), x_map, barrier, u32(k) << u32(6), token, (1 << CLUSTER) - 1
                            )
                        else:
                            tma_load_2d(x_slot, x_map, barrier, u32(k) << u32(6), token)
                        stage, phase = advance(stage, phase)
                if NORM:
                    most = u32(u32(cuda.gridDim.x) - u32(1))
                    if leave(workspace + u64(LEFT_AT), most) == most:
                        for i in range(token_tiles):
                            store_release(normed + u64(u32(i)) * u64(4), u32(0))
        else:
            more_registers()
            side = u32(group - u32(1))
            local = thread & u32(127)
            staging = base + u32(STAGING_AT) + side * u32(BUFFERS)
            if NORM:
                # The first ticket, and the weights, are there when the predecessors end.
                ticket_at = u32(staging + u32(2 * ROW_SCRATCH))
                last_ticket = u32(turns + u32(cuda.gridDim.x) * u32(GROUPS) - u32(1))
                if local == 0:
                    ticket = take(tickets, last_ticket)
                    put_number(ticket_at, ticket)
                    if ticket >= turns:
                        arrive(tickets_out)
                weight = norm_weight
                if AHEAD:
                    weight = load_row(norm_weight, local, cols)
            wait_for_predecessors()
            if NORM:
                named_barrier(side + u32(1), u32(128))
                turn = get_number(ticket_at)
                pitch = u64(cols) * u64(4)
                place = u32(0)
                while turn < turns:
                    its_tile = u32(turn // tile_turns)
                    x_row = u32(its_tile * u32(TOKENS) + u32(turn - its_tile * tile_turns) * turn_rows)
                    end = min(u32(x_row + turn_rows), min(u32(u32(its_tile + u32(1)) * u32(TOKENS)), m))
                    values = load_row(hidden + u64(x_row) * pitch, local, cols)
                    ticket_at = ticket_at ^ u32(4)
                    if local == 0:
                        ticket = take(tickets, last_ticket)
                        put_number(ticket_at, ticket)
                        if ticket >= turns:
                            arrive(tickets_out)
                    while x_row < end:
                        after = u32(x_row + u32(1))
                        source = hidden + u64(after) * pitch
                        there = u32(cols if after < end else u32(0))
                        if AHEAD:
                            coming = load_row(source, local, there)
                        # A warp may still read one place while others write the other, until the next barrier.
                        sums = measure_row(values, weight, local, cols, side + u32(1), staging + place)
                        place = place ^ u32(ROW_SCRATCH)
                        inverse = reciprocal(root(quotient(sums[0], f32(cols)) + eps))
                        factors = row_scales(sums[2] * inverse)
                        if local == 0:
                            store_float(token_scale + u64(x_row) * u64(4), factors[0])
                            # A little more than the norm: gemm_epilogue's bound must hold for rounded operands too.
                            store_float(token_norm + u64(x_row) * u64(4), root(sums[1]) * inverse * f32(1.002))
                        put_row(
                            half + u64(x_row) * (pitch >> u64(1)), values, weight, inverse * factors[1], local, cols
                        )
                        values = coming if AHEAD else load_row(source, local, there)
                        x_row = after
                    # The copy engines of all blocks read these rows: their writers and their readers order both.
                    fence_proxy_async_global()
                    named_barrier(side + u32(1), u32(128))
                    if local == 0:
                        mark(normed + u64(its_tile) * u64(4))
                    turn = get_number(ticket_at)
                if local == 0:
                    arrive(all_normed)
                # Not kept beside a row, which takes all registers.
                side = u32((thread_index() >> u32(7)) - u32(1))
            worker = worker_of(block, workers)
            first = range_start(worker, split, workers)
            last = range_start(worker + u32(1), split, workers)
            whole = u32(split_tiles + block)
            stage = u32(0)
            phase = u32(0)
            lane = thread & u32(31)
            row = ((local >> u32(5)) << u32(4)) + (lane >> u32(2))
            slot = base + u32(WEIGHTS_AT) + side * u32(SLOT)
            part = u32(rank * u32(GROUPS) + side)
            scales = base + u32(SCALES_AT) + side * u32(SCALES)
            never = u32(steps == 0)
            late = side
            # A warp's first lanes release a stage in each block of the cluster.
            freed = u32(empty)
            if CLUSTER > 1:
                freed = peer_address(empty, lane & u32(CLUSTER - 1))
            while first < last or whole < tiles:
                tile, g0, g1, first, whole = next_segment(first, last, whole, groups, blocks)
                count = u32(min(u32(g1 << u32(2)), steps) - (g0 << u32(2)))
                token_tile, slab_set = locate(tile, swath, sets, token_tiles)
                token = token_tile * u32(TOKENS)
                slab, end, second = find_set(slab_set, border, slabs)
                slab = u32(slab + part)
                if NORM:
                    # The producer has seen the rows: their scales are there too.
                    mbarrier_wait(full + stage * u32(8), phase)
                # What the epilogue multiplies by, on its way from memory while the main loop runs.
                n = u64(min(slab, u32(slabs - u32(1))) * u32(64) + row) * u64(4)
                scale_a = load_float(row_scale + n)
                scale_b = load_float(row_scale + n + u64(32))
                bias_a = f32(0.0)
                bias_b = f32(0.0)
                if bias != 0:
                    bias_a = load_float(bias + n)
                    bias_b = load_float(bias + n + u64(32))
                last_token = u32(m - u32(1))
                mine_0 = u64(min(u32(token + local), last_token)) * u64(4)
                mine_1 = u64(min(u32(token + local + u32(128)), last_token)) * u64(4)
                scale_0 = load_float(token_scale + mine_0)
                scale_1 = scale_0
                if OWN > 1:
                    scale_1 = load_float(token_scale + mine_1)
                norm_0 = f32(0.0)
                norm_1 = f32(0.0)
                if HALF:
                    norm_0 = load_float(token_norm + mine_0)
                    if OWN > 1:
                        norm_1 = load_float(token_norm + mine_1)
                if STAGGERED and late != 0:
                    mbarrier_wait(full + min(late, u32(count - u32(1))) * u32(8), u32(0))
                    late = u32(0)
                acc, stage, phase = multiply_segment(
                    second, base, slot, full, freed, stage, phase, count, local, lane, row, never
                )

                sums = workspace + u64(FLAG_BYTES) + u64(part) * u64(PARTIAL)
                if g0 != 0:
                    write_partial(acc, sums + u64(worker) * u64(SIDES * PARTIAL), local)
                    cuda.threadfence()
                    named_barrier(side + u32(1), u32(128))
                    if local == 0:
                        store_release(workspace + u64((worker * u32(SIDES) + part) * u32(4)), u32(1))
                else:
                    if g1 != groups:
                        # The tile's other parts: wait for all, then add them in the blocks' order.
                        parts = parts_after(u32((tile + u32(1)) * groups), worker, split, workers)
                        flags = workspace + u64(((worker + u32(1)) * u32(SIDES) + part) * u32(4))
                        for i in range(local, parts, u32(128)):
                            while load_acquire(flags + u64(u32(i) * u32(4 * SIDES))) == 0:
                                pass
                        named_barrier(side + u32(1), u32(128))
                        other = sums + u64(u32(worker + u32(1))) * u64(SIDES * PARTIAL)
                        for i in range(u32(0), parts, u32(TOGETHER)):
                            acc = add_partials(acc, other, local, u32(i), parts)
                        named_barrier(side + u32(1), u32(128))
                        for i in range(local, parts, u32(128)):
                            store_release(flags + u64(u32(i) * u32(4 * SIDES)), u32(0))
                    if slab < end:
                        write_scale = u64(0)
                        if HALF and slab == 0:
                            write_scale = out_scale + u64(token) * u64(4)
                        store(
                            acc, local, side + u32(1), staging, scales, out_map, slab * u32(COLUMNS), token, scale_a,
                            scale_b, bias_a, bias_b, (scale_0, scale_1), (norm_0, norm_1), write_scale, m, c2, c1,
                            c0, add,
                        )  # fmt: skip
            if local == 0:
                bulk_wait_read()
        if CLUSTER > 1:
            # The other block may still write here and arrive at these barriers.
            cluster_sync()

    signature = types.void(*(numba_type(spec) for _, spec in ARGUMENTS))
    return gemm_wgmma, signature
