"""From accumulators to memory: how the `wgmma` tier writes a finished tile of 64 weight rows x T tokens.

A thread's accumulators 4j .. 4j+3 are (row g, tokens 8j+2t, 8j+2t+1) and (row g+8, the same tokens): transposed
against the row-major result. They pass through shared memory in chunks of tokens, swizzled so that no bank is hit
twice, and the copy engine writes boxes of the result from there: coalesced, clipped at the result's edges, and for a
residual as `add`. A few buffers alternate, so that the copies overlap the arithmetic. The formulas: `gemm_epilogue.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from frink_numba.kernels.gates import activate
from frink_numba.kernels.gemm_epilogue import Epilogue
from frink_numba.kernels.ptx import Emitter, Register, emitted


def out_scales(e: Emitter, norm: Register, bounds: Sequence[Register]) -> tuple[Register, Register]:
    """(1 / out_scale, out_scale) of a token as float32, both powers of two."""
    c2, c1, c0 = bounds
    bits = e.float_bits((norm * c2 + c1) * norm + c0)
    # Biased exponent of a power of two at least the bound, kept where both results are normal numbers.
    exponent = (bits >> 23) + 1
    exponent = e.asm("min.u32 $0, $1, $2;", "u32", [exponent, e.constant("u32", 250)], pure=True)
    exponent = e.asm("max.u32 $0, $1, $2;", "u32", [exponent, e.constant("u32", 17)], pure=True)
    inverse = (e.constant("u32", 254 + 15) - exponent) << 23
    power = (exponent - 15) << 23
    return e.asm("mov.b32 $0, $1;", "f32", [inverse], pure=True), e.asm("mov.b32 $0, $1;", "f32", [power], pure=True)


@functools.cache
def store_tile(tokens: int, epilogue: Epilogue, buffers: int) -> Any:
    """The op store(acc, thread, barrier, staging, scales, map, column, token, scale_a, scale_b, bias_a, bias_b,
    token_scales, token_norms, out_scale, m, c2, c1, c0, add).

    `thread` counts in the warp group, `barrier` is its named barrier, `staging` its `buffers`, `scales` its room for
    the tokens' scales. `column` and `token` are the tile's corner in the result; scale and bias those of rows g and g
    + 8. A thread brings the scale and norm of its tokens: `thread` and `thread` + 128, loaded long before. `out_scale`
    is where the tile's first token has its power of two, 0 where another tile writes it.

    One barrier a chunk: before it, the chunk is written, and the leader has seen the copy read what the next chunk's
    buffer held.
    """
    count = tokens // 2
    size = epilogue.buffer_size(tokens)
    per_chunk = epilogue.chunk_tokens(tokens)
    chunks = epilogue.chunks(tokens)
    own = -(-tokens // 128)

    @emitted(
        None, f"f32x{count}", "u32", "u32", "u32", "u32", "u64", "u32", "u32", "f32", "f32", "f32", "f32", "f32x2",
        "f32x2", "u64", "u32", "f32", "f32", "f32", "u32",
    )  # fmt: skip
    def store(
        e: Emitter,
        acc: list[Register],
        thread: Register,
        barrier: Register,
        staging: Register,
        scales: Register,
        tensor_map: Register,
        column: Register,
        token: Register,
        scale_a: Register,
        scale_b: Register,
        bias_a: Register,
        bias_b: Register,
        token_scales: list[Register],
        token_norms: list[Register],
        out_scale: Register,
        m: Register,
        c2: Register,
        c1: Register,
        c0: Register,
        add: Register,
    ) -> None:
        lane, warp = thread & 31, thread >> 5
        g, t = lane >> 2, lane & 3
        leader = _flag(e, "==", thread, 0)
        with e.when(leader):
            e.asm("cp.async.bulk.wait_group.read 0;", None, [])
        for i in range(own):
            with e.when(_flag(e, "<", thread, min(tokens - 128 * i, 128))):
                place = thread + 128 * i
                if epilogue.half:
                    inverse, power = out_scales(e, token_norms[i], (c2, c1, c0))
                    e.asm("st.shared.v2.f32 [$0], {$1,$2};", None, [scales + (place << 3), token_scales[i], inverse])
                    with e.when(out_scale), e.when(_flag(e, "<", token + place, m)):
                        e.asm("st.global.f32 [$0], $1;", None, [out_scale + e.widen(place << 2), power])
                else:
                    e.asm("st.shared.f32 [$0], $1;", None, [scales + (place << 2), token_scales[i]])
        e.asm("bar.sync $0, 128;", None, [barrier])
        for chunk in range(chunks):
            buffer = staging + size * (chunk % buffers)
            results = []  # per block of 8 tokens: rows of [token 2t, token 2t + 1]
            for j in range(chunk * per_chunk // 8, (chunk + 1) * per_chunk // 8):
                scale, inverses = _pair_scales(e, epilogue, scales, 8 * j, t)
                a = [acc[4 * j + v] * scale_a * scale[v] for v in range(2)]
                b = [acc[4 * j + 2 + v] * scale_b * scale[v] for v in range(2)]
                if epilogue.gate:
                    rows = [[activate(e, epilogue.gate, a[v]) * b[v] for v in range(2)]]
                else:
                    rows = [[x + bias_a for x in a], [x + bias_b for x in b]]
                if epilogue.half:
                    rows = [[row[v] * inverses[v] for v in range(2)] for row in rows]
                results.append(rows)
            if epilogue.half:
                _stage_half(e, epilogue, results, buffer, warp, lane)
            else:
                _stage_float(e, epilogue, results, buffer, warp, g, t)
            e.asm("fence.proxy.async.shared::cta;", None, [])
            if buffers - 1 <= chunk < chunks - 1:
                with e.when(leader):
                    e.asm(f"cp.async.bulk.wait_group.read {buffers - 2};", None, [])
            e.asm("bar.sync $0, 128;", None, [barrier])
            with e.when(leader):
                _copy_out(e, epilogue, per_chunk, buffer, tensor_map, column, token + chunk * per_chunk, add)

    return store


def _pair_scales(e: Emitter, epilogue: Epilogue, scales: Register, token: int, t: Register) -> tuple[Any, Any]:
    """Of tokens token + 2t and token + 2t + 1: (their scales, 1 / out_scale where the result is f16)."""
    if epilogue.half:
        four = e.asm("ld.shared.v4.f32 {$0,$1,$2,$3}, [$4];", "f32x4", [scales + 8 * token + (t << 4)])
        return (four[0], four[2]), (four[1], four[3])
    return e.asm("ld.shared.v2.f32 {$0,$1}, [$2];", "f32x2", [scales + 4 * token + (t << 3)]), None


def _flag(e: Emitter, comparison: str, a: Register, b: Register | int) -> Register:
    other = b if isinstance(b, Register) else e.constant("u32", b)
    bit = e.builder.icmp_unsigned(comparison, a.value, other.value)
    return Register(e, "u32", e.builder.zext(bit, a.value.type))


def _stage_float(
    e: Emitter, epilogue: Epilogue, results: list[Any], buffer: Register, warp: Register, g: Register, t: Register
) -> None:
    """float32 into boxes of 32 columns x chunk tokens: 16-byte piece c of token row r goes to c ^ (r & 7)."""
    tokens = 8 * len(results)
    for j, rows in enumerate(results):
        for h, row in enumerate(rows):
            if epilogue.gate:
                n = (warp << 3) + g
                box = e.constant("u32", 0)
            else:
                n = ((warp & 1) << 4) + 8 * h + g if h else ((warp & 1) << 4) + g
                box = warp >> 1
            for v in range(2):
                r = (t << 1) + v
                piece = (n >> 2) ^ r  # tokens of a chunk start at multiples of 8
                address = buffer + box * (tokens * 128) + (r + 8 * j) * 128 + (piece << 4) + ((n & 3) << 2)
                e.asm("st.shared.f32 [$0], $1;", None, [address, row[v]])


def _stage_half(
    e: Emitter, epilogue: Epilogue, results: list[Any], buffer: Register, warp: Register, lane: Register
) -> None:
    """f16 by `stmatrix.trans`, up to four blocks of 8 tokens: lanes 8i .. 8i+7 give the addresses of block i's rows."""
    first = 0
    while first < len(results):
        blocks = next(count for count in (4, 2, 1) if count <= len(results) - first)
        r, matrix = lane & 7, (lane >> 3) & (blocks - 1)
        token = (matrix << 3) + r + 8 * first
        for h in range(len(results[0])):
            words = [
                e.asm("cvt.rn.f16x2.f32 $0, $2, $1;", "u32", [*rows[h]], pure=True)
                for rows in results[first : first + blocks]
            ]
            if epilogue.gate:
                address = buffer + token * 64 + ((warp ^ ((r >> 1) & 3)) << 4)
            else:
                address = buffer + token * 128 + ((((warp << 1) + h) ^ r) << 4)
            names = ",".join(f"${i + 1}" for i in range(blocks))
            e.asm(f"stmatrix.sync.aligned.m8n8.x{blocks}.trans.shared.b16 [$0], {{{names}}};", None, [address, *words])
        first += blocks


