"""Numbers that look random and are the same on every machine and with every NumPy: integer hashing, exact rounding.

NumPy does not promise that its generators keep their streams from version to version, and a golden file outlives both.
"""

from __future__ import annotations

import zlib
from functools import cache

import numpy as np


def _hash(name: str, count: int) -> np.ndarray:
    """uint64 [count]: the splitmix64 sequence whose start is drawn from `name`."""
    start = np.uint64(zlib.crc32(name.encode())) << np.uint64(32)
    x = start + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def normal(name: str, shape: tuple[int, ...], std: float = 1.0) -> np.ndarray:
    """float32 `shape`, close to Gaussian with mean 0: the sum of four uniform 16-bit numbers, scaled."""
    return _normal(name, shape, std).copy()


@cache  # tests write the same small models again and again
def _normal(name: str, shape: tuple[int, ...], std: float) -> np.ndarray:
    fields = _hash(name, int(np.prod(shape))).view(np.uint16).reshape(-1, 4)
    centred = fields.sum(axis=1, dtype=np.int64).astype(np.float64) - 4 * 32767.5
    return (centred * (std * np.sqrt(3.0) / 65536)).astype(np.float32).reshape(shape)


def integers(name: str, shape: tuple[int, ...], stop: int) -> np.ndarray:
    """int64 `shape` from 0 up to `stop`, exclusive."""
    return (_hash(name, int(np.prod(shape))) % np.uint64(stop)).astype(np.int64).reshape(shape)


def signs(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """float32 `shape` of +1 and -1."""
    return ((_hash(name, int(np.prod(shape))) >> np.uint64(63)).astype(np.float32) * 2 - 1).reshape(shape)
