"""The `wgmma` tier of the fused attention: one persistent kernel for Hopper (sm_90a). Grid: one block a multiprocessor.

A tile is 64 rows for each compute group: queries of one K/V head, packed so that all query heads of a position come
together, over the keys from its last visible block down to the first. Thread groups of a block:

- group 0, warp 0, one thread: takes the next tile (heaviest first, by an atomic counter, so that nobody idles), tells
  the others through two slots in shared memory, and keeps rings of K and V blocks full with bulk copies;
- group 0, warps 1 to 3: bring the tile's Q, swizzled, while the tile before is still being computed;
- the others compute, each its 64 rows: see fused_attention_step.py.

A tile's result does not depend on who computes it: runs repeat bit by bit.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from frink_numba.kernels.fused_attention_plan import LOG2E, Layout

SHARED_LIMIT = 232448  # bytes a block may use on sm_90
WORKSPACE_BYTES = 128  # the counter of tiles, and that of blocks that have ended

ARGUMENTS = (
    # name, type
    ("q", "u64"),
    ("out", "u64"),
    ("table", "u64"),
    ("maps", "u64"),  # two tensor maps a sequence: K, V
    ("workspace", "u64"),
    ("sinks", "u64"),  # float32 [n_heads], or 0
    ("factor", "f32"),  # of the scores, to the units of log2
    ("inner", "f32"),  # soft cap only: see fused_attention_emit.cap
    ("sequences", "u32"),
    ("n_heads", "u32"),
    ("n_kv_heads", "u32"),
    ("group", "u32"),
    ("resident", "u32"),  # positions times K/V heads whose tiles are walked through together, for the L2 cache
    ("window", "u32"),  # windowed variants only
)


@functools.cache
def row_ops(layout: Layout) -> tuple[Any, Any]:
    """(limits, row_inside) of a compute thread's two rows."""
    from frink_numba.kernels.fused_attention_emit import thread_of
    from frink_numba.kernels.fused_attention_schedule import row_limits
    from frink_numba.kernels.ptx import Emitter, Register, emitted

    def row_of(thread: Register) -> Register:
        """The thread's first row in the tile; the second is 8 further."""
        return ((thread - 128) >> 5 << 4) + ((thread & 31) >> 2)

    @emitted("u32")
    def row_inside(e: Emitter) -> Register:
        return row_of(thread_of(e))

    @emitted("u32x2", "u32", "u32", "u32", "u32", "u32")
    def limits(
        e: Emitter, first_row: Register, rows: Register, start: Register, group: Register, block: Register
    ) -> list[Register]:
        thread = thread_of(e)
        inside = [row_of(thread), row_of(thread) + 8]
        return row_limits(e, layout.keys, thread, inside, first_row, rows, start, group, block)

    return limits, row_inside


