"""Low-rank updates beside fused projections: which rows they reach, and the scale of the projection."""

from __future__ import annotations

import numpy as np
import pytest

from frink_numba.host.lora import add_loras, prepare_loras
from frink_numba.layer import Lora

SITES = [("q", 6), ("k", 2), ("v", 2)]


def lora(target: str, rows: int, rank: int = 3, cols: int = 5, scale: float = 0.5) -> Lora:
    rng = np.random.default_rng(len(target) + rows)
    down, up = rng.normal(size=(rank, cols)), rng.normal(size=(rows, rank))
    return Lora(target, down.astype(np.float32), up.astype(np.float32), scale)


def update(lora: Lora, x: np.ndarray) -> np.ndarray:
    return lora.scale * lora.up.astype(np.float64) @ lora.down @ x


@pytest.mark.parametrize("n", [1, 4])
def test_each_update_reaches_its_own_rows(n: int) -> None:
    """Two of one projection add up; rows of a projection without one stay as they are."""
    x = np.random.default_rng(9).normal(size=(5, n)).astype(np.float32)
    loras = [lora("v", 2), lora("q", 6), lora("q", 6, rank=1, scale=-2.0), lora("gate", 9)]
    out = np.ones((10, n), np.float32)
    add_loras(x, prepare_loras(loras, SITES), out)
    np.testing.assert_allclose(out[:6], 1 + update(loras[1], x) + update(loras[2], x), rtol=2e-6)
    np.testing.assert_array_equal(out[6:8], np.ones((2, n)))
    np.testing.assert_allclose(out[8:], 1 + update(loras[0], x), rtol=2e-6)


@pytest.mark.parametrize("scale", [np.full((1, 1), 3.0), np.arange(1.0, 7.0)[:, None]])
def test_the_scale_of_a_projection_holds_for_its_updates(scale: np.ndarray) -> None:
    """The update is of the weights, which the scale multiplies: one number, or one a row."""
    x = np.random.default_rng(9).normal(size=(5, 2)).astype(np.float32)
    one = lora("o", 6)
    out = np.zeros((6, 2), np.float32)
    add_loras(x, prepare_loras([one], [("o", 6)], scale.astype(np.float32)), out)
    np.testing.assert_allclose(out, scale * update(one, x), rtol=2e-6)


def test_nothing_is_prepared_for_projections_without_updates() -> None:
    assert prepare_loras([lora("gate", 9)], SITES) == ()
    assert prepare_loras([], SITES) == ()
