"""The product of few rows in the simulator."""

from __future__ import annotations

import pytest

from frink_numba.kernels.kinds import PLANES
from frink_numba.quant import KINDS
from tests.kernels import simt_checks as checks


@pytest.mark.parametrize("kind", sorted(PLANES))
def test_every_kind(kind: str) -> None:
    """One row of x, an octet for most threads of a row and none for the others."""
    checks.check_matmul(kind, 1, 5, max(KINDS[kind].block, 32))


@pytest.mark.parametrize("m", [2, 3, 4, 5, 8])
def test_every_height(m: int) -> None:
    """Filled and not; more octets than the threads of a row take in one round."""
    checks.check_matmul("Q4_0", m, 9, 1056)
