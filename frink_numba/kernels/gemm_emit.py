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

    def load_matrix(self, tile: Register, thread: Register, block: int) -> Any:
        # Lanes 8i .. 8i+7 give the rows of matrix i, which becomes register i: upper and lower rows, then columns.
        lane = thread & 31
        inner = lane & 7
        row = tile + (thread >> 5) * 2048 + ((lane >> 3) & 1) * 1024 + inner * 128
        address = row + (((lane >> 4) | 2 * block) ^ inner) * 16
        return self.e.asm("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0,$1,$2,$3}, [$4];", "u32x4", [address])

    def _op(self, template: str, *registers: Register) -> Any:
        return self.e.asm(template, "u32", registers, pure=True)

    def permute(self, a: Register, b: Register, selector: int) -> Any:
        return self._op(f"prmt.b32 $0, $1, $2, {selector:#x};", a, b)

    def permute_by(self, a: Register, b: Register, selector: Register) -> Any:
        return self._op("prmt.b32 $0, $1, $2, $3;", a, b, selector)

    def low(self, word: Register) -> Any:
        return self._op("{\n.reg .b16 l, h;\nmov.b32 {l, h}, $1;\nmov.b32 $0, {l, l};\n}", word)

    def high(self, word: Register) -> Any:
        return self._op("{\n.reg .b16 l, h;\nmov.b32 {l, h}, $1;\nmov.b32 $0, {h, h};\n}", word)

    def funnel(self, low: Register, high: Register, shift: int) -> Any:
        return self._op(f"shf.r.wrap.b32 $0, $1, $2, {shift};", low, high)

    def fma2(self, a: Register, b: Register, c: Register) -> Any:
        return self._op("fma.rn.f16x2 $0, $1, $2, $3;", a, b, c)

    def mul2(self, a: Register, b: Register) -> Any:
        return self._op("mul.rn.f16x2 $0, $1, $2;", a, b)

    def sub2(self, a: Register, b: Register) -> Any:
        return self._op("sub.rn.f16x2 $0, $1, $2;", a, b)


class Loader(PtxMachine):
    """Keeps what the fragment code loads, in order; what it computes from it is dropped by the compiler."""

    def __init__(self, e: Emitter, ahead: Register | int = 0) -> None:
        super().__init__(e)
        self.loaded: list[Register] = []
        self.ahead = ahead  # of every address

    def _load(self, width: str, result: str, address: Register) -> Any:
        return super()._load(width, result, address + self.ahead)

    def _keep(self, got: Any) -> Any:
        self.loaded += got if isinstance(got, list) else [got]
        return got

    def load32(self, address: Register) -> Any:
        return self._keep(super().load32(address))

    def load64(self, address: Register) -> Any:
        return self._keep(super().load64(address))

    def load128(self, address: Register) -> Any:
        return self._keep(super().load128(address))

    def load_matrix(self, tile: Register, thread: Register, block: int) -> Any:
        return self._keep(super().load_matrix(tile, thread, block))


class Converter(PtxMachine):
    """Computes from what a `Loader` has loaded."""

    def __init__(self, e: Emitter, loaded: Sequence[Register]) -> None:
        super().__init__(e)
        self.left = list(loaded)

    def _take(self, count: int) -> list[Register]:
        taken, self.left = self.left[:count], self.left[count:]
        return taken

    def load32(self, address: Register) -> Any:
        return self._take(1)[0]

    def load64(self, address: Register) -> Any:
        return self._take(2)

    def load128(self, address: Register) -> Any:
        return self._take(4)

    def load_matrix(self, tile: Register, thread: Register, block: int) -> Any:
        return self._take(4)


@functools.cache
def fragment_ops(name: str) -> tuple[Any, Any, tuple[Any, ...]]:
    """(header op, load op, (convert op of step 0, 1, 2, 3)) of a kind: its fragment code, cut after its loads.

    header(address, row) -> u32 tuple (one 0 where the kind has none); load(first, at, thread, row) -> the step's bits;
    convert(bits, header) -> 16 operand registers. `address` is the step's slot in shared memory, which begins with the
    header's room; `first` that of a ring's first slot, `at` bytes before it. They are added last, so that what does not
    depend on the step is computed once.
    """
    kind = FRAGMENT_KINDS[name]
    words = header_words(name)

    @emitted(f"u32x{words}", "u32", "u32")
    def header(e: Emitter, address: Register, row: Register) -> Sequence[Register]:
        if kind.header is None:
            return [e.constant("u32", 0)]
        return kind.header(PtxMachine(e), address, row)

    @emitted(f"u32x{kind.loaded_words}", "u32", "u32", "u32", "u32")
    def load(e: Emitter, address: Register, at: Register, thread: Register, row: Register) -> list[Register]:
        machine = Loader(e, at)
        kind.fragments(machine, address + kind.header_size, thread, row, 0, [e.constant("u32", 0)] * words)
        return machine.loaded

    def make(step: int) -> Any:
        @emitted("u32x16", f"u32x{kind.loaded_words}", f"u32x{words}")
        def convert(e: Emitter, loaded: list[Register], shared: Any) -> Any:
            zero = e.constant("u32", 0)
            return kind.fragments(Converter(e, loaded), zero, zero, zero, step, shared)

        return convert

    return header, load, tuple(make(step) for step in range(4))


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


