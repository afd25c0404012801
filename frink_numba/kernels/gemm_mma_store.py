"""From accumulators to memory: how the `mma` tier writes a finished tile of 128 weight rows x T tokens.

Results go to memory straight from the accumulators, 32 bytes of a row at a time. The formulas: `gemm_epilogue.py`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from frink_numba.kernels.gemm_mma import MmaGemm


def first_group(gemm: MmaGemm, warp: Any) -> Any:
    """The first of the warp's row groups, 0..7 in the tile."""
    return (warp >> (gemm.token_halves - 1)) * gemm.row_groups


@functools.cache
def store_tile(gemm: MmaGemm) -> Any:
    """store(acc, warp, lane, slab, token, arguments...): the epilogue, with every bound checked."""
    from frink_numba.kernels.gates import activate
    from frink_numba.kernels.gemm_store import out_scales
    from frink_numba.kernels.ptx import Emitter, Register, emitted

    epilogue, halves, groups = gemm.epilogue, gemm.token_halves, gemm.row_groups
    own_tokens = gemm.tokens // halves
    count = groups * own_tokens // 2

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

        for group in range(groups):
            rows = first_group(gemm, warp) + group
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
