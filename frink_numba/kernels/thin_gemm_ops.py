"""The pieces of the thin products' kernel, unrolled while it is compiled: fetch, multiply, reduce, store, normalize.

A warp's place in shared memory is a quarter of a slab's record, whatever quarter of the matrix it works on, so that the
fragment functions of `gemm_kinds.py` find everything where a slab would have it.
"""

from __future__ import annotations

import functools
from typing import Any

from frink_numba.kernels.gates import activate
from frink_numba.kernels.gemm_emit import PtxMachine, header_words
from frink_numba.kernels.gemm_epilogue import Epilogue
from frink_numba.kernels.gemm_kinds import FRAGMENT_KINDS, SLAB, THREADS
from frink_numba.kernels.gemm_store import out_scales
from frink_numba.kernels.ptx import Emitter, Register, emitted
from frink_numba.kernels.thin_gemm_plan import WARPS, item_steps, partial_room, sum_registers

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
def partial_ops(tokens: int, row_groups: int) -> tuple[Any, Any]:
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
            for part in range(WARPS // row_groups):
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