# The upper half of a descriptor of a K-major operand: rows of 128 bytes, swizzled, eight of them 1024 bytes on.
_DESCRIPTOR = (1 << 30) | 64


def _multiply(e: Emitter, acc: list[Register], tokens: int, block: int, a: list[Register], b: Register) -> Any:
    """One `wgmma` of 16 columns. `a`: four operand registers, or the descriptor's lower half; `b` likewise."""
    # The next 16 columns of a row lie 32 bytes on: 2 in the descriptor's units of 16. Added to all 64 bits of b, they
    # take ptxas one instruction; with the lower half alone it moves both halves into place before each product.
    count, on = tokens // 2, 2 * block
    sums = ",".join(f"${i}" for i in range(count))
    last = f"${count + len(a)}"
    if len(a) == 4:
        setup, first = "", "{" + ",".join(f"${count + i}" for i in range(4)) + "}"
        flags, arguments = "1, 1, 1, 0", [*a, b]
    else:
        setup, first = f".reg .b64 a;\nmov.b64 a, {{${count}, {_DESCRIPTOR}}};\n", "a"
        flags, arguments = "1, 1, 1, 0, 0", [a[0] + on, b]
    template = (
        f"{{\n{setup}.reg .b64 b;\nmov.b64 b, {{{last}, {_DESCRIPTOR}}};\nadd.s64 b, b, {on};\n"
        f"wgmma.mma_async.sync.aligned.m64n{tokens}k16.f32.f16.f16 {{{sums}}}, {first}, b, {flags};\n}}"
    )
    return e.asm(template, f"f32x{count}", arguments, tied=acc)


def _descriptor(address: Register) -> Register:
    return (address >> 4) | (1 << 16)


@emitted("u32", "u32")
def descriptor(e: Emitter, address: Register) -> Register:
    """The lower half of the descriptor of a tile in shared memory: that of one n * 16 bytes on is larger by n."""
    return _descriptor(address)


@functools.cache
def multiply_step(tokens: int) -> Any:
    """acc += A B for one step of 64 columns: four `wgmma` m64 n`tokens` k16, A in registers, as one committed group.

    multiply(acc, fragments, descriptor of the tokens' tile). The fragments pass through an empty volatile statement
    before the fence, so that no arithmetic on them slides behind it (ptxas would serialize).
    """
    count = tokens // 2

    @emitted(f"f32x{count}", f"f32x{count}", "u32x16", "u32")
    def op(e: Emitter, acc: list[Register], fragments: list[Register], tile: Register) -> list[Register]:
        *pinned, b = e.asm("", "u32x17", [], tied=[*fragments, tile])
        e.asm("wgmma.fence.sync.aligned;", None, [])
        for block in range(4):
            acc = _multiply(e, acc, tokens, block, pinned[4 * block : 4 * block + 4], b)
        e.asm("wgmma.commit_group.sync.aligned;", None, [])
        return acc

    return op


@functools.cache
def first_block(tokens: int) -> Any:
    """acc += A B for the first 16 columns of a step: begin(acc, fragments, descriptor of the tokens' tile)."""
    count = tokens // 2

    @emitted(f"f32x{count}", f"f32x{count}", "u32x16", "u32")
    def op(e: Emitter, acc: list[Register], fragments: list[Register], tile: Register) -> list[Register]:
        *pinned, b = e.asm("", "u32x17", [], tied=[*fragments, tile])
        e.asm("wgmma.fence.sync.aligned;", None, [])
        acc = _multiply(e, acc, tokens, 0, pinned[:4], b)
        e.asm("wgmma.commit_group.sync.aligned;", None, [])
        return acc

    return op


