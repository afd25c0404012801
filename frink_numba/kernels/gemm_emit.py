"""The compiler's side of the tensor-core GEMMs: ops that are unrolled while a kernel is compiled.

`PtxMachine` is the machine of `gemm_kinds.py`; `fragment_ops(kind)` turns a table row into ops that a kernel calls.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from frink_numba.kernels.gemm_kinds import FRAGMENT_KINDS
from frink_numba.kernels.ptx import Emitter, Register, emitted, instruction


class PtxMachine:
    """Emits the fragment code of `gemm_kinds.py` as PTX."""

    def __init__(self, e: Emitter) -> None:
        self.e = e

    def u32(self, value: int) -> Register:
        return self.e.constant("u32", value)

    def _load(self, width: str, result: str, address: Register) -> Any:
        count = int(result.partition("x")[2] or 1)
        names = ",".join(f"${i}" for i in range(count))
        target = f"{{{names}}}" if count > 1 else names
        return self.e.asm(f"ld.shared{width} {target}, [${count}];", result, [address])

    def load16(self, address: Register) -> Register:
        half = self._load(".u16", "u16", address)
        return Register(self.e, "u32", self.e.builder.zext(half.value, self.u32(0).value.type))

    def load32(self, address: Register) -> Any:
        return self._load(".u32", "u32", address)

    def load64(self, address: Register) -> Any:
        return self._load(".v2.u32", "u32x2", address)

    def load128(self, address: Register) -> Any:
        return self._load(".v4.u32", "u32x4", address)

    def _op(self, template: str, *registers: Register) -> Any:
        return self.e.asm(template, "u32", registers, pure=True)

    def permute(self, a: Register, b: Register, selector: int) -> Any:
        return self._op(f"prmt.b32 $0, $1, $2, {selector:#x};", a, b)

    def permute_by(self, a: Register, b: Register, selector: Register) -> Any:
        return self._op("prmt.b32 $0, $1, $2, $3;", a, b, selector)

    def funnel(self, low: Register, high: Register, shift: int) -> Any:
        return self._op(f"shf.r.wrap.b32 $0, $1, $2, {shift};", low, high)

    def fma2(self, a: Register, b: Register, c: Register) -> Any:
        return self._op("fma.rn.f16x2 $0, $1, $2, $3;", a, b, c)

    def mul2(self, a: Register, b: Register) -> Any:
        return self._op("mul.rn.f16x2 $0, $1, $2;", a, b)

    def sub2(self, a: Register, b: Register) -> Any:
        return self._op("sub.rn.f16x2 $0, $1, $2;", a, b)


@functools.cache
def fragment_ops(name: str) -> tuple[Any, tuple[Any, ...]]:
    """(header op, (fragments op of step 0, 1, 2, 3)) of a kind.

    header(address, row) -> u32 tuple (one 0 where the kind has none); fragments(address, thread, row, header) -> 16
    registers; `address` is the step's slot in shared memory, which begins with the header's room.
    """
    kind = FRAGMENT_KINDS[name]
    words = header_words(name)

    @emitted(f"u32x{words}", "u32", "u32")
    def header(e: Emitter, address: Register, row: Register) -> Sequence[Register]:
        if kind.header is None:
            return [e.constant("u32", 0)]
        return kind.header(PtxMachine(e), address, row)

    def make(step: int) -> Any:
        @emitted("u32x16", "u32", "u32", "u32", f"u32x{words}")
        def fragments(e: Emitter, address: Register, thread: Register, row: Register, shared: Any) -> Any:
            return kind.fragments(PtxMachine(e), address + kind.header_size, thread, row, step, shared)

        return fragments

    return header, tuple(make(step) for step in range(4))


def header_words(name: str) -> int:
    """Registers that a kind's header function gives."""
    return {"Q2_K": 2, "Q3_K": 8, "Q4_K": 8, "Q5_K": 8, "Q6_K": 2, "IQ4_XS": 4}.get(name, 1)


@functools.cache
def zeros(count: int, kind: str = "f32") -> Any:
    """An op that gives `count` zeros."""

    @emitted(f"{kind}x{count}")
    def op(e: Emitter) -> list[Register]:
        return [e.constant(kind, 0)] * count

    return op


