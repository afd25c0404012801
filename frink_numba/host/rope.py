"""Rotary position embedding of columns (R17): adjacent pairs (NORM) or split halves (NEOX), full or partial width."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np

from frink_numba.host.scratch import Scratch
from frink_numba.layer import Rope, RopeLayout


class RopeTable(NamedTuple):
    """What each rotated channel is multiplied by, and what its partner is: float32 [rot_dim, n], magnitude included.

    x becomes x * cos + partner(x) * sin, where `sin` is negative for the first channel of a pair.
    """

    cos: np.ndarray
    sin: np.ndarray
    layout: RopeLayout


RopeKey: TypeAlias = tuple[float, int, RopeLayout, float, bytes]


def rope_key(rope: Rope) -> RopeKey:
    """Equal for ropes with equal tables: layers share a step's table by it."""
    factors = b"" if rope.freq_factors is None else np.asarray(rope.freq_factors, np.float64).tobytes()
    return rope.theta, rope.rot_dim, rope.layout, rope.magnitude_scale, factors


def rope_table(rope: Rope, start: int, n: int) -> RopeTable:
    """The table of positions start .. start+n-1.

    Angles are float64: at position 100,000 a float32 angle would be off by a hundredth of a radian.
    """
    pairs = np.arange(rope.rot_dim // 2, dtype=np.float64)
    frequencies = rope.theta ** (-2.0 * pairs / rope.rot_dim)
    if rope.freq_factors is not None:
        frequencies /= rope.freq_factors
    angles = np.outer(frequencies, np.arange(start, start + n, dtype=np.float64))
    cos, sin = rope.magnitude_scale * np.cos(angles), rope.magnitude_scale * np.sin(angles)
    axis = 0 if rope.layout is RopeLayout.NEOX else 1  # where the two channels of a pair stand side by side
    shape = (rope.rot_dim, n)
    return RopeTable(
        np.stack((cos, cos), axis).astype(np.float32).reshape(shape),
        np.stack((-sin, sin), axis).astype(np.float32).reshape(shape),
        rope.layout,
    )


def rotate(x: np.ndarray, table: RopeTable, scratch: Scratch) -> None:
    """Turn the first rot_dim channels of every head of `x` float32 [heads, head_dim, n], in place."""
    heads, _, n = x.shape
    cos, sin, layout = table
    rot_dim = cos.shape[0]
    rotated = x[:, :rot_dim]
    # Views with an axis of 2 for the pair; reversed along it, every channel stands where its partner was.
    split = (2, rot_dim // 2, n) if layout is RopeLayout.NEOX else (rot_dim // 2, 2, n)
    pairs = rotated.reshape(heads, *split)
    partners = pairs[:, ::-1] if layout is RopeLayout.NEOX else pairs[:, :, ::-1]
    turned = scratch.array("rope", heads, rot_dim, n)
    np.multiply(partners, sin.reshape(split), out=turned.reshape(pairs.shape))
    np.multiply(rotated, cos, out=rotated)
    np.add(rotated, turned, out=rotated)