@functools.cache
def other_blocks(name: str, tokens: int, cluster: int) -> tuple[Any, ...]:
    """For each step of a record: the rest of a step's products, and the next step's conversion between them.

    op(acc, fragments, descriptor of the tokens' tile, old, codes, header, never, address, done, lane) -> (acc, the next
    step's fragments). A warp that issues a product waits until the one before has been taken, so that what stands
    between two products costs little while the first of them runs. `old` are the fragments of the step before, which
    are waited for first, with `done` released after that; codes and header are the next step's.
    """
    kind, count = FRAGMENT_KINDS[name], tokens // 2

    def make(step: int) -> Any:
        @emitted(
            (f"f32x{count}", "u32x16"), f"f32x{count}", "u32x16", "u32", "u32x16", f"u32x{kind.loaded_words}",
            f"u32x{header_words(name)}", "u32", "u32", "u32", "u32",
        )  # fmt: skip
        def op(
            e: Emitter,
            acc: list[Register],
            fragments: list[Register],
            tile: Register,
            old: list[Register],
            loaded: list[Register],
            header: list[Register],
            never: Register,
            address: Register,
            done: Register,
            lane: Register,
        ) -> Any:
            zero = e.constant("u32", 0)
            out: list[Register] = []
            converted = kind.blocks(Converter(e, loaded), zero, zero, zero, step, header)

            def convert() -> None:
                at = len(out)
                e.asm(_KEEP, None, [*old[at : at + 4], never, address])
                out.extend(e.asm("", "u32x4", [], tied=next(converted)))

            # The first product alone stays in flight, so that the whole step before is done.
            e.asm("wgmma.wait_group.sync.aligned 1;", None, [])
            release(e, cluster, done, lane)
            for block in range(1, 4):
                convert()
                e.asm("wgmma.fence.sync.aligned;", None, [])
                acc = _multiply(e, acc, tokens, block, fragments[4 * block : 4 * block + 4], tile)
                e.asm("wgmma.commit_group.sync.aligned;", None, [])
            convert()
            return acc, out

        return op

    return tuple(make(step) for step in range(4))


def release(e: Emitter, cluster: int, address: Register, lane: Register) -> None:
    """The warp is done with a stage; lane i tells block i of the cluster."""
    # Without a scope of its own: `.release.cluster` would put a memory fence here, slower than the step itself. What
    # is released was only read, and its reads are complete.
    space = "cluster" if cluster > 1 else "cta"
    e.asm(
        f"{{\n.reg .pred p;\nsetp.lt.u32 p, $1, {cluster};\n@p mbarrier.arrive.shared::{space}.b64 _, [$0];\n}}",
        None,
        [address, lane],
    )


@functools.cache
def multiply_shared(tokens: int) -> Any:
    """The same with A in shared memory: multiply(acc, address of the slab's 64 x 64 tile, address of the tokens')."""
    count = tokens // 2

    @emitted(f"f32x{count}", f"f32x{count}", "u32", "u32")
    def op(e: Emitter, acc: list[Register], slab: Register, tile: Register) -> list[Register]:
        a, b = e.asm("", "u32x2", [], tied=[_descriptor(slab), _descriptor(tile)])
        e.asm("wgmma.fence.sync.aligned;", None, [])
        for block in range(4):
            acc = _multiply(e, acc, tokens, block, [a], b)
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


# Use four fragments: see `keep`.
_KEEP = "{\n.reg .pred p;\nsetp.ne.u32 p, $4, 0;\n@p st.shared.v4.b32 [$5], {$0,$1,$2,$3};\n}"


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


@functools.cache
def next_stage(stages: int) -> Any:
    """(stage, phase) of the step after: the phase turns at the ring's end."""

    @emitted("u32x2", "u32", "u32")
    def op(e: Emitter, stage: Register, phase: Register) -> list[Register]:
        after = stage + 1
        wraps = e.builder.icmp_unsigned("==", after.value, e.constant("u32", stages).value)
        return [_select(e, wraps, e.constant("u32", 0), after), _select(e, wraps, phase ^ 1, phase)]

    return op


# ---- which block does what -------------------------------------------------------------------------------------------


def _divide(e: Emitter, a: Register, b: Register) -> Register:
    return Register(e, "u32", e.builder.udiv(a.value, b.value))


def _less(e: Emitter, a: Register, b: Register) -> Any:
    return e.builder.icmp_unsigned("<", a.value, b.value)


def _select(e: Emitter, flag: Any, a: Register, b: Register) -> Register:
    return Register(e, "u32", e.builder.select(flag, a.value, b.value))


@emitted("u32", "u32", "u32")
def worker_of(e: Emitter, block: Register, workers: Register) -> Register:
    """Which range of the split tiles a block has: the last one for block 0, and so on; blocks behind have none."""
    return _select(e, _less(e, block, workers), workers - 1 - block, block)


@emitted("u32", "u32", "u32", "u32")
def range_start(e: Emitter, worker: Register, split: Register, workers: Register) -> Register:
    """The first of `split` groups that belongs to `worker`:

    ranges of equal length for `workers` of them, in order; none for those after them.
    """
    return _divide(e, _select(e, _less(e, worker, workers), worker, workers) * split, workers)


@emitted("u32", "u32", "u32", "u32", "u32")
def parts_after(e: Emitter, end: Register, worker: Register, split: Register, workers: Register) -> Register:
    """How many workers after `worker` begin before group `end`: the last o with o * split < end * workers."""
    return _divide(e, end * workers + split - 1, split) - worker - 1


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
