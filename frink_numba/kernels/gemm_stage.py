"""The two ends of a stage in the `wgmma` tier: weights on their way in, and its release by the consumers."""

from __future__ import annotations

import functools
from typing import Any

from frink_numba.kernels.gemm_emit import release
from frink_numba.kernels.gemm_kinds import FragmentKind
from frink_numba.kernels.gemm_mixed import of_kind
from frink_numba.kernels.ptx import Emitter, Register, emitted


@functools.cache
def release_stage(cluster: int) -> Any:
    """release(address, lane): the warp is done with a stage; lane i tells block i of the cluster."""

    @emitted(None, "u32", "u32")
    def op(e: Emitter, address: Register, lane: Register) -> None:
        release(e, cluster, address, lane)

    return op


@functools.cache
def load_weights_step(kinds: tuple[FragmentKind, ...], count: int, tokens_size: int, slot_size: int) -> Any:
    """load(source, slab_bytes, second, step, slab, slabs, slot, barrier): arm a stage's barrier and fetch a step.

    `count`: how many slabs' step. `tokens_size`: bytes of the tokens that the barrier waits for as well; `slot_size`:
    from one slab's room to the next. `source` is where the first slab begins. Slabs beyond the last, `slabs`, are left
    out. The header of a record comes with its first step. kinds: one or two, of which `second` tells (gemm_mixed.py).
    """

    def copy(e: Emitter, target: Register, source: Register, size: Register, barrier: Register) -> None:
        e.asm(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
            None,
            [target, source, size, barrier],
        )

    @emitted(None, "u64", "u64", "u32", "u32", "u32", "u32", "u32", "u32")
    def load(
        e: Emitter,
        source: Register,
        slab_bytes: Register,
        second: Register,
        step: Register,
        slab: Register,
        slabs: Register,
        slot: Register,
        barrier: Register,
    ) -> None:
        b = e.builder

        def chosen(flag: Any, yes: Register, no: Register) -> Register:
            return Register(e, yes.kind, b.select(flag, yes.value, no.value))

        def place(kind: FragmentKind) -> tuple[Register, Register, Register]:
            """Where the step begins in a slab, its bytes, and where it goes in its slot."""
            header, step_size = kind.header_size, kind.step_size
            if kind.group_steps == 1:
                return e.widen(step) * step_size, e.constant("u32", step_size), zero
            first = b.icmp_unsigned("==", (step & 3).value, zero.value)
            inner = chosen(first, zero, (step & 3) * step_size + header)
            size = chosen(first, e.constant("u32", header + step_size), e.constant("u32", step_size))
            behind_header = chosen(first, zero, e.constant("u32", header))
            return e.widen(step >> 2) * kind.record_size + e.widen(inner), size, behind_header

        zero = e.constant("u32", 0)
        at, size, inside = (of_kind(e, second, each) for each in zip(*map(place, kinds), strict=True))
        slot = slot + inside
        there = [b.icmp_unsigned("<", (slab + i).value, slabs.value) for i in range(count)]
        total = e.constant("u32", tokens_size)
        for flag in there:
            total = total + chosen(flag, size, zero)
        e.asm("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", None, [barrier, total])
        source = source + at
        for i, flag in enumerate(there):
            with b.if_then(flag):
                copy(e, slot + slot_size * i, source, size, barrier)
            source = source + slab_bytes

    return load
