"""x on its way into the thin products: f16 rows as they are, or float32 rows through an RMS norm.

Kinds whose scales are applied to sums (`thin_gemm_scales.py`) need the sums of x over 16 or 32 columns as well: of what
was rounded to f16, times 2**-SUM_BITS, as the sum of two f16 numbers. Two blocks' sums are 8 bytes: the larger parts of
both, then the smaller ones; with items of four blocks the larger parts are the words 0 and 2 of 16 bytes as well, so
that four lanes find a product's operand in four words.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from frink_numba.kernels.gemm_store import out_scales
from frink_numba.kernels.ptx import Emitter, Register, emitted
from frink_numba.kernels.thin_gemm_scales import SUM_BITS

# Four words at $4 where $5 is not 0, else zeros.
_LOAD_OR_ZERO = (
    "{\n.reg .pred p;\n.reg .b32 a, b, c, d;\nsetp.ne.u32 p, $5, 0;\nmov.b32 a, 0;\nmov.b32 b, 0;\nmov.b32 c, 0;\n"
    "mov.b32 d, 0;\n@p ld.global.v4.b32 {a,b,c,d}, [$4];\nmov.b32 $0, a;\nmov.b32 $1, b;\nmov.b32 $2, c;\n"
    "mov.b32 $3, d;\n}"
)


def _less(e: Emitter, a: Register, b: Register | int) -> Any:
    other = b if isinstance(b, Register) else e.constant("u32", b)
    return e.builder.icmp_unsigned("<", a.value, other.value)


def _flag(e: Emitter, condition: Any) -> Register:
    return Register(e, "u32", e.builder.zext(condition, e.constant("u32", 0).value.type))


def _multiple(e: Emitter, value: Register, of: int) -> Any:
    return e.builder.icmp_unsigned("==", (value & (of - 1)).value, e.constant("u32", 0).value)


def _sum_of_halves(e: Emitter, words: Sequence[Register]) -> Register:
    """The sum of the f16 numbers of two or four words."""
    floats = []
    for word in words:
        template = "{\n.reg .b16 a, b;\nmov.b32 {a, b}, $2;\ncvt.f32.f16 $0, a;\ncvt.f32.f16 $1, b;\n}"
        floats += e.asm(template, "f32x2", [word], pure=True)
    while len(floats) > 1:
        floats = [a + b for a, b in zip(floats[::2], floats[1::2], strict=True)]
    return floats[0]


def _sum_of_lanes(e: Emitter, value: Register, lanes: int) -> Register:
    """The sum over `lanes` neighbours, in each of them."""
    distance = 1
    while distance < lanes:
        value = value + e.asm(f"shfl.sync.bfly.b32 $0, $1, {distance}, 0x1f, 0xffffffff;", "f32", [value])
        distance *= 2
    return value


def _put_sum(e: Emitter, value: Register, sums: Register, block: Register, condition: Any) -> None:
    """Store the sum of a block where the condition holds: see the module's text."""
    template = (
        "{\n.reg .pred p;\n.reg .b16 high;\n.reg .b16 low;\n.reg .f32 value;\n.reg .f32 rest;\n"
        f"setp.ne.u32 p, $2, 0;\nmul.rn.f32 value, $1, 0f{(127 - SUM_BITS) << 23:08x};\n"
        "cvt.rn.f16.f32 high, value;\ncvt.f32.f16 rest, high;\nsub.rn.f32 rest, value, rest;\n"
        "cvt.rn.f16.f32 low, rest;\n@p st.shared.b16 [$0], high;\n@p st.shared.b16 [$0+4], low;\n}"
    )
    e.asm(template, None, [sums + ((block >> 1) << 3) + ((block & 1) << 1), value, _flag(e, condition)])


def _store_where(e: Emitter, address: Register, values: Sequence[Register], condition: Any) -> None:
    """Store two or four words in shared memory where the condition holds: no branch, so that nothing waits for it."""
    names = ",".join(f"${i + 2}" for i in range(len(values)))
    template = f"{{\n.reg .pred p;\nsetp.ne.u32 p, $1, 0;\n@p st.shared.v{len(values)}.u32 [$0], {{{names}}};\n}}"
    e.asm(template, None, [address, _flag(e, condition), *values])


