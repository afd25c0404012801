"""The pieces of the thin products' kernel, unrolled while it is compiled: fetch, multiply, reduce, store, normalize.

A warp's place in shared memory is a quarter of a slab's record, whatever quarter of the matrix it works on, so that the
fragment functions of `gemm_kinds.py` find everything where a slab would have it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from frink_numba.kernels.gemm_emit import PtxMachine, header_words
from frink_numba.kernels.gemm_epilogue import Epilogue
from frink_numba.kernels.gemm_kinds import FRAGMENT_KINDS, SLAB, THREADS
from frink_numba.kernels.gemm_store import activate, out_scales
from frink_numba.kernels.ptx import Emitter, Register, emitted
from frink_numba.kernels.thin_gemm_plan import item_steps, partial_room, sum_registers

# Four words at $4 where $5 is not 0, else zeros.
_LOAD_OR_ZERO = (
    "{\n.reg .pred p;\n.reg .b32 a, b, c, d;\nsetp.ne.u32 p, $5, 0;\nmov.b32 a, 0;\nmov.b32 b, 0;\nmov.b32 c, 0;\n"
    "mov.b32 d, 0;\n@p ld.global.v4.b32 {a,b,c,d}, [$4];\nmov.b32 $0, a;\nmov.b32 $1, b;\nmov.b32 $2, c;\n"
    "mov.b32 $3, d;\n}"
)

_HEADER_REGIONS = {"Q3_K": (2, 4, 4, 4)}  # bytes a row of each region of a header; else the header is one region


def item_regions(name: str) -> list[tuple[int, int, int]]:
    """(offset in a slab's item, bytes of a quarter there, step) of everything that an item holds; header: step 0."""
    kind = FRAGMENT_KINDS[name]
    out, at = [], 0
    for size in _HEADER_REGIONS.get(name, (kind.header_bytes,) if kind.header_bytes else ()):
        out.append((at, size * SLAB // 4, 0))
        at += size * SLAB
    for step in range(item_steps(kind)):
        if kind.scale_bytes:
            out.append((at, kind.scale_bytes * SLAB // 4, step))
        at += kind.scale_bytes * SLAB
        for plane in kind.planes:
            out.append((at, plane * THREADS // 4, step))
            at += plane * THREADS
    return out


def _less(e: Emitter, a: Register, b: Register | int) -> Any:
    other = b if isinstance(b, Register) else e.constant("u32", b)
    return e.builder.icmp_unsigned("<", a.value, other.value)


@functools.cache
def fetch_item(name: str) -> Any:
    """fetch(source, quarter, slot, place, lane, steps): start the copies of a quarter's item, `steps` of it or more."""
    regions = item_regions(name)

    @emitted(None, "u64", "u32", "u32", "u32", "u32", "u32")
    def fetch(
        e: Emitter,
        source: Register,
        quarter: Register,
        slot: Register,
        place: Register,
        lane: Register,
        steps: Register,
    ) -> None:
        piece = lane << 4
        ends: dict[int, tuple[Register, Register]] = {}  # by the bytes of a quarter
        for _, size, _ in regions:
            if size not in ends:
                ends[size] = (slot + place * size + piece, source + e.widen(quarter * size + piece))

        def copy(at: int, size: int) -> None:
            target, start = ends[size]
            for k in range(0, size, 512):
                arguments = [target + (at + k), start + (at + k)]
                here = "cp.async.cg.shared.global [$0], [$1], 16;"
                if size - k >= 512:
                    e.asm(here, None, arguments)
                    continue
                template = f"{{\n.reg .pred p;\nsetp.lt.u32 p, $2, {(size - k) // 16};\n@p {here}\n}}"
                e.asm(template, None, [*arguments, lane])

        for step in range(regions[-1][2] + 1):
            own = [(at, size) for at, size, of in regions if of == step]
            if step == 0 or FRAGMENT_KINDS[name].group_steps == 4:
                for at, size in own:
                    copy(at, size)
            else:
                with e.builder.if_then(_less(e, e.constant("u32", step), steps)):
                    for at, size in own:
                        copy(at, size)

    return fetch


@functools.cache
def multiply_item(name: str, tokens: int) -> Any:
    """multiply(acc, slot, place, lane, x, x_high, steps) -> acc: a quarter's item times the rows of x.

    x: this lane's address for `ldmatrix` of rows 0..7 at the item's first column; x_high: of rows 8..15. acc: two sums
    that take turns, so that products need not wait for each other; each has sum_registers(tokens).
    """
    kind = FRAGMENT_KINDS[name]
    size = sum_registers(tokens)
    count = item_steps(kind)

    @emitted(f"f32x{2 * size}", f"f32x{2 * size}", "u32", "u32", "u32", "u32", "u32", "u32")
    def multiply(
        e: Emitter,
        acc: list[Register],
        slot: Register,
        place: Register,
        lane: Register,
        x: Register,
        x_high: Register,
        steps: Register,
    ) -> list[Register]:
        machine = PtxMachine(e)
        thread = (place << 5) + lane
        row = (place << 4) + (lane >> 2)
        header = kind.header(machine, slot, row) if kind.header else []
        assert not kind.header or len(header) == header_words(name)

        def one(sums: list[Register], step: int) -> list[Register]:
            base = slot + (kind.header_size + kind.step_size * step)
            inner = step if kind.group_steps == 4 else 0
            fragments = kind.fragments(machine, base, thread, row, inner, header)
            out = list(sums)
            for pair in range(2):
                for half, source in enumerate((x, x_high)[: size // 4]):
                    address = source + (128 * step + 64 * pair)
                    b = e.asm("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0,$1,$2,$3}, [$4];", "u32x4", [address])
                    for block in range(2):
                        at = size * block + 4 * half
                        a = fragments[8 * pair + 4 * block : 8 * pair + 4 * block + 4]
                        out[at : at + 4] = e.asm(
                            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, "
                            "{$8,$9}, {$0,$1,$2,$3};",
                            "f32x4",
                            [*a, b[2 * block], b[2 * block + 1]],
                            tied=out[at : at + 4],
                            pure=True,
                        )
            return out

        sums = one(list(acc), 0)
        for step in range(1, count):
            if kind.group_steps == 4:
                sums = one(sums, step)
                continue
            before = e.builder.block
            with e.builder.if_then(_less(e, e.constant("u32", step), steps)):
                more = one(sums, step)
                inside = e.builder.block
            merged = []
            for old, new in zip(sums, more, strict=True):
                phi = e.builder.phi(new.value.type)
                phi.add_incoming(old.value, before)
                phi.add_incoming(new.value, inside)
                merged.append(Register(e, "f32", phi))
            sums = merged
        return sums

    return multiply


@functools.cache
def partial_ops(tokens: int, warps: int, row_groups: int) -> tuple[Any, Any]:
    """(put(acc, address, lane), add_up(address) -> sums): a warp's sums in shared memory.

    `address`: where the lane's first 16 bytes lie in the warp's room, and in that of a row group's first warp. Parts
    are added in a tree that is always the same.
    """
    size, room = sum_registers(tokens), partial_room(tokens)

    @emitted(None, f"f32x{2 * size}", "u32", "u32")
    def put(e: Emitter, acc: list[Register], address: Register, lane: Register) -> None:
        for k in range(0, size, 4):
            values = [acc[k + i] + acc[size + k + i] for i in range(4)]
            _put_four(e, "st.shared.v4.f32", tokens, address + 128 * k, values, lane)

    @emitted(f"f32x{size}", "u32")
    def add_up(e: Emitter, address: Register) -> list[Register]:
        out: list[Register] = []
        for k in range(0, size, 4):
            parts = []
            for part in range(warps // row_groups):
                at = address + (128 * k + part * row_groups * room)
                parts.append(e.asm("ld.shared.v4.f32 {$0,$1,$2,$3}, [$4];", "f32x4", [at]))
            while len(parts) > 1:
                pairs = zip(parts[::2], parts[1::2], strict=True)
                parts = [[a + b for a, b in zip(p, q, strict=True)] for p, q in pairs]
            out += parts[0]
        return out

    return put, add_up


@functools.cache
def exchange_ops(tokens: int) -> tuple[Any, Any]:
    """Where K is cut over blocks, through global memory: (put(sums, address, lane), add(sums, address) -> sums)."""
    size = sum_registers(tokens)

    @emitted(None, f"f32x{size}", "u64", "u32")
    def put(e: Emitter, sums: list[Register], address: Register, lane: Register) -> None:
        for k in range(0, size, 4):
            _put_four(e, "st.global.cg.v4.f32", tokens, address + 128 * k, sums[k : k + 4], lane)

    @emitted(f"f32x{size}", f"f32x{size}", "u64")
    def add(e: Emitter, sums: list[Register], address: Register) -> list[Register]:
        out = []
        for k in range(0, size, 4):
            part = e.asm("ld.global.cg.v4.f32 {$0,$1,$2,$3}, [$4];", "f32x4", [address + 128 * k])
            out += [sums[k + i] + part[i] for i in range(4)]
        return out

    return put, add


def _put_four(e: Emitter, store: str, tokens: int, address: Register, values: list[Register], lane: Register) -> None:
    """With two tokens at most, only the lanes t = 0 have anything."""
    condition = "and.b32 t, $5, 3;\nsetp.eq.u32 p, t, 0;" if tokens == 2 else "setp.eq.u32 p, 0, 0;"
    template = f"{{\n.reg .pred p;\n.reg .b32 t;\n{condition}\n@p {store} [$0], {{$1,$2,$3,$4}};\n}}"
    e.asm(template, None, [address, *values, lane])


@functools.cache
def store_quarter(epilogue: Epilogue, tokens: int) -> Any:
    """store(sums, (scales of rows g and g + 8, biases), token_values, quarter, lane, out, m, outputs, pitch, add)."""
    size = sum_registers(tokens)
    own = size // 2

    @emitted(
        None, f"f32x{size}", "f32x4", f"f32x{2 * own}", "u32", "u32", "u64", "u32", "u32", "u32", "u32"
    )  # fmt: skip
    def store(
        e: Emitter,
        sums: list[Register],
        rows: list[Register],
        token: list[Register],
        quarter: Register,
        lane: Register,
        out: Register,
        m: Register,
        outputs: Register,
        pitch: Register,
        add: Register,
    ) -> None:
        b = e.builder
        g, t = lane >> 2, lane & 3
        token_scale, inverse = token[:own], token[own:]

        def put(address: Register, column: Register, value: Register) -> None:
            with b.if_then(_less(e, column, outputs)):
                if epilogue.half:
                    bits = e.asm("cvt.rn.f16.f32 $0, $1;", "u16", [value], pure=True)
                    e.asm("st.global.u16 [$0], $1;", None, [address + e.widen(column << 1), bits])
                    return
                e.asm(
                    "{\n.reg .pred p;\nsetp.ne.u32 p, $2, 0;\n@p red.global.add.f32 [$0], $1;\n"
                    "@!p st.global.f32 [$0], $1;\n}",
                    None,
                    [address + e.widen(column << 2), value, add],
                )

        for i in range(own):
            row = (t << 1) + (8 * (i >> 1) + (i & 1))
            with b.if_then(_less(e, row, m)):
                at = 4 * (i >> 1) + (i & 1)
                low = sums[at] * rows[0] * token_scale[i]
                high = sums[at + 2] * rows[1] * token_scale[i]
                address = out + e.widen(row) * e.widen(pitch)
                if epilogue.gate:
                    values, columns = [activate(e, epilogue.gate, low) * high], [(quarter << 3) + g]
                else:
                    values = [low + rows[2], high + rows[3]]
                    columns = [(quarter << 4) + g, (quarter << 4) + g + 8]
                for column, value in zip(columns, values, strict=True):
                    put(address, column, value * inverse[i] if epilogue.half else value)

    return store


# ---- x on its way in -------------------------------------------------------------------------------------------------


@functools.cache
def copy_rows(threads: int) -> Any:
    """copy(x, first, count, pieces, inverse, cols, column, target, stride): 8 pieces of 16 bytes a thread at a time.

    Piece i of `count` is piece i mod `pieces` of row i / pieces (`inverse` = 2**32 / pieces, rounded up); `column` is
    the part's first; zeros beyond `cols`. Rows lie `stride` bytes apart in shared memory.
    """

    @emitted(None, "u64", "u32", "u32", "u32", "u32", "u32", "u32", "u32", "u32")
    def copy(
        e: Emitter,
        x: Register,
        first: Register,
        count: Register,
        pieces: Register,
        inverse: Register,
        cols: Register,
        column: Register,
        target: Register,
        stride: Register,
    ) -> None:
        b = e.builder
        loaded = []
        for k in range(8):
            index = first + threads * k
            row = e.asm("mul.hi.u32 $0, $1, $2;", "u32", [index, inverse], pure=True)
            piece = index - row * pieces
            at = column + (piece << 3)
            inside = b.and_(_less(e, index, count), _less(e, at, cols))
            flag = Register(e, "u32", b.zext(inside, row.value.type))
            source = x + ((e.widen(row) * e.widen(cols) + e.widen(at)) << 1)
            values = e.asm(
                _LOAD_OR_ZERO,
                "u32x4",
                [source, flag],
            )
            loaded.append((index, target + row * stride + (piece << 4), values))
        for index, address, values in loaded:
            with b.if_then(_less(e, index, count)):
                e.asm("st.shared.v4.u32 [$0], {$1,$2,$3,$4};", None, [address, *values])

    return copy


def _row_op(vectors: int, threads: int, body: Callable[..., Any]) -> list[Any]:
    return [body(4 * i, threads * i) for i in range(vectors)]


@functools.cache
def norm_ops(vectors: int, threads: int) -> tuple[Any, Any, Any]:
    """A thread's share of a float32 row: `vectors` times four columns, `threads` vectors apart.

    load(row, thread, cols) -> values, zeros beyond `cols`; measure(values, weight) -> (sum of x**2, of (x w)**2,
    largest |x w|) of the warp's columns; convert(values, weight, rms, factor, thread, column, end, target): f16 of x
    rms w factor to shared memory, for the columns from `column` to `end`.
    """
    count = 4 * vectors

    @emitted(f"f32x{count}", "u64", "u32", "u32")
    def load(e: Emitter, row: Register, thread: Register, cols: Register) -> list[Register]:
        def one(_: int, apart: int) -> list[Register]:
            vector = thread + apart
            flag = Register(e, "u32", e.builder.zext(_less(e, vector << 2, cols), thread.value.type))
            return e.asm(_LOAD_OR_ZERO, "f32x4", [row + e.widen(vector << 4), flag])

        return [value for four in _row_op(vectors, threads, one) for value in four]

    def tree(terms: list[Register], combine: Callable[[Register, Register], Register]) -> Register:
        while len(terms) > 1:
            pairs = [combine(a, b) for a, b in zip(terms[::2], terms[1::2], strict=False)]
            terms = pairs + terms[len(pairs) * 2 :]
        return terms[0]

    @emitted("f32x3", f"f32x{count}", f"f32x{count}")
    def measure(e: Emitter, values: list[Register], weight: list[Register]) -> list[Register]:
        def larger(a: Register, b: Register) -> Register:
            return e.asm("max.f32 $0, $1, $2;", "f32", [a, b], pure=True)

        weighted = [v * w for v, w in zip(values, weight, strict=True)]
        sizes = [e.asm("abs.f32 $0, $1;", "f32", [v], pure=True) for v in weighted]
        out = [tree([v * v for v in terms], lambda a, b: a + b) for terms in (values, weighted)]
        out.append(tree(sizes, larger))
        for distance in (16, 8, 4, 2, 1):
            shuffle = f"shfl.sync.bfly.b32 $0, $1, {distance}, 0x1f, 0xffffffff;"
            moved = [e.asm(shuffle, "f32", [value]) for value in out]
            out = [out[0] + moved[0], out[1] + moved[1], larger(out[2], moved[2])]
        return out

    @emitted(None, f"f32x{count}", f"f32x{count}", "f32", "f32", "u32", "u32", "u32", "u32")
    def convert(
        e: Emitter,
        values: list[Register],
        weight: list[Register],
        rms: Register,
        power: Register,
        thread: Register,
        column: Register,
        end: Register,
        target: Register,
    ) -> None:
        def one(at: int, apart: int) -> None:
            first = (thread + apart) << 2
            inside = e.builder.and_(_less(e, first, end), e.builder.not_(_less(e, first, column)))
            with e.builder.if_then(inside):
                scaled = [values[at + i] * rms * weight[at + i] * power for i in range(4)]
                words = [
                    e.asm("cvt.rn.f16x2.f32 $0, $2, $1;", "u32", [scaled[i], scaled[i + 1]], pure=True) for i in (0, 2)
                ]
                e.asm("st.shared.v2.u32 [$0], {$1,$2};", None, [target + ((first - column) << 1), *words])

        _row_op(vectors, threads, one)

    return load, measure, convert


@functools.cache
def norm_facts(warps: int) -> Any:
    """facts(address, cols, eps) -> (1 / rms, a bound of the normalized row's 2-norm, 1 / scale, scale).

    `address`: what `measure` gave for each warp, 16 bytes apart in shared memory. The scale is the power of two that
    keeps the largest element under 2**15. Where the sum of (x w)**2 is out of float32's range, the bound is looser.
    """

    @emitted("f32x4", "u32", "u32", "f32")
    def facts(e: Emitter, address: Register, cols: Register, eps: Register) -> list[Register]:
        def op(template: str, *inputs: Register) -> Register:
            return e.asm(template, "f32", inputs, pure=True)

        total = weighted = top = e.constant("f32", 0.0)
        for w in range(warps):
            four = e.asm("ld.shared.v4.f32 {$0,$1,$2,$3}, [$4];", "f32x4", [address + 16 * w])
            total, weighted = total + four[0], weighted + four[1]
            top = op("max.f32 $0, $1, $2;", top, four[2])
        width = op("cvt.rn.f32.u32 $0, $1;", cols)
        rms = op("rsqrt.approx.f32 $0, $1;", op("div.rn.f32 $0, $1, $2;", total, width) + eps)
        b = e.builder
        sound = b.and_(
            b.fcmp_ordered(">", weighted.value, e.constant("f32", 1e-30).value),
            b.fcmp_ordered("<", weighted.value, e.constant("f32", 3e38).value),
        )
        root, loose = op("sqrt.rn.f32 $0, $1;", weighted), op("sqrt.rn.f32 $0, $1;", width) * top
        norm = Register(e, "f32", b.select(sound, root.value, loose.value)) * rms * 1.002
        zero, one = e.constant("f32", 0.0), e.constant("f32", 1.0)
        return [rms, norm, *out_scales(e, top * rms, (zero, one, zero))]

    return facts


@functools.cache
def out_power() -> Any:
    """power(norm, c2, c1, c0) -> the power of two of an f16 result: see gemm_store.out_scales."""

    @emitted("f32", "f32", "f32", "f32", "f32")
    def power(e: Emitter, norm: Register, c2: Register, c1: Register, c0: Register) -> Register:
        return out_scales(e, norm, (c2, c1, c0))[1]

    return power


@functools.cache
def token_values(tokens: int) -> Any:
    """values(scales, lane, m, c2, c1, c0) -> scales of the lane's tokens, then 1 / out_scale of each."""
    own = sum_registers(tokens) // 2

    @emitted(f"f32x{2 * own}", "u32", "u32", "u32", "f32", "f32", "f32")
    def values(
        e: Emitter, scales: Register, lane: Register, m: Register, c2: Register, c1: Register, c0: Register
    ) -> list[Register]:
        found = []
        for i in range(own):
            token = ((lane & 3) << 1) + (8 * (i >> 1) + (i & 1))
            token = e.asm("min.u32 $0, $1, $2;", "u32", [token, m - 1], pure=True)
            found.append(e.asm("ld.shared.v2.f32 {$0,$1}, [$2];", "f32x2", [scales + (token << 4)]))
        return [scale for scale, _ in found] + [out_scales(e, norm, (c2, c1, c0))[0] for _, norm in found]

    return values
