"""Scales of the thin products, applied to sums instead of weights: one table row a kind.

A block of 16 or 32 columns of a row has one scale, so that its share of a product is

    d * sum(q x) - c * sum(x)

The tensor core makes sum(q x) from the codes as they are (integers in the mantissa of an f16 word: `gemm_kinds.py`),
exact up to float32; four `fma` add it to the sums of two rows of W and two of x. The second term is a small product of
its own, over blocks instead of columns: one `mma` an item, or two, with the blocks' offsets as A and the sums of x as
B. Those sums are made once, when x enters shared memory, as the sum of two f16 numbers times 2**SUM_BITS.

Beside scaling every weight this saves half of the arithmetic, and the rounding of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from frink_numba.kernels.gemm_kinds import FRAGMENT_KINDS

SUM_BITS = 5  # x is under 2**16, so that sums of 32 are under 2**16 after a division by 2**5

Pair = tuple[Any, Any]  # of row g and of row g + 8


@dataclass(frozen=True, slots=True)
class ThinScheme:
    """How a kind's scales enter.

    columns: of a block, 16 or 32. scales(m, base, row, step, header): for each block of a step, float32 of rows g and
    g + 8. outer(m, header): factors of the sums of a whole item, or None where `scales` has everything. offsets(m,
    slot, row, t, header): A operands, f16 of blocks 2t and 2t + 1 (then 8 + 2t and 9 + 2t) of rows g and g + 8; for
    items of two steps those of step t & 1. factors: constants of the second term for rows g and g + 8; both terms have
    the outer factor too.
    """

    columns: int
    scales: Callable[..., list[Pair]]
    offsets: Callable[..., list[Pair]]
    factors: tuple[float, float]
    outer: Callable[..., Pair] | None = None
    outer_offsets: Callable[..., Pair] | None = None  # where the second term's differs


def _rows(row: Any) -> tuple[Any, Any]:
    return row, row + 8


# ---- blocks of 32 with f16 scales --------------------------------------------------------------------------------


def _plain_scales(width: int) -> Callable[..., list[Pair]]:
    """Two f16 a row and step, at the beginning of its `width` bytes."""

    def scales(m: Any, base: Any, row: Any, step: int, header: Sequence[Any]) -> list[Pair]:
        a, b = (m.floats(m.load32(base + r * width)) for r in _rows(row))
        return [(a[0], b[0]), (a[1], b[1])]

    return scales


def _plain_offsets(name: str, width: int, at: int) -> Callable[..., list[Pair]]:
    size = FRAGMENT_KINDS[name].step_size

    def offsets(m: Any, slot: Any, row: Any, t: Any, header: Sequence[Any]) -> list[Pair]:
        base = slot + (t & 1) * size
        a, b = (m.load32(base + r * width + at) for r in _rows(row))
        return [(a, b)]

    return offsets


def _symmetric(name: str, offset: int) -> ThinScheme:
    lo = FRAGMENT_KINDS[name].lo
    factors = (-offset * 2.0 ** (SUM_BITS - 24), -offset * 2.0 ** (SUM_BITS - 24 + lo))
    return ThinScheme(32, _plain_scales(4), _plain_offsets(name, 4, 0), factors)


def _affine(name: str) -> ThinScheme:
    return ThinScheme(32, _plain_scales(8), _plain_offsets(name, 8, 4), (2.0**SUM_BITS, 2.0**SUM_BITS))


# ---- super-blocks ------------------------------------------------------------------------------------------------


def _bits_k4(words: Sequence[Any], step: int) -> Any:
    """Scales at bits 0..5 and minima at bits 6..11 of a step's two blocks: see gemm_kinds._scales_k4."""
    if step < 3:
        return words[step]
    return ((words[0] >> 12) & 0x000F000F) | ((words[1] >> 8) & 0x00F000F0) | ((words[2] >> 4) & 0x0F000F00)


def _scales_k4(m: Any, base: Any, row: Any, step: int, header: Sequence[Any]) -> list[Pair]:
    """The six bits as they are: a subnormal, the scale times 2**-24."""
    a, b = (m.floats(_bits_k4(header[4 * side + 1 : 4 * side + 4], step) & 0x003F003F) for side in range(2))
    return [(a[0], b[0]), (a[1], b[1])]


def _offsets_k4(m: Any, slot: Any, row: Any, t: Any, header: Sequence[Any]) -> list[Pair]:
    out = []
    for side in range(2):
        words = header[4 * side + 1 : 4 * side + 4]
        bits = m.select(t, [_bits_k4(words, step) for step in range(4)])
        out.append((bits >> 6) & 0x003F003F)
    return [(out[0], out[1])]


def _outer_k4(m: Any, header: Sequence[Any]) -> Pair:
    a, b = (m.power(m.floats(header[4 * side])[0], 24) for side in range(2))
    return a, b


def _outer_offsets_k4(m: Any, header: Sequence[Any]) -> Pair:
    a, b = (m.floats(header[4 * side])[1] for side in range(2))
    return a, b


_K4 = ThinScheme(32, _scales_k4, _offsets_k4, (2.0**SUM_BITS, 2.0**SUM_BITS), _outer_k4, _outer_offsets_k4)


def _scales_q6(m: Any, base: Any, row: Any, step: int, header: Sequence[Any]) -> list[Pair]:
    sides = []
    for r in _rows(row):
        word = m.load32(base + r * 4)
        sides.append([value for low in (0, 2) for value in m.floats(m.bytes_less(word, low, 128))])
    return list(zip(*sides, strict=True))


def _offsets_q6(m: Any, slot: Any, row: Any, t: Any, header: Sequence[Any]) -> list[Pair]:
    kind = FRAGMENT_KINDS["Q6_K"]
    base = slot + kind.header_size + (t >> 1) * kind.step_size + (t & 1) * 2
    out = []
    for half in range(2):
        words = [m.load16(base + (2 * half * kind.step_size) + r * 4) for r in _rows(row)]
        out.append((m.bytes_less(words[0], 0, 128), m.bytes_less(words[1], 0, 128)))
    return out


def _outer_d(m: Any, header: Sequence[Any]) -> Pair:
    return m.lower(header[0]), m.lower(header[1])


_Q6_K = ThinScheme(
    16, _scales_q6, _offsets_q6, (-32 * 2.0 ** (SUM_BITS - 24), -32 * 2.0 ** (SUM_BITS - 20)), _outer_d, _outer_d
)

# Kinds that are not here have their weights scaled, as in the products of many rows.
SCHEMES: dict[str, ThinScheme] = {
    "Q4_0": _symmetric("Q4_0", 8),
    "Q4_1": _affine("Q4_1"),
    "Q5_0": _symmetric("Q5_0", 16),
    "Q5_1": _affine("Q5_1"),
    "Q8_0": _symmetric("Q8_0", 128),
    "IQ4_NL": _symmetric("IQ4_NL", 128),
    "Q4_K": _K4,
    "Q5_K": _K4,
    "Q6_K": _Q6_K,
}
