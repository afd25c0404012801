"""Bias on a GPU against float64."""

from __future__ import annotations

import pytest

from tests.kernels import simt_checks as checks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("n", [1, 255, 256, 257, 960, 8192])
@pytest.mark.parametrize("rows", [1, 5, 3000])
def test_add_bias(rows: int, n: int) -> None:
    checks.check_add_bias(rows, n)


def test_more_rows_than_a_grid_has_places() -> None:
    """A grid's second axis holds 65535 blocks."""
    checks.check_add_bias(70000, 257)
