"""SwiGLU on a GPU against float64, gates of 200 and -200 among them."""

from __future__ import annotations

import pytest

from tests.kernels import simt_checks as checks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("rows", "n"), [(1, 1), (1, 3), (3, 5), (7, 1023), (512, 576), (513, 3072), (2048, 8192)])
@pytest.mark.parametrize("in_place", [False, True])
def test_swiglu(rows: int, n: int, in_place: bool) -> None:
    checks.check_swiglu(rows, n, in_place=in_place)
