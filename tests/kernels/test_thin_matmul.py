"""The product of few rows on a GPU against float64."""

from __future__ import annotations

import pytest

from frink_numba.kernels.kinds import PLANES
from frink_numba.quant import KINDS
from tests.kernels import simt_checks as checks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("kind", sorted(PLANES))
def test_few_rows(kind: str, m: int) -> None:
    """Every kind and height of the kernel, N odd, K of one block and of many."""
    block = max(KINDS[kind].block, 32)
    for n, k in [(1, block), (77, 5 * block), (1031, 3072)]:
        checks.check_matmul(kind, m, n, k)
