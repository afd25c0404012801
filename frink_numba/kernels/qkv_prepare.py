"""Between the projections and the attention: QK norm, rotation, the stores of Q, K and V in one pass (R9, R14, R17).

    q_i, k_i: y = x * weight / sqrt(mean(x^2) + eps), over the head or over all heads (or y = x)
              (y_a, y_b) -> (y_a cos - y_b sin, y_a sin + y_b cos) for each pair (a, b) of channels that turn
              or the other way round, the norm of what has turned
    q   f16 [M, n_heads, pitch] = y / q_scale
    K, V   f16 into the sequence's mirrors at the row's position, / k_scale and / v_scale; float32 for the host's cache

A warp takes a head of a row at a time: a head of q, or one of K together with its V. A lane holds units of four
channels (two pairs), or of two where head_dim or the rotation are no multiples of 4, so that pairs of both layouts
stay in a lane and memory is read in vectors. What f16 cannot hold is never stored as infinity: such a
head of q is stored as not-a-number; such a row of K or V makes its row of K not-a-number and that of V zeros, so that
exactly the rows that see it become not-a-number (a zero weight times infinity would spoil the others as well).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from frink_numba.kernels.cubins import Source
from frink_numba.layer import RopeLayout

THREADS = 256
WARPS = THREADS // 32
NORMS = ("", "head", "whole")

ARGUMENTS = (
    # name, type
    ("q_source", "u64"),  # float32 rows of n_heads * head_dim, `source_pitch` bytes apart
    ("k_source", "u64"),
    ("v_source", "u64"),
    ("q", "u64"),
    ("table", "u64"),
    ("k_rows", "u64"),  # or 0
    ("v_rows", "u64"),
    ("cos", "u64"),
    ("sin", "u64"),
    ("q_norm", "u64"),
    ("k_norm", "u64"),
    ("eps", "f32"),
    ("q_inverse", "f32"),  # 1 / scale
    ("k_inverse", "f32"),
    ("v_inverse", "f32"),
    ("source_pitch", "u32"),  # bytes from row to row of each source
    ("n_heads", "u32"),
    ("n_kv_heads", "u32"),
    ("sequences", "u32"),
    ("blocks_per_row", "u32"),  # 1 for the norm of the whole vector
)


@dataclass(frozen=True, slots=True)
class QkvPrepare:
    """One compiled variant: channels of a head, the norm ("", "head" or "whole"), and the rotation (None: none).

    norm_last: the norm comes after the rotation.
    """

    head_dim: int
    norm: str = ""
    layout: RopeLayout | None = None
    rot_dim: int = 0
    overlap: bool = False  # launched with the attribute of that name (sm_90)
    norm_last: bool = False

    @property
    def unit(self) -> int:
        """Channels that a lane takes at a time: 4 or 2."""
        return 4 if self.head_dim % 4 == 0 and self.rot_dim % 4 == 0 else 2

    @property
    def pitch(self) -> int:
        return -(-self.head_dim // 8) * 8

    @property
    def per_lane(self) -> int:
        """Units of a lane."""
        return -(-self.head_dim // (32 * self.unit))

    @property
    def count(self) -> int:
        """Values of a lane."""
        return self.per_lane * self.unit


def _floats(count: int) -> str:
    return f"f32x{count}" if count > 1 else "f32"


class _Head:
    """Emits what a lane does with its part of a head."""

    def __init__(self, e: Any, variant: QkvPrepare, lane: Any) -> None:
        self.e, self.variant, self.lane = e, variant, lane

    def unit(self, i: int) -> Any:
        return self.lane + 32 * i

    def inside(self, i: int) -> Any:
        """1 where the lane's unit i lies in the head, or None when every lane's does."""
        units = self.variant.head_dim // self.variant.unit
        return None if 32 * (i + 1) <= units else self._flag("<", self.unit(i), units)

    def _flag(self, comparison: str, a: Any, value: int) -> Any:
        from frink_numba.kernels.ptx import Register

        bit = self.e.builder.icmp_unsigned(comparison, a.value, self.e.constant("u32", value).value)
        return Register(self.e, "u32", self.e.builder.zext(bit, a.value.type))

    def chosen(self, flag: Any, yes: Any, no: Any) -> Any:
        from frink_numba.kernels.ptx import Register

        bit = self.e.builder.icmp_unsigned("!=", flag.value, self.e.constant("u32", 0).value)
        return Register(self.e, yes.kind, self.e.builder.select(bit, yes.value, no.value))

    def places(self, i: int) -> list[tuple[Any, int]]:
        """(first channel, channels) of the runs that make up unit i."""
        u, unit = self.unit(i), self.variant.unit
        if self.variant.layout is not RopeLayout.NEOX:
            return [(u * unit, unit)]
        # Two runs, one of each side of the pairs; past the rotation simply the channels in order.
        run, turning = unit // 2, self.variant.rot_dim // unit
        turns = self._flag("<", u, turning)
        plain = (u - turning) * unit + self.variant.rot_dim
        return [
            (self.chosen(turns, u * run, plain), run),
            (self.chosen(turns, u * run + self.variant.rot_dim // 2, plain + run), run),
        ]

    def pairs(self) -> list[tuple[int, int]]:
        """Which values of a unit turn together."""
        if self.variant.layout is RopeLayout.NEOX:
            run = self.variant.unit // 2
            return [(j, j + run) for j in range(run)]
        return [(j, j + 1) for j in range(0, self.variant.unit, 2)]

    def guarded(self, flag: Any, template: str, result: str | None, arguments: Sequence[Any]) -> Any:
        """Emit where `flag` is not 0 (None: always); the results are 0 elsewhere."""
        if flag is None:
            return self.e.asm(template, result, arguments)
        base, _, count = (result or "").partition("x")
        results = int(count or 1) if result else 0
        at = results + len(arguments)
        text = f"{{\n.reg .pred inside;\nsetp.ne.u32 inside, ${at}, 0;\n@inside {template}\n}}"
        # The zeros enter in the results' own registers.
        zeros = [self.e.constant(base, 0) for _ in range(results)]
        return self.e.asm(text, result, [*arguments, flag], tied=zeros)

    def load(self, source: Any) -> list[Any]:
        """The lane's values of a head of float32 at `source`; zeros outside."""
        out: list[Any] = []
        for i in range(self.variant.per_lane):
            for channel, run in self.places(i):
                names = ",".join(f"${k}" for k in range(run))
                vector = f".v{run}" if run > 1 else ""
                target = f"{{{names}}}" if run > 1 else names
                address = source + self.e.widen(channel << 2)
                values = self.guarded(
                    self.inside(i), f"ld.global{vector}.f32 {target}, [${run}];", _floats(run), [address]
                )
                out += values if run > 1 else [values]
        return out

    def store_float(self, values: Sequence[Any], target: Any) -> None:
        at = 0
        for i in range(self.variant.per_lane):
            for channel, run in self.places(i):
                names = ",".join(f"${k + 1}" for k in range(run))
                vector = f".v{run}" if run > 1 else ""
                source = f"{{{names}}}" if run > 1 else names
                address = target + self.e.widen(channel << 2)
                self.guarded(
                    self.inside(i), f"st.global{vector}.f32 [$0], {source};", None, [address, *values[at : at + run]]
                )
                at += run

    def store_half(self, values: Sequence[Any], target: Any) -> None:
        """Values, which f16 can hold, as f16; zeros in the channels that fill the head up to the pitch."""
        e, at = self.e, 0
        for i in range(self.variant.per_lane):
            for channel, run in self.places(i):
                address = target + e.widen(channel << 1)
                part = values[at : at + run]
                if run == 1:
                    bits = e.asm("cvt.rn.f16.f32 $0, $1;", "u16", [part[0]], pure=True)
                    self.guarded(self.inside(i), "st.global.u16 [$0], $1;", None, [address, bits])
                else:
                    words = [
                        e.asm("cvt.rn.f16x2.f32 $0, $2, $1;", "u32", part[k : k + 2], pure=True)
                        for k in range(0, run, 2)
                    ]
                    vector, names = (".v2", "{$1,$2}") if run == 4 else ("", "$1")
                    self.guarded(self.inside(i), f"st.global{vector}.u32 [$0], {names};", None, [address, *words])
                at += run
        spare = (self.variant.pitch - self.variant.head_dim) // 2
        if spare:
            address = target + e.widen((self.lane << 2) + 2 * self.variant.head_dim)
            flag = self._flag("<", self.lane, spare)
            self.guarded(flag, "st.global.u32 [$0], $1;", None, [address, e.constant("u32", 0)])


