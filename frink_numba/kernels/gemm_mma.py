"""The `mma` tier: quantized W times f16 tokens with `mma.sync`, for every GPU from sm_80 on.

    y[M, N] = epilogue(x[M, K] W[N, K]^T)

The packs, fragment functions and result rules are those of the `wgmma` tier (`gemm_kinds.py`, `gemm_epilogue.py`): an A
fragment of `mma.m16n8k16` is that of a warp of `wgmma`. A block of 8 warps owns a tile of 128 weight rows x T tokens
and walks along K in steps of 64 columns: `cp.async` keeps three or more stages in flight, the weights' codes become
f16 in registers, the tokens come through `ldmatrix` from rows of 128 bytes whose 16-byte pieces are swizzled (piece c
of row r lies at c ^ (r & 7)). With 128 tokens a warp owns 32 rows x 64 tokens, with fewer 16 rows x all tokens.
Results go to memory straight from the accumulators, 32 bytes of a row at a time.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from frink_numba.kernels.gemm_epilogue import PLAIN, Epilogue
from frink_numba.kernels.gemm_kinds import FRAGMENT_KINDS, FragmentKind

THREADS = 256
TOKEN_TILES = (16, 64, 128)
SHARED_LIMIT = 99 * 1024  # what a block may use on sm_86, 89 and 120; sm_80, 90 and 100 have more
_MOST_STAGES = 6

ARGUMENTS = (
    # name, type
    ("x", "u64"),  # f16 [m, cols]
    ("out", "u64"),
    ("weights", "u64"),
    ("row_scale", "u64"),
    ("token_scale", "u64"),
    ("bias", "u64"),  # float32 [slabs * 64], or 0
    ("token_norm", "u64"),  # f16 results only, else 0
    ("out_scale", "u64"),  # f16 results only, else 0
    ("c2", "f32"),
    ("c1", "f32"),
    ("c0", "f32"),
    ("m", "u32"),
    ("outputs", "u32"),
    ("pitch", "u32"),  # bytes from row to row of the result
    ("cols", "u32"),
    ("slabs", "u32"),
    ("token_tiles", "u32"),
    ("add", "u32"),
)


@dataclass(frozen=True, slots=True)
class MmaGemm:
    """One compiled variant: the kind of the weights, T tokens a tile, and the epilogue."""

    kind: str
    tokens: int
    epilogue: Epilogue = PLAIN

    @property
    def row(self) -> FragmentKind:
        return FRAGMENT_KINDS[self.kind]

    @property
    def token_halves(self) -> int:
        """Warps side by side along the tokens; as many row groups of 16 has each warp."""
        return 2 if self.tokens == 128 else 1

    @property
    def slot(self) -> int:
        return self.row.header_size + self.row.step_size

    @property
    def stage(self) -> int:
        return self.tokens * 128 + 2 * self.slot

    @property
    def stages(self) -> int:
        return min(_MOST_STAGES, SHARED_LIMIT // self.stage)

    @property
    def shared(self) -> int:
        return self.stages * self.stage


@functools.cache
def _load_step(gemm: MmaGemm) -> Any:
    """load(x, weights, slot, thread, step, token, m, cols, slab, slabs): start the copies of one step, then commit.

    `weights` is where the tile's first slab begins. Tokens and columns beyond the matrix, and slabs beyond the last,
    become zeros or stay out.
    """
    from frink_numba.kernels.ptx import Emitter, Register, emitted

    kind = gemm.row
    header, step_size, record = kind.header_size, kind.step_size, kind.record_size
    pieces = gemm.tokens * 8

    @emitted(None, "u64", "u64", "u32", "u32", "u32", "u32", "u32", "u32", "u32", "u32", "u32")
    def load(
        e: Emitter,
        x: Register,
        weights: Register,
        slot: Register,
        thread: Register,
        step: Register,
        steps: Register,
        token: Register,
        m: Register,
        cols: Register,
        slab: Register,
        slabs: Register,
    ) -> None:
        b = e.builder

        def less(p: Register, q: Register) -> Any:
            return b.icmp_unsigned("<", p.value, q.value)

        def chosen(flag: Any, yes: Register, no: Register) -> Register:
            return Register(e, yes.kind, b.select(flag, yes.value, no.value))

        zero = e.constant("u32", 0)
        with b.if_then(less(step, steps)):
            for i in range(-(-pieces // THREADS)):
                index = thread + i * THREADS
                row, piece = index >> 3, index & 7
                column = (step << 6) + (piece << 3)
                inside = b.and_(less(token + row, m), less(column, cols))
                source = chosen(inside, e.widen(token + row) * e.widen(cols) + e.widen(column), e.constant("u64", 0))
                size = chosen(inside, e.constant("u32", 16), zero)
                target = slot + (row << 7) + ((piece ^ (row & 7)) << 4)
                with b.if_then(less(index, e.constant("u32", pieces))):
                    e.asm("cp.async.cg.shared.global [$0], [$1], 16, $2;", None, [target, x + (source << 1), size])
            if kind.group_steps == 1:
                first, inner = None, zero
                at = e.widen(step) * step_size
                count = e.constant("u32", step_size)
            else:
                first = b.icmp_unsigned("==", (step & 3).value, zero.value)
                inner = chosen(first, zero, e.constant("u32", header))
                at = e.widen(step >> 2) * record + e.widen(chosen(first, zero, (step & 3) * step_size + header))
                count = chosen(first, e.constant("u32", header + step_size), e.constant("u32", step_size))
            slab_bytes = e.widen(steps >> (kind.group_steps >> 1)) * record
            for side in range(2):
                with b.if_then(less(slab + side, slabs)):
                    for i in range(-(-(header + step_size) // (16 * THREADS))):
                        offset = (thread + i * THREADS) << 4
                        with b.if_then(less(offset, count)):
                            source = weights + slab_bytes * side + at + e.widen(offset)
                            target = slot + (gemm.tokens * 128 + gemm.slot * side) + inner + offset
                            e.asm("cp.async.cg.shared.global [$0], [$1], 16;", None, [target, source])
        e.asm("cp.async.commit_group;", None, [])

    return load


@functools.cache
def _multiply_step(gemm: MmaGemm) -> tuple[Any, tuple[Any, ...]]:
    """(header op, multiply ops of steps 0..3 of a record).

    header(slot, warp, lane) -> the shared scales of the warp's row groups; multiply(acc, slot, warp, lane, header) ->
    acc.
    """
    from frink_numba.kernels.gemm_emit import PtxMachine, header_words
    from frink_numba.kernels.ptx import Emitter, Register, emitted

    kind, halves = gemm.row, gemm.token_halves
    words = header_words(gemm.kind)
    own_tokens = gemm.tokens // halves
    count = halves * own_tokens // 2

    def place(slot: Register, warp: Register, lane: Register, group: int) -> tuple[Register, Register, Register]:
        """(slab's slot, thread in the slab, row g in the slab) of the warp's row group."""
        rows = (warp >> 1) * 2 + group if halves == 2 else warp
        inner = rows & 3
        base = slot + gemm.tokens * 128 + (rows >> 2) * gemm.slot
        return base, (inner << 5) + lane, (inner << 4) + (lane >> 2)

    @emitted(f"u32x{halves * words}", "u32", "u32", "u32")
    def header(e: Emitter, slot: Register, warp: Register, lane: Register) -> list[Register]:
        out: list[Register] = []
        for group in range(halves):
            base, _, row = place(slot, warp, lane, group)
            out += kind.header(PtxMachine(e), base, row) if kind.header else [e.constant("u32", 0)]
        return out

    def make(step: int) -> Any:
        @emitted(f"f32x{count}", f"f32x{count}", "u32", "u32", "u32", f"u32x{halves * words}")
        def multiply(
            e: Emitter, acc: list[Register], slot: Register, warp: Register, lane: Register, shared: list[Register]
        ) -> list[Register]:
            fragments = []
            for group in range(halves):
                base, thread, row = place(slot, warp, lane, group)
                own = shared[group * words : (group + 1) * words]
                fragments.append(kind.fragments(PtxMachine(e), base + kind.header_size, thread, row, step, own))
            # Lanes 8i .. 8i+7 give the rows of matrix i: tokens 0-7 and 8-15, columns 0-7 and 8-15 of each.
            token = ((lane >> 4) << 3) + (lane & 7)
            if halves == 2:
                token = token + (warp & 1) * own_tokens
            out = list(acc)
            for block in range(4):
                piece = ((lane >> 3) & 1) + 2 * block
                for pair in range(own_tokens // 16):
                    address = slot + ((token + 16 * pair) << 7) + ((piece ^ (token & 7)) << 4)
                    b = e.asm("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0,$1,$2,$3}, [$4];", "u32x4", [address])
                    for n in range(2):
                        for group in range(halves):
                            at = 4 * (group * (own_tokens // 8) + 2 * pair + n)
                            a = fragments[group][4 * block : 4 * block + 4]
                            out[at : at + 4] = e.asm(
                                "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, "
                                "{$8,$9}, {$0,$1,$2,$3};",
                                "f32x4",
                                [*a, b[2 * n], b[2 * n + 1]],
                                tied=out[at : at + 4],
                                pure=True,
                            )
            return out

        return multiply

    return header, tuple(make(step) for step in range(4))


@functools.cache
def _store_tile(gemm: MmaGemm) -> Any:
    """store(acc, warp, lane, slab, token, arguments...): the epilogue, with every bound checked."""
    from frink_numba.kernels.gemm_store import activate, out_scales
    from frink_numba.kernels.ptx import Emitter, Register, emitted

    epilogue, halves = gemm.epilogue, gemm.token_halves
    own_tokens = gemm.tokens // halves
    count = halves * own_tokens // 2

    @emitted(
        None, f"f32x{count}", "u32", "u32", "u32", "u32", "u64", "u64", "u64", "u64", "u64", "u64", "f32", "f32", "f32",
        "u32", "u32", "u32", "u32", "u32",
    )  # fmt: skip
    def store(
        e: Emitter,
        acc: list[Register],
        warp: Register,
        lane: Register,
        slab: Register,
        token: Register,
        out: Register,
        row_scale: Register,
        token_scale: Register,
        bias: Register,
        token_norm: Register,
        out_scale: Register,
        c2: Register,
        c1: Register,
        c0: Register,
        m: Register,
        outputs: Register,
        pitch: Register,
        slabs: Register,
        add: Register,
    ) -> None:
        b = e.builder
        g, t = lane >> 2, lane & 3

        def load(pointer: Register, index: Register) -> Register:
            return e.asm("ld.global.f32 $0, [$1];", "f32", [pointer + e.widen(index << 2)])

        def less(p: Register, q: Register) -> Any:
            return b.icmp_unsigned("<", p.value, q.value)

        def put(row: Register, column: Register, value: Register) -> None:
            with b.if_then(less(column, outputs)):
                address = out + e.widen(row) * e.widen(pitch) + e.widen(column << (1 if epilogue.half else 2))
                if epilogue.half:
                    bits = e.asm("cvt.rn.f16.f32 $0, $1;", "u16", [value], pure=True)
                    e.asm("st.global.u16 [$0], $1;", None, [address, bits])
                    return
                with b.if_else(b.icmp_unsigned("!=", add.value, e.constant("u32", 0).value)) as (then, otherwise):
                    with then:
                        before = e.asm("ld.global.f32 $0, [$1];", "f32", [address])
                        e.asm("st.global.f32 [$0], $1;", None, [address, before + value])
                    with otherwise:
                        e.asm("st.global.f32 [$0], $1;", None, [address, value])

        for group in range(halves):
            rows = (warp >> 1) * 2 + group if halves == 2 else warp
            own_slab = slab + (rows >> 2)
            inner = rows & 3
            n = own_slab * 64 + (inner << 4) + g
            with b.if_then(less(own_slab, slabs)):
                scales = [load(row_scale, n), load(row_scale, n + 8)]
                zero = e.constant("f32", 0.0)
                offsets = [zero, zero]
                if not epilogue.gate:
                    # Without a bias the scales' own memory is read and dropped: no branch, no fault.
                    given = b.icmp_unsigned("!=", bias.value, e.constant("u64", 0).value)
                    source = Register(e, "u64", b.select(given, bias.value, row_scale.value))
                    offsets = [
                        Register(e, "f32", b.select(given, load(source, k).value, zero.value)) for k in (n, n + 8)
                    ]
                for j in range(own_tokens // 8):
                    for v in range(2):
                        row = token + 8 * j + (t << 1) + v
                        if halves == 2:
                            row = row + (warp & 1) * own_tokens
                        with b.if_then(less(row, m)):
                            scale = load(token_scale, row)
                            at = 4 * (group * (own_tokens // 8) + j) + v
                            low, high = acc[at] * scales[0] * scale, acc[at + 2] * scales[1] * scale
                            if epilogue.gate:
                                values = [activate(e, epilogue.gate, low) * high]
                                columns = [own_slab * 32 + (inner << 3) + g]
                            else:
                                values, columns = [low + offsets[0], high + offsets[1]], [n, n + 8]
                            if epilogue.half:
                                inverse, power = out_scales(e, load(token_norm, row), (c2, c1, c0))
                                values = [value * inverse for value in values]
                                owner = b.icmp_unsigned("==", n.value, e.constant("u32", 0).value)
                                with b.if_then(owner):
                                    e.asm("st.global.f32 [$0], $1;", None, [out_scale + e.widen(row << 2), power])
                            for column, value in zip(columns, values, strict=True):
                                put(row, column, value)

    return store


@functools.cache
def build(gemm: MmaGemm) -> tuple[Any, Any]:
    """The kernel as a Python function for numba, and its signature. Grid: one block a tile, token tiles first."""
    from numba import cuda, types

    from frink_numba.kernels.gemm_emit import zeros
    from frink_numba.kernels.instructions import copies_pending
    from frink_numba.kernels.ptx import numba_type, shared_address

    kind = gemm.row
    TOKENS, STAGES, STAGE = gemm.tokens, gemm.stages, gemm.stage
    AHEAD = STAGES - 1
    RECORD, GROUPED = kind.record_size, kind.group_steps == 4
    no_sums = zeros(gemm.tokens // 2)
    load, store = _load_step(gemm), _store_tile(gemm)
    header, (multiply0, multiply1, multiply2, multiply3) = _multiply_step(gemm)
    arrived = copies_pending(AHEAD - 1)
    u32, u64 = types.uint32, types.uint64

    def gemm_mma(
        x, out, weights, row_scale, token_scale, bias, token_norm, out_scale, c2, c1, c0, m, outputs, pitch, cols,
        slabs, token_tiles, add,
    ):  # fmt: skip
        shared = cuda.shared.array(0, types.uint8, alignment=128)
        base = shared_address(shared)
        thread = u32(cuda.threadIdx.x)
        warp = thread >> u32(5)
        lane = thread & u32(31)
        tile = u32(cuda.blockIdx.x)
        pair = u32(tile // token_tiles)
        token = u32(u32(tile - pair * token_tiles) * u32(TOKENS))
        slab = u32(pair << u32(1))
        steps = u32(u32(cols + u32(63)) >> u32(6))
        source = weights + u64(slab) * (u64(steps >> u32(2 if GROUPED else 0)) * u64(RECORD))
        for i in range(AHEAD):
            load(x, source, base + u32(STAGE * i), thread, u32(i), steps, token, m, cols, slab, slabs)
        slot = u32(base)
        free = u32(base + u32(STAGE * AHEAD))
        end = u32(base + u32(STAGE * STAGES))
        acc = no_sums()
        step = u32(0)
        while step < steps:
            arrived()
            cuda.syncthreads()
            load(x, source, free, thread, u32(step + u32(AHEAD)), steps, token, m, cols, slab, slabs)
            free = slot
            scales = header(slot, warp, lane)
            acc = multiply0(acc, slot, warp, lane, scales)
            slot = u32(slot + u32(STAGE))
            if slot == end:
                slot = u32(base)
            step = u32(step + u32(1))
            if GROUPED:
                arrived()
                cuda.syncthreads()
                load(x, source, free, thread, u32(step + u32(AHEAD)), steps, token, m, cols, slab, slabs)
                free = slot
                acc = multiply1(acc, slot, warp, lane, scales)
                slot = u32(slot + u32(STAGE))
                if slot == end:
                    slot = u32(base)
                step = u32(step + u32(1))

                arrived()
                cuda.syncthreads()
                load(x, source, free, thread, u32(step + u32(AHEAD)), steps, token, m, cols, slab, slabs)
                free = slot
                acc = multiply2(acc, slot, warp, lane, scales)
                slot = u32(slot + u32(STAGE))
                if slot == end:
                    slot = u32(base)
                step = u32(step + u32(1))

                arrived()
                cuda.syncthreads()
                load(x, source, free, thread, u32(step + u32(AHEAD)), steps, token, m, cols, slab, slabs)
                free = slot
                acc = multiply3(acc, slot, warp, lane, scales)
                slot = u32(slot + u32(STAGE))
                if slot == end:
                    slot = u32(base)
                step = u32(step + u32(1))
        store(
            acc, warp, lane, slab, token, out, row_scale, token_scale, bias, token_norm, out_scale, c2, c1, c0, m,
            outputs, pitch, slabs, add,
        )  # fmt: skip

    return gemm_mma, types.void(*(numba_type(spec) for _, spec in ARGUMENTS))
