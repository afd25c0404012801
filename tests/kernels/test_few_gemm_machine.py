"""Products of few rows: the kernel's own PTX against float64 without a GPU (issue 4): parts, kinds and epilogues."""

from __future__ import annotations

import numpy as np
import pytest

from frink_numba.kernels import few_gemm_product
from frink_numba.kernels.few_gemm_plan import few_plan
from frink_numba.kernels.gemm_pack import pack
from tests.kernels.compiling import missing_tools
from tests.kernels.gemm_device import dequantized, relative_error, worst_row_error
from tests.kernels.gemm_machine import run_on_machine, stand_in_map
from tests.kernels.packed_weights import random_matrix

pytestmark = pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))

LIMIT = 8e-4  # f16 operands, and an f16 result


@pytest.fixture(autouse=True)
def _maps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_gemm_product, "tensor_map", stand_in_map)


def rounded(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """float32 that f16 holds."""
    return rng.standard_normal(shape).astype(np.float16).astype(np.float32)


@pytest.mark.parametrize(
    ("kind", "m", "n", "k", "groups", "parts", "half"),
    [
        ("Q4_K", 50, 300, 1024, 4, 1, True),  # several sets, the last of one slab
        ("Q4_K", 61, 130, 1024, 3, 3, False),  # parts of different lengths
        ("Q6_K", 30, 200, 768, 2, 1, False),
        ("Q5_K", 9, 260, 1024, 4, 4, True),  # more parts than octets of rows
        ("Q8_0", 33, 70, 512, 3, 2, True),
        ("Q4_0", 17, 200, 2560, 4, 1, False),  # more records than stages
    ],
)
def test_products(kind: str, m: int, n: int, k: int, groups: int, parts: int, half: bool) -> None:
    """Copies, products and stores come as late as they may: a stage or buffer that is given back early shows."""
    rng = np.random.default_rng(k + n)
    matrix = random_matrix(kind, n, k, rng)
    x = rounded(rng, m, k)
    plan = few_plan(kind, m, n, k, 12 if parts > 1 else 2, groups, parts)
    out = run_on_machine(pack([matrix]), x, plan, half=half, launches=2)
    reference = x.astype(np.float64) @ dequantized([matrix]).T
    assert relative_error(out, reference) < LIMIT
    assert worst_row_error(out, reference) < 2e-3


@pytest.mark.parametrize("parts", [1, 2])
def test_gate_and_up(parts: int) -> None:
    """SwiGLU over interleaved rows, as f16 with a power of two a token."""
    rng = np.random.default_rng(5)
    gate, up = (random_matrix("Q4_K", 72, 512, rng) for _ in range(2))
    x = rounded(rng, 40, 512)
    plan = few_plan("Q4_K", 40, 144, 512, 8, 3, parts)
    out = run_on_machine(pack([gate, up], gated=True), x, plan, gate="swiglu", half=True)
    g, u = (x.astype(np.float64) @ dequantized([matrix]).T for matrix in (gate, up))
    assert relative_error(out, g / (1 + np.exp(-g)) * u) < LIMIT


@pytest.mark.parametrize("parts", [1, 3])
def test_bias_and_a_residual_sum(parts: int) -> None:
    rng = np.random.default_rng(6)
    matrix, bias, hidden = random_matrix("Q4_1", 90, 768, rng), rounded(rng, 90), rounded(rng, 20, 90)
    x = rounded(rng, 20, 768)
    plan = few_plan("Q4_1", 20, 90, 768, 8, 2, parts)
    out = run_on_machine(pack([matrix]), x, plan, bias=bias, add_to=hidden)
    assert relative_error(out, x.astype(np.float64) @ dequantized([matrix]).T + bias + hidden) < LIMIT
