"""Products of 9 to 64 rows on Hopper's tensor cores: quantized W times f16 rows of x (sm_90a).

    y[M, N] = x[M, K] W[N, K]^T

What gemm_wgmma.py does, for weights that come from memory faster than a few warps convert them: as many groups as a
multiprocessor has registers for, each with its slab of 64 weight rows against the same rows of x, and a ring of whole
records of 256 columns, so that barriers, addresses and copies count once where they count four times there. A
thread of the last warp fetches. Where there are fewer sets of slabs than multiprocessors, blocks share a set's records:
each writes its sums to the workspace, and when all are there, adds up those of every part, in order, for its share of
the rows of x. All blocks of such a launch are on the device at once. Counts in the workspace are back at zero at the
end.
"""

from __future__ import annotations

import functools
from typing import Any

from frink_numba.kernels.few_gemm_variant import ARGUMENTS, FLAG_BYTES, PIECES, FewGemm
from frink_numba.kernels.gemm_kinds import GROUP_STEPS


@functools.cache
def build(variant: FewGemm) -> Any:
    """The kernel as a Python function for numba, and its signature."""
    from numba import cuda, types

    from frink_numba.kernels.few_gemm_ops import load_record, multiply_record
    from frink_numba.kernels.gemm_emit import keep, next_stage, wait_multiplied, zeros
    from frink_numba.kernels.gemm_stage import release_stage
    from frink_numba.kernels.gemm_store import partial_ops, store_tile
    from frink_numba.kernels.grid_meeting import arrive, leave
    from frink_numba.kernels.instructions import (
        bulk_wait_read,
        fence_barrier_init,
        launch_dependents,
        load_acquire,
        load_float,
        mbarrier_init,
        mbarrier_wait,
        named_barrier,
        prefetch_line,
        prefetch_map,
        tma_prefetch_2d,
        wait_for_predecessors,
    )
    from frink_numba.kernels.ptx import numba_type, shared_address

    TOKENS, STAGES, SLOT, GROUPS = variant.tokens, variant.stages, variant.slot, variant.groups
    X_STAGE, W_STAGE, RECORD = TOKENS * 512, GROUPS * SLOT, variant.record_bytes
    COLUMNS, HALF, SPLIT = variant.epilogue.columns, variant.epilogue.half, variant.split
    STAGING, STAGING_AT = variant.staging, STAGES * X_STAGE
    WEIGHTS_AT = STAGING_AT + GROUPS * STAGING
    SCALES, SCALES_AT = variant.epilogue.scale_size(TOKENS), WEIGHTS_AT + STAGES * W_STAGE
    BARRIERS_AT = SCALES_AT + GROUPS * SCALES
    PARTIAL, PART, LINES = variant.partial, GROUPS * variant.partial, -(-TOKENS * 4 // 128)

    multiply, load = multiply_record(variant.kind, TOKENS), load_record(variant)
    wait_all, no_sums, no_fragments = wait_multiplied(TOKENS), zeros(TOKENS // 2), zeros(16, "u32")
    no_share, advance, release = zeros(4), next_stage(STAGES), release_stage(1)
    write_partial, _, _ = partial_ops(TOKENS, PART)
    _, add_parts, TOGETHER = partial_ops(8, PART)
    store = store_tile(variant.store_tokens, variant.store, variant.buffers)
    u32, u64, f32 = types.uint32, types.uint64, types.float32

    def few_gemm(
        x_map, out_map, weights, row_scale, token_scale, bias, token_norm, out_scale, workspace, c2, c1, c0, m,
        slabs, records, sets, parts, add,
    ):  # fmt: skip
        shared = cuda.shared.array(0, types.uint8, alignment=1024)
        base = shared_address(shared)
        full = u32(base + u32(BARRIERS_AT))
        empty = u32(full + u32(8 * PIECES * STAGES))
        thread = u32(cuda.threadIdx.x)
        side = thread >> u32(7)
        work = u32(cuda.blockIdx.x)
        pieces = u32(sets * parts)
        slab_bytes = u64(records) * u64(RECORD)
        if thread == 0:
            prefetch_map(x_map)
            prefetch_map(out_map)
            for s in range(STAGES):
                for i in range(PIECES):
                    mbarrier_init(full + u32(8 * PIECES) * u32(s) + u32(8) * u32(i), u32(1))
                mbarrier_init(empty + u32(8 * s), u32(4 * GROUPS))
            fence_barrier_init()
        cuda.syncthreads()
        # Blocks may wait for each other: the grid fits the device, and the next kernel's blocks come behind all of it.
        launch_dependents()
        if side == GROUPS:
            if thread == u32(128 * GROUPS):
                stage = u32(0)
                phase = u32(0)
                # The weights do not depend on the kernels before: a ringful of them goes ahead of the wait. Rows of x
                # that nobody has read or written lately come as near as the L2 cache, and so do their scales.
                first = u32(u32(u32(work % parts) * records) // parts)
                count = u32(u32(u32(u32(work % parts) + u32(1)) * records) // parts) - first
                ahead = u32(min(count, u32(STAGES)))
                slab = u32(u32(work // parts) * u32(GROUPS))
                source = weights + u64(slab) * slab_bytes
                for i in range(ahead):
                    load(
                        source + u64(first + u32(i)) * u64(RECORD), slab_bytes, slab, slabs,
                        base + u32(WEIGHTS_AT) + u32(i) * u32(W_STAGE), base, x_map, u32(0),
                        full + u32(i) * u32(8 * PIECES), u32(1), u32(0),
                    )  # fmt: skip
                    if i == 0:
                        for box in range(GROUP_STEPS):
                            tma_prefetch_2d(x_map, u32(first << u32(8)) + (u32(box) << u32(6)), u32(0))
                for i in range(LINES):
                    prefetch_line(token_scale + u64(128 * i))
                    if HALF:
                        prefetch_line(token_norm + u64(128 * i))
                wait_for_predecessors()
                while work < pieces:
                    part = u32(work % parts)
                    slab = u32(u32(work // parts) * u32(GROUPS))
                    source = weights + u64(slab) * slab_bytes
                    last = u32(u32(u32(part + u32(1)) * records) // parts)
                    for k in range(u32(u32(part * records) // parts), last):
                        fetched = u32(min(ahead, u32(1)))
                        ahead = u32(ahead - fetched)
                        if fetched == 0:
                            mbarrier_wait(empty + stage * u32(8), phase ^ u32(1))
                        load(
                            source + u64(k) * u64(RECORD), slab_bytes, slab, slabs,
                            base + u32(WEIGHTS_AT) + stage * u32(W_STAGE), base + stage * u32(X_STAGE), x_map,
                            u32(k) << u32(8), full + stage * u32(8 * PIECES), u32(1) - fetched, u32(1),
                        )  # fmt: skip
                        stage, phase = advance(stage, phase)
                    work = u32(work + u32(cuda.gridDim.x))
        else:
            wait_for_predecessors()
            stage = u32(0)
            phase = u32(0)
            local = thread & u32(127)
            lane = thread & u32(31)
            row = ((local >> u32(5)) << u32(4)) + (lane >> u32(2))
            slot = base + u32(WEIGHTS_AT) + side * u32(SLOT)
            staging = base + u32(STAGING_AT) + side * u32(STAGING)
            scales = base + u32(SCALES_AT) + side * u32(SCALES)
            never = u32(records == 0)
            while work < pieces:
                part = u32(work % parts)
                piece = u32(work // parts)
                slab = u32(piece * u32(GROUPS) + side)
                # What the epilogue multiplies by, on its way from memory while the main loop runs.
                n = u64(min(slab, u32(slabs - u32(1))) * u32(64) + row) * u64(4)
                scale_a = load_float(row_scale + n)
                scale_b = load_float(row_scale + n + u64(32))
                acc = no_sums()
                old = no_fragments()
                # The stage in use when a piece begins: none yet, so that no lane is to release one.
                done = u32(empty)
                idle = u32(32)
                count = u32(u32(u32(part + u32(1)) * records) // parts) - u32(u32(part * records) // parts)
                for _ in range(count):
                    acc, old = multiply(
                        acc, old, base + stage * u32(X_STAGE), slot + stage * u32(W_STAGE), local, row, never, base,
                        done, lane + idle, full + stage * u32(8 * PIECES), phase,
                    )  # fmt: skip
                    idle = u32(0)
                    done = u32(empty + stage * u32(8))
                    stage, phase = advance(stage, phase)
                acc = wait_all(acc)
                keep(old, never, base)
                release(done, lane + idle)
                bias_a = f32(0.0)
                bias_b = f32(0.0)
                if bias != 0:
                    bias_a = load_float(bias + n)
                    bias_b = load_float(bias + n + u64(32))
                if slab < slabs:
                    if SPLIT:
                        octets = u32(u32(m + u32(7)) >> u32(3))
                        readers = u32(min(parts, octets))
                        sums = workspace + u64(FLAG_BYTES) + u64(piece * parts) * u64(PART) + u64(side * u32(PARTIAL))
                        meeting = workspace + u64(slab) * u64(4)
                        write_partial(acc, sums + u64(part) * u64(PART), local)
                        named_barrier(side + u32(1), u32(128))
                        if local == 0:
                            arrive(meeting, u32(parts + readers - u32(1)))
                            if part < octets:
                                while load_acquire(meeting) < parts:
                                    pass
                                leave(meeting, u32(parts + readers - u32(1)))
                        named_barrier(side + u32(1), u32(128))
                        for octet in range(part, octets, parts):
                            token = u32(octet) << u32(3)
                            # On their way from memory together with the parts.
                            mine = u64(min(u32(token + local), u32(m - u32(1)))) * u64(4)
                            scale = load_float(token_scale + mine)
                            norm = f32(0.0)
                            write_scale = u64(0)
                            if HALF:
                                norm = load_float(token_norm + mine)
                                if slab == 0:
                                    write_scale = out_scale + u64(token) * u64(4)
                            share = no_share()
                            for i in range(u32(0), parts, u32(TOGETHER)):
                                share = add_parts(share, sums + u64(u32(octet)) * u64(2048), local, u32(i), parts)
                            store(
                                share, local, side + u32(1), staging, scales, out_map, slab * u32(COLUMNS), token,
                                scale_a, scale_b, bias_a, bias_b, (scale, scale), (norm, norm), write_scale, m, c2, c1,
                                c0, add,
                            )  # fmt: skip
                    else:
                        mine = u64(min(local, u32(m - u32(1)))) * u64(4)
                        scale = load_float(token_scale + mine)
                        norm = f32(0.0)
                        write_scale = u64(0)
                        if HALF:
                            norm = load_float(token_norm + mine)
                            if slab == 0:
                                write_scale = out_scale
                        store(
                            acc, local, side + u32(1), staging, scales, out_map, slab * u32(COLUMNS), u32(0), scale_a,
                            scale_b, bias_a, bias_b, (scale, scale), (norm, norm), write_scale, m, c2, c1, c0, add,
                        )  # fmt: skip
                work = u32(work + u32(cuda.gridDim.x))
            if local == 0:
                bulk_wait_read()

    signature = types.void(*(numba_type(spec) for _, spec in ARGUMENTS))
    return few_gemm, signature
