"""What the thin products' kernel does behind its loop: the sums of its warps are put together, scaled and stored."""

from __future__ import annotations

import functools
from typing import Any

from frink_numba.kernels.gates import activate
from frink_numba.kernels.gemm_epilogue import Epilogue
from frink_numba.kernels.gemm_store import out_scales
from frink_numba.kernels.ptx import Emitter, Register, emitted
from frink_numba.kernels.thin_gemm_ops import acc_registers, column_tiles, less, own_results
from frink_numba.kernels.thin_gemm_plan import sum_registers
from frink_numba.kernels.thin_gemm_scales import SCHEMES


@functools.cache
def partial_ops(name: str, tokens: int, parts: int, stride: int) -> tuple[Any, Any]:
    """(put(acc, address, lane), add_up(address) -> sums): a warp's sums in shared memory.

    `address`: where the lane's sums lie in the warp's room, and in the first of `parts` rooms that are `stride` bytes
    apart. Parts are added in a tree that is always the same.
    """
    size, own = sum_registers(tokens), own_results(tokens)
    width = len(own)
    names = ",".join(f"${i}" for i in range(width))

    @emitted(None, f"f32x{acc_registers(name, tokens)}", "u32", "u32")
    def put(e: Emitter, acc: list[Register], address: Register, lane: Register) -> None:
        if name not in SCHEMES:
            half = len(acc) // 2
            both = [acc[i] + acc[half + i] for i in range(half)]
            acc = [both[4 * tile + i] for tile in range(column_tiles(tokens)) for i in own]
        if tokens == 1:
            # All columns of the product are the one row of x: the lanes t = 0 have it.
            store = "{\n.reg .pred p;\n.reg .b32 t;\nand.b32 t, $3, 3;\nsetp.eq.u32 p, t, 0;\n"
            e.asm(f"{store}@p st.shared.v2.f32 [$0], {{$1,$2}};\n}}", None, [address, *acc, lane])
            return
        for k in range(0, size, 4):
            e.asm("st.shared.v4.f32 [$0], {$1,$2,$3,$4};", None, [address + 128 * k, *acc[k : k + 4]])

    @emitted(f"f32x{size}", "u32")
    def add_up(e: Emitter, address: Register) -> list[Register]:
        out: list[Register] = []
        for k in range(0, size, width):
            terms = []
            for part in range(parts):
                at = address + (128 * k + part * stride)
                terms.append(e.asm(f"ld.shared.v{width}.f32 {{{names}}}, [${width}];", f"f32x{width}", [at]))
            while len(terms) > 1:
                pairs = zip(terms[::2], terms[1::2], strict=True)
                terms = [[a + b for a, b in zip(p, q, strict=True)] for p, q in pairs]
            out += terms[0]
        return out

    return put, add_up


@functools.cache
def store_quarter(epilogue: Epilogue, tokens: int) -> Any:
    """store(sums, (scales of rows g and g + 8, biases), token_values, quarter, lane, out, m, outputs, pitch, add)."""
    size = sum_registers(tokens)
    own = size // 2  # tokens of a lane

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
            with b.if_then(less(e, column, outputs)):
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
            with b.if_then(less(e, row, m)):
                at, apart = (0, 1) if tokens == 1 else (4 * (i >> 1) + (i & 1), 2)
                low = sums[at] * rows[0] * token_scale[i]
                high = sums[at + apart] * rows[1] * token_scale[i]
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
