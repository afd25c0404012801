"""Rotary position embedding of columns (R17): adjacent pairs (NORM) or split halves (NEOX), full or partial width."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np

from frink_numba.host.scratch import Scratch
from frink_numba.layer import Rope, RopeLayout


class RopeTable(NamedTuple):
    """Cosine and sine of every pair and position, the magnitude scale included: float32 [rot_dim/2, n]."""

    cos: np.ndarray
    sin: np.ndarray


RopeKey: TypeAlias = tuple[float, int, float, bytes]


def rope_key(rope: Rope) -> RopeKey:
    """Equal for ropes with equal tables: layers share a step's table by it. The layout does not matter to a table."""
    factors = b"" if rope.freq_factors is None else np.asarray(rope.freq_factors, np.float64).tobytes()
    return rope.theta, rope.rot_dim, rope.magnitude_scale, factors


def rope_table(rope: Rope, start: int, n: int) -> RopeTable:
    """The table of positions start .. start+n-1.

    Angles are float64: at position 100,000 a float32 angle would be off by a hundredth of a radian.
    """
    pairs = np.arange(rope.rot_dim // 2, dtype=np.float64)
    frequencies = rope.theta ** (-2.0 * pairs / rope.rot_dim)
    if rope.freq_factors is not None:
        frequencies /= rope.freq_factors
    angles = np.outer(frequencies, np.arange(start, start + n, dtype=np.float64))
    scale = rope.magnitude_scale
    return RopeTable((scale * np.cos(angles)).astype(np.float32), (scale * np.sin(angles)).astype(np.float32))


def rotate(x: np.ndarray, table: RopeTable, rot_dim: int, layout: RopeLayout, scratch: Scratch) -> None:
    """Turn the first `rot_dim` channels of every head of `x` float32 [heads, head_dim, n], in place."""
    heads, _, n = x.shape
    half = rot_dim // 2
    if layout is RopeLayout.NEOX:
        first, second = x[:, :half], x[:, half:rot_dim]
    else:
        first, second = x[:, 0:rot_dim:2], x[:, 1:rot_dim:2]
    turned = scratch.array("rope", 2, heads, half, n)
    cos, sin = table
    np.multiply(second, sin, out=turned[0])
    np.multiply(first, sin, out=turned[1])
    np.multiply(first, cos, out=first)
    np.multiply(second, cos, out=second)
    np.subtract(first, turned[0], out=first)
    np.add(second, turned[1], out=second)
