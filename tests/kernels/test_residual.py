"""The residual connection on a GPU against float64: whole quads and what is left."""

from __future__ import annotations

import pytest

from tests.kernels import simt_checks as checks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("rows", "n"), [(1, 1), (1, 3), (3, 5), (7, 1023), (512, 576), (513, 3072), (2048, 8192)])
def test_residual_add(rows: int, n: int) -> None:
    checks.check_residual_add(rows, n)
