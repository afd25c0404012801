"""RoPE against float64: layouts, partial width, factors, magnitude, far positions (R17; faults 12, 14 to 16)."""

from __future__ import annotations

import numpy as np
import pytest

from frink_numba.host.rope import Rotation, rope_key, rope_table
from frink_numba.host.scratch import Scratch
from frink_numba.layer import Rope, RopeLayout
from tests import reference

LAYOUTS = pytest.mark.parametrize("layout", list(RopeLayout), ids=lambda layout: layout.value)


def turned(x: np.ndarray, rope: Rope, start: int) -> np.ndarray:
    """Rows [n, heads, head_dim] through the package's columns."""
    columns = np.array(x.transpose(1, 2, 0), np.float32, order="C")
    Rotation(columns, rope.rot_dim, rope.layout, Scratch()).turn(rope_table(rope, start, x.shape[0]))
    return columns.transpose(2, 0, 1)


@LAYOUTS
@pytest.mark.parametrize(("head_dim", "rot_dim"), [(2, 2), (16, 16), (10, 6), (64, 32), (96, 96)])
@pytest.mark.parametrize("start", [0, 1, 37, 100_000])
@pytest.mark.parametrize("n", [1, 3])
def test_matches_float64(layout: RopeLayout, head_dim: int, rot_dim: int, start: int, n: int) -> None:
    """Fault 15: the layouts agree at position 0 only, so others are tested; angles stay exact far out."""
    rng = np.random.default_rng(start + n)
    x = rng.normal(size=(n, 3, head_dim)).astype(np.float32)
    factors = rng.uniform(1, 8, rot_dim // 2).astype(np.float32)
    rope = Rope(500000.0, rot_dim, layout, factors, magnitude_scale=1.1386)
    got = turned(x, rope, start)
    assert reference.relative_error(got, reference.rotate(x, rope, start)) < 3e-7
    np.testing.assert_array_equal(got[:, :, rot_dim:], x[:, :, rot_dim:])


@LAYOUTS
def test_frequency_factors_are_used(layout: RopeLayout) -> None:
    """Fault 16: factors [1, 1, 8, 8] at position 100; linear scaling by s is a factor of s everywhere (fault 14)."""
    x = np.random.default_rng(0).normal(size=(1, 1, 8)).astype(np.float32)
    rope = Rope(10000.0, 8, layout, np.array([1, 1, 8, 8], np.float32))
    got = turned(x, rope, 100)
    assert reference.relative_error(got, reference.rotate(x, rope, 100)) < 3e-7
    assert reference.relative_error(got, turned(x, Rope(10000.0, 8, layout), 100)) > 0.1
    scaled = Rope(10000.0, 8, layout, np.full(4, 4, np.float32))
    np.testing.assert_array_equal(turned(x, scaled, 400), turned(x, Rope(10000.0, 8, layout), 100))


@LAYOUTS
def test_magnitude_is_applied_once(layout: RopeLayout) -> None:
    """Fault 12: the length of a turned vector grows by exactly the scale."""
    x = np.random.default_rng(1).normal(size=(2, 2, 12)).astype(np.float32)
    got = turned(x, Rope(10000.0, 12, layout, magnitude_scale=1.1386), 5)
    np.testing.assert_allclose(np.linalg.norm(got), 1.1386 * np.linalg.norm(x), rtol=1e-6)


def test_the_two_layouts_differ_by_a_permutation() -> None:
    x = np.random.default_rng(2).normal(size=(1, 1, 8)).astype(np.float32)
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # pairs (2i, 2i + 1) to halves
    norm = turned(x, Rope(100.0, 8, RopeLayout.NORM), 3)
    neox = turned(x[:, :, order], Rope(100.0, 8, RopeLayout.NEOX), 3)
    np.testing.assert_array_equal(norm[:, :, order], neox)


def test_equal_ropes_have_equal_keys() -> None:
    """Layers share a step's table by key, so a key must tell apart everything that a table depends on."""
    factors = np.ones(4, np.float32)
    base = Rope(10000.0, 8, RopeLayout.NORM, factors, 1.0)
    assert rope_key(base) == rope_key(Rope(10000.0, 8, RopeLayout.NORM, factors.copy(), 1.0))
    others = [
        Rope(20000.0, 8, RopeLayout.NORM, factors, 1.0),
        Rope(10000.0, 6, RopeLayout.NORM, factors[:3], 1.0),
        Rope(10000.0, 8, RopeLayout.NEOX, factors, 1.0),
        Rope(10000.0, 8, RopeLayout.NORM, 2 * factors, 1.0),
        Rope(10000.0, 8, RopeLayout.NORM, None, 1.0),
        Rope(10000.0, 8, RopeLayout.NORM, factors, 2.0),
    ]
    assert len({rope_key(rope) for rope in [base, *others]}) == 7
