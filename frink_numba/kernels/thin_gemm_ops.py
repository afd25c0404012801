"""The pieces of the thin products' loop over K, unrolled while the kernel is compiled: fetch and multiply.

A warp's place in shared memory is a quarter of a slab's record, whatever quarter of the matrix it works on, so that the
fragment functions of `gemm_kinds.py` find everything where a slab would have it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from frink_numba.kernels.gemm_emit import PtxMachine, header_words
from frink_numba.kernels.gemm_kinds import FRAGMENT_KINDS, SLAB, THREADS, half_bits
from frink_numba.kernels.ptx import Emitter, Register, emitted
from frink_numba.kernels.thin_gemm_plan import item_steps, sum_registers
from frink_numba.kernels.thin_gemm_scales import SCHEMES

_HEADER_REGIONS = {"Q3_K": (2, 4, 4, 4)}  # bytes a row of each region of a header; else the header is one region


class ThinMachine(PtxMachine):
    """A PtxMachine with float32."""

    def floats(self, word: Register) -> list[Register]:
        """The two f16 numbers of a word."""
        template = "{\n.reg .b16 a, b;\nmov.b32 {a, b}, $2;\ncvt.f32.f16 $0, a;\ncvt.f32.f16 $1, b;\n}"
        return self.e.asm(template, "f32x2", [word], pure=True)

    def lower(self, word: Register) -> Register:
        """The lower f16 number of a word."""
        template = "{\n.reg .b16 a, b;\nmov.b32 {a, b}, $1;\ncvt.f32.f16 $0, a;\n}"
        return self.e.asm(template, "f32", [word], pure=True)

    def power(self, value: Register, exponent: int) -> Register:
        return value * 2.0**exponent

    def select(self, index: Register, choices: Sequence[Register]) -> Register:
        """choices[index], the last one beyond."""
        chosen = choices[-1]
        for k in reversed(range(len(choices) - 1)):
            is_k = self.e.builder.icmp_unsigned("==", index.value, self.u32(k).value)
            chosen = Register(self.e, "u32", self.e.builder.select(is_k, choices[k].value, chosen.value))
        return chosen

    def bytes_less(self, word: Register, low: int, bias: int) -> Register:
        """Bytes `low` and `low` + 1 of a word less `bias`, as two f16 numbers: 0x64 above a byte makes 1024 + byte."""
        magic = self.permute(word, self.u32(0x64), 0x4040 | low | (low + 1) << 8)
        return self.sub2(magic, self.u32(half_bits(1024.0 + bias)))


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


def less(e: Emitter, a: Register, b: Register | int) -> Any:
    other = b if isinstance(b, Register) else e.constant("u32", b)
    return e.builder.icmp_unsigned("<", a.value, other.value)


@functools.cache
def fetch_item(name: str) -> Any:
    """fetch(source, quarter, slot, place, lane, steps): start the copies of a quarter's item, `steps` of it or more.

    source: of the slab's item, plus 16 bytes a lane; quarter: of the slab.
    """
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
        target = slot + (lane << 4)
        ends: dict[int, tuple[Register, Register]] = {}  # by the bytes of a quarter
        for _, size, _ in regions:
            if size not in ends:
                ends[size] = (target + place * size, source + e.widen(quarter) * size)

        def copy(at: int, size: int) -> None:
            for k in range(0, size, 512):
                here = f"cp.async.cg.shared.global [$0+{at + k}], [$1+{at + k}], 16;"
                if size - k >= 512:
                    e.asm(here, None, ends[size])
                    continue
                template = f"{{\n.reg .pred p;\nsetp.lt.u32 p, $2, {(size - k) // 16};\n@p {here}\n}}"
                e.asm(template, None, [*ends[size], lane])

        for step in range(regions[-1][2] + 1):
            own = [(at, size) for at, size, of in regions if of == step]
            if step == 0 or FRAGMENT_KINDS[name].group_steps == 4:
                for at, size in own:
                    copy(at, size)
            else:
                with e.builder.if_then(less(e, e.constant("u32", step), steps)):
                    for at, size in own:
                        copy(at, size)

    return fetch


def acc_registers(name: str, tokens: int) -> int:
    """float32 registers of a lane's sums while K is walked through."""
    return sum_registers(tokens) if name in SCHEMES else 2 * column_tiles(tokens) * 4


