"""Codes in the order in which a thread of the tensor-core products reads them: the planes of a step (gemm_kinds.py).

An element's place has ten digits. Rows: slab, warp, half r, g. Columns: step k, pair of blocks d, block b of the pair,
upper half u, t, element e of a pair. A thread is (warp, g, t); its words hold the rest. Digits whose codes share a byte
are merged while they lie in rows, and then every byte is moved once: NumPy's cost is bytes moved one by one.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from frink_numba.kernels.gemm_kinds import SLAB, STEP, FragmentKind

_DIGITS = {"s": -1, "w": 4, "r": 2, "g": 8, "k": -1, "d": 2, "b": 2, "u": 2, "t": 4, "e": 2}
_LOW = np.uint32(0x0F0F0F0F)

# Of kinds with four bits and nothing else: bytes of a record of the file, where its codes begin, and the digit that
# tells a byte's low nibble from its high one.
_NIBBLES = {"Q4_0": (18, 2, "b"), "Q4_1": (20, 4, "b"), "Q4_K": (144, 16, "d")}


def has_nibbles(name: str) -> bool:
    """Whether `nibble_plane` serves a kind."""
    return name in _NIBBLES


def nibble_plane(name: str, raw: np.ndarray, steps: int) -> np.ndarray:
    """The one plane of a kind of four bits, uint8 [slabs, steps, 2048], from file rows [rows, blocks, bytes]."""
    size, first, digit = _NIBBLES[name]
    rows = raw.shape[0]
    if digit == "d":  # a super-block's codes are those of four steps
        found = np.ascontiguousarray(raw[..., first:]).reshape(-1, 32)
    else:
        if raw.shape[1] % 2:
            raw = np.concatenate([raw, np.zeros((rows, 1, size), np.uint8)], axis=1)
        found = raw.reshape(-1, 2 * size)
    # [.., t, the other digit of the block, e and u as the four bytes of a word]
    words = np.take(found, _nibble_order(name), axis=1, mode="clip").view(np.uint32)
    words = words.reshape(rows // SLAB, 4, 2, 8, steps, 4, 2).transpose(2, 0, 4, 1, 3, 5, 6)
    upper, lower = words
    out = np.empty((*upper.shape, 2), np.uint32)
    low, high = (out[..., 0], out[..., 1]) if digit == "b" else (out[..., 0, :], out[..., 1, :])
    np.copyto(low, (upper & _LOW) | ((lower & _LOW) << np.uint32(4)))
    np.copyto(high, ((upper >> np.uint32(4)) & _LOW) | (lower & ~_LOW))
    return out.view(np.uint8).reshape(rows // SLAB, steps, -1)


@functools.cache
def _nibble_order(name: str) -> np.ndarray:
    """Which bytes of a step's file bytes a row's threads take, in their order."""
    size, first, digit = _NIBBLES[name]
    block = 16 if digit == "d" else size
    place = np.arange(2)[:, None] * block + (0 if digit == "d" else first) + np.arange(16)
    return place.reshape(2, 2, 4, 2).transpose(2, 0, 3, 1).reshape(-1)  # other, u, t, e -> t, other, e, u


def code_planes(kind: FragmentKind, name: str, codes: np.ndarray) -> list[np.ndarray]:
    """The planes of a kind, each uint8 [slabs, steps, bytes], from its codes, uint8 [rows, columns of whole steps]."""
    if name.startswith("IQ4"):
        return [_plane(codes, {"e": 4}, "dbur")]
    if kind.planes == (16, 16):
        return [_plane(codes, {}, "buer", d=d) for d in range(2)]
    if kind.planes == (16,):
        return [_plane(codes, {"r": 4}, "dbeu")]
    if kind.planes in ((16, 4), (16, 8)):
        return (_five_bits if kind.planes[1] == 4 else _six_bits)(codes)
    two = _plane(codes & np.uint8(3), {"r": 2, "u": 4}, "deb")
    return [two] if kind.planes == (8,) else [two, _plane(codes >> np.uint8(2), {"r": 2, "b": 4, "u": 1}, "ed")]


def _five_bits(codes: np.ndarray) -> list[np.ndarray]:
    """The planes of gemm_kinds._codes5: a word of each block, then one with a nibble of each."""
    (a0, a2), (a1, a3) = _registers(codes)
    words = a0 | (a1 << 5) | (a2 << 10) | ((a3 & 1) << 15)
    a3 >>= 1
    rest = a3[0, 0] | (a3[0, 1] << 4) | (a3[1, 0] << 8) | (a3[1, 1] << 12)
    return [_words(words), _words(rest[None, None])]


def _six_bits(codes: np.ndarray) -> list[np.ndarray]:
    """The planes of gemm_kinds._codes6: a word of each block, then one of each pair."""
    (a0, a2), (a1, a3) = _registers(codes)
    words = a0 | (a2 << 6) | ((a3 >> 2) << 12)
    a3 &= 3
    rest = a3[:, 0] | (a3[:, 1] << 2) | (a1[:, 0] << 4) | (a1[:, 1] << 10)
    return [_words(words), _words(rest[:, None])]


def _registers(codes: np.ndarray) -> np.ndarray:
    """Codes [rows, cols] as uint16 [r, u, d, b, slabs, warp, g, steps, t e]: those of a register are neighbours."""
    slabs, steps = codes.shape[0] // SLAB, codes.shape[1] // STEP
    eights = codes.view(np.uint64).reshape(slabs, 4, 2, 8, steps, 2, 2, 2)
    moved = np.ascontiguousarray(eights.transpose(2, 7, 5, 6, 0, 1, 3, 4))
    return moved.view(np.uint8).reshape(*moved.shape, 8).astype(np.uint16)


def _words(halves: np.ndarray) -> np.ndarray:
    """uint16 [d, b, slabs, warp, g, steps, t e] as bytes [slabs, steps, warp g t d b, 4]: a thread's words."""
    words = halves.view(np.uint32)
    slabs, steps = words.shape[2], words.shape[5]
    return np.ascontiguousarray(words.transpose(2, 5, 3, 4, 6, 0, 1)).view(np.uint8).reshape(slabs, steps, -1)


