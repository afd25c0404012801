"""The kernels of `sample.py`: rows of a packed matrix as float32, and the largest of each row of logits."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from frink_numba.kernels.cubins import Source
from frink_numba.kernels.gemm_kinds import FRAGMENT_KINDS

EMBED_THREADS = 128
ARGMAX_THREADS = 256
ARGMAX_BLOCKS = 64  # of a row of logits
_TOGETHER = 8  # logits that a thread has on their way

EMBED_ARGUMENTS = (
    # name, type
    ("ids", "u64"),  # int32 [m]
    ("weights", "u64"),
    ("row_scale", "u64"),
    ("hidden", "u64"),  # float32 [m, cols]
    ("scale", "f32"),
    ("rows", "u32"),
    ("cols", "u32"),
)
ARGMAX_ARGUMENTS = (
    ("logits", "u64"),  # float32 [m, pitch]
    ("ids", "u64"),  # int32 [m]
    ("workspace", "u64"),  # 16 bytes a row, zeros: the best so far, and how many blocks are done
    ("count", "u32"),  # of a row's logits, the first
    ("pitch", "u32"),  # logits from row to row
    ("answers", "u64"),  # int32 [m, most]; 0: no step follows, and the rest is of no meaning
    ("done", "u64"),  # int32 [m]: steps before this one
    ("positions", "u64"),  # int32 [m]
    ("records", "u64"),  # SEQUENCE [layers, m]
    ("layers", "u32"),
    ("most", "u32"),
)


@functools.cache
def _row_values(name: str, step: int) -> Any:
    """values(record, thread, row, side) -> a row's 16 elements of a step in float32, rounded once.

    `record`: where a record begins in global memory; `thread`, `row`: place in the slab; side 1: row + 8. Elements come
    in pairs: columns 16b + 2t and 16b + 2t + 8 for b = 0..3.
    """
    from frink_numba.kernels.gemm_emit import PtxMachine
    from frink_numba.kernels.ptx import Emitter, Register, emitted

    kind = FRAGMENT_KINDS[name]

    class Pair:
        """Two float32 in place of an f16x2 register."""

        def __init__(self, low: Register, high: Register) -> None:
            self.low, self.high = low, high

    class WideMachine(PtxMachine):
        """The fragment code's machine over global memory, with float32 where the kernels have f16."""

        def _load(self, width: str, result: str, address: Register) -> Any:
            count = int(result.partition("x")[2] or 1)
            names = ",".join(f"${i}" for i in range(count))
            target = f"{{{names}}}" if count > 1 else names
            return self.e.asm(f"ld.global.nc{width} {target}, [${count}];", result, [address])

        def load_matrix(self, tile: Register, thread: Register, block: int) -> Any:
            # Word by word: the lanes here are at different rows, not at those of one tile as `ldmatrix` wants them.
            lane = thread & 31
            row, column = ((thread >> 5) << 4) + (lane >> 2), (lane & 3) << 2
            pieces = [(row + 8 * (i & 1), (row & 7) ^ (2 * block + (i >> 1))) for i in range(4)]
            return [self.load32(tile + (r << 7) + (piece << 4) + column) for r, piece in pieces]

        def pair(self, x: Any) -> Pair:
            if isinstance(x, Pair):
                return x
            template = "{\n.reg .b16 l, h;\nmov.b32 {l, h}, $2;\ncvt.f32.f16 $0, l;\ncvt.f32.f16 $1, h;\n}"
            return Pair(*self.e.asm(template, "f32x2", [x], pure=True))

        def _each(self, template: str, *operands: Any) -> Any:
            pairs = [self.pair(x) for x in operands]
            sides = ([p.low for p in pairs], [p.high for p in pairs])
            return Pair(*(self.e.asm(template, "f32", side, pure=True) for side in sides))

        def permute(self, a: Any, b: Any, selector: int) -> Any:
            if not isinstance(a, Pair):
                return super().permute(a, b, selector)
            half = {0x1010: a.low, 0x3232: a.high}[selector]
            return Pair(half, half)

        def low(self, word: Any) -> Any:
            return Pair(word.low, word.low) if isinstance(word, Pair) else super().low(word)

        def high(self, word: Any) -> Any:
            return Pair(word.high, word.high) if isinstance(word, Pair) else super().high(word)

        def fma2(self, a: Any, b: Any, c: Any) -> Any:
            return self._each("fma.rn.f32 $0, $1, $2, $3;", a, b, c)

        def mul2(self, a: Any, b: Any) -> Any:
            return self._each("mul.rn.f32 $0, $1, $2;", a, b)

        def sub2(self, a: Any, b: Any) -> Any:
            return self._each("sub.rn.f32 $0, $1, $2;", a, b)

    @emitted("f32x16", "u64", "u64", "u64", "u32")
    def values(e: Emitter, record: Register, thread: Register, row: Register, side: Register) -> list[Register]:
        machine = WideMachine(e)
        header = kind.header(machine, record, row) if kind.header else []
        base = record + (kind.header_size + step * kind.step_size)
        pairs = [machine.pair(x) for x in kind.fragments(machine, base, thread, row, step, header)]
        upper = e.builder.icmp_unsigned("!=", side.value, e.constant("u32", 0).value)
        out = []
        for block in range(4):
            for half in range(2):
                low, high = pairs[4 * block + 2 * half], pairs[4 * block + 2 * half + 1]
                for of_high, of_low in ((high.low, low.low), (high.high, low.high)):
                    out.append(Register(e, "f32", e.builder.select(upper, of_high.value, of_low.value)))
        return out

    return values


