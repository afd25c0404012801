"""Projections of columns: fused sets, scale before bias."""

from __future__ import annotations

import numpy as np
import pytest

from frink_numba.host.linear import linear
from frink_numba.host.weights import WeightStore
from frink_numba.quant import QuantMatrix
from tests import reference


@pytest.mark.parametrize("n", [1, 2, 33])
@pytest.mark.parametrize("scale", [None, (5, 1), (1, 1)])
@pytest.mark.parametrize("bias", [False, True])
def test_matches_float64(n: int, scale: tuple[int, int] | None, bias: bool) -> None:
    rng = np.random.default_rng(n)
    w = [rng.normal(size=(rows, 7)).astype(np.float32) for rows in (3, 2)]
    x = rng.normal(size=(7, n)).astype(np.float32)
    factor = rng.normal(size=scale).astype(np.float32) if scale else None
    offset = rng.normal(size=(5, 1)).astype(np.float32) if bias else None
    out = np.full((5, n), np.nan, np.float32)
    matrices = tuple(QuantMatrix.from_float32(part) for part in w)
    assert linear(WeightStore(1 << 20), x, matrices, out, scale=factor, bias=offset) is out
    want = np.concatenate(w).astype(np.float64) @ x
    want = want * (1.0 if factor is None else factor) + (0.0 if offset is None else offset)
    assert reference.relative_error(out, want) < 1e-6