def column_tiles(tokens: int) -> int:
    """Products of eight columns side by side."""
    return max(1, tokens // 8)


def own_results(tokens: int) -> tuple[int, ...]:
    """Of the four results of a product, those that count: with one row of x, one for each of the two rows of W."""
    return (0, 2) if tokens == 1 else (0, 1, 2, 3)


class _Product:
    """Emits a quarter's item."""

    def __init__(self, e: Emitter, x: Sequence[Register]) -> None:
        self.e, self.x = e, x
        self.none = [e.constant("f32", 0.0)] * 4

    def columns(self, at: int) -> list[list[Register]]:
        """B operands of 32 columns from byte `at` of the item's x: for each eight rows of x, two of two registers."""
        load = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0,$1,$2,$3}, [$4];"
        return [self.e.asm(load, "u32x4", [source + at]) for source in self.x]

    def mma(self, a: Sequence[Register], b: Sequence[Register], c: Sequence[Register]) -> list[Register]:
        """m16n8k16, or m16n8k8 with two registers of A and one of B."""
        k = 8 * len(b)
        names = [f"${i}" for i in range(4 + len(a) + len(b))]
        sets = (names[:4], names[4 : 4 + len(a)], names[4 + len(a) :], names[:4])
        operands = ", ".join(f"{{{','.join(group)}}}" for group in sets)
        return self.e.asm(
            f"mma.sync.aligned.m16n8k{k}.row.col.f32.f16.f16.f32 {operands};", "f32x4", [*a, *b], tied=c, pure=True
        )

    def fma(self, a: Register, b: Register, c: Register | None) -> Register:
        """a * b + c rounded once, or a * b: never anything else, so that results do not depend on the compiler."""
        if c is None:
            return self.e.asm("mul.rn.f32 $0, $1, $2;", "f32", [a, b], pure=True)
        return self.e.asm("fma.rn.f32 $0, $1, $2, $3;", "f32", [a, b, c], pure=True)


@functools.cache
def multiply_item(name: str, tokens: int) -> Any:
    """multiply(acc, slot, place, lane, x, x_high, sums, sums_high, steps) -> acc: a quarter's item times the rows of x.

    x: this lane's address for `ldmatrix` of rows 0..7 at the item's first column; x_high: of rows 8..15. sums,
    sums_high: the lane's address of the sums of x for the item (see `thin_gemm_rows.py`). acc: acc_registers(name,
    tokens).
    """
    size = acc_registers(name, tokens)

    @emitted(f"f32x{size}", f"f32x{size}", "u32", "u32", "u32", "u32", "u32", "u32", "u32", "u32")
    def multiply(
        e: Emitter,
        acc: list[Register],
        slot: Register,
        place: Register,
        lane: Register,
        x: Register,
        x_high: Register,
        sums: Register,
        sums_high: Register,
        steps: Register,
    ) -> list[Register]:
        tiles = column_tiles(tokens)
        where = ((x, x_high)[:tiles], (sums, sums_high)[:tiles])
        return _multiply(e, name, tokens, acc, (slot, place, lane), where, steps)

    return multiply


