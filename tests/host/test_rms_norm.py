"""rms_norm: columns, heads and head rows against float64, whatever the number of channels."""

from __future__ import annotations

import numpy as np
import pytest

from frink_numba.host.rms_norm import rms_norm
from frink_numba.host.scratch import Scratch
from tests import reference


@pytest.mark.parametrize("channels", [1, 3, 32, 40, 576, 8192])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_columns_match_float64(channels: int, n: int) -> None:
    rng = np.random.default_rng(channels + n)
    x = rng.normal(0, 3, (channels, n)).astype(np.float32)
    weight = rng.normal(1, 0.4, (channels, 1)).astype(np.float32)
    out = np.full_like(x, np.nan)
    assert rms_norm(x, weight, 1e-3, out, Scratch()) is out
    want = reference.rms_norm(x.T.astype(np.float64), weight[:, 0], 1e-3).T
    assert reference.relative_error(out, want) < 5e-7


def test_epsilon_counts_where_columns_are_small() -> None:
    x = np.full((8, 2), 1e-3, np.float32)
    out = np.empty_like(x)
    rms_norm(x, np.ones((8, 1), np.float32), 3e-6, out, Scratch())
    np.testing.assert_allclose(out, 0.5, rtol=1e-6)  # 1e-3 / sqrt(1e-6 + 3e-6)


@pytest.mark.parametrize("rows", [False, True], ids=["one weight", "a row per head"])
@pytest.mark.parametrize("n", [1, 4])
def test_heads_are_normed_by_themselves(rows: bool, n: int) -> None:
    """R14: a weight of head_dim serves every head; a weight of [heads, head_dim] has a row for each."""
    rng = np.random.default_rng(n)
    x = rng.normal(0, 1, (3, 24, n)).astype(np.float32)
    weight = rng.normal(1, 0.4, (3 if rows else 1, 24, 1)).astype(np.float32)
    want = reference.head_norm(x.transpose(2, 0, 1).astype(np.float64), weight[:, :, 0].squeeze(), 1e-5)
    rms_norm(x, weight, 1e-5, x, Scratch())  # in place
    assert reference.relative_error(x.transpose(2, 0, 1), want) < 5e-7


def test_thousands_of_channels_keep_their_digits() -> None:
    """A plain float32 sum of 16384 equal squares is off by 2e-4; taken in parts it is not."""
    x = np.full((1 << 14, 2), 0.7, np.float32)
    out = np.empty_like(x)
    rms_norm(x, np.ones((1 << 14, 1), np.float32), 0.0, out, Scratch())
    assert np.abs(out - 1).max() < 5e-6


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("size", [1e18, 3e19, 1e37])
def test_numbers_whose_squares_are_beyond_float32(size: float, n: int) -> None:
    """The norm does not depend on the size of its input, and nothing warns."""
    rng = np.random.default_rng(n)
    x = (rng.uniform(-1, 1, (64, n)) * size).astype(np.float32)
    weight = rng.normal(1, 0.4, (64, 1)).astype(np.float32)
    out = np.full_like(x, np.nan)
    with np.errstate(over="ignore"):  # as everywhere in the body
        rms_norm(x, weight, 1e-5, out, Scratch())
    want = reference.rms_norm(x.T.astype(np.float64), weight[:, 0], 1e-5).T
    assert reference.relative_error(out, want) < 5e-7


@pytest.mark.parametrize("n", [1, 2])
def test_zeros_without_an_epsilon_are_not_numbers(n: int) -> None:
    out = np.empty((8, n), np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        rms_norm(np.zeros((8, n), np.float32), np.ones((8, 1), np.float32), 0.0, out, Scratch())
    assert np.isnan(out).all()
