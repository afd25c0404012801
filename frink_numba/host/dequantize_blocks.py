"""Dequantization of the common block formats: uint8 blocks [n, block_bytes] to float32 [n, block], in plain NumPy.

Each function does the arithmetic of the `gguf` package's function of the same kind in the same order, so that the
results are equal bit for bit, but some three times faster and without importing it. The caller passes a few thousand
blocks at a time: the temporaries then stay in the processor's cache. All integer steps stay inside 8 bits on purpose,
where a shift drops what leaves the byte.

Field layouts: https://github.com/ggml-org/ggml, ggml-common.h (block_q4_0 and its neighbours).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

_U8 = np.uint8


def _bytes(blocks: np.ndarray, start: int, size: int) -> np.ndarray:
    """Bytes `start` to `start + size` of every block, gathered: uint8 [n, size]."""
    # As one opaque item a block: copying items is several times faster than copying rows of bytes.
    items = blocks[:, start : start + size].view(np.dtype((np.void, size)))
    return np.ascontiguousarray(items).view(_U8)


def _half(blocks: np.ndarray, start: int) -> np.ndarray:
    """The float16 at byte `start` of every block: float32 [n, 1]."""
    return blocks[:, start : start + 2].view("<f2").astype(np.float32)


def _nibbles(packed: np.ndarray, run: int, low: bytes | None = None, high: bytes | None = None) -> np.ndarray:
    """Of each `run` bytes the low nibbles, then the high ones: uint8 [packed.size / run, 2 run].

    With `low` and `high` (tables of 256 bytes) nibbles are looked up on the way.
    """
    item = np.dtype((np.void, run))
    both = np.empty((packed.size // run, 2), dtype=item)
    if low is None or high is None:
        both[:, 0] = (packed & _U8(15)).reshape(-1).view(item)
        both[:, 1] = (packed >> _U8(4)).reshape(-1).view(item)
    else:
        raw = packed.tobytes()
        both[:, 0] = np.frombuffer(raw.translate(low), dtype=item)
        both[:, 1] = np.frombuffer(raw.translate(high), dtype=item)
    return both.view(_U8)


def _scaled(out: np.ndarray, quants: np.ndarray, factor: np.ndarray, offset: np.ndarray | None = None) -> None:
    """out = factor * quants (+ offset), one factor and offset for each equal run of elements."""
    np.copyto(out, quants.reshape(out.shape))
    runs = out.reshape(factor.size, -1)
    runs *= factor.reshape(-1, 1)
    if offset is not None:
        runs += offset.reshape(-1, 1)


def q4_0(blocks: np.ndarray, out: np.ndarray) -> None:
    quants = _nibbles(_bytes(blocks, 2, 16), 16)
    quants -= _U8(8)
    _scaled(out, quants.view(np.int8), _half(blocks, 0))


def q4_1(blocks: np.ndarray, out: np.ndarray) -> None:
    _scaled(out, _nibbles(_bytes(blocks, 4, 16), 16), _half(blocks, 0), _half(blocks, 2))


def _with_fifth_bits(blocks: np.ndarray, start: int) -> np.ndarray:
    """Nibbles at `start + 4`, the fifth bit of element i being bit i of the word at `start`: uint8 [n, 32]."""
    fifth = np.unpackbits(_bytes(blocks, start, 4), axis=1, bitorder="little")
    fifth <<= _U8(4)
    fifth |= _nibbles(_bytes(blocks, start + 4, 16), 16)
    return fifth


def q5_0(blocks: np.ndarray, out: np.ndarray) -> None:
    quants = _with_fifth_bits(blocks, 2)
    quants -= _U8(16)
    _scaled(out, quants.view(np.int8), _half(blocks, 0))


def q5_1(blocks: np.ndarray, out: np.ndarray) -> None:
    _scaled(out, _with_fifth_bits(blocks, 4), _half(blocks, 0), _half(blocks, 2))


def q8_0(blocks: np.ndarray, out: np.ndarray) -> None:
    _scaled(out, blocks[:, 2:].view(np.int8), _half(blocks, 0))


def q2_k(blocks: np.ndarray, out: np.ndarray) -> None:
    scales = _bytes(blocks, 0, 16)
    factor = _half(blocks, 80) * (scales & _U8(15)).astype(np.float32)
    offset = _half(blocks, 82) * (scales >> _U8(4)).astype(np.float32)
    _scaled(out, _crumbs(_bytes(blocks, 16, 64)), factor, -offset)


def _crumbs(packed: np.ndarray) -> np.ndarray:
    """Of each 32 bytes bits 0-1, then 2-3, 4-5, 6-7: uint8 [n, 2, 4, 32] of packed [n, 64]."""
    packed = packed.reshape(-1, 2, 32)
    quants = np.empty((packed.shape[0], 2, 4, 32), dtype=_U8)
    for i in range(4):
        quants[:, :, i] = (packed >> _U8(2 * i)) & _U8(3)
    return quants


def q3_k(blocks: np.ndarray, out: np.ndarray) -> None:
    n = blocks.shape[0]
    packed = blocks[:, 96:108]
    scales = np.empty((n, 16), dtype=_U8)
    scales[:, :8] = packed[:, :8] & _U8(15)
    scales[:, 8:] = packed[:, :8] >> _U8(4)
    for i in range(4):
        scales[:, 4 * i : 4 * i + 4] |= ((packed[:, 8:] >> _U8(2 * i)) & _U8(3)) << _U8(4)
    scales -= _U8(32)
    quants = _crumbs(_bytes(blocks, 32, 64)).reshape(n, 8, 32)
    # A mask bit that is clear takes 4 off.
    clear = ~_bytes(blocks, 0, 32)
    for i in range(8):
        quants[:, i] -= ((clear >> _U8(i)) & _U8(1)) << _U8(2)
    _scaled(out, quants.view(np.int8), _half(blocks, 108) * scales.view(np.int8).astype(np.float32))


def _scales_and_offsets(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of Q4_K and Q5_K: float32 factor and offset [n, 8], from two halves and twelve bytes of 6-bit numbers."""
    packed = blocks[:, 4:16]
    scales = np.empty((blocks.shape[0], 8), dtype=_U8)
    mins = np.empty_like(scales)
    scales[:, :4] = packed[:, 0:4] & _U8(63)
    mins[:, :4] = packed[:, 4:8] & _U8(63)
    scales[:, 4:] = (packed[:, 8:] & _U8(15)) | (packed[:, 0:4] >> _U8(6)) << _U8(4)
    mins[:, 4:] = (packed[:, 8:] >> _U8(4)) | (packed[:, 4:8] >> _U8(6)) << _U8(4)
    return _half(blocks, 0) * scales.astype(np.float32), -(_half(blocks, 2) * mins.astype(np.float32))


