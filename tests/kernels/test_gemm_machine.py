"""The `wgmma` tier's own PTX against float64 without a GPU (issue 4): tiles, cuts along K, kinds and epilogues."""

from __future__ import annotations

import numpy as np
import pytest

from frink_numba.kernels import gemm
from frink_numba.kernels.gemm_kinds import fragment_kind
from frink_numba.kernels.gemm_pack import pack
from frink_numba.kernels.gemm_plan import layouts
from tests.kernels.compiling import missing_tools
from tests.kernels.gemm_device import dequantized, relative_error, worst_row_error
from tests.kernels.gemm_machine import run_on_machine, stand_in_map
from tests.kernels.packed_weights import random_matrix

pytestmark = pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))

LIMIT = 8e-4  # f16 operands, and an f16 result


@pytest.mark.parametrize(
    ("kind", "m", "n", "k", "groups", "tokens", "split", "half"),
    [
        ("Q4_0", 37, 200, 576, 1, 32, False, True),  # a tail of steps, odd edges, several tiles a block
        ("Q4_K", 50, 300, 1024, 3, 64, True, False),  # tiles cut along K
        ("Q6_K", 110, 150, 512, 2, 104, False, True),  # a chunk that is not a power of two
        ("Q5_K", 130, 200, 768, 3, 128, True, True),
        ("Q8_0", 30, 100, 352, 2, 16, False, False),
        ("F16", 120, 130, 320, 2, 112, False, True),
    ],
)
def test_products(
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    m: int,
    n: int,
    k: int,
    groups: int,
    tokens: int,
    split: bool,
    half: bool,
) -> None:
    """Copies, products and stores come as late as they may: a stage or buffer that is given back early shows."""
    monkeypatch.setattr(gemm, "tensor_map", stand_in_map)
    rng = np.random.default_rng(k + n)
    matrix = random_matrix(kind, n, k, rng)
    x = rng.standard_normal((m, k)).astype(np.float16).astype(np.float32)
    row = fragment_kind(kind)
    assert row is not None
    plans = list(layouts(m, n, k, row, 3, tokens, 1, groups))
    plan = plans[-1] if split else plans[0]
    assert bool(plan.split_tiles) == split
    out = run_on_machine(pack([matrix]), x, plan, half=half)
    reference = x.astype(np.float64) @ dequantized([matrix]).T
    assert relative_error(out, reference) < LIMIT
    assert worst_row_error(out, reference) < 2e-3
