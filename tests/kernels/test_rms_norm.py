"""RMS norm on a GPU against float64: short and long rows, into another array and in place."""

from __future__ import annotations

import pytest

from tests.kernels import simt_checks as checks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("n", [1, 31, 64, 80, 128, 512, 513, 576, 3072, 8191, 14336])
@pytest.mark.parametrize("rows", [1, 7, 8, 9, 519])
@pytest.mark.parametrize("in_place", [False, True])
def test_rms_norm(rows: int, n: int, in_place: bool) -> None:
    checks.check_rms_norm(rows, n, in_place=in_place)
