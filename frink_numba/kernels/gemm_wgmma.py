"""The `wgmma` tier: quantized W times f16 tokens on Hopper's tensor cores, one persistent kernel (sm_90a).

    y[M, N] = x[M, K] W[N, K]^T

Three warp groups share a block. Group 0 is the producer: one thread of it keeps a ring of stages full with bulk copies.
Groups 1 and 2 are consumers, each with its slab of 64 weight rows against the same tokens: they turn the codes of a
step (64 columns) into f16 operands in registers while the tensor cores still work on the step before, and release a
stage once per warp. A stage holds the tokens' tile [T, 64] f16, 128-byte swizzled, and both slabs' bytes of the step.

Blocks are persistent (one per multiprocessor). The first `split_tiles` tiles are cut, along K too, into equal
ranges of groups of four steps, one range a block; the remaining tiles go to the blocks whole. A block whose range
begins inside a tile writes its sums to the workspace; the block that has the tile's first group adds them up, in the
blocks' order, so that results repeat bit by bit. Flags in the workspace are back at zero at the end.

Registers: the accumulators take T/2, two sets of 16 fragments alternate. See `gemm_emit.keep` for the hazard that
decides the shape of the main loop, and docs/kernels/gemm.md for the picture.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from frink_numba.kernels.gemm_epilogue import PLAIN, Epilogue
from frink_numba.kernels.gemm_kinds import FRAGMENT_KINDS, FragmentKind
from frink_numba.kernels.gemm_plan import blocks_on_multiprocessor

THREADS = 384
SHARED_LIMIT = 232448  # bytes a block may use on sm_90
FLAG_BYTES = 8192  # the workspace's flags: two for each block
_MOST_STAGES = 16

ARGUMENTS = (
    # name, type
    ("x_map", "u64"),  # tensor map of the tokens, in device memory
    ("out_map", "u64"),
    ("weights", "u64"),
    ("row_scale", "u64"),
    ("token_scale", "u64"),  # float32, as many as the token tiles cover
    ("bias", "u64"),  # float32 [slabs * 64], or 0
    ("token_norm", "u64"),  # f16 results only, else 0
    ("out_scale", "u64"),  # f16 results only, else 0
    ("workspace", "u64"),  # FLAG_BYTES of zeros, then the sums of each block
    ("c2", "f32"),
    ("c1", "f32"),
    ("c0", "f32"),
    ("token_tiles", "u32"),
    ("slabs", "u32"),
    ("steps", "u32"),
    ("swath", "u32"),  # token tiles that are walked through together, for the L2 cache
    ("split_tiles", "u32"),
    ("add", "u32"),  # add to the result instead of writing it (float32, not gated)
)


@dataclass(frozen=True, slots=True)
class WgmmaGemm:
    """One compiled variant:

    the kind of the weights, T tokens a tile, the epilogue, and the blocks of a cluster (1 or 2).
    """

    kind: str
    tokens: int
    epilogue: Epilogue = PLAIN
    cluster: int = 1

    @property
    def resident(self) -> int:
        return blocks_on_multiprocessor(self.tokens, self.cluster)

    @property
    def row(self) -> FragmentKind:
        return FRAGMENT_KINDS[self.kind]

    @property
    def slot(self) -> int:
        """Bytes of one slab's step in a stage: room for the header, then the step."""
        return -(-(self.row.header_size + self.row.step_size) // 128) * 128

    @property
    def stage(self) -> int:
        return self.tokens * 128 + 2 * self.slot

    @property
    def around(self) -> int:
        """Bytes of shared memory beside the stages and their barriers: staging and scales of two warp groups."""
        return 4 * self.epilogue.buffer_size(self.tokens) + 2 * self.epilogue.scale_size(self.tokens)

    @property
    def stages(self) -> int:
        limit = SHARED_LIMIT if self.resident == 1 else SHARED_LIMIT // 2 - 1024
        return min(_MOST_STAGES, (limit - self.around) // (self.stage + 16))

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory: tokens, staging, weights, scales, barriers."""
        return self.stages * (self.stage + 16) + self.around

    @property
    def partial(self) -> int:
        """Bytes of a cluster's sums in the workspace."""
        return self.cluster * 2 * 64 * self.tokens * 4

    def workspace(self, clusters: int) -> int:
        return FLAG_BYTES + clusters * self.partial


@functools.cache
def build(gemm: WgmmaGemm) -> Any:
    """The kernel as a Python function for numba, and its signature."""
    from numba import cuda, types

    from frink_numba.kernels.gemm_emit import (
        fragment_ops,
        keep,
        locate,
        multiply_step,
        next_segment,
        parts_after,
        range_start,
        wait_multiplied,
        wait_one_pending,
        zeros,
    )
    from frink_numba.kernels.gemm_stage import load_weights_step, release_stage
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
        wait_for_predecessors,
    )
    from frink_numba.kernels.ptx import numba_type, shared_address

    kind = gemm.row
    TOKENS, STAGES, SLOT = gemm.tokens, gemm.stages, gemm.slot
    X_STAGE, W_STAGE = TOKENS * 128, 2 * SLOT
    RECORD, PER_RECORD = kind.record_size, kind.group_steps
    BUFFER = gemm.epilogue.buffer_size(TOKENS)
    COLUMNS = gemm.epilogue.columns
    CLUSTER, SIDES = gemm.cluster, 2 * gemm.cluster
    PARTIAL = gemm.partial // SIDES
    X_PART = X_STAGE // CLUSTER
    HALF = gemm.epilogue.half
    TAIL = PER_RECORD == 1
    STAGING_AT = STAGES * X_STAGE
    WEIGHTS_AT = STAGING_AT + 4 * BUFFER
    SCALES_AT = WEIGHTS_AT + STAGES * W_STAGE
    SCALES = gemm.epilogue.scale_size(TOKENS)
    BARRIERS_AT = SCALES_AT + 2 * SCALES
    OWN = max(1, TOKENS // 128)
    # K-major operand, 128-byte swizzle, rows of 128 bytes, groups of eight rows 1024 bytes apart.
    DESCRIPTOR = (1 << 62) | (64 << 32) | (1 << 16)

    header, (fragments0, fragments1, fragments2, fragments3) = fragment_ops(gemm.kind)
    multiply, wait_all, no_sums = multiply_step(TOKENS), wait_multiplied(TOKENS), zeros(TOKENS // 2)
    no_fragments = zeros(16, "u32")
    write_partial, add_partial = partial_ops(TOKENS)
    store = store_tile(TOKENS, gemm.epilogue)
    few, many = (32, 104) if gemm.resident == 2 else (40, 232) if TOKENS > 128 else (56, 224)
    fewer_registers, more_registers = set_registers(few, more=False), set_registers(many, more=True)
    release = release_stage(CLUSTER)
    load_weights = load_weights_step(gemm.kind, TOKENS * 128, SLOT)
    u32, u64, f32 = types.uint32, types.uint64, types.float32

    def gemm_wgmma(
        x_map, out_map, weights, row_scale, token_scale, bias, token_norm, out_scale, workspace, c2, c1, c0,
        token_tiles, slabs, steps, swath, split_tiles, add,
    ):  # fmt: skip
        shared = cuda.shared.array(0, types.uint8, alignment=1024)
        base = shared_address(shared)
        full = u32(base + u32(BARRIERS_AT))
        empty = u32(full + u32(8 * STAGES))
        thread = u32(cuda.threadIdx.x)
        group = thread >> u32(7)
        rank = u32(0)
        if CLUSTER > 1:
            rank = cluster_rank()
        block = u32(u32(cuda.blockIdx.x) >> u32(CLUSTER - 1))
        blocks = u32(u32(cuda.gridDim.x) >> u32(CLUSTER - 1))
        sets = u32(u32(slabs + u32(SIDES - 1)) >> u32(CLUSTER))
        tiles = u32(token_tiles * sets)
        groups = u32((steps + u32(3)) >> u32(2))
        slab_bytes = u64(steps >> u32(PER_RECORD >> 1)) * u64(RECORD)
        if thread == 0:
            prefetch_map(x_map)
            prefetch_map(out_map)
            for s in range(STAGES):
                mbarrier_init(full + u32(8 * s), u32(1))
                mbarrier_init(empty + u32(8 * s), u32(8 * CLUSTER))
            fence_barrier_init()
        if CLUSTER > 1:
            cluster_sync()
        else:
            cuda.syncthreads()

        launch_dependents()

        split = u32(split_tiles * groups)
        if group == 0:
            fewer_registers()
            if thread == 0:
                first = range_start(block, split, blocks)
                last = range_start(block + u32(1), split, blocks)
                whole = u32(split_tiles + block)
                stage = u32(0)
                phase = u32(0)
                # The weights do not depend on the kernels before: a ringful of them goes ahead of the wait.
                tile, g0, g1, _, _ = next_segment(first, last, whole, groups, blocks)
                _, slab_set = locate(tile, swath, sets, token_tiles)
                begin = u32(g0 << u32(2))
                ahead = u32(0)
                if first < last or whole < tiles:
                    ahead = u32(min(u32(min(u32(g1 << u32(2)), steps) - begin), u32(STAGES)))
                slab = u32(slab_set * u32(SIDES) + rank + rank)
                for i in range(ahead):
                    w_slot = base + u32(WEIGHTS_AT) + u32(i) * u32(W_STAGE)
                    load_weights(
                        weights + u64(slab) * slab_bytes, slab_bytes, u32(begin + u32(i)), slab, slabs, w_slot,
                        full + u32(i) * u32(8),
                    )  # fmt: skip
                wait_for_predecessors()
                while first < last or whole < tiles:
                    tile, g0, g1, first, whole = next_segment(first, last, whole, groups, blocks)
                    token_tile, slab_set = locate(tile, swath, sets, token_tiles)
                    token = token_tile * u32(TOKENS) + rank * u32(TOKENS // CLUSTER)
                    slab = u32(slab_set * u32(SIDES) + rank + rank)
                    source = weights + u64(slab) * slab_bytes
                    for k in range(u32(g0 << u32(2)), min(u32(g1 << u32(2)), steps)):
                        barrier = full + stage * u32(8)
                        if ahead > 0:
                            ahead = u32(ahead - u32(1))
                        else:
                            mbarrier_wait(empty + stage * u32(8), phase ^ u32(1))
                            w_slot = base + u32(WEIGHTS_AT) + stage * u32(W_STAGE)
                            load_weights(source, slab_bytes, u32(k), slab, slabs, w_slot, barrier)
                        x_slot = base + stage * u32(X_STAGE)
                        if CLUSTER > 1:
                            tma_multicast_2d(
                                x_slot + rank * u32(X_PART), x_map, barrier, u32(k) << u32(6), token, (1 << CLUSTER) - 1
                            )
                        else:
                            tma_load_2d(x_slot, x_map, barrier, u32(k) << u32(6), token)
                        stage = u32(stage + u32(1))
                        if stage == STAGES:
                            stage = u32(0)
                            phase = u32(phase ^ u32(1))
        else:
            more_registers()
            wait_for_predecessors()
            first = range_start(block, split, blocks)
            last = range_start(block + u32(1), split, blocks)
            whole = u32(split_tiles + block)
            stage = u32(0)
            phase = u32(0)
            side = u32(group - u32(1))
            local = thread & u32(127)
            lane = thread & u32(31)
            row = ((local >> u32(5)) << u32(4)) + (lane >> u32(2))
            slot = base + u32(WEIGHTS_AT) + side * u32(SLOT)
            part = u32(rank + rank + side)
            staging = base + u32(STAGING_AT) + side * u32(2 * BUFFER)
            scales = base + u32(SCALES_AT) + side * u32(SCALES)
            never = u32(steps == 0)
            # A warp's first lanes release a stage in each block of the cluster.
            freed = u32(empty)
            if CLUSTER > 1:
                freed = peer_address(empty, lane & u32(CLUSTER - 1))
            while first < last or whole < tiles:
                tile, g0, g1, first, whole = next_segment(first, last, whole, groups, blocks)
                count = u32(min(u32(g1 << u32(2)), steps) - (g0 << u32(2)))
                token_tile, slab_set = locate(tile, swath, sets, token_tiles)
                token = token_tile * u32(TOKENS)
                slab = u32(slab_set * u32(SIDES) + part)
                # What the epilogue multiplies by, on its way from memory while the main loop runs.
                n = u64(min(slab, u32(slabs - u32(1))) * u32(64) + row) * u64(4)
                scale_a = load_float(row_scale + n)
                scale_b = load_float(row_scale + n + u64(32))
                bias_a = f32(0.0)
                bias_b = f32(0.0)
                if bias != 0:
                    bias_a = load_float(bias + n)
                    bias_b = load_float(bias + n + u64(32))
                mine = u64(u32(token + min(local, u32(TOKENS - 1)))) * u64(4)
                scale_0 = load_float(token_scale + mine)
                scale_1 = scale_0
                if OWN > 1:
                    scale_1 = load_float(token_scale + mine + u64(512))
                acc = no_sums()
                odd = no_fragments()
                # The step in flight when a group begins: none yet, so that no lane is to release a stage.
                done = u32(freed)
                idle = u32(32)
                for _ in range(count >> u32(2)):
                    # Four steps in a straight line: fragments of a step take one register set while the step before
                    # is in flight with the other, across the groups too.
                    mbarrier_wait(full + stage * u32(8), phase)
                    at = u32(slot + stage * u32(W_STAGE))
                    shared_scales = header(at, row)
                    even = fragments0(at, local, row, shared_scales)
                    acc = multiply(acc, even, u64(DESCRIPTOR) | u64((base + stage * u32(X_STAGE)) >> u32(4)))
                    wait_one_pending()
                    keep(odd, never, base)
                    release(done, lane + idle)
                    idle = u32(0)
                    done = u32(freed + stage * u32(8))
                    stage = u32(stage + u32(1))
                    if stage == STAGES:
                        stage = u32(0)
                        phase = u32(phase ^ u32(1))

                    mbarrier_wait(full + stage * u32(8), phase)
                    at = u32(slot + stage * u32(W_STAGE))
                    odd = fragments1(at, local, row, shared_scales)
                    acc = multiply(acc, odd, u64(DESCRIPTOR) | u64((base + stage * u32(X_STAGE)) >> u32(4)))
                    wait_one_pending()
                    keep(even, never, base)
                    release(done, lane)
                    done = u32(freed + stage * u32(8))
                    stage = u32(stage + u32(1))
                    if stage == STAGES:
                        stage = u32(0)
                        phase = u32(phase ^ u32(1))

                    mbarrier_wait(full + stage * u32(8), phase)
                    at = u32(slot + stage * u32(W_STAGE))
                    even = fragments2(at, local, row, shared_scales)
                    acc = multiply(acc, even, u64(DESCRIPTOR) | u64((base + stage * u32(X_STAGE)) >> u32(4)))
                    wait_one_pending()
                    keep(odd, never, base)
                    release(done, lane)
                    done = u32(freed + stage * u32(8))
                    stage = u32(stage + u32(1))
                    if stage == STAGES:
                        stage = u32(0)
                        phase = u32(phase ^ u32(1))

                    mbarrier_wait(full + stage * u32(8), phase)
                    at = u32(slot + stage * u32(W_STAGE))
                    odd = fragments3(at, local, row, shared_scales)
                    acc = multiply(acc, odd, u64(DESCRIPTOR) | u64((base + stage * u32(X_STAGE)) >> u32(4)))
                    wait_one_pending()
                    keep(even, never, base)
                    release(done, lane)
                    done = u32(freed + stage * u32(8))
                    stage = u32(stage + u32(1))
                    if stage == STAGES:
                        stage = u32(0)
                        phase = u32(phase ^ u32(1))
                acc = wait_all(acc)
                keep(odd, never, base)
                release(done, lane + idle)
                if TAIL:
                    for _ in range(count & u32(3)):
                        mbarrier_wait(full + stage * u32(8), phase)
                        at = u32(slot + stage * u32(W_STAGE))
                        even = fragments0(at, local, row, header(at, row))
                        acc = multiply(acc, even, u64(DESCRIPTOR) | u64((base + stage * u32(X_STAGE)) >> u32(4)))
                        acc = wait_all(acc)
                        keep(even, never, base)
                        release(u32(freed + stage * u32(8)), lane)
                        stage = u32(stage + u32(1))
                        if stage == STAGES:
                            stage = u32(0)
                            phase = u32(phase ^ u32(1))

                sums = workspace + u64(FLAG_BYTES) + u64(part) * u64(PARTIAL)
                if g0 != 0:
                    write_partial(acc, sums + u64(block) * u64(SIDES * PARTIAL), local)
                    cuda.threadfence()
                    named_barrier(side + u32(1), u32(128))
                    if local == 0:
                        store_release(workspace + u64((block * u32(SIDES) + part) * u32(4)), u32(1))
                else:
                    if g1 != groups:
                        # The tile's other parts: wait for all, then add them in the blocks' order.
                        parts = parts_after(u32((tile + u32(1)) * groups), block, split, blocks)
                        flags = workspace + u64(((block + u32(1)) * u32(SIDES) + part) * u32(4))
                        for i in range(local, parts, u32(128)):
                            while load_acquire(flags + u64(u32(i) * u32(4 * SIDES))) == 0:
                                pass
                        named_barrier(side + u32(1), u32(128))
                        for i in range(parts):
                            other = u64(u32(block + u32(1)) + u32(i))
                            acc = add_partial(acc, sums + other * u64(SIDES * PARTIAL), local)
                        named_barrier(side + u32(1), u32(128))
                        for i in range(local, parts, u32(128)):
                            store_release(flags + u64(u32(i) * u32(4 * SIDES)), u32(0))
                    if slab < slabs:
                        write_scale = u64(0)
                        norm_0 = f32(0.0)
                        norm_1 = f32(0.0)
                        if HALF:
                            norm_0 = load_float(token_norm + mine)
                            if OWN > 1:
                                norm_1 = load_float(token_norm + mine + u64(512))
                            if slab == 0:
                                write_scale = out_scale + u64(token) * u64(4)
                        store(
                            acc, local, side + u32(1), staging, scales, out_map, slab * u32(COLUMNS), token, scale_a,
                            scale_b, bias_a, bias_b, (scale_0, scale_1), (norm_0, norm_1), write_scale, c2, c1, c0,
                            add,
                        )  # fmt: skip
            if local == 0:
                bulk_wait_read()
        if CLUSTER > 1:
            # The other block may still write here and arrive at these barriers.
            cluster_sync()

    signature = types.void(*(numba_type(spec) for _, spec in ARGUMENTS))
    return gemm_wgmma, signature
