"""The compiler's side of the norm in front of a `wgmma` product (gemm_norm.py): ops that are unrolled for a width."""

from __future__ import annotations

import functools
from typing import Any

from frink_numba.kernels.gemm_norm import GROUP, RowShares
from frink_numba.kernels.ptx import Emitter, Register, emitted

# Four numbers at $4 where $5 is not 0, else zeros.
_LOAD_OR_ZERO = (
    "{\n.reg .pred p;\n.reg .f32 a, b, c, d;\nsetp.ne.u32 p, $5, 0;\nmov.f32 a, 0f00000000;\nmov.f32 b, 0f00000000;\n"
    "mov.f32 c, 0f00000000;\nmov.f32 d, 0f00000000;\n@p ld.global.v4.f32 {a,b,c,d}, [$4];\nmov.f32 $0, a;\n"
    "mov.f32 $1, b;\nmov.f32 $2, c;\nmov.f32 $3, d;\n}"
)
_STORE_WHERE = "{\n.reg .pred p;\nsetp.ne.u32 p, $3, 0;\n@p st.global.v2.u32 [$0], {$1,$2};\n}"


def _flag(e: Emitter, condition: Any) -> Register:
    return Register(e, "u32", e.builder.zext(condition, e.constant("u32", 0).value.type))


def _works(e: Emitter, row: RowShares, thread: Register) -> Any:
    """Whether the thread has columns at all."""
    return e.builder.icmp_unsigned("<", thread.value, e.constant("u32", row.apart).value)


def _inside(e: Emitter, row: RowShares, thread: Register, cols: Register, j: int) -> tuple[Register, Register]:
    """(the column of a thread's float4 `j`, whether it is there)."""
    column = (thread + row.apart * j) << 2
    condition = e.builder.icmp_unsigned("<", column.value, cols.value)
    return column, _flag(e, e.builder.and_(condition, _works(e, row, thread)))


@functools.cache
def row_ops(columns: int, kept: bool) -> tuple[Any, Any, Any]:
    """(load, measure, put) for rows of up to `columns` columns; weights are `kept` in registers, or an address.

    load(address, thread, cols) -> values, zeros beyond `cols`.
    measure(values, weights, thread, cols, barrier, scratch) -> sum of x**2, sum of (x w)**2, max |x w|, in all threads;
    scratch: 12 bytes a warp of `row_threads`, used anew when the group has met once more.
    put(target, values, weights, factor, thread, cols): f16 of x w factor.
    """
    row = RowShares.of(columns)
    spec = f"f32x{4 * row.vectors}"
    weights_spec = spec if kept else "u64"
    warps = row.threads // 32

    def load4(e: Emitter, address: Register, thread: Register, cols: Register, j: int) -> Any:
        column, flag = _inside(e, row, thread, cols, j)
        return e.asm(_LOAD_OR_ZERO, "f32x4", [address + (e.widen(column) << 2), flag])

    def weighted(e: Emitter, values: list[Register], weights: Any, thread: Register, cols: Register, j: int) -> Any:
        w = weights[4 * j : 4 * j + 4] if kept else load4(e, weights, thread, cols, j)
        return [v * factor for v, factor in zip(values[4 * j : 4 * j + 4], w, strict=True)]

    @emitted(spec, "u64", "u32", "u32")
    def load(e: Emitter, address: Register, thread: Register, cols: Register) -> list[Register]:
        return [value for j in range(row.vectors) for value in load4(e, address, thread, cols, j)]

    def of_squares(x: list[Register]) -> Register:
        return (x[0] * x[0] + x[1] * x[1]) + (x[2] * x[2] + x[3] * x[3])

    @emitted("f32x3", spec, weights_spec, "u32", "u32", "u32", "u32")
    def measure(
        e: Emitter,
        values: list[Register],
        weights: Any,
        thread: Register,
        cols: Register,
        barrier: Register,
        scratch: Register,
    ) -> list[Register]:
        def larger(a: Register, b: Register) -> Any:
            return e.asm("max.NaN.f32 $0, $1, $2;", "f32", [a, b], pure=True)

        def plus(a: Register, b: Register) -> Any:
            return e.asm("add.f32 $0, $1, $2;", "f32", [a, b], pure=True)

        combine = (plus, plus, larger)
        first_lane = e.builder.icmp_unsigned("==", (thread & 31).value, e.constant("u32", 0).value)
        lead = _flag(e, e.builder.and_(first_lane, _works(e, row, thread)))
        parts: list[list[Register]] = []
        for share in range(row.shares):
            sums = [e.constant("f32", 0.0)] * 3
            for j in range(share, row.vectors, row.shares):
                scaled = weighted(e, values, weights, thread, cols, j)
                sizes = [e.asm("abs.f32 $0, $1;", "f32", [x], pure=True) for x in scaled]
                top = larger(larger(sizes[0], sizes[1]), larger(sizes[2], sizes[3]))
                sums = [
                    sums[0] + of_squares(values[4 * j : 4 * j + 4]), sums[1] + of_squares(scaled), larger(sums[2], top),
                ]  # fmt: skip
            parts.append(sums)
        for distance in (16, 8, 4, 2, 1):
            shuffle = f"shfl.sync.bfly.b32 $0, $1, {distance}, 0x1f, 0xffffffff;"
            parts = [
                [combine[i](x, e.asm(shuffle, "f32", [x])) for i, x in enumerate(sums)] for sums in parts
            ]  # fmt: skip
        with e.when(lead):
            for share, sums in enumerate(parts):
                at = scratch + ((thread >> 5) << 2) + 4 * (row.apart // 32) * share
                for i, value in enumerate(sums):
                    e.asm("st.shared.f32 [$0], $1;", None, [at + 4 * warps * i, value])
        e.asm("bar.sync $0, $1;", None, [barrier, e.constant("u32", GROUP)])
        out = []
        for i in range(3):
            each = [e.asm("ld.shared.f32 $0, [$1];", "f32", [scratch + 4 * (warps * i + w)]) for w in range(warps)]
            out.append(functools.reduce(combine[i], each))
        return out

    @emitted(None, "u64", spec, weights_spec, "f32", "u32", "u32")
    def put(
        e: Emitter,
        target: Register,
        values: list[Register],
        weights: Any,
        factor: Register,
        thread: Register,
        cols: Register,
    ) -> None:
        for j in range(row.vectors):
            x = [v * factor for v in weighted(e, values, weights, thread, cols, j)]
            words = [
                e.asm("cvt.rn.f16x2.f32 $0, $2, $1;", "u32", [x[i], x[i + 1]], pure=True) for i in (0, 2)
            ]  # fmt: skip
            column, flag = _inside(e, row, thread, cols, j)
            e.asm(_STORE_WHERE, None, [target + (e.widen(column) << 1), *words, flag])

    return load, measure, put
