"""Norms, biases, rotation, SwiGLU and the residual in the simulator, on shapes that no block divides."""

from __future__ import annotations

import pytest

from frink_numba.layer import RopeLayout
from tests.kernels import simt_checks as checks


@pytest.mark.parametrize(
    ("rows", "n", "in_place"),
    [(9, 77, False), (3, 4, True), (2, 600, False), (1, 513, True)],
)
def test_rms_norm(rows: int, n: int, in_place: bool) -> None:
    """Warps over short rows, blocks over long ones."""
    checks.check_rms_norm(rows, n, in_place=in_place)


def test_add_bias() -> None:
    checks.check_add_bias(3, 261)


@pytest.mark.parametrize(("rows", "n"), [(3, 5), (5, 52)])
def test_residual_add(rows: int, n: int) -> None:
    checks.check_residual_add(rows, n)


@pytest.mark.parametrize(("rows", "n", "in_place"), [(3, 5, True), (5, 52, False)])
def test_swiglu(rows: int, n: int, in_place: bool) -> None:
    checks.check_swiglu(rows, n, in_place=in_place)


def test_rope_table() -> None:
    """R17: the magnitude scale is in the table, once; float64 angles (fault 12)."""
    checks.check_rope_table(3, 5, 3000, 1.1386)


@pytest.mark.parametrize("layout", list(RopeLayout))
@pytest.mark.parametrize(("head_dim", "pairs"), [(12, 6), (13, 4)])
def test_rope(layout: RopeLayout, head_dim: int, pairs: int) -> None:
    """R17: both layouts, whole and partial width."""
    checks.check_rope(3, 3, head_dim, pairs, layout)
