"""Rotary position embedding on a GPU against float64 (R17)."""

from __future__ import annotations

import pytest

from frink_numba.layer import RopeLayout
from tests.kernels import simt_checks as checks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("start_pos", [0, 1, 3000, 131000])
@pytest.mark.parametrize(("rows", "pairs"), [(1, 1), (5, 20), (513, 64), (70000, 16)])
def test_rope_table(rows: int, pairs: int, start_pos: int) -> None:
    """The magnitude scale once (fault 12), and angles that are still exact at position 131000."""
    checks.check_rope_table(rows, pairs, start_pos, 1.1386)


@pytest.mark.parametrize("layout", list(RopeLayout))
@pytest.mark.parametrize(
    ("rows", "heads", "head_dim", "pairs"),
    [(1, 1, 2, 1), (5, 3, 64, 32), (33, 9, 64, 16), (512, 24, 128, 64), (7, 5, 80, 32), (9, 4, 256, 128)],
)
def test_rope(rows: int, heads: int, head_dim: int, pairs: int, layout: RopeLayout) -> None:
    """Both layouts, whole and partial width."""
    checks.check_rope(rows, heads, head_dim, pairs, layout)
