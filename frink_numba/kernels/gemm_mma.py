"""The `mma` tier: quantized W times f16 tokens with `mma.sync`, for every GPU from sm_80 on.

    y[M, N] = epilogue(x[M, K] W[N, K]^T)

The packs, fragment functions and result rules are those of the `wgmma` tier (`gemm_kinds.py`, `gemm_epilogue.py`): an A
fragment of `mma.m16n8k16` is that of a warp of `wgmma`. A block of 4 warps owns a tile of 128 weight rows x T tokens
and walks along K in steps of 64 columns: `cp.async` keeps stages in flight, the weights' codes become f16 in
registers, the tokens come through `ldmatrix` from rows of 128 bytes whose 16-byte pieces are swizzled (piece c of row r
lies at c ^ (r & 7)). With 128 tokens a warp owns 64 rows x 64 tokens, so that a fragment that was read or converted
serves many multiplications; with fewer tokens 32 rows x all tokens. Two blocks share a multiprocessor where its shared
memory has room for both: one multiplies while the other waits or writes.
`gemm_mma_store.py` writes the results.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from frink_numba.kernels.gemm_epilogue import PLAIN, Epilogue
from frink_numba.kernels.gemm_kinds import FRAGMENT_KINDS, FragmentKind
from frink_numba.kernels.gemm_mma_store import first_group, store_tile

THREADS = 128
TOKEN_TILES = (16, 64, 128)
_MOST_STAGES = 6
HEADERS = 3  # records that are in use or on their way at a time
# Bytes of shared memory that all blocks of a multiprocessor may use together, by compute capability. A block takes 1024
# of them beside its own.
_SHARED = {(8, 0): 164 << 10, (8, 7): 164 << 10, (9, 0): 228 << 10, (10, 0): 228 << 10, (10, 3): 228 << 10}
_SHARED_LEAST = 100 << 10

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


def shared_memory(capability: tuple[int, int]) -> int:
    """Bytes of shared memory of a multiprocessor."""
    return _SHARED.get(capability, _SHARED_LEAST)


@dataclass(frozen=True, slots=True)
class MmaGemm:
    """One compiled variant: the kind of the weights, T tokens a tile, the epilogue, and a multiprocessor's memory."""

    kind: str
    tokens: int
    epilogue: Epilogue = PLAIN
    memory: int = _SHARED_LEAST

    @property
    def row(self) -> FragmentKind:
        return FRAGMENT_KINDS[self.kind]

    @property
    def token_halves(self) -> int:
        """Warps side by side along the tokens."""
        return 2 if self.tokens == 128 else 1

    @property
    def row_groups(self) -> int:
        """Groups of 16 rows that a warp owns."""
        return 2 * self.token_halves

    @property
    def slot(self) -> int:
        return self.row.step_size

    @property
    def stage(self) -> int:
        return self.tokens * 128 + 2 * self.slot

    @property
    def headers(self) -> int:
        """Bytes of the headers of both slabs' records: a ring of its own, as a header serves four steps."""
        return HEADERS * 2 * self.row.header_size

    @property
    def resident(self) -> int:
        """Blocks on a multiprocessor."""
        return 2 if (self.memory // 2 - 1024 - self.headers) // self.stage >= 2 else 1

    @property
    def stages(self) -> int:
        return min(_MOST_STAGES, (self.memory // self.resident - 1024 - self.headers) // self.stage)

    @property
    def shared(self) -> int:
        return self.stages * self.stage + self.headers


@functools.cache
def _load_step(gemm: MmaGemm) -> Any:
    """load(x, weights, slot, head, thread, step, steps, token, m, cols, slab, slabs): start the copies of one step,
    then commit. `head`: where the headers of the step's record go.

    `weights` is where the tile's first slab begins. Tokens and columns beyond the matrix, and slabs beyond the last,
    become zeros or stay out.
    """
    from frink_numba.kernels.ptx import Emitter, Register, emitted

    kind = gemm.row
    header, step_size, record = kind.header_size, kind.step_size, kind.record_size

    @emitted(None, "u64", "u64", *["u32"] * 10)
    def load(
        e: Emitter,
        x: Register,
        weights: Register,
        slot: Register,
        head: Register,
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
            # A thread's pieces lie 16 rows apart: one address, one place in the swizzle.
            row, piece = thread >> 3, thread & 7
            column = (step << 6) + (piece << 3)
            source = x + ((e.widen(token + row) * e.widen(cols) + e.widen(column)) << 1)
            target = slot + (row << 7) + ((piece ^ (row & 7)) << 4)
            apart = THREADS // 8
            for i in range(gemm.tokens // apart):
                inside = b.and_(less(token + row + apart * i, m), less(column, cols))
                size = chosen(inside, e.constant("u32", 16), zero)
                # Nothing is read at an address of which no bytes are wanted.
                address = source + e.widen(cols) * (2 * apart * i) if i else source
                e.asm("cp.async.cg.shared.global [$0], [$1], 16, $2;", None, [target + 16 * 128 * i, address, size])
            at = e.widen(step >> (kind.group_steps >> 1)) * record
            inner = (step & (kind.group_steps - 1)) * step_size + header
            slab_bytes = e.widen(steps >> (kind.group_steps >> 1)) * record

            def copy(source: Register, target: Register, size: int) -> None:
                for i in range(-(-size // (16 * THREADS))):
                    offset = (thread + i * THREADS) << 4
                    with b.if_then(less(thread << 4, e.constant("u32", size - 16 * THREADS * i))):
                        e.asm(
                            "cp.async.cg.shared.global [$0], [$1], 16;", None,
                            [target + offset, source + e.widen(offset)],
                        )  # fmt: skip

            for side in range(2):
                with b.if_then(less(slab + side, slabs)):
                    source = weights + slab_bytes * side + at
                    copy(source + e.widen(inner), slot + (gemm.tokens * 128 + gemm.slot * side), step_size)
                    if header:
                        with b.if_then(b.icmp_unsigned("==", (step & 3).value, zero.value)):
                            copy(source, head + header * side, header)
        e.asm("cp.async.commit_group;", None, [])

    return load


@functools.cache
def _head(gemm: MmaGemm) -> Any:
    """head(base, step): where the headers of the step's record lie."""
    from frink_numba.kernels.ptx import Emitter, Register, emitted

    @emitted("u32", "u32", "u32")
    def head(e: Emitter, base: Register, step: Register) -> Register:
        turn = Register(e, "u32", e.builder.urem((step >> 2).value, e.constant("u32", HEADERS).value))
        return base + gemm.stages * gemm.stage + turn * (2 * gemm.row.header_size)

    return head


@functools.cache
def _multiply_step(gemm: MmaGemm) -> tuple[Any, ...]:
    """The multiply ops of steps 0..3 of a record: multiply(acc, slot, head, warp, lane) -> acc."""
    from frink_numba.kernels.gemm_emit import Converter, Loader, PtxMachine, header_words
    from frink_numba.kernels.ptx import Emitter, Register, emitted

    kind, halves, groups = gemm.row, gemm.token_halves, gemm.row_groups
    words = header_words(gemm.kind)
    own_tokens = gemm.tokens // halves
    count = groups * own_tokens // 2

    def thread_slab(warp: Register, group: int) -> Register:
        return (first_group(gemm, warp) + group) >> 2

    def place(slot: Register, warp: Register, lane: Register, group: int) -> tuple[Register, Register, Register]:
        """(slab's slot, thread in the slab, row g in the slab) of the warp's row group."""
        rows = first_group(gemm, warp) + group
        inner = rows & 3
        base = slot + gemm.tokens * 128 + (rows >> 2) * gemm.slot
        return base, (inner << 5) + lane, (inner << 4) + (lane >> 2)

    def make(step: int) -> Any:
        @emitted(f"f32x{count}", f"f32x{count}", "u32", "u32", "u32", "u32")
        def multiply(
            e: Emitter, acc: list[Register], slot: Register, head: Register, warp: Register, lane: Register
        ) -> list[Register]:
            codes, headers = [], []
            nothing = [e.constant("u32", 0)] * words
            for group in range(groups):
                base, thread, row = place(slot, warp, lane, group)
                machine = Loader(e)
                kind.fragments(machine, base, thread, row, step, nothing)
                codes.append(machine.loaded)
                own_head = head + (thread_slab(warp, group) * kind.header_size)
                headers.append(kind.header(PtxMachine(e), own_head, row) if kind.header else nothing)
            zero = e.constant("u32", 0)
            # Lanes 8i .. 8i+7 give the rows of matrix i: tokens 0-7 and 8-15, columns 0-7 and 8-15 of each.
            token = ((lane >> 4) << 3) + (lane & 7)
            if halves == 2:
                token = token + (warp & 1) * own_tokens
            out = list(acc)
            for block in range(4):
                piece = ((lane >> 3) & 1) + 2 * block
                fragments = []
                for group in range(groups):
                    # Through empty statements: operands are made when they are needed, not all at once. Two blocks
                    # of 16 columns share what most kinds make of the header.
                    codes[group] = e.asm("", f"u32x{len(codes[group])}", [], tied=codes[group])
                    if kind.header and block % 2 == 0:
                        headers[group] = e.asm("", f"u32x{words}", [], tied=headers[group])
                    made = kind.fragments(Converter(e, codes[group]), zero, zero, zero, step, headers[group])
                    fragments.append(made[4 * block : 4 * block + 4])
                for pair in range(own_tokens // 16):
                    address = slot + ((token + 16 * pair) << 7) + ((piece ^ (token & 7)) << 4)
                    b = e.asm("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0,$1,$2,$3}, [$4];", "u32x4", [address])
                    for n in range(2):
                        for group in range(groups):
                            at = 4 * (group * (own_tokens // 8) + 2 * pair + n)
                            out[at : at + 4] = e.asm(
                                "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, "
                                "{$8,$9}, {$0,$1,$2,$3};",
                                "f32x4",
                                [*fragments[group], b[2 * n], b[2 * n + 1]],
                                tied=out[at : at + 4],
                                pure=True,
                            )
            return out

        return multiply

    return tuple(make(step) for step in range(4))


@functools.cache
def build(gemm: MmaGemm) -> tuple[Any, Any]:
    """The kernel as a Python function for numba, and its signature. Grid: one block a tile, token tiles first."""
    from numba import cuda, types

    from frink_numba.kernels.gemm_emit import zeros
    from frink_numba.kernels.instructions import block_index, copies_pending
    from frink_numba.kernels.ptx import numba_type, shared_address

    kind = gemm.row
    TOKENS, STAGES, STAGE = gemm.tokens, gemm.stages, gemm.stage
    AHEAD = STAGES - 1
    RECORD, GROUPED = kind.record_size, kind.group_steps == 4
    no_sums = zeros(gemm.tokens)
    load, store = _load_step(gemm), store_tile(gemm)
    multiply0, multiply1, multiply2, multiply3 = _multiply_step(gemm)
    heads = _head(gemm)
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
        tile = block_index()
        pair = u32(tile // token_tiles)
        token = u32(u32(tile - pair * token_tiles) * u32(TOKENS))
        slab = u32(pair << u32(1))
        steps = u32(u32(cols + u32(63)) >> u32(6))
        source = weights + u64(slab) * (u64(steps >> u32(2 if GROUPED else 0)) * u64(RECORD))
        for i in range(AHEAD):
            load(
                x,
                source,
                base + u32(STAGE * i),
                heads(base, u32(i)),
                thread,
                u32(i),
                steps,
                token,
                m,
                cols,
                slab,
                slabs,
            )
        slot = u32(base)
        free = u32(base + u32(STAGE * AHEAD))
        end = u32(base + u32(STAGE * STAGES))
        acc = no_sums()
        step = u32(0)
        while step < steps:
            head = heads(base, step)
            arrived()
            cuda.syncthreads()
            far = heads(base, u32(step + u32(AHEAD)))
            load(x, source, free, far, thread, u32(step + u32(AHEAD)), steps, token, m, cols, slab, slabs)
            free = slot
            acc = multiply0(acc, slot, head, warp, lane)
            slot = u32(slot + u32(STAGE))
            if slot == end:
                slot = u32(base)
            step = u32(step + u32(1))
            if GROUPED:
                arrived()
                cuda.syncthreads()
                far = heads(base, u32(step + u32(AHEAD)))
                load(x, source, free, far, thread, u32(step + u32(AHEAD)), steps, token, m, cols, slab, slabs)
                free = slot
                acc = multiply1(acc, slot, head, warp, lane)
                slot = u32(slot + u32(STAGE))
                if slot == end:
                    slot = u32(base)
                step = u32(step + u32(1))

                arrived()
                cuda.syncthreads()
                far = heads(base, u32(step + u32(AHEAD)))
                load(x, source, free, far, thread, u32(step + u32(AHEAD)), steps, token, m, cols, slab, slabs)
                free = slot
                acc = multiply2(acc, slot, head, warp, lane)
                slot = u32(slot + u32(STAGE))
                if slot == end:
                    slot = u32(base)
                step = u32(step + u32(1))

                arrived()
                cuda.syncthreads()
                far = heads(base, u32(step + u32(AHEAD)))
                load(x, source, free, far, thread, u32(step + u32(AHEAD)), steps, token, m, cols, slab, slabs)
                free = slot
                acc = multiply3(acc, slot, head, warp, lane)
                slot = u32(slot + u32(STAGE))
                if slot == end:
                    slot = u32(base)
                step = u32(step + u32(1))
        # The tile's place once more, so that it needs no registers in the loop.
        tile = block_index()
        pair = u32(tile // token_tiles)
        token = u32(u32(tile - pair * token_tiles) * u32(TOKENS))
        slab = u32(pair << u32(1))
        store(
            acc, warp, lane, slab, token, out, row_scale, token_scale, bias, token_norm, out_scale, c2, c1, c0, m,
            outputs, pitch, slabs, add,
        )  # fmt: skip

    return gemm_mma, types.void(*(numba_type(spec) for _, spec in ARGUMENTS))
