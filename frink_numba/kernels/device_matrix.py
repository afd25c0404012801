"""A quantized matrix on the device: the planes of kinds.py, packed once on the host from the file's own bytes."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from frink_numba.errors import ShapeError
from frink_numba.kernels.in_threads import in_threads
from frink_numba.kernels.kinds import PLANES, can_multiply, packed_bytes, padded_cols
from frink_numba.quant import QuantKind, QuantMatrix

_CHUNK_BYTES = 1 << 18  # source bytes rearranged at a time: the temporary arrays stay in the processor's cache
_MOST_THREADS = 16


@dataclass(frozen=True, slots=True, eq=False)
class DeviceMatrix:
    """W [rows, cols] on the device. `data`: the uint8 device array that `pack` made, 16-byte aligned."""

    kind: QuantKind
    data: Any
    rows: int
    cols: int

    def __post_init__(self) -> None:
        reason = can_multiply(self.kind, self.rows, self.cols)
        if reason is not None:
            raise ShapeError(f"device matrix of {self.rows} x {self.cols}: {reason}")
        want = (packed_bytes(self.kind, self.rows, self.cols),)
        if self.data.dtype != np.uint8 or tuple(self.data.shape) != want:
            raise ShapeError(
                f"a packed {self.kind} matrix of {self.rows} x {self.cols} is uint8 {list(want)}, "
                f"got {self.data.dtype} {list(self.data.shape)}"
            )

    @property
    def nbytes(self) -> int:
        return int(self.data.nbytes)

    @property
    def stored_cols(self) -> int:
        """Elements of a row as stored, padding included."""
        return padded_cols(self.kind, self.cols)


def _join(values: np.ndarray, bits: int) -> np.ndarray:
    """Pack uint8 `values` [n, 8 m] of `bits` (1, 2, 4) bits into integers of 8 fields, the first one lowest."""
    v = np.ascontiguousarray(values).view("<u8").copy()
    v |= v >> np.uint64(8 - bits)
    v &= np.uint64((1 << 2 * bits) - 1) * np.uint64(0x0001000100010001)
    v |= v >> np.uint64(2 * (8 - bits))
    v &= np.uint64((1 << 4 * bits) - 1) * np.uint64(0x0000000100000001)
    v |= v >> np.uint64(4 * (8 - bits))
    return v.astype(f"<u{bits}")


def _shifts(*counts: int) -> np.ndarray:
    return np.array(counts, np.uint8)[:, None]


def _fields(blocks: np.ndarray, group: int, *shifts: int) -> np.ndarray:
    """Fields of packed bytes [n, m] in element order: each `group` of bytes holds a run of elements per shift."""
    n = blocks.shape[0]
    return (blocks.reshape(n, -1, 1, group) >> _shifts(*shifts)).reshape(n, -1)


def _words(blocks: np.ndarray, size: int) -> np.ndarray:
    return np.ascontiguousarray(blocks).view(f"<u{size}")


def _nibble_pairs(values: np.ndarray) -> np.ndarray:
    """Two 4-bit values a byte, the first low."""
    return values[:, 0::2] | (values[:, 1::2] << np.uint8(4))


def _split_simple(blocks: np.ndarray, scales: int, has_high: bool) -> list[np.ndarray]:
    """Q4_0, Q4_1, Q5_0, Q5_1 and IQ4_NL: `scales` bytes, four bytes of high bits or none, then 16 bytes of nibbles."""
    start = scales + (4 if has_high else 0)
    low = _join(_fields(blocks[:, start:], 16, 0, 4) & np.uint8(15), 4)
    planes = [low, _words(blocks[:, :scales], scales)]
    return [*planes, blocks[:, scales:start]] if has_high else planes


def _split_q8_0(blocks: np.ndarray) -> list[np.ndarray]:
    return [_words(blocks[:, 2:], 8), _words(blocks[:, :2], 2)]


def _split_q2_k(blocks: np.ndarray) -> list[np.ndarray]:
    low = _join(_fields(blocks[:, 16:80], 32, 0, 2, 4, 6) & np.uint8(3), 2)
    return [_words(blocks[:, 80:84], 4), low, blocks[:, :16]]


def _split_q3_k(blocks: np.ndarray) -> list[np.ndarray]:
    high = _join(_fields(blocks[:, :32], 32, *range(8)) & np.uint8(1), 1)
    low = _join(_fields(blocks[:, 32:96], 32, 0, 2, 4, 6) & np.uint8(3), 2)
    scales = blocks[:, 96:108]
    low_scales = _nibble_pairs(_fields(scales[:, :8], 8, 0, 4) & np.uint8(15))
    pairs = (_fields(scales[:, 8:], 4, 0, 2, 4, 6) & np.uint8(3)).reshape(-1, 4, 4)
    high_scales = (pairs << np.array([0, 2, 4, 6], np.uint8)).sum(axis=2, dtype=np.uint8)
    return [low, _words(blocks[:, 108:], 2), high, low_scales, high_scales]


def _split_6_bit_scales(packed: np.ndarray) -> list[np.ndarray]:
    """Q4_K's and Q5_K's 12 bytes of eight scales and eight minimums as a plane of low nibbles and one of high pairs."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, (third & 15) | (first >> 2 & 48)], axis=1)
    minimums = np.concatenate([second & 63, (third >> 4) | (second >> 2 & 48)], axis=1)
    low = (scales & 15) | (minimums & 15) << 4
    return [low, _nibble_pairs(scales >> 4 | minimums >> 4 << 2)]


