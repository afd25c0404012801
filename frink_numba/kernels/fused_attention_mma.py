"""The `mma` tier of the fused attention: `mma.sync`, `ldmatrix` and `cp.async`, for every GPU from sm_80 on.

A block of some warps owns a tile of packed rows (the query heads of a K/V head, position by position) and walks over
the blocks of keys from the last visible one down. Q stays in shared memory. While the scores of a block are computed
its V is on its way, while its values are summed the next K is: one buffer each, and two or three blocks of threads on a
multiprocessor to fill the gaps. A warp of 32 rows reads each fragment of K and V once for both of its row groups, which
shared memory needs. Softmax, masks and stores are those of the `wgmma` tier: the accumulators are the same.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from frink_numba.kernels.fused_attention_plan import LOG2E, MmaLayout

ARGUMENTS = (
    # name, type
    ("q", "u64"),
    ("out", "u64"),
    ("table", "u64"),
    ("sinks", "u64"),  # float32 [n_heads], or 0
    ("factor", "f32"),
    ("inner", "f32"),
    ("sequences", "u32"),
    ("n_heads", "u32"),
    ("n_kv_heads", "u32"),
    ("group", "u32"),
    ("resident", "u32"),
    ("window", "u32"),
)


@functools.cache
def _copy_ops(layout: MmaLayout) -> tuple[Any, Any, Any]:
    """(load_k, load_v, load_queries): start the copies of a block of K or V, or of the tile's Q, and commit them."""
    from frink_numba.kernels.fused_attention_emit import thread_of
    from frink_numba.kernels.fused_attention_schedule import divide
    from frink_numba.kernels.ptx import Emitter, Register, emitted

    stored, step = -(-layout.head_dim // 8), layout.threads // 8

    def wide(e: Emitter, a: Register, b: Register, c: Register) -> Register:
        return e.asm("mad.wide.u32 $0, $1, $2, $3;", "u64", [a, b, c], pure=True)

    def copy_rows(e: Emitter, rows: int, target: Register, safe: Register, source_of: Any) -> None:
        """A thread takes one 16-byte piece of every `step`-th row, in each box of 64 channels."""
        thread = thread_of(e)
        row, piece = thread >> 3, thread & 7
        place = target + (row << 7) + ((piece ^ (row & 7)) << 4)
        for i in range(rows // step):
            source = source_of(row + i * step)
            for chunk in range(layout.chunks):
                offset = chunk * rows * 128 + i * step * 128
                size, origin = e.constant("u32", 16), source + 128 * chunk
                if stored < 8 * (chunk + 1):
                    # Beyond the head's channels: zeros, and nothing is read.
                    inside = e.builder.icmp_unsigned("<", piece.value, e.constant("u32", stored - 8 * chunk).value)
                    size = Register(e, "u32", e.builder.select(inside, size.value, e.constant("u32", 0).value))
                    origin = Register(e, "u64", e.builder.select(inside, origin.value, safe.value))
                e.asm(f"cp.async.cg.shared.global [$0+{offset}], [$1], 16, $2;", None, [place, origin, size])
        e.asm("cp.async.commit_group;", None, [])

    def loader(source_at: int, target_at: int) -> Any:
        @emitted(None, "u32", "u32", "u32", "u32")
        def load(e: Emitter, base: Register, block: Register, stride: Register, last: Register) -> None:
            """A block's rows of a head, `stride` bytes apart; rows past `last` repeat it."""
            source = e.asm("ld.shared.u64 $0, [$1];", "u64", [base + source_at]) + e.widen((thread_of(e) & 7) << 4)

            def source_of(row: Register) -> Register:
                at = e.asm("min.u32 $0, $1, $2;", "u32", [block * layout.keys + row, last], pure=True)
                return wide(e, at, stride, source)

            copy_rows(e, layout.keys, base + target_at, source, source_of)

        return load

    @emitted(None, "u64", "u32", "u32", "u32", "u32", "u32", "u32")
    def load_queries(
        e: Emitter,
        q: Register,
        target: Register,
        first: Register,
        last: Register,
        group: Register,
        head_stride: Register,
        row_stride: Register,
    ) -> None:
        """Packed rows `first` ..: row r is position r / group, query head r % group; rows past `last` repeat it."""

        def source_of(row: Register) -> Register:
            packed = e.asm("min.u32 $0, $1, $2;", "u32", [first + row, last], pure=True)
            position = divide(e, packed, group)
            return wide(e, packed - position * group, head_stride, wide(e, position, row_stride, source))

        source = q + e.widen((thread_of(e) & 7) << 4)
        copy_rows(e, layout.rows, target, q, source_of)

    sources = layout.slot_at + 16
    return loader(sources, layout.k_at), loader(sources + 8, layout.v_at), load_queries


class _Tile:
    """Fragments of a tile of rows of 128 bytes, whose 16-byte pieces are swizzled, in boxes of 64 channels.

    Lanes 8i .. 8i + 7 give the addresses of the rows of matrix i of a fragment: rows 0 to 7 and 8 to 15 of one piece,
    then of the next; `pieces_first`: both pieces of rows 0 to 7, then of rows 8 to 15. Tiles share these addresses but
    for constants, which the instruction adds.
    """

    def __init__(self, e: Any, base: Any, at: int, rows: int, *, pieces_first: bool = False) -> None:
        from frink_numba.kernels.fused_attention_emit import thread_of

        lane = thread_of(e) & 31
        upper, piece = (lane >> 3) & 1, lane >> 4
        if pieces_first:
            upper, piece = piece, upper
        row = (lane & 7) + (upper << 3)
        self.e, self.at, self.rows = e, at, rows
        self.base, self.bits = base + (row << 7), (piece ^ (lane & 7)) << 4

    def fragment(self, row: int, piece: int, transposed: bool = False) -> list[Any]:
        """Four 8 x 8 matrices, of rows from `row` (a multiple of 8) and pieces from `piece` (even)."""
        offset = self.at + (piece // 8) * self.rows * 128 + row * 128
        kind = ".trans" if transposed else ""
        return self.e.asm(
            f"ldmatrix.sync.aligned.m8n8.x4{kind}.shared.b16 {{$0,$1,$2,$3}}, [$4+{offset}];",
            "u32x4",
            [self.base + (self.bits ^ ((piece % 8) << 4))],
        )


def _multiply(e: Any, acc: Sequence[Any], a: Sequence[Any], b: Sequence[Any]) -> list[Any]:
    return e.asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$0,$1,$2,$3};",
        "f32x4",
        [*a, *b],
        tied=acc,
        memory=False,
    )


def _totals(e: Any, layout: MmaLayout, base: Any, row_group: int) -> Any:
    """Where the thread keeps the sums of weights of its two rows of a group: registers are all taken."""
    from frink_numba.kernels.fused_attention_emit import thread_of

    return base + (thread_of(e) << 3) + (layout.totals_at + 8 * layout.threads * row_group)


@functools.cache
def _step_ops(layout: MmaLayout) -> tuple[Any, Any, Any]:
    """(scores, masked weigh, free weigh): the two halves of a step.

    scores(base) -> the scores of the warp's rows; weigh(carried, scores, base, limits, window, inner, factor) ->
    carried, which holds the value sums of each row group, then the maxima of each.
    """
    from frink_numba.kernels.fused_attention_emit import cap, halves, mask, softmax, thread_of
    from frink_numba.kernels.ptx import Emitter, Register, emitted

    groups, per_group, own = layout.row_groups, layout.keys // 2, layout.width // 2
    count, carried = groups * per_group, f"f32x{groups * (own + 2)}"

    @emitted(f"f32x{count}", "u32")
    def scores(e: Emitter, base: Register) -> list[Register]:
        queries = _Tile(e, base + (thread_of(e) >> 5) * (groups * 2048), 0, layout.rows)
        keys = _Tile(e, base, layout.k_at, layout.keys, pieces_first=True)
        out = [e.constant("f32", 0.0)] * count
        for block in range(layout.width // 16):
            a = [queries.fragment(16 * r, 2 * block) for r in range(groups)]
            for pair in range(layout.keys // 16):
                b = keys.fragment(16 * pair, 2 * block)
                for n in range(2):
                    for r in range(groups):
                        at = r * per_group + 4 * (2 * pair + n)
                        out[at : at + 4] = _multiply(e, out[at : at + 4], a[r], b[2 * n : 2 * n + 2])
        return out

    def make(masked: bool) -> Any:
        @emitted(carried, carried, f"f32x{count}", "u32", f"u32x{2 * groups}", "u32", "f32", "f32")
        def weigh(
            e: Emitter,
            before: list[Register],
            products: list[Register],
            base: Register,
            limits: list[Register],
            window: Register,
            inner: Register,
            factor: Register,
        ) -> list[Register]:
            values = _Tile(e, base, layout.v_at, layout.keys)
            sums, p, state = [], [], []
            for r in range(groups):
                s = products[r * per_group : (r + 1) * per_group]
                if layout.capped:
                    s = cap(e, s, inner)
                if masked:
                    s = mask(e, s, limits[2 * r : 2 * r + 2], window if layout.windowed else None)
                at = groups * own + 2 * r
                weights, maxima, added, rescale = softmax(e, s, before[at : at + 2], factor, guard=masked)
                place = _totals(e, layout, base, r)
                totals = e.asm("ld.shared.v2.f32 {$0,$1}, [$2];", "f32x2", [place])
                totals = [totals[h] * rescale[h] + added[h] for h in range(2)]
                e.asm("st.shared.v2.f32 [$0], {$1,$2};", None, [place, *totals])
                sums += [x * rescale[(i >> 1) & 1] for i, x in enumerate(before[r * own : (r + 1) * own])]
                p.append(halves(e, weights, pure=True))
                state += maxima
            for block in range(layout.keys // 16):
                a = [p[r][4 * block : 4 * block + 4] for r in range(groups)]
                for pair in range(layout.width // 16):
                    b = values.fragment(16 * block, 2 * pair, transposed=True)
                    for n in range(2):
                        for r in range(groups):
                            at = r * own + 4 * (2 * pair + n)
                            sums[at : at + 4] = _multiply(e, sums[at : at + 4], a[r], b[2 * n : 2 * n + 2])
            return [*sums, *state]

        return weigh

    return scores, make(True), make(False)


@functools.cache
def _edge_ops(layout: MmaLayout) -> tuple[Any, Any, Any, Any]:
    """(start, limits, later, store): the first carried values, the rows' limits, those of the next block, the end."""
    from frink_numba.kernels.fused_attention_emit import finish, select, store_rows, thread_of
    from frink_numba.kernels.fused_attention_schedule import divide, row_limits
    from frink_numba.kernels.ptx import Emitter, Register, emitted

    groups, own = layout.row_groups, layout.width // 2
    carried, rows_of = f"f32x{groups * (own + 2)}", f"u32x{2 * groups}"

    def row(e: Emitter, r: int, h: int) -> Register:
        """The thread's row g + 8h of row group r, in the tile."""
        thread = thread_of(e)
        return (thread >> 5) * (16 * groups) + 16 * r + 8 * h + ((thread & 31) >> 2)

    @emitted(carried, "u32")
    def start(e: Emitter, base: Register) -> list[Register]:
        zero, none = e.constant("f32", 0.0), e.constant("f32", float("-inf"))
        for r in range(groups):
            e.asm("st.shared.v2.f32 [$0], {$1,$1};", None, [_totals(e, layout, base, r), zero])
        return [zero] * (groups * own) + [none, none] * groups

    @emitted(rows_of, "u32", "u32", "u32", "u32", "u32")
    def limits(
        e: Emitter, first_row: Register, rows: Register, begin: Register, group: Register, block: Register
    ) -> list[Register]:
        inside = [row(e, r, h) for r in range(groups) for h in range(2)]
        return row_limits(e, layout.keys, thread_of(e), inside, first_row, rows, begin, group, block)

    @emitted(rows_of, rows_of)
    def later(e: Emitter, before: list[Register]) -> list[Register]:
        return [limit + layout.keys for limit in before]

    @emitted(None, carried, "u32", "u64", "u64", "u32", "u32", "u32", "u32", "u32", "u32", "f32")
    def store(
        e: Emitter,
        values: list[Register],
        base: Register,
        out: Register,
        sinks: Register,
        first_row: Register,
        rows: Register,
        batch_row: Register,
        head: Register,
        n_heads: Register,
        group: Register,
        factor: Register,
    ) -> None:
        b, lane = e.builder, thread_of(e) & 31
        given = b.icmp_unsigned("!=", sinks.value, e.constant("u64", 0).value)
        none = e.constant("f32", float("-inf"))
        for r in range(groups):
            addresses, flags, logits = [], [], []
            for h in range(2):
                packed = first_row + row(e, r, h)
                valid = b.icmp_unsigned("<", packed.value, rows.value)
                position = divide(e, packed, group)
                query = select(e, valid, head * group + packed - position * group, e.constant("u32", 0))
                place = e.widen(batch_row + position) * e.widen(n_heads) + e.widen(query)
                addresses.append(out + place * (2 * layout.head_dim))
                flags.append(valid)
                # Without sinks the table of heads is not there: no load, through a predicate.
                wanted = Register(e, "u32", b.zext(given, packed.value.type))
                text = "{\n.reg .pred p;\nsetp.ne.u32 p, $2, 0;\n@p ld.global.f32 $0, [$1];\n}"
                address = sinks + e.widen(query << 2)
                loaded = e.asm(text, "f32", [address, wanted], tied=[none])
                logits.append(loaded * LOG2E)
            at = groups * own + 2 * r
            totals = e.asm("ld.shared.v2.f32 {$0,$1}, [$2];", "f32x2", [_totals(e, layout, base, r)])
            done = finish(e, values[r * own : (r + 1) * own], values[at : at + 2], totals, factor, logits)
            store_rows(e, done, addresses, flags, lane, layout.head_dim)

    return start, limits, later, store


@functools.cache
def build(layout: MmaLayout) -> tuple[Any, Any]:
    """The kernel as a Python function for numba, and its signature. Grid: a block a tile, or more blocks than tiles."""
    from numba import cuda, types

    from frink_numba.kernels.fused_attention_schedule import schedule_ops
    from frink_numba.kernels.instructions import copies_pending
    from frink_numba.kernels.ptx import instruction, numba_type, shared_address

    load_k, load_v, load_queries = _copy_ops(layout)
    scores, masked_weigh, free_weigh = _step_ops(layout)
    start_sums, limits_of, later, store = _edge_ops(layout)
    locate, bounds, _ = schedule_ops(layout.rows, layout.keys, layout.windowed)
    arrived = copies_pending(0)
    load_record = instruction("ld.global.v4.u32 {$0,$1,$2,$3}, [$4];", "u32x4", "u64")
    load_address = instruction("ld.global.u64 $0, [$1];", "u64", "u64")
    read_slot = instruction("ld.shared.v4.u32 {$0,$1,$2,$3}, [$4];", "u32x4", "u32")
    write_slot = instruction("st.shared.v4.u32 [$0], {$1,$2,$3,$4};", None, "u32", "u32", "u32", "u32", "u32")
    write_sources = instruction("st.shared.v2.u64 [$0], {$1,$2};", None, "u32", "u64", "u64")
    quotient = instruction("div.u32 $0, $1, $2;", "u32", "u32", "u32", pure=True)
    ROWS, SLOT_AT = layout.rows, layout.slot_at
    HEAD_BYTES = -(-layout.head_dim // 8) * 16
    WINDOWED = layout.windowed
    u32, u64 = types.uint32, types.uint64

    def attention_mma(q, out, table, sinks, factor, inner, sequences, n_heads, n_kv_heads, group, resident, window):
        shared = cuda.shared.array(0, types.uint8, alignment=128)
        base = shared_address(shared)
        number = u32(cuda.blockIdx.x)
        sequence = u32(0)
        tokens = u32(0)
        rows = u32(0)
        tiles = u32(1)
        while sequence < sequences:
            _, tokens, _, _ = load_record(table + u64(sequence) * u64(32))
            rows = u32(tokens * group)
            tiles = quotient(u32(rows + u32(ROWS - 1)), u32(ROWS))
            count = u32(tiles * n_kv_heads)
            if number < count:
                break
            number = u32(number - count)
            sequence = u32(sequence + u32(1))
        if sequence < sequences:
            entry = table + u64(sequence) * u64(32)
            batch_row, tokens, start, _ = load_record(entry)
            head, first_row = locate(number, tiles, n_kv_heads, u32(start + tokens), resident)
            stride = u32(n_kv_heads * u32(HEAD_BYTES))
            k_source = load_address(entry + u64(16)) + u64(head) * u64(HEAD_BYTES)
            v_source = load_address(entry + u64(24)) + u64(head) * u64(HEAD_BYTES)
            last_key = u32(start + tokens - u32(1))
            # What is not always needed, out of the registers' way. All threads write, and read, the same.
            write_slot(base + u32(SLOT_AT), head, first_row, rows, batch_row)
            write_sources(base + u32(SLOT_AT + 16), k_source, v_source)
            cuda.syncthreads()
            row_stride = u32(n_heads * u32(HEAD_BYTES))
            source = q + u64(batch_row) * u64(row_stride) + u64(head * group) * u64(HEAD_BYTES)
            load_queries(source, base, first_row, rows - u32(1), group, u32(HEAD_BYTES), row_stride)
            block, free_end, free_begin, begin = bounds(first_row, rows, start, group, window)
            block = u32(block - u32(1))
            load_k(base, block, stride, last_key)
            limits = limits_of(first_row, rows, start, group, block)
            carried = start_sums(base)
            block = u32(block + u32(1))
            free_end = u32(min(free_end, u32(block - u32(1))))
            free_begin = u32(min(free_begin, free_end))
            while block > free_end:
                block = u32(block - u32(1))
                arrived()
                cuda.syncthreads()
                load_v(base, block, stride, last_key)
                products = scores(base)
                arrived()
                cuda.syncthreads()
                if block > begin:
                    load_k(base, u32(block - u32(1)), stride, last_key)
                carried = masked_weigh(carried, products, base, limits, window, inner, factor)
                limits = later(limits)
            while block > free_begin:
                block = u32(block - u32(1))
                arrived()
                cuda.syncthreads()
                load_v(base, block, stride, last_key)
                products = scores(base)
                arrived()
                cuda.syncthreads()
                if block > begin:
                    load_k(base, u32(block - u32(1)), stride, last_key)
                carried = free_weigh(carried, products, base, limits, window, inner, factor)
                if WINDOWED:
                    limits = later(limits)
            if WINDOWED:
                while block > begin:
                    block = u32(block - u32(1))
                    arrived()
                    cuda.syncthreads()
                    load_v(base, block, stride, last_key)
                    products = scores(base)
                    arrived()
                    cuda.syncthreads()
                    if block > begin:
                        load_k(base, u32(block - u32(1)), stride, last_key)
                    carried = masked_weigh(carried, products, base, limits, window, inner, factor)
                    limits = later(limits)
            head, first_row, rows, batch_row = read_slot(base + u32(SLOT_AT))
            store(carried, base, out, sinks, first_row, rows, batch_row, head, n_heads, group, factor)

    return attention_mma, types.void(*(numba_type(spec) for _, spec in ARGUMENTS))
