"""Weights on a GPU, bit for bit."""

from __future__ import annotations

import pytest

from frink_numba.kernels.kinds import PLANES
from frink_numba.quant import KINDS
from tests.kernels import simt_checks as checks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("extreme", [False, True])
@pytest.mark.parametrize("kind", sorted(PLANES))
def test_weights_equal_the_gguf_package_bit_for_bit(kind: str, extreme: bool) -> None:
    """Zero tolerance (fault 21), with scales of weights and with any finite scale."""
    checks.check_dequantization(kind, 67, max(4 * KINDS[kind].block, 100), extreme=extreme)
