"""The main loop of the `wgmma` tier over one segment of a tile's steps (see gemm_wgmma.py).

It is made for one kind of weights. The compiler's front end puts it in the place of its calls, so that a kernel of two
kinds has two loops, and the loop of a kernel of one kind is as if it stood there.
"""

from __future__ import annotations

import functools
from typing import Any

from frink_numba.kernels.gemm_variant import WgmmaGemm


@functools.cache
def main_loop(gemm: WgmmaGemm) -> Any:
    """loop(second, base, slot, full, freed, stage, phase, count, local, lane, row, never) -> (sums, stage, phase).

    `second`: not 0 where the slab is of the second kind. `slot` is the group's room in the first stage; `full` and
    `freed` are where the first stage's barriers lie, `freed` in the block of the cluster that the lane tells; `count`
    steps from `stage` on are multiplied; `local` counts in the group, `row` is the thread's row g in the slab. `never`
    is 0. At the end all stages are released, and all products waited for.
    """
    if not gemm.second:
        return _loop_of_kind(gemm, gemm.kind)
    from numba import cuda

    first_loop, second_loop = _loop_of_kind(gemm, gemm.kind), _loop_of_kind(gemm, gemm.second)

    @cuda.jit(device=True, inline="always")
    def loop(second, base, slot, full, freed, stage, phase, count, local, lane, row, never):
        if second == 0:
            return first_loop(second, base, slot, full, freed, stage, phase, count, local, lane, row, never)
        return second_loop(second, base, slot, full, freed, stage, phase, count, local, lane, row, never)

    return loop


@functools.cache
def _loop_of_kind(gemm: WgmmaGemm, name: str) -> Any:
    """The loop for slabs of one kind, whatever `second` says."""
    from numba import cuda, types

    from frink_numba.kernels.gemm_emit import (
        descriptor,
        first_block,
        fragment_ops,
        keep,
        multiply_shared,
        multiply_step,
        next_stage,
        other_blocks,
        wait_multiplied,
        wait_one_pending,
        zeros,
    )
    from frink_numba.kernels.gemm_kinds import FRAGMENT_KINDS
    from frink_numba.kernels.gemm_stage import release_stage
    from frink_numba.kernels.instructions import mbarrier_wait, mbarrier_wait_if

    kind = FRAGMENT_KINDS[name]
    TOKENS, CLUSTER = gemm.tokens, gemm.cluster
    X_STAGE, W_STAGE = gemm.tokens * 128, gemm.groups * gemm.slot
    DIRECT, TAIL = kind.scales is None, kind.group_steps == 1

    header, load_codes, (convert, *_) = fragment_ops(name)
    multiply_first, (rest0, rest1, rest2, rest3) = first_block(TOKENS), other_blocks(name, TOKENS, CLUSTER)
    multiply, multiply_direct = multiply_step(TOKENS), multiply_shared(TOKENS)
    wait_all, no_sums, no_fragments = wait_multiplied(TOKENS), zeros(TOKENS // 2), zeros(16, "u32")
    advance, release = next_stage(gemm.stages), release_stage(CLUSTER)
    u32 = types.uint32

    @cuda.jit(device=True, inline="always")
    def loop(second, base, slot, full, freed, stage, phase, count, local, lane, row, never):
        acc = no_sums()
        # The step in flight when a segment begins: none yet, so that no lane is to release a stage.
        done = u32(freed)
        idle = u32(32)
        if DIRECT:
            for _ in range(count):
                mbarrier_wait(full + stage * u32(8), phase)
                acc = multiply_direct(acc, slot + stage * u32(W_STAGE), base + stage * u32(X_STAGE))
                wait_one_pending()
                release(done, lane + idle)
                idle = u32(0)
                done = u32(freed + stage * u32(8))
                stage, phase = advance(stage, phase)
            acc = wait_all(acc)
            release(done, lane + idle)
        else:
            odd = no_fragments()
            tokens = descriptor(base)
            left = u32(count)
            mbarrier_wait(full + stage * u32(8), phase)
            at = u32(slot + stage * u32(W_STAGE))
            shared_scales = header(at, row)
            codes = load_codes(slot, stage * u32(W_STAGE), local, row)
            even = convert(codes, shared_scales)
            for _ in range(count >> u32(2)):
                # Four steps in a straight line: the fragments of a step take one register set, those of the next step
                # the other, which are made while the products run.
                tile_at = u32(tokens + stage * u32(X_STAGE >> 4))
                acc = multiply_first(acc, even, tile_at)
                now = u32(freed + stage * u32(8))
                stage, phase = advance(stage, phase)
                mbarrier_wait(full + stage * u32(8), phase)
                codes = load_codes(slot, stage * u32(W_STAGE), local, row)
                acc, odd = rest1(acc, even, tile_at, odd, codes, shared_scales, never, base, done, lane + idle)
                done = now
                idle = u32(0)

                tile_at = u32(tokens + stage * u32(X_STAGE >> 4))
                acc = multiply_first(acc, odd, tile_at)
                now = u32(freed + stage * u32(8))
                stage, phase = advance(stage, phase)
                mbarrier_wait(full + stage * u32(8), phase)
                codes = load_codes(slot, stage * u32(W_STAGE), local, row)
                acc, even = rest2(acc, odd, tile_at, even, codes, shared_scales, never, base, done, lane)
                done = now

                tile_at = u32(tokens + stage * u32(X_STAGE >> 4))
                acc = multiply_first(acc, even, tile_at)
                now = u32(freed + stage * u32(8))
                stage, phase = advance(stage, phase)
                mbarrier_wait(full + stage * u32(8), phase)
                codes = load_codes(slot, stage * u32(W_STAGE), local, row)
                acc, odd = rest3(acc, even, tile_at, odd, codes, shared_scales, never, base, done, lane)
                done = now

                tile_at = u32(tokens + stage * u32(X_STAGE >> 4))
                acc = multiply_first(acc, odd, tile_at)
                now = u32(freed + stage * u32(8))
                stage, phase = advance(stage, phase)
                left = u32(left - u32(4))
                mbarrier_wait_if(full + stage * u32(8), phase, left)
                at = u32(slot + stage * u32(W_STAGE))
                shared_scales = header(at, row)
                codes = load_codes(slot, stage * u32(W_STAGE), local, row)
                acc, even = rest0(acc, odd, tile_at, even, codes, shared_scales, never, base, done, lane)
                done = now
            acc = wait_all(acc)
            keep(odd, never, base)
            release(done, lane + idle)
            if TAIL:
                for _ in range(count & u32(3)):
                    acc = multiply(acc, even, u32(tokens + stage * u32(X_STAGE >> 4)))
                    acc = wait_all(acc)
                    keep(even, never, base)
                    release(u32(freed + stage * u32(8)), lane)
                    stage, phase = advance(stage, phase)
                    left = u32(left - u32(1))
                    mbarrier_wait_if(full + stage * u32(8), phase, left)
                    codes = load_codes(slot, stage * u32(W_STAGE), local, row)
                    even = convert(codes, shared_scales)
        return acc, stage, phase

    return loop