def _split_q4_k(blocks: np.ndarray) -> list[np.ndarray]:
    low = _join(_fields(blocks[:, 16:], 32, 0, 4) & np.uint8(15), 4)
    return [low, _words(blocks[:, :4], 4), *_split_6_bit_scales(blocks[:, 4:16])]


def _split_q5_k(blocks: np.ndarray) -> list[np.ndarray]:
    low = _join(_fields(blocks[:, 48:], 32, 0, 4) & np.uint8(15), 4)
    high = _join(_fields(blocks[:, 16:48], 32, *range(8)) & np.uint8(1), 1)
    return [low, _words(blocks[:, :4], 4), high, *_split_6_bit_scales(blocks[:, 4:16])]


def _split_q6_k(blocks: np.ndarray) -> list[np.ndarray]:
    low = _join(_fields(blocks[:, :128], 64, 0, 4) & np.uint8(15), 4)
    high = _join(_fields(blocks[:, 128:192], 32, 0, 2, 4, 6) & np.uint8(3), 2)
    return [low, high, _words(blocks[:, 208:], 2), blocks[:, 192:208]]


def _split_iq4_xs(blocks: np.ndarray) -> list[np.ndarray]:
    low = _join(_fields(blocks[:, 8:], 16, 0, 4) & np.uint8(15), 4)
    return [low, _words(blocks[:, :2], 2), _words(blocks[:, 2:4], 2), blocks[:, 4:8]]


# From blocks uint8 [n, block_bytes] to each plane's entries [n, entries of a block], in the order of kinds.PLANES.
_SPLIT: dict[str, Callable[[np.ndarray], list[np.ndarray]]] = {
    "Q4_0": lambda blocks: _split_simple(blocks, 2, False),
    "Q4_1": lambda blocks: _split_simple(blocks, 4, False),
    "Q5_0": lambda blocks: _split_simple(blocks, 2, True),
    "Q5_1": lambda blocks: _split_simple(blocks, 4, True),
    "Q8_0": _split_q8_0,
    "Q2_K": _split_q2_k,
    "Q3_K": _split_q3_k,
    "Q4_K": _split_q4_k,
    "Q5_K": _split_q5_k,
    "Q6_K": _split_q6_k,
    "IQ4_NL": lambda blocks: _split_simple(blocks, 2, False),
    "IQ4_XS": _split_iq4_xs,
}


def _split_unblocked(data: np.ndarray, stored_bytes: int) -> list[np.ndarray]:
    """F32, F16, BF16: rows [n, bytes] padded with zeros and cut into entries of 16 bytes."""
    padded = np.zeros((data.shape[0], stored_bytes), np.uint8)
    padded[:, : data.shape[1]] = data
    return [padded.view("V16")]


def pack(matrix: QuantMatrix) -> np.ndarray:
    """The bytes of `matrix` as the kernels read them: uint8 [packed_bytes], in the planes of kinds.PLANES.

    ShapeError when no kernel serves the kind or shape. Vectorised, chunk by chunk of rows, on
    all processors.
    """
    kind, rows, cols = matrix.kind, matrix.rows, matrix.cols
    reason = can_multiply(kind, rows, cols)
    if reason is not None:
        raise ShapeError(f"pack a matrix of {rows} x {cols}: {reason}")
    stored = padded_cols(kind, cols)
    out = np.empty(packed_bytes(kind, rows, cols), np.uint8)
    planes, start = [], 0
    for plane in PLANES[kind.name]:
        entries = stored // plane.span
        stop = start + entries * rows * plane.entry_bytes
        entry = "V16" if plane.entry_bytes == 16 else f"<u{plane.entry_bytes}"
        planes.append(out[start:stop].view(entry).reshape(entries, rows))
        start = stop
    step = max(1, _CHUNK_BYTES // kind.row_bytes(cols))

    def rearrange(first: int) -> None:
        chunk = matrix.data[first : first + step]
        if kind.block == 1:
            parts = _split_unblocked(chunk, kind.row_bytes(stored))
        else:
            parts = _SPLIT[kind.name](chunk.reshape(-1, kind.block_bytes))
        for plane_out, part in zip(planes, parts, strict=True):
            plane_out[:, first : first + step] = part.reshape(chunk.shape[0], -1).T

    # NumPy lets other threads run while it works, and each chunk fills columns of its own.
    in_threads(rearrange, range(0, rows, step), min(_MOST_THREADS, os.cpu_count() or 1))
    return out
