"""Which quantization kinds the CUDA kernels multiply, and how their bytes are laid out on the device.

Importable without numba: `can_multiply` answers R19 before any device exists.

A matrix W [rows, cols] of a kind is stored as planes. A plane holds one entry for each `span` consecutive elements of a
row: `entry_bytes` bytes, at [entry, row], rows adjacent. A warp whose lanes take consecutive rows therefore loads whole
128-byte lines, aligned, however wide the block of the file's format is. Planes follow each other without gaps, widest
entries first, so that every entry is aligned to its size. The sum is the file's own size, except that rows of F32, F16
and BF16 are padded with zeros to a multiple of 16 elements.
"""

from __future__ import annotations

from dataclasses import dataclass

from frink_numba.quant import QuantKind

OCTET = 8  # elements that one thread dequantizes at a time: consecutive in a row, and starting at a multiple of 8


@dataclass(frozen=True, slots=True)
class Plane:
    """One field of a block format: `entry_bytes` for each `span` consecutive elements of a row."""

    entry_bytes: int
    span: int

    @property
    def words(self) -> int:
        """32-bit words that hold this plane's part of one octet."""
        return max(1, self.entry_bytes * max(1, OCTET // self.span) // 4)


_FIELDS4 = Plane(4, 8)  # eight 4-bit values, first in the low bits
_FIELDS2 = Plane(2, 8)  # eight 2-bit values
_FIELDS1 = Plane(1, 8)  # eight bits

PLANES: dict[str, tuple[Plane, ...]] = {
    "F32": (Plane(16, 4),),
    "F16": (Plane(16, 8),),
    "BF16": (Plane(16, 8),),
    "Q4_0": (_FIELDS4, Plane(2, 32)),  # scale f16
    "Q4_1": (_FIELDS4, Plane(4, 32)),  # scale, minimum f16
    "Q5_0": (_FIELDS4, Plane(2, 32), _FIELDS1),
    "Q5_1": (_FIELDS4, Plane(4, 32), _FIELDS1),
    "Q8_0": (Plane(8, 8), Plane(2, 32)),
    "Q2_K": (Plane(4, 256), _FIELDS2, Plane(1, 16)),  # d, dmin f16; scale and minimum nibbles
    "Q3_K": (_FIELDS2, Plane(2, 256), _FIELDS1, Plane(1, 32), Plane(1, 64)),  # d; scales: 2 low nibbles, 4 high pairs
    "Q4_K": (_FIELDS4, Plane(4, 256), Plane(1, 32), Plane(1, 64)),  # d, dmin; scale, minimum: low nibbles, high pairs
    "Q5_K": (_FIELDS4, Plane(4, 256), _FIELDS1, Plane(1, 32), Plane(1, 64)),
    "Q6_K": (_FIELDS4, _FIELDS2, Plane(2, 256), Plane(1, 16)),  # d f16; scales int8
    "IQ4_NL": (_FIELDS4, Plane(2, 32)),
    "IQ4_XS": (_FIELDS4, Plane(2, 256), Plane(2, 256), Plane(1, 64)),  # d f16; scales: 8 high pairs, 2 low nibbles
}

supported_kinds: frozenset[str] = frozenset(PLANES)

_PADDING = 16  # elements; the depth of a tile of the matrix product


def padded_cols(kind: QuantKind, cols: int) -> int:
    """Elements of a row as stored: `cols`, except that unblocked kinds are padded to a multiple of 16."""
    return -(-cols // _PADDING) * _PADDING if kind.block == 1 else cols


def packed_bytes(kind: QuantKind, rows: int, cols: int) -> int:
    """Bytes that W [rows, cols] takes on the device."""
    return rows * kind.row_bytes(padded_cols(kind, cols))


def can_multiply(kind: QuantKind, rows: int, cols: int) -> str | None:
    """None when `quantized_matmul` serves a W [rows, cols] of this kind, else the reason (R19)."""
    if kind.name not in PLANES:
        return f"no CUDA kernel multiplies {kind.name}"
    if rows < 1 or cols < 1:
        return f"an empty {kind.name} matrix"
    if cols % kind.block:
        return f"{kind.name}: rows of {cols} are not a multiple of the block of {kind.block}"
    return None