@functools.cache
def build(layout: Layout) -> tuple[Any, Any]:
    """The kernel as a Python function for numba, and its signature."""
    from numba import cuda, types

    from frink_numba.kernels.fused_attention_schedule import schedule_ops
    from frink_numba.kernels.fused_attention_step import load_block, load_queries, step_ops, store_op
    from frink_numba.kernels.gemm_stage import release_stage
    from frink_numba.kernels.instructions import (
        fence_barrier_init,
        launch_dependents,
        load_float,
        mbarrier_init,
        mbarrier_wait,
        prefetch_map,
        set_registers,
        wait_for_predecessors,
    )
    from frink_numba.kernels.ptx import instruction, numba_type, shared_address

    KEYS, GROUPS, STAGES, Q_STAGES, ROWS = layout.keys, layout.groups, layout.stages, layout.q_stages, layout.rows
    Q_GROUP = layout.q_group
    TILES_AT = layout.tiles_at
    K_FULL, K_FREE, V_FULL, V_FREE = layout.k_full, layout.k_free, layout.v_full, layout.v_free
    Q_FULL, Q_FREE, TILE_FULL, TILE_FREE = layout.q_full, layout.q_free, layout.tile_full, layout.tile_free
    HEAD_BYTES = -(-layout.head_dim // 8) * 16
    OUT_BYTES = layout.head_dim * 2
    END = 0xFFFFFFFF
    WINDOWED = layout.windowed

    first, masked_step, free_step, last = step_ops(layout)
    store, load_q = store_op(layout), load_queries(layout)
    load_k, load_v = load_block(layout, layout.k_at, layout.k_full), load_block(layout, layout.v_at, layout.v_full)
    limits, row_inside = row_ops(layout)
    locate, bounds, counts = schedule_ops(layout.rows, layout.keys, layout.windowed)
    release = release_stage(1)
    few, many = layout.registers
    fewer_registers, more_registers = set_registers(few, more=False), set_registers(many, more=True)
    load_record = instruction("ld.global.v4.u32 {$0,$1,$2,$3}, [$4];", "u32x4", "u64")
    read_slot = instruction("ld.shared.v4.u32 {$0,$1,$2,$3}, [$4];", "u32x4", "u32")
    write_slot = instruction("st.shared.v4.u32 [$0], {$1,$2,$3,$4};", None, "u32", "u32", "u32", "u32", "u32")
    take = instruction("atom.global.add.u32 $0, [$1], 1;", "u32", "u64")
    reset = instruction("st.global.v2.u32 [$0], {$1,$1};", None, "u64", "u32")
    arrive = instruction("mbarrier.arrive.shared::cta.b64 _, [$0];", None, "u32")
    pass_turn = instruction("bar.arrive $0, 256;", None, "u32")
    quotient = instruction("div.u32 $0, $1, $2;", "u32", "u32", "u32", pure=True)
    thread_index = instruction("mov.u32 $0, %tid.x;", "u32")
    sync_warp = instruction("bar.warp.sync 0xffffffff;", None)
    u32, u64, f32 = types.uint32, types.uint64, types.float32

    def attention_wgmma(
        q, out, table, maps, workspace, sinks, factor, inner, sequences, n_heads, n_kv_heads, group, resident, window
    ):
        shared = cuda.shared.array(0, types.uint8, alignment=1024)
        base = shared_address(shared)
        thread = u32(cuda.threadIdx.x)
        side = u32(thread >> u32(7))
        lane = u32(thread & u32(31))
        if thread == 0:
            prefetch_map(maps)
            prefetch_map(maps + u64(128))
            for s in range(STAGES):
                mbarrier_init(base + u32(K_FULL + 8 * s), u32(1))
                mbarrier_init(base + u32(K_FREE + 8 * s), u32(4 * GROUPS))
                mbarrier_init(base + u32(V_FULL + 8 * s), u32(1))
                mbarrier_init(base + u32(V_FREE + 8 * s), u32(4 * GROUPS))
            for s in range(Q_STAGES * GROUPS):
                mbarrier_init(base + u32(Q_FULL + 8 * s), u32(3))
                mbarrier_init(base + u32(Q_FREE + 8 * s), u32(4))
            for s in range(2):
                mbarrier_init(base + u32(TILE_FULL + 8 * s), u32(1))
                mbarrier_init(base + u32(TILE_FREE + 8 * s), u32(4 * GROUPS + 3))
            fence_barrier_init()
        cuda.syncthreads()
        launch_dependents()
        wait_for_predecessors()

        if side == 0:
            fewer_registers()
            done = u32(0)  # tiles so far
            if thread == 0:
                loaded = u32(0)  # blocks of keys so far
                tile = u32(cuda.blockIdx.x)
                going = u32(1)
                while going != 0:
                    # Which sequence has the tile.
                    sequence = u32(0)
                    number = u32(tile)
                    start = u32(0)
                    batch_row = u32(0)
                    tokens = u32(0)
                    tiles = u32(1)
                    while sequence < sequences:
                        batch_row, tokens, start, _ = load_record(table + u64(sequence) * u64(32))
                        tiles = quotient(u32(u32(tokens * group) + u32(ROWS - 1)), u32(ROWS))
                        count = u32(tiles * n_kv_heads)
                        if number < count:
                            break
                        number = u32(number - count)
                        sequence = u32(sequence + u32(1))
                    head = u32(END)
                    first_row = u32(0)
                    if sequence < sequences:
                        head, first_row = locate(number, tiles, n_kv_heads, u32(start + tokens), resident)
                    slot = u32(done & u32(1))
                    mbarrier_wait(base + u32(TILE_FREE) + slot * u32(8), (u32(done >> u32(1)) & u32(1)) ^ u32(1))
                    at = u32(base + u32(TILES_AT) + slot * u32(32))
                    write_slot(at, head, first_row, tokens * group, start)
                    write_slot(at + u32(16), batch_row, u32(0), u32(0), u32(0))
                    arrive(base + u32(TILE_FULL) + slot * u32(8))
                    done = u32(done + u32(1))
                    if head == u32(END):
                        going = u32(0)
                    else:
                        tile = u32(take(workspace) + u32(cuda.gridDim.x))
                        end, _, _, begin = bounds(first_row, u32(tokens * group), start, group, window)
                        k_map = maps + u64(sequence) * u64(256)
                        block = u32(end)
                        while u32(block + u32(1)) > begin:
                            # K of the next block is needed before V of this one.
                            if block > begin:
                                load_k(base, k_map, head, u32(block - u32(1)), loaded)
                                loaded = u32(loaded + u32(1))
                            if block < end:
                                load_v(base, k_map + u64(128), head, block, u32(loaded - u32(block > begin) - u32(1)))
                            block = u32(block - u32(1))
                # The last block to end leaves the counters at zero.
                cuda.threadfence()
                if take(workspace + u64(4)) == u32(u32(cuda.gridDim.x) - u32(1)):
                    reset(workspace, u32(0))
            elif thread >= 32:
                going = u32(1)
                while going != 0:
                    slot = u32(done & u32(1))
                    mbarrier_wait(base + u32(TILE_FULL) + slot * u32(8), u32(done >> u32(1)) & u32(1))
                    at = u32(base + u32(TILES_AT) + slot * u32(32))
                    head, first_row, rows, _ = read_slot(at)
                    batch_row, _, _, _ = read_slot(at + u32(16))
                    sync_warp()
                    release(base + u32(TILE_FREE) + slot * u32(8), lane)
                    if head == u32(END):
                        going = u32(0)
                    else:
                        row_stride = u64(n_heads) * u64(HEAD_BYTES)
                        source = q + u64(batch_row) * row_stride + u64(head * group) * u64(HEAD_BYTES)
                        phase = u32(u32(done >> u32(Q_STAGES >> 1)) & u32(1)) ^ u32(1)
                        for i in range(GROUPS):
                            place = u32(u32(done & u32(Q_STAGES - 1)) * u32(GROUPS) + u32(i))
                            mbarrier_wait(base + u32(Q_FREE) + place * u32(8), phase)
                            load_q(
                                source, base + place * u32(Q_GROUP), thread - u32(32),
                                first_row + u32(i) * u32(64), rows - u32(1), group, u64(HEAD_BYTES), row_stride,
                            )  # fmt: skip
                            sync_warp()
                            release(base + u32(Q_FULL) + place * u32(8), lane)
                        done = u32(done + u32(1))
        else:
            more_registers()
            side = u32(side - u32(1))
            if side == u32(GROUPS - 1) and GROUPS > 1:
                pass_turn(u32(1))
            used = u32(0)  # blocks of keys, and tiles, so far
            done = u32(0)
            going = u32(1)
            while going != 0:
                slot = u32(done & u32(1))
                mbarrier_wait(base + u32(TILE_FULL) + slot * u32(8), u32(done >> u32(1)) & u32(1))
                head, first_row, rows, start = read_slot(base + u32(TILES_AT) + slot * u32(32))
                if head == u32(END):
                    going = u32(0)
                else:
                    block, masked, free, _ = counts(first_row, rows, start, group, window)
                    limit_0, limit_1 = limits(first_row, rows, start, group, block)
                    place = u32(u32(done & u32(Q_STAGES - 1)) * u32(GROUPS) + u32(thread_index() >> u32(7)) - u32(1))
                    mbarrier_wait(base + u32(Q_FULL) + place * u32(8), u32(done >> u32(Q_STAGES >> 1)) & u32(1))
                    queries = u32(base + place * u32(Q_GROUP))
                    carried = first(base, queries, used, limit_0, limit_1, window, inner, factor)
                    used = u32(used + u32(1))
                    while masked != 0:
                        masked = u32(masked - u32(1))
                        limit_0 = u32(limit_0 + u32(KEYS))
                        limit_1 = u32(limit_1 + u32(KEYS))
                        carried = masked_step(
                            carried, base, queries, used, limit_0, limit_1, window, inner, factor, n_heads
                        )
                        used = u32(used + u32(1))
                    # With a window, read again what the loops have no registers for.
                    if WINDOWED:
                        _, first_row, rows, start = read_slot(base + u32(TILES_AT) + u32(done & u32(1)) * u32(32))
                        _, _, free, _ = counts(first_row, rows, start, group, window)
                    unused = u32(0)
                    while free != 0:
                        free = u32(free - u32(1))
                        carried = free_step(
                            carried, base, queries, used, unused, unused, window, inner, factor, n_heads
                        )
                        used = u32(used + u32(1))
                    if WINDOWED:
                        _, first_row, rows, start = read_slot(base + u32(TILES_AT) + u32(done & u32(1)) * u32(32))
                        block, masked, free, left = counts(first_row, rows, start, group, window)
                        block = u32(block - masked - free)
                        limit_0, limit_1 = limits(first_row, rows, start, group, block)
                        while left != 0:
                            left = u32(left - u32(1))
                            limit_0 = u32(limit_0 + u32(KEYS))
                            limit_1 = u32(limit_1 + u32(KEYS))
                            carried = masked_step(
                                carried, base, queries, used, limit_0, limit_1, window, inner, factor, n_heads
                            )
                            used = u32(used + u32(1))
                    lane = u32(thread_index() & u32(31))
                    place = u32(u32(done & u32(Q_STAGES - 1)) * u32(GROUPS) + u32(thread_index() >> u32(7)) - u32(1))
                    release(base + u32(Q_FREE) + place * u32(8), lane)
                    carried = last(carried, base, used, n_heads)
                    slot = u32(done & u32(1))
                    at = u32(base + u32(TILES_AT) + slot * u32(32))
                    head, first_row, rows, _ = read_slot(at)
                    batch_row, _, _, _ = read_slot(at + u32(16))
                    row_0 = u32(first_row + row_inside())
                    row_1 = u32(row_0 + u32(8))
                    position_0 = quotient(row_0, group)
                    position_1 = quotient(row_1, group)
                    head_0 = u32(head * group + row_0 - position_0 * group)
                    head_1 = u32(head * group + row_1 - position_1 * group)
                    sink_0 = f32(-math.inf)
                    sink_1 = f32(-math.inf)
                    valid_0 = u32(row_0 < rows)
                    valid_1 = u32(row_1 < rows)
                    if sinks != 0:
                        if valid_0 != 0:
                            sink_0 = load_float(sinks + u64(head_0) * u64(4)) * f32(LOG2E)
                        if valid_1 != 0:
                            sink_1 = load_float(sinks + u64(head_1) * u64(4)) * f32(LOG2E)
                    out_0 = out + (u64(u32(batch_row + position_0)) * u64(n_heads) + u64(head_0)) * u64(OUT_BYTES)
                    out_1 = out + (u64(u32(batch_row + position_1)) * u64(n_heads) + u64(head_1)) * u64(OUT_BYTES)
                    sync_warp()
                    release(base + u32(TILE_FREE) + slot * u32(8), lane)
                    done = u32(done + u32(1))
                    store(carried, out_0, out_1, valid_0, valid_1, sink_0, sink_1, factor, lane)

    return attention_wgmma, types.void(*(numba_type(spec) for _, spec in ARGUMENTS))
