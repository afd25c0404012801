"""Two thin products in one launch on a GPU, against float64 and against two launches (R11, issue 7)."""

from __future__ import annotations

import pytest

from frink_numba.kernels.thin_gemm import ThinGemms
from tests.kernels.attention_device import Gpu
from tests.kernels.thin_pair_case import check

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("m", [1, 3, 4])
@pytest.mark.parametrize(
    ("kinds", "rows", "cols"),
    [
        (("Q4_K", "Q6_K"), (4096, 1024), 3072),
        (("Q4_K", "Q6_K"), (5120, 1024), 4096),
        (("Q5_K", "Q6_K"), (1001, 77), 2048),
        (("Q4_0", "Q5_1"), (640, 320), 960),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else str(value),
)
def test_against_float64(kinds: tuple[str, str], rows: tuple[int, int], cols: int, m: int) -> None:
    """Both results, repeatable, and the very bits of two launches with the pair's cut."""
    from numba import cuda

    device = cuda.get_current_device()
    check(ThinGemms(device.compute_capability, device.MULTIPROCESSOR_COUNT), Gpu(), kinds, m, rows, cols)
