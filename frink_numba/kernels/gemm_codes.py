"""The file's bytes of each kind, taken apart: unsigned codes per element, and the scales as the format stores them.

Only `gemm_pack.py` calls this, once per matrix at upload. Source of the layouts: the GGUF formats as the `gguf` package
dequantizes them; the tests hold the whole chain against it. Arrays: `raw` is uint8 [rows, blocks, block bytes],
contiguous.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(slots=True)
class Codes:
    """An element is d * scale * (code - offset) - dmin * minimum (IQ4: table[code] in place of code - offset).

    codes: makes uint8 [rows, cols], one byte an element; d, dmin: float32 [rows, blocks]; scale (the format's integers,
    offset removed) and minimum: int16 [rows, blocks, sub-blocks]. Kinds without super-blocks have scale None, and
    `dmin` = -m where the format adds m.
    """

    codes: Callable[[], np.ndarray]
    d: np.ndarray
    dmin: np.ndarray | None = None
    scale: np.ndarray | None = None
    minimum: np.ndarray | None = None


def _half(raw: np.ndarray, at: int) -> np.ndarray:
    """The f16 at byte `at` of each block as float32 [rows, blocks]."""
    return raw.view(np.float16)[..., at // 2].astype(np.float32)


def _flat(parts: np.ndarray) -> np.ndarray:
    """[rows, blocks, ...] to [rows, cols]."""
    return parts.reshape(parts.shape[0], -1)


def _split_nibbles(qs: np.ndarray) -> np.ndarray:
    """[..., 16 or 32] bytes to [..., twice as many] codes: all low nibbles, then all high ones."""
    return np.concatenate([qs & np.uint8(15), qs >> np.uint8(4)], axis=-1)


def _bits_of(word_bytes: np.ndarray) -> np.ndarray:
    """[..., 4] bytes to their 32 bits, least significant first, as uint8 [..., 32]."""
    return np.unpackbits(np.ascontiguousarray(word_bytes), axis=-1, bitorder="little")


def _q4_0(raw: np.ndarray) -> Codes:
    return Codes(lambda: _flat(_split_nibbles(raw[..., 2:])), _half(raw, 0))


def _q4_1(raw: np.ndarray) -> Codes:
    return Codes(lambda: _flat(_split_nibbles(raw[..., 4:])), _half(raw, 0), dmin=-_half(raw, 2))


def _q5_0(raw: np.ndarray) -> Codes:
    codes = _split_nibbles(raw[..., 6:]) | (_bits_of(raw[..., 2:6]) << np.uint8(4))
    return Codes(lambda: _flat(codes), _half(raw, 0))


def _q5_1(raw: np.ndarray) -> Codes:
    codes = _split_nibbles(raw[..., 8:]) | (_bits_of(raw[..., 4:8]) << np.uint8(4))
    return Codes(lambda: _flat(codes), _half(raw, 0), dmin=-_half(raw, 2))


def _q8_0(raw: np.ndarray) -> Codes:
    return Codes(lambda: _flat(raw[..., 2:] ^ np.uint8(128)), _half(raw, 0))


def _k4_scales(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Q4_K's and Q5_K's 12 bytes: eight 6-bit scales and eight 6-bit minima."""
    q = packed.astype(np.int16)
    low_scale, low_min, both = q[..., 0:4], q[..., 4:8], q[..., 8:12]
    scale = np.concatenate([low_scale & 63, (both & 15) | ((low_scale >> 6) << 4)], axis=-1)
    minimum = np.concatenate([low_min & 63, (both >> 4) | ((low_min >> 6) << 4)], axis=-1)
    return scale, minimum


def _q4_k(raw: np.ndarray) -> Codes:
    scale, minimum = _k4_scales(raw[..., 4:16])
    packed = raw[..., 16:].reshape(*raw.shape[:2], 4, 32)
    return Codes(lambda: _flat(_split_nibbles(packed)), _half(raw, 0), _half(raw, 2), scale, minimum)


def _q5_k(raw: np.ndarray) -> Codes:
    scale, minimum = _k4_scales(raw[..., 4:16])
    codes = _split_nibbles(raw[..., 48:].reshape(*raw.shape[:2], 4, 32)).reshape(*raw.shape[:2], 8, 32)
    high = raw[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]
    codes = codes | ((high & np.uint8(1)) << np.uint8(4))
    return Codes(lambda: _flat(codes), _half(raw, 0), _half(raw, 2), scale, minimum)


def _q6_k(raw: np.ndarray) -> Codes:
    low = raw[..., 0:128].reshape(*raw.shape[:2], 2, 2, 32)
    low = np.concatenate([low & np.uint8(15), low >> np.uint8(4)], axis=-2)  # [.., half, 4, 32]
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = (raw[..., 128:192].reshape(*raw.shape[:2], 2, 1, 32) >> shifts) & np.uint8(3)
    scale = np.ascontiguousarray(raw[..., 192:208]).view(np.int8).astype(np.int16)
    return Codes(lambda: _flat(low | (high << np.uint8(4))), _half(raw, 208), scale=scale)


def _two_bit_codes(qs: np.ndarray) -> np.ndarray:
    """64 bytes a block: for each half of 128 columns, 32 bytes hold four rows of 32 codes at bits 0, 2, 4, 6."""
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    return (qs.reshape(*qs.shape[:2], 2, 1, 32) >> shifts) & np.uint8(3)  # [.., half, 4, 32]


def _q2_k(raw: np.ndarray) -> Codes:
    scales = raw[..., 0:16].astype(np.int16)
    codes = _two_bit_codes(raw[..., 16:80])
    return Codes(lambda: _flat(codes), _half(raw, 80), _half(raw, 82), scales & 15, scales >> 4)


def _q3_k(raw: np.ndarray) -> Codes:
    shifts = np.arange(8, dtype=np.uint8).reshape(2, 4, 1)
    third = (raw[..., None, None, 0:32] >> shifts) & np.uint8(1)
    codes = _two_bit_codes(raw[..., 32:96]) | (third << np.uint8(2))
    packed = raw[..., 96:108].astype(np.int16)
    low = np.concatenate([packed[..., :8] & 15, packed[..., :8] >> 4], axis=-1)
    high = packed[..., None, 8:12] >> np.array([0, 2, 4, 6], np.int16)[:, None]
    scale = low | ((high.reshape(*raw.shape[:2], 16) & 3) << 4)
    return Codes(lambda: _flat(codes), _half(raw, 108), scale=scale - 32)


def _iq4_nl(raw: np.ndarray) -> Codes:
    return _q4_0(raw)


def _iq4_xs(raw: np.ndarray) -> Codes:
    codes = _split_nibbles(raw[..., 8:].reshape(*raw.shape[:2], 8, 16))
    high = np.ascontiguousarray(raw[..., 2:4]).view(np.uint16).astype(np.int32)  # [.., 1]
    low = raw[..., 4:8].astype(np.int32)
    low = np.stack([low & 15, low >> 4], axis=-1).reshape(*raw.shape[:2], 8)
    scale = low | (((high >> (2 * np.arange(8))) & 3) << 4)
    return Codes(lambda: _flat(codes), _half(raw, 0), scale=(scale - 32).astype(np.int16))


CODES: dict[str, Callable[[np.ndarray], Codes]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}