@functools.cache
def _ops(variant: QkvPrepare) -> tuple[Any, ...]:
    """(load, squares, weigh, rotate, scaled, store_float, store_half): the kernel's ops over a lane's values."""
    from frink_numba.kernels.ptx import Emitter, Register, emitted

    head = f"f32x{variant.count}"

    @emitted(head, "u64", "u32")
    def load(e: Emitter, source: Register, lane: Register) -> list[Register]:
        return _Head(e, variant, lane).load(source)

    @emitted("f32", head)
    def squares(e: Emitter, values: list[Register]) -> Register:
        total = values[0] * values[0]
        for value in values[1:]:
            total = e.asm("fma.rn.f32 $0, $1, $1, $2;", "f32", [value, total], pure=True)
        return total

    @emitted(head, head, "u64", "f32", "u32")
    def weigh(
        e: Emitter, values: list[Register], weights: Register, factor: Register, lane: Register
    ) -> list[Register]:
        loaded = _Head(e, variant, lane).load(weights)
        return [value * factor * weight for value, weight in zip(values, loaded, strict=True)]

    @emitted(head, head, "u64", "u64", "u32")
    def rotate(e: Emitter, values: list[Register], cos: Register, sin: Register, lane: Register) -> list[Register]:
        h = _Head(e, variant, lane)
        unit, turning = variant.unit, variant.rot_dim // variant.unit
        out = list(values)
        for i in range(variant.per_lane):
            flag = None if 32 * (i + 1) <= turning else h._flag("<", h.unit(i), turning)
            at = e.widen(h.unit(i) * (2 * unit))
            run = unit // 2
            target = "{$0,$1}" if run == 2 else "$0"
            vector = ".v2" if run == 2 else ""
            template = f"ld.global{vector}.f32 {target}, [${run}];"
            c = h.guarded(flag, template, _floats(run), [cos + at])
            s = h.guarded(flag, template, _floats(run), [sin + at])
            c, s = (c, s) if run > 1 else ([c], [s])
            for k, (p, q) in enumerate(h.pairs()):
                a, b = values[unit * i + p], values[unit * i + q]
                x, y = a * c[k] - b * s[k], a * s[k] + b * c[k]
                out[unit * i + p] = x if flag is None else h.chosen(flag, x, a)
                out[unit * i + q] = y if flag is None else h.chosen(flag, y, b)
        return out

    @emitted(f"f32x{variant.count + 1}", head, "f32")
    def scaled(e: Emitter, values: list[Register], factor: Register) -> list[Register]:
        """The values times `factor`, and the largest magnitude (not-a-number when one is)."""
        out = [value * factor for value in values]
        top = e.constant("f32", 0.0)
        for value in out:
            magnitude = e.asm("abs.f32 $0, $1;", "f32", [value], pure=True)
            top = e.asm("max.NaN.f32 $0, $1, $2;", "f32", [top, magnitude], pure=True)
        return [*out, top]

    @emitted(None, head, "u64", "u32")
    def store_float(e: Emitter, values: list[Register], target: Register, lane: Register) -> None:
        _Head(e, variant, lane).store_float(values, target)

    @emitted(None, f"f32x{variant.count + 1}", "f32", "u32", "u64", "u32")
    def store_half(
        e: Emitter, values: list[Register], instead: Register, spoilt: Register, target: Register, lane: Register
    ) -> None:
        """f16 at `target`; where `spoilt` is not 0, `instead` in place of every value."""
        h = _Head(e, variant, lane)
        h.store_half([h.chosen(spoilt, instead, value) for value in values[:-1]], target)

    return load, squares, weigh, rotate, scaled, store_float, store_half


