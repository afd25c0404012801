"""Weights in the simulator, bit for bit."""

from __future__ import annotations

import pytest

from frink_numba.kernels.kinds import PLANES
from frink_numba.quant import KINDS
from tests.kernels import simt_checks as checks


@pytest.mark.parametrize("extreme", [False, True])
@pytest.mark.parametrize("kind", sorted(PLANES))
def test_weights_equal_the_gguf_package_bit_for_bit(kind: str, extreme: bool) -> None:
    """Zero tolerance (fault 21): every block random, with scales of weights and with any finite scale."""
    checks.check_dequantization(kind, 5, max(2 * KINDS[kind].block, 24), extreme=extreme)
