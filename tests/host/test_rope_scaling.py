"""Scalings as frequency factors and magnitudes, against the papers' formulas (R17; faults 12, 14, 16)."""

from __future__ import annotations

import math

import numpy as np
import pytest

from frink_numba.host.rope_scaling import PLAIN, RopeScaling, ScalingKind, scaled_rope, yarn_magnitude
from frink_numba.layer import RopeLayout


def factors(scaling: RopeScaling, theta: float = 10000.0, dim: int = 64, stored: np.ndarray | None = None):
    rope = scaled_rope(theta, dim, RopeLayout.NEOX, scaling, stored)
    assert (rope.theta, rope.rot_dim, rope.layout) == (theta, dim, RopeLayout.NEOX)
    assert rope.magnitude_scale == scaling.magnitude
    assert rope.freq_factors is None or rope.freq_factors.dtype == np.float32
    return rope.freq_factors


def test_a_plain_rotation_has_no_factors() -> None:
    assert factors(PLAIN) is None
    assert factors(RopeScaling(ScalingKind.LINEAR, 1.0)) is None
    assert factors(RopeScaling(ScalingKind.YARN, 1.0, 4096)) is None


def test_linear_scaling_divides_every_frequency() -> None:
    np.testing.assert_array_equal(factors(RopeScaling(ScalingKind.LINEAR, 2.5)), np.full(32, 2.5, np.float32))


def test_stored_factors_are_taken_and_come_on_top_of_a_scaling() -> None:
    stored = np.linspace(1, 8, 32).astype(np.float32)
    np.testing.assert_array_equal(factors(PLAIN, stored=stored), stored)
    np.testing.assert_array_equal(factors(RopeScaling(ScalingKind.LONGROPE, magnitude=1.2), stored=stored), stored)
    np.testing.assert_allclose(factors(RopeScaling(ScalingKind.LINEAR, 4.0), stored=stored), 4 * stored, rtol=1e-7)


@pytest.mark.parametrize("theta", [10000.0, 1e6])
@pytest.mark.parametrize("original", [4096, 32768])
@pytest.mark.parametrize("turns", [(32.0, 1.0), (16.0, 2.0)])
def test_yarn_blends_pairs_by_how_often_they_turn(theta: float, original: int, turns: tuple[float, float]) -> None:
    """A pair turns original / wavelength times; the bounds are rounded outwards to whole pairs."""
    fast, slow = turns
    dim, factor = 64, 4.0
    got = factors(RopeScaling(ScalingKind.YARN, factor, original, fast, slow), theta, dim)
    turned = [original * theta ** (-2 * pair / dim) / (2 * math.pi) for pair in range(dim // 2)]
    low = max(pair for pair in range(dim // 2) if turned[pair] >= fast)
    high = min(pair for pair in range(dim // 2) if turned[pair] <= slow)
    for pair in range(dim // 2):
        share = min(max((pair - low) / (high - low), 0), 1)
        assert got[pair] == pytest.approx(1 / (share / factor + 1 - share), rel=1e-6)
    assert got[0] == 1
    assert got[-1] == factor


def test_yarn_of_a_tiny_head_stays_within_its_pairs() -> None:
    """Bounds beyond the head are cut; equal bounds make a step, not a division by zero."""
    got = factors(RopeScaling(ScalingKind.YARN, 8.0, 2), 10000.0, 4)
    assert got.tolist() == [1.0, 8.0]
    assert factors(RopeScaling(ScalingKind.YARN, 8.0, 1 << 30), 10000.0, 4)[0] == 1


def test_yarns_magnitude() -> None:
    """Fault 12: factor 4 gives 1.1386, once."""
    assert yarn_magnitude(4.0) == pytest.approx(1.1386, abs=5e-5)
    assert yarn_magnitude(1.0) == yarn_magnitude(0.5) == 1.0