def q4_k(blocks: np.ndarray, out: np.ndarray) -> None:
    _scaled(out, _nibbles(_bytes(blocks, 16, 128), 32), *_scales_and_offsets(blocks))


def q5_k(blocks: np.ndarray, out: np.ndarray) -> None:
    quants = _nibbles(_bytes(blocks, 48, 128), 32).reshape(-1, 8, 32)
    fifth = _bytes(blocks, 16, 32)
    for i in range(8):
        quants[:, i] |= ((fifth >> _U8(i)) & _U8(1)) << _U8(4)
    _scaled(out, quants, *_scales_and_offsets(blocks))


def q6_k(blocks: np.ndarray, out: np.ndarray) -> None:
    # Each half of 128 elements: the low nibbles of 64 bytes, then their high ones; above them bits 0-1, 2-3, 4-5, 6-7
    # of 32 bytes in turn.
    quants = _nibbles(_bytes(blocks, 0, 128), 64).reshape(-1, 2, 4, 32)
    high = _bytes(blocks, 128, 64).reshape(-1, 2, 32)
    for i in range(4):
        quants[:, :, i] |= ((high >> _U8(2 * i)) & _U8(3)) << _U8(4)
    quants -= _U8(32)
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    _scaled(out, quants.view(np.int8), _half(blocks, 208) * scales)


def _nibble_tables(values: tuple[int, ...]) -> tuple[bytes, bytes]:
    """For bytes.translate: the int8 value of a byte's low nibble, and of its high one."""
    signed = np.array(values, dtype=np.int8)
    every_byte = np.arange(256)
    return signed[every_byte & 15].tobytes(), signed[every_byte >> 4].tobytes()


_IQ4_TABLES = _nibble_tables((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113))
_FP4_TABLES = _nibble_tables((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12))  # twice the E2M1 value


def iq4_nl(blocks: np.ndarray, out: np.ndarray) -> None:
    _scaled(out, _nibbles(_bytes(blocks, 2, 16), 16, *_IQ4_TABLES).view(np.int8), _half(blocks, 0))


def iq4_xs(blocks: np.ndarray, out: np.ndarray) -> None:
    scales = np.empty((blocks.shape[0], 8), dtype=_U8)
    scales[:, 0::2] = blocks[:, 4:8] & _U8(15)
    scales[:, 1::2] = blocks[:, 4:8] >> _U8(4)
    for i in range(8):
        scales[:, i] |= ((blocks[:, 2 + i // 4] >> _U8(2 * (i % 4))) & _U8(3)) << _U8(4)
    scales -= _U8(32)
    factor = _half(blocks, 0) * scales.view(np.int8).astype(np.float32)
    _scaled(out, _nibbles(_bytes(blocks, 8, 128), 16, *_IQ4_TABLES).view(np.int8), factor)


def mxfp4(blocks: np.ndarray, out: np.ndarray) -> None:
    # The scale is 2**(e - 127), halved since the table holds doubled values; the two smallest are subnormal.
    exponent = blocks[:, 0].astype(np.uint32)
    bits = np.where(exponent < 2, np.uint32(0x00200000) << exponent, (exponent - np.uint32(1)) << np.uint32(23))
    _scaled(out, _nibbles(_bytes(blocks, 1, 16), 16, *_FP4_TABLES).view(np.int8), bits.view(np.float32))


BLOCK_FUNCTIONS: dict[str, Callable[[np.ndarray, np.ndarray], None]] = {
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q5_0": q5_0,
    "Q5_1": q5_1,
    "Q8_0": q8_0,
    "Q2_K": q2_k,
    "Q3_K": q3_k,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
    "IQ4_NL": iq4_nl,
    "IQ4_XS": iq4_xs,
    "MXFP4": mxfp4,
}