@functools.cache
def copy_rows(threads: int, columns: int, together: int) -> Any:
    """copy(x, first, count, pieces, inverse, cols, column, target, stride, sums, sums_stride):

    `together` pieces of 16 bytes a thread at a time, by whole warps. Piece i of `count` is piece i mod `pieces` of row
    i / pieces (`inverse` = 2**32 / pieces, rounded up); `column` is the part's first; zeros beyond `cols`. Rows lie
    `stride` bytes apart in shared memory, the sums of each `columns` columns (0: none) at `sums`, `sums_stride` apart.
    """

    @emitted(None, "u64", *["u32"] * 10)
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
        sums: Register,
        sums_stride: Register,
    ) -> None:
        b = e.builder
        loaded = []
        for k in range(together):
            index = first + threads * k
            row = e.asm("mul.hi.u32 $0, $1, $2;", "u32", [index, inverse], pure=True)
            piece = index - row * pieces
            at = column + (piece << 3)
            flag = _flag(e, b.and_(_less(e, index, count), _less(e, at, cols)))
            source = x + ((e.widen(row) * e.widen(cols) + e.widen(at)) << 1)
            loaded.append((index, row, piece, e.asm(_LOAD_OR_ZERO, "u32x4", [source, flag])))
        for index, row, piece, values in loaded:
            inside = _less(e, index, count)
            _store_where(e, target + row * stride + (piece << 4), values, inside)
            if columns:
                total = _sum_of_lanes(e, _sum_of_halves(e, values), columns // 8)
                block = piece >> (columns // 16).bit_length()
                lead = b.and_(inside, _multiple(e, piece, columns // 8))
                _put_sum(e, total, sums + row * sums_stride, block, lead)

    return copy


def _put_normed(
    e: Emitter,
    values: Sequence[Register],
    weight: Sequence[Register],
    factors: Sequence[Register],
    place: Register,
    inside: Any,
    targets: tuple[Register, Register],
    columns: int,
) -> None:
    """f16 of four columns of x w times both factors to shared memory, from column `place` on, and their sums."""
    rms, power = factors
    scaled = [v * rms * w * power for v, w in zip(values, weight, strict=True)]
    words = [e.asm("cvt.rn.f16x2.f32 $0, $2, $1;", "u32", [scaled[i], scaled[i + 1]], pure=True) for i in (0, 2)]
    target, sums = targets
    if columns:
        total = _sum_of_lanes(e, _sum_of_halves(e, words), columns // 4)
        lead = e.builder.and_(inside, _multiple(e, place, columns))
        _put_sum(e, total, sums, place >> (columns - 1).bit_length(), lead)
    _store_where(e, target + (place << 1), words, inside)


def _row_op(vectors: int, threads: int, body: Callable[..., Any]) -> list[Any]:
    return [body(4 * i, threads * i) for i in range(vectors)]


@functools.cache
def norm_ops(vectors: int, threads: int, columns: int) -> tuple[Any, Any, Any]:
    """A thread's share of a float32 row: `vectors` times four columns, `threads` vectors apart.

    load(row, thread, cols) -> values, zeros beyond `cols`; measure(values, weight) -> (sum of x**2, of (x w)**2,
    largest |x w|) of the warp's columns; convert(values, weight, rms, factor, thread, column, end, target, sums): f16
    of x rms w factor to shared memory, for the columns from `column` to `end`, and the sums of each `columns` of them
    (0: none).
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

    @emitted(None, f"f32x{count}", f"f32x{count}", "f32", "f32", "u32", "u32", "u32", "u32", "u32")
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
        sums: Register,
    ) -> None:
        def one(at: int, apart: int) -> None:
            first = (thread + apart) << 2
            inside = e.builder.and_(_less(e, first, end), e.builder.not_(_less(e, first, column)))
            four = slice(at, at + 4)
            _put_normed(e, values[four], weight[four], (rms, power), first - column, inside, (target, sums), columns)

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
        mean = op("mul.rn.f32 $0, $1, $2;", total, op("rcp.approx.ftz.f32 $0, $1;", width))
        rms = op("rsqrt.approx.f32 $0, $1;", mean + eps)
        b = e.builder
        sound = b.and_(
            b.fcmp_ordered(">", weighted.value, e.constant("f32", 1e-30).value),
            b.fcmp_ordered("<", weighted.value, e.constant("f32", 3e38).value),
        )
        root, loose = op("sqrt.approx.ftz.f32 $0, $1;", weighted), op("sqrt.approx.ftz.f32 $0, $1;", width) * top
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
