"""Which tile of the fused attention comes when, and which blocks of keys it needs. Index arithmetic of both tiers.

A tile is `rows` packed rows of one K/V head: row r is position r / group of the sequence's part of the batch, query
head r % group of the K/V head. The functions take an Emitter (or the tests' stand-in) and u32 registers.
"""

from __future__ import annotations

import functools
from typing import Any

from frink_numba.kernels.ptx import Emitter, Register, emitted


def divide(e: Emitter, a: Register, b: Register | int) -> Register:
    other = b if isinstance(b, Register) else e.constant("u32", b)
    return Register(e, "u32", e.builder.udiv(a.value, other.value))


def least(e: Emitter, a: Register, b: Register) -> Register:
    return Register(e, "u32", e.builder.select(e.builder.icmp_signed("<", a.value, b.value), a.value, b.value))


def most(e: Emitter, a: Register, b: Register | int) -> Register:
    other = b if isinstance(b, Register) else e.constant("u32", b)
    return Register(e, "u32", e.builder.select(e.builder.icmp_signed(">", a.value, other.value), a.value, other.value))


def locate_tile(
    e: Emitter, rows: int, number: Register, tiles: Register, heads: Register, positions: Register, resident: Register
) -> list[Register]:
    """(K/V head, first packed row) of tile `number` of a sequence that has `tiles` a head.

    A section of heads after the other, as many as fit `resident` (positions times heads) with their keys; in a section
    the last rows first, which see the most keys, so that the light tiles fill the gaps at the end.
    """
    section = most(e, least(e, divide(e, resident, positions), heads), 1)
    per_section = tiles * section
    part = divide(e, number, per_section)
    rest = number - part * per_section
    width = least(e, section, heads - part * section)
    level = divide(e, rest, width)
    return [part * section + rest - level * width, (tiles - 1 - level) * rows]


def key_bounds(
    e: Emitter,
    rows: int,
    keys: int,
    first_row: Register,
    all_rows: Register,
    start: Register,
    group: Register,
    window: Register | None,
) -> list[Register]:
    """(end, free end, free begin, begin) of a tile's blocks of keys: blocks begin .. end - 1 have a visible key.

    All rows of the tile see all keys of the blocks free begin .. free end - 1, if any. The tile starts at packed row
    `first_row` of the sequence's `all_rows`, which start at position `start`. window None: all keys up to the row.
    """
    first = start + divide(e, first_row, group)
    last = start + divide(e, least(e, first_row + (rows - 1), all_rows - 1), group)
    end, free_end = divide(e, last, keys) + 1, divide(e, first + 1, keys)
    if window is None:
        zero = e.constant("u32", 0)
        return [end, free_end, zero, zero]
    begin = divide(e, most(e, first - window + 1, 0), keys)
    free_begin = divide(e, most(e, last - window + 1, 0) + (keys - 1), keys)
    free_end = most(e, free_end, begin)
    return [end, free_end, least(e, free_end, free_begin), begin]


def step_counts(e: Emitter, bounds: list[Register]) -> list[Register]:
    """(the last block, then how many blocks follow it with a mask, without one, and with one again)."""
    end, free_end, free_begin, begin = bounds
    top = end - 1
    free_end, free_begin = least(e, top, free_end), least(e, top, free_begin)
    return [top, top - free_end, free_end - free_begin, free_begin - begin]


def row_limits(
    e: Emitter,
    keys: int,
    thread: Register,
    inside: list[Register],
    first_row: Register,
    all_rows: Register,
    start: Register,
    group: Register,
    block: Register,
) -> list[Register]:
    """Of a thread's rows `inside` the tile: the last visible key less the first of the block and of the thread.

    As signed numbers. A thread's first key of a block is twice its place in its quad; rows past the last repeat it.
    """
    gone = block * keys + ((thread & 3) << 1) - start
    return [divide(e, least(e, first_row + row, all_rows - 1), group) - gone for row in inside]


@functools.cache
def schedule_ops(rows: int, keys: int, windowed: bool) -> tuple[Any, Any, Any]:
    """(locate, bounds, counts): `locate_tile`, `key_bounds` and `step_counts` as ops.

    locate(number, tiles, heads, positions, resident); the others (first_row, all_rows, start, group, window).
    """

    @emitted("u32x2", "u32", "u32", "u32", "u32", "u32")
    def locate(
        e: Emitter, number: Register, tiles: Register, heads: Register, positions: Register, resident: Register
    ) -> list[Register]:
        return locate_tile(e, rows, number, tiles, heads, positions, resident)

    @emitted("u32x4", "u32", "u32", "u32", "u32", "u32")
    def bounds(
        e: Emitter, first_row: Register, all_rows: Register, start: Register, group: Register, window: Register
    ) -> list[Register]:
        return key_bounds(e, rows, keys, first_row, all_rows, start, group, window if windowed else None)

    @emitted("u32x4", "u32", "u32", "u32", "u32", "u32")
    def counts(
        e: Emitter, first_row: Register, all_rows: Register, start: Register, group: Register, window: Register
    ) -> list[Register]:
        found = key_bounds(e, rows, keys, first_row, all_rows, start, group, window if windowed else None)
        return step_counts(e, found)

    return locate, bounds, counts
