"""Rotary position embedding of columns (R17): adjacent pairs (NORM) or split halves (NEOX), full or partial width."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np

from frink_numba.host.scratch import Scratch
from frink_numba.layer import Rope, RopeLayout

RopeKey: TypeAlias = tuple[float, int, RopeLayout, float, bytes]


def rope_key(rope: Rope) -> RopeKey:
    """Equal for ropes with equal tables: layers share a step's table by it."""
    factors = b"" if rope.freq_factors is None else np.asarray(rope.freq_factors, np.float64).tobytes()
    return rope.theta, rope.rot_dim, rope.layout, rope.magnitude_scale, factors


class RopeTable(NamedTuple):
    """What each rotated channel is multiplied by, and what its partner is, the magnitude included.

    x becomes x * cos + partner(x) * sin, where `sin` is negative for the first channel of a pair. Both are float32
    with an axis of 2 for the two channels of a pair: NORM [rot_dim/2, 2, n], NEOX [2, rot_dim/2, n].
    """

    cos: np.ndarray
    sin: np.ndarray


def rope_table(rope: Rope, start: int, n: int) -> RopeTable:
    """The table of positions start .. start+n-1."""
    return rope_table_of(rope, np.arange(start, start + n))


def rope_table_of(rope: Rope, positions: np.ndarray) -> RopeTable:
    """The table of any positions, int [n].

    Angles are float64: at position 100,000 a float32 angle would be off by a hundredth of a radian.
    """
    pairs = np.arange(rope.rot_dim // 2, dtype=np.float64)
    frequencies = rope.theta ** (-2.0 * pairs / rope.rot_dim)
    if rope.freq_factors is not None:
        frequencies /= rope.freq_factors
    angles = np.outer(frequencies, positions.astype(np.float64))
    cos, sin = rope.magnitude_scale * np.cos(angles), rope.magnitude_scale * np.sin(angles)
    axis = _pair_axis(rope.layout)
    return RopeTable(
        np.stack((cos, cos), axis).astype(np.float32),
        np.stack((-sin, sin), axis).astype(np.float32),
    )


class Rotation:
    """Views of heads `x` float32 [heads, head_dim, n] that turn with tables of one width and layout, in place."""

    def __init__(self, x: np.ndarray, rot_dim: int, layout: RopeLayout, scratch: Scratch) -> None:
        heads, _, n = x.shape
        split = (2, rot_dim // 2, n) if layout is RopeLayout.NEOX else (rot_dim // 2, 2, n)
        self._pairs = x[:, :rot_dim].reshape(heads, *split)
        # Reversed along the axis of the pair, every channel stands where its partner was.
        self._partners = np.flip(self._pairs, 1 + _pair_axis(layout))
        self._turned = scratch.array("rope", heads, *split)

    def turn(self, table: RopeTable) -> None:
        """Rotate the first rot_dim channels of every head."""
        pairs, turned = self._pairs, self._turned
        np.multiply(self._partners, table.sin, out=turned)
        np.multiply(pairs, table.cos, out=pairs)
        np.add(pairs, turned, out=pairs)


def _pair_axis(layout: RopeLayout) -> int:
    """Where, in a table, the two channels of a pair stand side by side."""
    return 0 if layout is RopeLayout.NEOX else 1