def _copy_out(
    e: Emitter,
    epilogue: Epilogue,
    tokens: int,
    buffer: Register,
    tensor_map: Register,
    column: Register,
    token: Register,
    add: Register,
) -> None:
    boxes = epilogue.columns // epilogue.box_columns
    for box in range(boxes):
        arguments = [
            tensor_map,
            column + epilogue.box_columns * box,
            token,
            buffer + box * tokens * epilogue.swizzle,
        ]
        if epilogue.half or epilogue.gate:
            e.asm("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [$0, {$1, $2}], [$3];", None, arguments)
        else:
            e.asm(
                "{\n.reg .pred p;\nsetp.ne.u32 p, $4, 0;\n"
                "@p cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [$0, {$1, $2}], [$3];\n"
                "@!p cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [$0, {$1, $2}], [$3];\n}",
                None,
                [*arguments, add],
            )
    e.asm("cp.async.bulk.commit_group;", None, [])


@functools.cache
def partial_ops(tokens: int, pitch: int) -> tuple[Any, Any, int]:
    """(write(acc, address, thread), add(acc, address, thread, first, parts) -> acc, parts added at a time):

    a tile's sums in the workspace, 16 bytes a thread. `add` takes parts `first`.. before `parts`; part i lies `pitch`
    bytes on. Several small parts are on their way from memory together.
    """
    count = tokens // 2
    together = max(1, 64 // count)

    @emitted(None, f"f32x{count}", "u64", "u32")
    def write(e: Emitter, acc: list[Register], address: Register, thread: Register) -> None:
        address = address + e.widen(thread << 4)
        for i in range(count // 4):
            e.asm("st.global.v4.f32 [$0], {$1,$2,$3,$4};", None, [address + 2048 * i, *acc[4 * i : 4 * i + 4]])

    @emitted(f"f32x{count}", f"f32x{count}", "u64", "u32", "u32", "u32")
    def add(
        e: Emitter, acc: list[Register], address: Register, thread: Register, first: Register, parts: Register
    ) -> list[Register]:
        address = address + e.widen(thread << 4) + e.widen(first) * pitch
        loaded = []
        for p in range(together):
            there = _flag(e, "<", first + p, parts)
            for i in range(count // 4):
                # Past the first-level cache, which other multiprocessors' stores do not reach.
                loaded += e.asm(
                    "{\n.reg .pred p;\nsetp.ne.u32 p, $5, 0;\nmov.f32 $0, 0f00000000;\nmov.f32 $1, 0f00000000;\n"
                    "mov.f32 $2, 0f00000000;\nmov.f32 $3, 0f00000000;\n@p ld.global.cg.v4.f32 {$0,$1,$2,$3}, [$4];\n}",
                    "f32x4",
                    [address + (pitch * p + 2048 * i), there],
                )
        out = list(acc)
        for p in range(together):
            out = [sum_ + loaded[p * count + i] for i, sum_ in enumerate(out)]
        return out

    return write, add, together