@functools.cache
def build(variant: QkvPrepare) -> tuple[Any, Any]:
    """The kernel for numba, and its signature. Grid: M * blocks_per_row blocks of 256 threads."""
    from numba import cuda, types

    from frink_numba.kernels.instructions import launch_dependents, wait_for_predecessors
    from frink_numba.kernels.ptx import instruction, numba_type
    from frink_numba.kernels.row_operations import ballot, beyond_half

    load, squares, weigh, rotate, scaled, store_float, store_half = _ops(variant)
    load_word = instruction("ld.global.u32 $0, [$1];", "u32", "u64")
    load_address = instruction("ld.global.u64 $0, [$1];", "u64", "u64")
    lowest = instruction("{\n.reg .b32 t;\nbrev.b32 t, $1;\nclz.b32 $0, t;\n}", "u32", "u32", pure=True)
    inverse_root = instruction("{\n.reg .f32 t;\nsqrt.rn.f32 t, $1;\nrcp.rn.f32 $0, t;\n}", "f32", "f32", pure=True)
    nan = instruction("mov.b32 $0, 0x7fffffff;", "f32", pure=True)
    u32, u64, f32 = types.uint32, types.uint64, types.float32
    D, PITCH, ROT, TOP = variant.head_dim, variant.pitch, variant.rot_dim, variant.count
    SUMS = 2 * WARPS
    OVERLAP, HEAD, WHOLE = variant.overlap, variant.norm == "head", variant.norm == "whole"
    NORMED = variant.norm != ""
    # The rotation comes before the norm, or after it.
    TURN_FIRST, TURN_LAST = variant.norm_last and ROT > 0, not variant.norm_last and ROT > 0

    def qkv_prepare(
        q_source, k_source, v_source, q, table, k_rows, v_rows, cos, sin, q_norm, k_norm, eps, q_inverse, k_inverse,
        v_inverse, source_pitch, n_heads, n_kv_heads, sequences, blocks_per_row,
    ):  # fmt: skip
        if OVERLAP:
            launch_dependents()
            wait_for_predecessors()
        sums = cuda.shared.array(SUMS, types.float32)
        thread = u32(cuda.threadIdx.x)
        lane = u32(thread & u32(31))
        warp = u32(thread >> u32(5))
        row = u32(u32(cuda.blockIdx.x) // blocks_per_row)
        first_task = u32(u32(u32(cuda.blockIdx.x) - row * blocks_per_row) * u32(WARPS) + warp)
        stride = u32(blocks_per_row * u32(WARPS))
        tasks = u32(n_heads + n_kv_heads)
        at = u64(row) * u64(source_pitch)
        cos_row = cos + u64(row) * u64(2 * ROT)
        sin_row = sin + u64(row) * u64(2 * ROT)
        q_factor = f32(1.0)
        k_factor = f32(1.0)
        if WHOLE:
            q_total = f32(0.0)
            k_total = f32(0.0)
            task = u32(warp)
            while task < tasks:
                source = q_source + at + u64(task) * u64(4 * D)
                if task >= n_heads:
                    source = k_source + at + u64(u32(task - n_heads)) * u64(4 * D)
                values = load(source, lane)
                if TURN_FIRST:
                    values = rotate(values, cos_row, sin_row, lane)
                total = squares(values)
                if task < n_heads:
                    q_total += total
                else:
                    k_total += total
                task = u32(task + u32(WARPS))
            for step in (16, 8, 4, 2, 1):
                q_total += cuda.shfl_xor_sync(0xFFFFFFFF, q_total, step)
                k_total += cuda.shfl_xor_sync(0xFFFFFFFF, k_total, step)
            if lane == 0:
                sums[warp] = q_total
                sums[warp + u32(WARPS)] = k_total
            cuda.syncthreads()
            q_total = f32(0.0)
            k_total = f32(0.0)
            for i in range(WARPS):
                q_total += sums[i]
                k_total += sums[i + WARPS]
            q_factor = inverse_root(q_total / f32(u32(n_heads * u32(D))) + eps)
            k_factor = inverse_root(k_total / f32(n_kv_heads * u32(D)) + eps)
        # The row's sequence: the record whose rows hold it.
        record = u32(0xFFFFFFFF)
        begin = u32(0)
        while begin < sequences:
            mine = u32(begin + lane)
            hit = u32(0)
            if mine < sequences:
                first = load_word(table + u64(mine) * u64(32))
                if u32(row - first) < load_word(table + u64(mine) * u64(32) + u64(4)):
                    hit = u32(1)
            found = ballot(hit)
            if found != 0:
                record = u32(begin + lowest(found))
            begin = u32(begin + u32(32))
        k_target = u64(0)
        v_target = u64(0)
        kept = u64(row)
        if record != u32(0xFFFFFFFF):
            entry = table + u64(record) * u64(32)
            kept += u64(load_word(entry + u64(12)))
            position = u32(load_word(entry + u64(8)) + row - load_word(entry))
            place = u64(position) * u64(n_kv_heads) * u64(2 * PITCH)
            k_target = load_address(entry + u64(16)) + place
            v_target = load_address(entry + u64(24)) + place
        task = u32(first_task)
        while task < tasks:
            if task < n_heads:
                values = load(q_source + at + u64(task) * u64(4 * D), lane)
                weights = u64(q_norm)
                if TURN_FIRST:
                    values = rotate(values, cos_row, sin_row, lane)
                if HEAD:
                    total = squares(values)
                    for step in (16, 8, 4, 2, 1):
                        total += cuda.shfl_xor_sync(0xFFFFFFFF, total, step)
                    q_factor = inverse_root(total * f32(1.0 / D) + eps)
                if WHOLE:
                    weights += u64(task) * u64(4 * D)
                if NORMED:
                    values = weigh(values, weights, q_factor, lane)
                if TURN_LAST:
                    values = rotate(values, cos_row, sin_row, lane)
                halves = scaled(values, q_inverse)
                spoilt = ballot(beyond_half(halves[TOP]))
                target = q + (u64(row) * u64(n_heads) + u64(task)) * u64(2 * PITCH)
                store_half(halves, nan(), spoilt, target, lane)
            else:
                head = u64(u32(task - n_heads))
                values = load(k_source + at + head * u64(4 * D), lane)
                others = load(v_source + at + head * u64(4 * D), lane)
                weights = u64(k_norm)
                if TURN_FIRST:
                    values = rotate(values, cos_row, sin_row, lane)
                if HEAD:
                    total = squares(values)
                    for step in (16, 8, 4, 2, 1):
                        total += cuda.shfl_xor_sync(0xFFFFFFFF, total, step)
                    k_factor = inverse_root(total * f32(1.0 / D) + eps)
                if WHOLE:
                    weights += head * u64(4 * D)
                if NORMED:
                    values = weigh(values, weights, k_factor, lane)
                if TURN_LAST:
                    values = rotate(values, cos_row, sin_row, lane)
                place = (kept * u64(n_kv_heads) + head) * u64(4 * D)
                if k_rows != 0:
                    store_float(values, k_rows + place, lane)
                    store_float(others, v_rows + place, lane)
                halves = scaled(values, k_inverse)
                other_halves = scaled(others, v_inverse)
                spoilt = ballot(beyond_half(halves[TOP]) | beyond_half(other_halves[TOP]))
                if k_target != 0:
                    store_half(halves, nan(), spoilt, k_target + head * u64(2 * PITCH), lane)
                    store_half(other_halves, f32(0.0), spoilt, v_target + head * u64(2 * PITCH), lane)
            task = u32(task + stride)

    return qkv_prepare, types.void(*(numba_type(spec) for _, spec in ARGUMENTS))


def source(variant: QkvPrepare) -> Source:
    """What to compile."""
    return Source(f"qkv_prepare {variant!r}", functools.partial(build, variant), THREADS)
