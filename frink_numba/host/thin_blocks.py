"""Block formats expanded in registers: for each kind, the 32 elements of a part of a block as two times 16 lanes.

The values are those of `dequantize_blocks`, bit for bit; the sources of the layouts are named there. `at` is the
block's address, `part` counts the block's runs of 32 elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numba import float32, njit

from frink_numba.host.lanes import (
    as_floats,
    bits_and,
    bits_of,
    bits_or,
    brain_halves,
    half,
    halves,
    less,
    offset,
    scaled,
    shifted_left,
    shifted_right,
    signed_byte,
    signed_bytes,
    unsigned_byte,
    unsigned_bytes,
    word,
)


@njit
def _q4_0(at, part):
    packed, scale = unsigned_bytes(at + 2), half(at)
    return (
        scaled(scale, as_floats(less(bits_and(packed, 15), 8))),
        scaled(scale, as_floats(less(shifted_right(packed, 4), 8))),
    )


@njit
def _q4_1(at, part):
    packed, scale, lowest = unsigned_bytes(at + 4), half(at), half(at + 2)
    return (
        offset(scaled(scale, as_floats(bits_and(packed, 15))), lowest),
        offset(scaled(scale, as_floats(shifted_right(packed, 4))), lowest),
    )


@njit
def _with_fifth_bits(at):
    """Nibbles behind a word whose bit i is the fifth of element i."""
    fifth, packed = word(at), unsigned_bytes(at + 4)
    return (
        bits_or(bits_and(packed, 15), shifted_left(bits_of(fifth), 4)),
        bits_or(shifted_right(packed, 4), shifted_left(bits_of(fifth >> 16), 4)),
    )


@njit
def _q5_0(at, part):
    scale = half(at)
    first, second = _with_fifth_bits(at + 2)
    return scaled(scale, as_floats(less(first, 16))), scaled(scale, as_floats(less(second, 16)))


@njit
def _q5_1(at, part):
    scale, lowest = half(at), half(at + 2)
    first, second = _with_fifth_bits(at + 4)
    return offset(scaled(scale, as_floats(first)), lowest), offset(scaled(scale, as_floats(second)), lowest)


@njit
def _q8_0(at, part):
    scale = half(at)
    return scaled(scale, as_floats(signed_bytes(at + 2))), scaled(scale, as_floats(signed_bytes(at + 18)))


@njit
def _scale_and_offset(at, part):
    """Of a run of Q4_K and Q5_K: two float16, and twelve bytes of 6-bit numbers."""
    if part < 4:
        scale = unsigned_byte(at + 4 + part) & 63
        lowest = unsigned_byte(at + 8 + part) & 63
    else:
        both = unsigned_byte(at + 8 + part)
        scale = (both & 15) | (unsigned_byte(at + part) >> 6) << 4
        lowest = (both >> 4) | (unsigned_byte(at + 4 + part) >> 6) << 4
    return half(at) * float32(scale), -(half(at + 2) * float32(lowest))


@njit
def _q4_k(at, part):
    scale, lowest = _scale_and_offset(at, part)
    packed, shift = at + 16 + 32 * (part // 2), 4 * (part % 2)
    first = bits_and(shifted_right(unsigned_bytes(packed), shift), 15)
    second = bits_and(shifted_right(unsigned_bytes(packed + 16), shift), 15)
    return offset(scaled(scale, as_floats(first)), lowest), offset(scaled(scale, as_floats(second)), lowest)


@njit
def _q5_k(at, part):
    scale, lowest = _scale_and_offset(at, part)
    packed, shift = at + 48 + 32 * (part // 2), 4 * (part % 2)
    fifth = shifted_left(bits_and(shifted_right(unsigned_bytes(at + 16), part), 1), 4)
    first = bits_or(bits_and(shifted_right(unsigned_bytes(packed), shift), 15), fifth)
    fifth = shifted_left(bits_and(shifted_right(unsigned_bytes(at + 32), part), 1), 4)
    second = bits_or(bits_and(shifted_right(unsigned_bytes(packed + 16), shift), 15), fifth)
    return offset(scaled(scale, as_floats(first)), lowest), offset(scaled(scale, as_floats(second)), lowest)


@njit
def _q6_k_lanes(low, high, low_shift, high_shift):
    upper = shifted_left(bits_and(shifted_right(unsigned_bytes(high), high_shift), 3), 4)
    return as_floats(less(bits_or(bits_and(shifted_right(unsigned_bytes(low), low_shift), 15), upper), 32))


@njit
def _q6_k(at, part):
    # Each half of 128 elements: the low nibbles of 64 bytes, then their high ones; above them bits 0-1, 2-3, 4-5, 6-7
    # of 32 bytes in turn. A scale serves 16 elements.
    side, quarter = part // 4, part % 4
    low = at + 64 * side + 32 * (quarter % 2)
    high = at + 128 + 32 * side
    scale = half(at + 208)
    first = scale * float32(signed_byte(at + 192 + 2 * part))
    second = scale * float32(signed_byte(at + 193 + 2 * part))
    low_shift, high_shift = 4 * (quarter // 2), 2 * quarter
    return (
        scaled(first, _q6_k_lanes(low, high, low_shift, high_shift)),
        scaled(second, _q6_k_lanes(low + 16, high + 16, low_shift, high_shift)),
    )


@njit
def _f16(at, part):
    return halves(at), halves(at + 32)


@njit
def _bf16(at, part):
    return brain_halves(at), brain_halves(at + 32)


@dataclass(frozen=True, slots=True)
class ThinBlock:
    """`expand(address, part)` gives 32 elements; a block of `nbytes` has `parts` times as many."""

    expand: Any
    parts: int
    nbytes: int


THIN_BLOCKS: dict[str, ThinBlock] = {
    "Q4_0": ThinBlock(_q4_0, 1, 18),
    "Q4_1": ThinBlock(_q4_1, 1, 20),
    "Q5_0": ThinBlock(_q5_0, 1, 22),
    "Q5_1": ThinBlock(_q5_1, 1, 24),
    "Q8_0": ThinBlock(_q8_0, 1, 34),
    "Q4_K": ThinBlock(_q4_k, 8, 144),
    "Q5_K": ThinBlock(_q5_k, 8, 176),
    "Q6_K": ThinBlock(_q6_k, 8, 210),
    "F16": ThinBlock(_f16, 1, 64),
    "BF16": ThinBlock(_bf16, 1, 64),
}