def _plane(codes: np.ndarray, merged: dict[str, int], order: str, d: int | None = None) -> np.ndarray:
    """Bytes [slabs, steps, 128 threads, `order`] as [slabs, steps, bytes]; of one pair of blocks `d`, or of both.

    merged: digits whose codes share a byte, with the place of the second. A digit r that is not merged comes last.
    """
    slabs, steps = codes.shape[0] // SLAB, codes.shape[1] // STEP
    digits = "".join(_DIGITS)
    shape = {**_DIGITS, "s": slabs, "k": steps}
    parts = codes.reshape(*shape.values())
    for digit, shift in merged.items():
        before: tuple[Any, ...] = (slice(None),) * digits.index(digit)
        parts = parts[(*before, 0)] | (parts[(*before, 1)] << np.uint8(shift))
        digits = digits.replace(digit, "")
    columns = digits[digits.index("k") + 1 :]
    taken = _order(columns, "t" + order.replace("r", ""), d)
    moved = np.take(parts.reshape(-1, np.prod([shape[x] for x in columns], dtype=np.intp)), taken, axis=1, mode="clip")
    if "r" in digits:
        halves = moved.reshape(slabs, 4, 2, 8, steps, -1).transpose(2, 0, 4, 1, 3, 5)
        out = np.empty((*halves.shape[1:], 2), np.uint8)
        out[..., 0], out[..., 1] = halves
    else:
        words = moved.view(np.uint64).reshape(slabs, 4, 8, steps, -1)
        out = np.ascontiguousarray(words.transpose(0, 3, 1, 2, 4)).view(np.uint8)
    return out.reshape(slabs, steps, -1)


@functools.cache
def _order(columns: str, wanted: str, d: int | None) -> np.ndarray:
    """Where the bytes of `wanted` digits lie among those of `columns`, in the order wanted."""
    places = np.arange(np.prod([_DIGITS[x] for x in columns])).reshape([_DIGITS[x] for x in columns])
    if d is not None:
        places = np.take(places, [d], axis=columns.index("d"))
        wanted += "d"  # of which there is one
    return places.transpose([columns.index(x) for x in wanted]).reshape(-1)