@functools.cache
def build_embed(name: str, overlap: bool) -> tuple[Any, Any]:
    """hidden[i] = scale * row ids[i]. Grid: one block of 128 threads a row; four lanes share a record of columns."""
    from numba import cuda, types

    from frink_numba.kernels.instructions import launch_dependents, load_float, wait_for_predecessors
    from frink_numba.kernels.ptx import Emitter, Register, emitted, instruction, numba_type

    kind = FRAGMENT_KINDS[name]
    RECORD, STEPS, SHIFT = kind.record_size, kind.group_steps, kind.group_steps >> 1
    step_values = [_row_values(name, step) for step in range(STEPS)]
    first, second, third, fourth = (step_values * 4)[:4]
    load_word = instruction("ld.global.u32 $0, [$1];", "u32", "u64")
    u32, u64 = types.uint32, types.uint64
    GROUPS = EMBED_THREADS // 4

    @emitted(None, "u64", "f32x16", "f32", "u32", "u32", "u32")
    def put(
        e: Emitter, row: Register, values: list[Register], factor: Register, step: Register, t: Register, cols: Register
    ) -> None:
        for i in range(8):
            column = (step << 6) + (t << 1) + 8 * i
            with e.builder.if_then(e.builder.icmp_unsigned("<", column.value, cols.value)):
                pair = [values[2 * i] * factor, values[2 * i + 1] * factor]
                e.asm("st.global.v2.f32 [$0], {$1,$2};", None, [row + e.widen(column << 2), *pair])

    def embed(ids, weights, row_scale, hidden, scale, rows, cols):
        if overlap:
            launch_dependents()
            wait_for_predecessors()
        thread = u32(cuda.threadIdx.x)
        token = u64(cuda.blockIdx.x)
        t = u32(thread & u32(3))
        index = u32(min(load_word(ids + token * u64(4)), u32(rows - u32(1))))
        slab = u64(index >> u32(6))
        quarter = u32(index >> u32(4)) & u32(3)
        side = u32(index >> u32(3)) & u32(1)
        g = u32(index & u32(7))
        place = u64(u32(quarter * u32(32)) + u32(g * u32(4)) + t)
        row = u64(u32(quarter * u32(16)) + g)
        steps = u32(u32(cols + u32(63)) >> u32(6))
        records = u32(steps >> u32(SHIFT))
        factor = load_float(row_scale + u64(index) * u64(4)) * scale
        source = weights + slab * u64(records) * u64(RECORD)
        target = hidden + token * u64(cols) * u64(4)
        for i in range(u32(thread >> u32(2)), records, u32(GROUPS)):
            record = source + u64(i) * u64(RECORD)
            step = u32(u32(i) * u32(STEPS))
            put(target, first(record, place, row, side), factor, step, t, cols)
            if STEPS == 4:
                put(target, second(record, place, row, side), factor, u32(step + u32(1)), t, cols)
                put(target, third(record, place, row, side), factor, u32(step + u32(2)), t, cols)
                put(target, fourth(record, place, row, side), factor, u32(step + u32(3)), t, cols)

    return embed, types.void(*(numba_type(spec) for _, spec in EMBED_ARGUMENTS))


