"""Ops of the products of few rows (few_gemm.py): records on their way in, and what a group does with one."""

from __future__ import annotations

import functools
from typing import Any

from frink_numba.kernels.few_gemm_variant import PIECES, FewGemm
from frink_numba.kernels.gemm_emit import (
    _KEEP,
    Converter,
    Loader,
    PtxMachine,
    _descriptor,
    _multiply,
    header_words,
    release,
)
from frink_numba.kernels.gemm_kinds import FRAGMENT_KINDS, GROUP_STEPS
from frink_numba.kernels.ptx import Emitter, Register, emitted


def _load_piece(variant: FewGemm, piece: int) -> Any:
    """load(e, source, slab_bytes, slab, slabs, slot, barrier): arm a barrier and fetch a piece of each slab's record.

    `source` is where the first slab's record begins. The barrier waits for the rows of x as well. Slabs beyond the last
    are left out.
    """
    begin, size = variant.piece_bytes(piece)
    x_size = variant.tokens * 512 // PIECES

    def load(
        e: Emitter,
        source: Register,
        slab_bytes: Register,
        slab: Register,
        slabs: Register,
        slot: Register,
        barrier: Register,
    ) -> None:
        b, zero, bytes_ = e.builder, e.constant("u32", 0), e.constant("u32", size)
        there = [b.icmp_unsigned("<", (slab + i).value, slabs.value) for i in range(variant.groups)]
        total = e.constant("u32", x_size)
        for flag in there:
            total = total + Register(e, "u32", b.select(flag, bytes_.value, zero.value))
        e.asm("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", None, [barrier, total])
        source = source + begin
        for i, flag in enumerate(there):
            with b.if_then(flag):
                e.asm(
                    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
                    None,
                    [slot + (variant.slot * i + begin), source, bytes_, barrier],
                )
            source = source + slab_bytes

    return load


@functools.cache
def load_record(variant: FewGemm) -> Any:
    """load(source, slab_bytes, slab, slabs, w_slot, x_slot, x_map, column, barrier, weights, x): fetch a record.

    Piece by piece, each with its barrier, which is armed with the weights. `weights` and `x` say which of both to
    fetch.
    """
    pieces = [_load_piece(variant, piece) for piece in range(PIECES)]
    boxes = GROUP_STEPS // PIECES

    @emitted(None, "u64", "u64", "u32", "u32", "u32", "u32", "u64", "u32", "u32", "u32", "u32")
    def load(
        e: Emitter,
        source: Register,
        slab_bytes: Register,
        slab: Register,
        slabs: Register,
        slot: Register,
        x_slot: Register,
        x_map: Register,
        column: Register,
        barrier: Register,
        weights: Register,
        x: Register,
    ) -> None:
        for i, piece in enumerate(pieces):
            with e.when(weights):
                piece(e, source, slab_bytes, slab, slabs, slot, barrier + 8 * i)
            with e.when(x):
                for box in range(i * boxes, (i + 1) * boxes):
                    e.asm(
                        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                        "[$0], [$1, {$3, $4}], [$2];",
                        None,
                        [x_slot + box * variant.tokens * 128, x_map, barrier + 8 * i, column + 64 * box,
                         e.constant("u32", 0)],
                    )  # fmt: skip

    return load


# instructions.mbarrier_wait inside an op.
_WAIT = (
    "{\n.reg .pred done;\nWAIT_${:uid}:\nmbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1;\n"
    "@done bra DONE_${:uid};\nbra WAIT_${:uid};\nDONE_${:uid}:\n}"
)
# Products that are committed together.
_TOGETHER = 2


@functools.cache
def multiply_record(name: str, tokens: int) -> Any:
    """op(acc, old, tile, slot, thread, row, never, address, done, lane, barrier, phase) -> (acc, last fragments).

    16 products of 16 columns, two committed together. Before the fragments of two are made, those that had their
    registers are waited for: two stay in flight meanwhile. `old` are the fragments of the record before; when its last
    product is known to be done, `done` is released. `tile` is the record's rows of x, `slot` its codes, `barrier` and
    `phase` what tells that its first piece is there; those of the others lie behind.
    """
    kind, count = FRAGMENT_KINDS[name], tokens // 2

    @emitted(
        (f"f32x{count}", "u32x16"), f"f32x{count}", "u32x16", "u32", "u32", "u32", "u32", "u32", "u32", "u32", "u32",
        "u32", "u32",
    )  # fmt: skip
    def op(
        e: Emitter,
        acc: list[Register],
        old: list[Register],
        tile: Register,
        slot: Register,
        thread: Register,
        row: Register,
        never: Register,
        address: Register,
        done: Register,
        lane: Register,
        barrier: Register,
        phase: Register,
    ) -> Any:
        zero = e.constant("u32", 0)

        def load(step: int) -> list[Register]:
            if step % (GROUP_STEPS // PIECES) == 0:
                e.asm(_WAIT, None, [barrier + 8 * (step * PIECES // GROUP_STEPS), phase])
            machine = Loader(e)
            base = slot + (kind.header_size + step * kind.step_size)
            kind.fragments(machine, base, thread, row, step & (kind.group_steps - 1), header)
            return machine.loaded

        # Equal in all lanes, which this tells the compiler: it keeps addresses in uniform registers.
        tile = e.asm("shfl.sync.idx.b32 $0, $1, 0, 0x1f, 0xffffffff;", "u32", [tile])
        b = _descriptor(tile)
        out: list[Register] = list(old)
        header: Any = [zero] * header_words(name)
        codes = load(0)
        if kind.header is not None:
            header = kind.header(PtxMachine(e), slot, row)
        for step in range(GROUP_STEPS):
            converted = kind.blocks(Converter(e, codes), zero, zero, zero, step, header)
            if step + 1 < GROUP_STEPS:
                codes = load(step + 1)
            for first in range(0, 4, _TOGETHER):
                e.asm(f"wgmma.wait_group.sync.aligned {4 // _TOGETHER - 1};", None, [])
                blocks = range(first, first + _TOGETHER)
                for block in blocks:
                    own = slice(4 * block, 4 * block + 4)
                    e.asm(_KEEP, None, [*out[own], never, address])
                    out[own] = e.asm("", "u32x4", [], tied=next(converted))
                if step == 0 and first == 4 - _TOGETHER:
                    release(e, 1, done, lane)
                e.asm("wgmma.fence.sync.aligned;", None, [])
                for block in blocks:
                    own = slice(4 * block, 4 * block + 4)
                    acc = _multiply(e, acc, tokens, block, out[own], b + step * (tokens * 128 >> 4))
                e.asm("wgmma.commit_group.sync.aligned;", None, [])
        return acc, out

    return op