def _multiply(
    e: Emitter,
    name: str,
    tokens: int,
    acc: Sequence[Register],
    item: tuple[Register, Register, Register],
    where: tuple[Sequence[Register], Sequence[Register]],
    steps: Register,
) -> list[Register]:
    """Emits a quarter's item: (slot, place, lane) say where it is, `where` the addresses of x and of its sums."""
    kind, scheme = FRAGMENT_KINDS[name], SCHEMES.get(name)
    size, count = acc_registers(name, tokens), item_steps(kind)
    tiles, own = column_tiles(tokens), own_results(tokens)
    slot, place, lane = item
    machine = ThinMachine(e)
    thread, row, t = (place << 5) + lane, (place << 4) + (lane >> 2), lane & 3
    header = kind.header(machine, slot, row) if kind.header else []
    assert not kind.header or len(header) == header_words(name)
    product = _Product(e, where[0])

    def scaled_weights(out: list[Register], base: Register, step: int) -> list[Register]:
        """The kind's operands are whole weights. Two sums take turns, so that products need not wait."""
        fragments = kind.fragments(machine, base, thread, row, step % kind.group_steps, header)
        for pair in range(2):
            for tile, b in enumerate(product.columns(128 * step + 64 * pair)):
                for block in range(2):
                    at = 4 * (tiles * block + tile)
                    a = fragments[8 * pair + 4 * block : 8 * pair + 4 * block + 4]
                    out[at : at + 4] = product.mma(a, b[2 * block : 2 * block + 2], out[at : at + 4])
        return out

    def add(out: list[Any], tile: int, scale: Sequence[Register], found: Sequence[Register]) -> None:
        for i, which in enumerate(own):
            at = len(own) * tile + i
            out[at] = product.fma(scale[which >> 1], found[which], out[at])

    def scaled_sums(out: list[Any], base: Register, step: int) -> list[Any]:
        """The operands are codes; each block's sum is scaled."""
        assert scheme is not None
        codes = [register for block in kind.codes(machine, base, thread) for register in block]
        scales = scheme.scales(machine, base, row, step % kind.group_steps, header)
        for pair in range(2):
            for tile, b in enumerate(product.columns(128 * step + 64 * pair)):
                first = product.mma(codes[8 * pair : 8 * pair + 4], b[:2], product.none)
                a = codes[8 * pair + 4 : 8 * pair + 8]
                if scheme.columns == 32:
                    add(out, tile, scales[pair], product.mma(a, b[2:], first))
                    continue
                add(out, tile, scales[2 * pair], first)
                add(out, tile, scales[2 * pair + 1], product.mma(a, b[2:], product.none))
        return out

    def offset_sums(tile: int) -> list[Register]:
        """The second term of the whole item, before its factors."""
        assert scheme is not None
        source, out = where[1][tile], product.none
        for i, pair in enumerate(scheme.offsets(machine, slot, row, t, header)):
            if kind.group_steps == 4:
                b = e.asm("ld.shared.v2.u32 {$0,$1}, [$2];", "u32x2", [source + 32 * i])
                out = product.mma([*pair, *pair], b, out)
                continue
            # The step t & 1 may not be there.
            there = less(e, t & 1, steps)
            zero = e.constant("u32", 0)
            words = [*pair, e.asm("ld.shared.u32 $0, [$1];", "u32", [source])]
            a, a_8, b = (Register(e, "u32", e.builder.select(there, word.value, zero.value)) for word in words)
            out = product.mma([a, a_8], [b], out)
        return out

    one = scaled_sums if scheme else scaled_weights
    outer = scheme.outer(machine, header) if scheme and scheme.outer else None
    start: list[Any] = [None] * size if outer else list(acc)
    out = one(start, slot + kind.header_size, 0)
    for step in range(1, count):
        base = slot + (kind.header_size + kind.step_size * step)
        if kind.group_steps == 4:
            out = one(out, base, step)
            continue
        before = e.builder.block
        with e.builder.if_then(less(e, e.constant("u32", step), steps)):
            more = one(list(out), base, step)
            inside = e.builder.block
        merged = []
        for old, new in zip(out, more, strict=True):
            phi = e.builder.phi(new.value.type)
            phi.add_incoming(old.value, before)
            phi.add_incoming(new.value, inside)
            merged.append(Register(e, "f32", phi))
        out = merged
    if scheme is None:
        return out
    if outer:
        inner, out = out, list(acc)
        for tile in range(tiles):
            for i, which in enumerate(own):
                at = len(own) * tile + i
                out[at] = product.fma(outer[which >> 1], inner[at], out[at])
    factors: Sequence[Register] = [e.constant("f32", factor) for factor in scheme.factors]
    if scheme.outer_offsets:
        pairs = zip(factors, scheme.outer_offsets(machine, header), strict=True)
        factors = [product.fma(b, a, None) for a, b in pairs]
    for tile in range(tiles):
        add(out, tile, factors, offset_sums(tile))
    return out