def _key_of(e: Any, logit: Any, index: Any) -> Any:
    """The logit's bits in the order of its values above, the index from the end below."""
    from frink_numba.kernels.ptx import Register

    b = e.builder
    bits = e.float_bits(logit + 0.0)  # -0 becomes 0
    sign = Register(e, "u32", b.ashr(bits.value, e.constant("u32", 31).value))
    ordered = bits ^ (sign | 0x80000000)
    not_number = b.fcmp_unordered("uno", logit.value, logit.value)
    ordered = Register(e, "u32", b.select(not_number, e.constant("u32", 0xFFFFFFFF).value, ordered.value))
    return (e.widen(ordered) << 32) | e.widen(e.constant("u32", 0xFFFFFFFF) - index)


@functools.cache
def build_argmax(overlap: bool) -> tuple[Any, Any]:
    """ids[i] = the first index of row i's largest logit; a not-a-number counts as the largest, as in NumPy.

    Grid: ARGMAX_BLOCKS blocks of 256 threads a row. A logit and its index make a 64-bit key whose order is theirs; the
    largest key wins, in whatever order blocks arrive. With `answers`, the row's last block prepares its next step.
    """
    from numba import cuda, types

    from frink_numba.kernels.instructions import launch_dependents, wait_for_predecessors
    from frink_numba.kernels.ptx import Emitter, Register, emitted, instruction, numba_type, shared_address

    raise_to = instruction("red.relaxed.gpu.global.max.u64 [$0], $1;", None, "u64", "u64")
    count_up = instruction("atom.acq_rel.gpu.global.add.u32 $0, [$1], $2;", "u32", "u64", "u32")
    load_word = instruction("ld.global.u32 $0, [$1];", "u32", "u64")
    load_key = instruction("ld.relaxed.gpu.global.u64 $0, [$1];", "u64", "u64")
    store_key = instruction("st.global.u64 [$0], $1;", None, "u64", "u64")
    store_word = instruction("st.global.u32 [$0], $1;", None, "u64", "u32")
    store_shared = instruction("st.shared.u64 [$0], $1;", None, "u32", "u64")
    load_shared = instruction("ld.shared.u64 $0, [$1];", "u64", "u32")
    larger = instruction("max.u64 $0, $1, $2;", "u64", "u64", "u64", pure=True)
    fence = instruction("fence.acq_rel.gpu;", None)
    exchange = instruction(
        "{\n.reg .b32 l, h;\nmov.b64 {l, h}, $1;\nshfl.sync.bfly.b32 l, l, $2, 0x1f, 0xffffffff;\n"
        "shfl.sync.bfly.b32 h, h, $2, 0x1f, 0xffffffff;\nmov.b64 $0, {l, h};\n}",
        "u64",
        "u64",
        "u32",
    )
    u32, u64 = types.uint32, types.uint64
    WARPS = ARGMAX_THREADS // 32
    NOT_NUMBER = np.uint64(0xFFFFFFFF << 32)

    @emitted("u64", "u64", "u32", "u32", "u64")
    def best_of(e: Emitter, source: Register, first: Register, count: Register, best: Register) -> Register:
        """The best of `best` and the keys of this thread's next logits; beyond the end the last one comes again."""
        indices = [first + ARGMAX_BLOCKS * ARGMAX_THREADS * i for i in range(_TOGETHER)]
        indices = [e.asm("min.u32 $0, $1, $2;", "u32", [index, count - 1], pure=True) for index in indices]
        logits = [e.asm("ld.global.f32 $0, [$1];", "f32", [source + e.widen(index << 2)]) for index in indices]
        for logit, index in zip(logits, indices, strict=True):
            best = e.asm("max.u64 $0, $1, $2;", "u64", [best, _key_of(e, logit, index)], pure=True)
        return best

    @emitted("u32", "u64")
    def index_of(e: Emitter, key: Register) -> Register:
        return e.constant("u32", 0xFFFFFFFF) - e.narrow(key)

    def argmax(logits, ids, workspace, count, pitch, answers, done, positions, records, layers, most):
        if overlap:
            launch_dependents()
            wait_for_predecessors()
        shared = cuda.shared.array(WARPS, types.uint64)
        keys = shared_address(shared)
        thread = u32(cuda.threadIdx.x)
        block = u32(cuda.blockIdx.x)
        row = u32(block // u32(ARGMAX_BLOCKS))
        part = u32(block - row * u32(ARGMAX_BLOCKS))
        source = logits + u64(row) * u64(pitch) * u64(4)
        best = u64(0)
        stride = u32(ARGMAX_BLOCKS * ARGMAX_THREADS * _TOGETHER)
        for i in range(u32(part * u32(ARGMAX_THREADS) + thread), count, stride):
            best = best_of(source, u32(i), count, best)
        for distance in (16, 8, 4, 2, 1):
            best = larger(best, exchange(best, u32(distance)))
        if thread & u32(31) == 0:
            store_shared(u32(keys + (thread >> u32(5)) * u32(8)), best)
        cuda.syncthreads()
        if thread == 0:
            for w in range(1, WARPS):
                best = larger(best, load_shared(u32(keys + u32(w * 8))))
            place = workspace + u64(row) * u64(16)
            raise_to(place, best)
            fence()
            last = u64(0)
            if count_up(place + u64(8), u32(1)) == u32(ARGMAX_BLOCKS - 1):
                fence()
                last = u64(1)
                key = load_key(place)
                chosen = index_of(key)
                word = u64(row) * u64(4)
                store_word(ids + word, chosen)
                store_key(place, u64(0))
                store_word(place + u64(8), u32(0))
                if answers != 0:
                    if key >= NOT_NUMBER:
                        chosen = u32(0xFFFFFFFF)
                    step = load_word(done + word)
                    store_word(answers + (u64(row) * u64(most) + u64(step)) * u64(4), chosen)
                    store_word(done + word, u32(step + u32(1)))
                    store_word(positions + word, u32(load_word(positions + word) + u32(1)))
            store_shared(keys, last)
        if answers != 0:
            cuda.syncthreads()
            if load_shared(keys) != 0:
                rows = u32(u32(cuda.gridDim.x) // u32(ARGMAX_BLOCKS))
                for layer in range(thread, layers, u32(ARGMAX_THREADS)):
                    record = records + (u64(u32(layer)) * u64(rows) + u64(row)) * u64(32)
                    store_word(record + u64(8), u32(load_word(record + u64(8)) + u32(1)))  # start_pos
                    store_word(record + u64(12), u32(load_word(record + u64(12)) + u32(1)))  # kv_row

    return argmax, types.void(*(numba_type(spec) for _, spec in ARGMAX_ARGUMENTS))


def embed_source(name: str, overlap: bool) -> Source:
    """What to compile."""
    return Source(f"embed {name} overlap={overlap}", functools.partial(build_embed, name, overlap), EMBED_THREADS)


def argmax_source(overlap: bool) -> Source:
    """What to compile."""
    return Source(f"argmax overlap={overlap}", functools.partial(build_argmax, overlap), ARGMAX_THREADS)