@functools.cache
def multiply_step(tokens: int) -> Any:
    """acc += A B for one step of 64 columns: four `wgmma` m64 n`tokens` k16, A in registers, as one committed group.

    multiply(acc, fragments, descriptor of the tokens' tile). The fragments pass through an empty volatile statement
    before the fence, so that no arithmetic on them slides behind it (ptxas would serialize).
    """
    count = tokens // 2

    @emitted(f"f32x{count}", f"f32x{count}", "u32x16", "u64")
    def op(e: Emitter, acc: list[Register], fragments: list[Register], descriptor: Register) -> list[Register]:
        pinned = e.asm("", "u32x16", [], tied=fragments)
        e.asm("wgmma.fence.sync.aligned;", None, [])
        accumulators = ",".join(f"${i}" for i in range(count))
        a = ",".join(f"${count + i}" for i in range(4))
        template = (
            f"wgmma.mma_async.sync.aligned.m64n{tokens}k16.f32.f16.f16 {{{accumulators}}}, {{{a}}}, ${count + 4}, "
            "1, 1, 1, 0;"
        )
        for block in range(4):
            # The next 16 columns of a row lie 32 bytes on: 2 in the descriptor's units of 16.
            arguments = [*pinned[4 * block : 4 * block + 4], descriptor + 2 * block]
            acc = e.asm(template, f"f32x{count}", arguments, tied=acc)
        e.asm("wgmma.commit_group.sync.aligned;", None, [])
        return acc

    return op


wait_one_pending = instruction("wgmma.wait_group.sync.aligned 1;", None)


@functools.cache
def wait_multiplied(tokens: int) -> Any:
    """Wait for every committed group: wait(acc) -> acc, so that nothing reads the sums before."""
    count = tokens // 2

    @emitted(f"f32x{count}", f"f32x{count}")
    def op(e: Emitter, acc: list[Register]) -> Any:
        return e.asm("wgmma.wait_group.sync.aligned 0;", f"f32x{count}", [], tied=acc)

    return op


@emitted(None, "u32x16", "u32", "u32")
def keep(e: Emitter, fragments: list[Register], never: Register, address: Register) -> None:
    """Use the fragments after their wait: a store that never happens (`never` is 0).

    Without it ptxas takes the fragments' registers for free as soon as the wgmma is issued, while the tensor cores
    still read them: wrong results in silence.
    """
    stores = "".join(
        f"@p st.shared.v4.b32 [$17+{16 * j}], {{${4 * j},${4 * j + 1},${4 * j + 2},${4 * j + 3}}};\n" for j in range(4)
    )
    e.asm(f"{{\n.reg .pred p;\nsetp.ne.u32 p, $16, 0;\n{stores}}}", None, [*fragments, never, address])


# ---- which block does what -------------------------------------------------------------------------------------------


def _divide(e: Emitter, a: Register, b: Register) -> Register:
    return Register(e, "u32", e.builder.udiv(a.value, b.value))


def _less(e: Emitter, a: Register, b: Register) -> Any:
    return e.builder.icmp_unsigned("<", a.value, b.value)


def _select(e: Emitter, flag: Any, a: Register, b: Register) -> Register:
    return Register(e, "u32", e.builder.select(flag, a.value, b.value))


@emitted("u32", "u32", "u32", "u32")
def range_start(e: Emitter, block: Register, split: Register, blocks: Register) -> Register:
    """The first of `split` groups that belongs to `block`: ranges of equal length, in the blocks' order."""
    return _divide(e, block * split, blocks)


@emitted("u32", "u32", "u32", "u32", "u32")
def parts_after(e: Emitter, end: Register, block: Register, split: Register, blocks: Register) -> Register:
    """How many blocks after `block` begin before group `end`: the last o with o * split < end * blocks is the last."""
    return _divide(e, end * blocks + split - 1, split) - block - 1


@emitted("u32x5", "u32", "u32", "u32", "u32", "u32")
def next_segment(
    e: Emitter, first: Register, last: Register, whole: Register, groups: Register, blocks: Register
) -> list[Register]:
    """(tile, first group, end group, first', whole'): a piece of the block's range while it lasts, then whole tiles."""
    in_range = _less(e, first, last)
    tile = _divide(e, first, groups)
    g0 = first - tile * groups
    wanted = g0 + last - first
    g1 = _select(e, _less(e, wanted, groups), wanted, groups)
    zero = e.constant("u32", 0)
    return [
        _select(e, in_range, tile, whole),
        _select(e, in_range, g0, zero),
        _select(e, in_range, g1, groups),
        _select(e, in_range, first + g1 - g0, first),
        _select(e, in_range, whole, whole + blocks),
    ]


@emitted("u32x2", "u32", "u32", "u32", "u32")
def locate(e: Emitter, tile: Register, swath: Register, pairs: Register, token_tiles: Register) -> list[Register]:
    """(token tile, pair of slabs):

    bands of `swath` token tiles; in a band all token tiles of a pair, then the next pair.
    """
    band = _divide(e, tile, swath * pairs)
    left = token_tiles - band * swath
    width = _select(e, _less(e, swath, left), swath, left)
    inner = tile - band * swath * pairs
    pair = _divide(e, inner, width)
    return [band * swath + inner - pair * width, pair]
