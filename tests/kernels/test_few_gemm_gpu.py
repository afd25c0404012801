"""Products of few rows on a GPU against float64 (design section 5, issue 4): kinds, cuts, epilogues, range."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import numpy as np
import pytest

from frink_numba.kernels.few_gemm_plan import MOST_ROWS, few_plan
from frink_numba.kernels.few_gemm_product import FewProduct
from frink_numba.kernels.gemm import Gemms
from frink_numba.kernels.gemm_kinds import FRAGMENT_KINDS
from frink_numba.kernels.gemm_pack import pack
from tests.kernels.gemm_device import dequantized, relative_error, run_product, worst_row_error
from tests.kernels.packed_weights import random_matrix

pytestmark = pytest.mark.gpu

LIMIT = 2e-3  # tensor-core kernels, whole result
EXPECTED = 6e-4  # f16 operands and nothing else: a kernel that loses a step or a scale is far above


@pytest.fixture(scope="module")
def gemms() -> Iterator[Gemms]:
    from numba import cuda

    device = cuda.get_current_device()
    if tuple(device.compute_capability) != (9, 0):
        pytest.skip("the kernels are Hopper's")
    made = Gemms("wgmma", (9, 0), device.MULTIPROCESSOR_COUNT)
    yield made
    made.close()


def check(gemms: Gemms, kind: str, m: int, n: int, k: int, groups: int | None = None, parts: int | None = None) -> None:
    rng = np.random.default_rng(zlib.crc32(f"{kind} {m} {n} {k}".encode()))
    matrix = random_matrix(kind, n, k, rng)
    x = rng.standard_normal((m, k)).astype(np.float32)
    plan = few_plan(kind, m, n, k, gemms.multiprocessors, groups, parts)
    ran = run_product(gemms, pack([matrix]), x, plan=plan, runs=2)
    reference = x.astype(np.float64) @ dequantized([matrix]).T
    assert relative_error(ran.out[0], reference) < EXPECTED < LIMIT
    assert worst_row_error(ran.out[0], reference) < LIMIT
    assert np.array_equal(ran.out[0], ran.out[1]), "two runs differ"


@pytest.mark.parametrize("kind", [name for name, row in FRAGMENT_KINDS.items() if row.scales is not None])
def test_every_kind(gemms: Gemms, kind: str) -> None:
    """Odd M, N beyond a set, records shared out and not."""
    check(gemms, kind, 21, 328, 1792)
    check(gemms, kind, 9, 200, 768, 3, 1)


@pytest.mark.parametrize("m", [9, 16, 17, 32, 33, 64])
@pytest.mark.parametrize("groups", [2, 3, 4])
def test_every_cut(gemms: Gemms, m: int, groups: int) -> None:
    """More sets than multiprocessors; many parts; parts of one record and of several."""
    check(gemms, "Q4_K", m, 64 * groups * 140 - 30, 256, groups, 1)
    check(gemms, "Q4_K", m, 64 * 7, 14336, groups)
    check(gemms, "Q4_K", m, 64 * 5, 4096, groups, 16)


@pytest.mark.parametrize(("n", "k"), [(5120, 3072), (3072, 8192), (28672, 4096), (4096, 14336)])
def test_shapes_of_models(gemms: Gemms, n: int, k: int) -> None:
    """The plan's own cuts."""
    check(gemms, "Q4_K", 32, n, k)


@pytest.mark.parametrize("k", [512, 4096])
def test_bias_residual_and_gate(gemms: Gemms, k: int) -> None:
    """y = x W^T + bias; hidden += x W^T; SwiGLU over interleaved rows, as f16 with a power of two a token."""
    rng = np.random.default_rng(3)
    matrices = [random_matrix("Q4_K", rows, k, rng) for rows in (160, 40, 40)]
    x = rng.standard_normal((37, k)).astype(np.float32)
    product = x.astype(np.float64) @ dequantized(matrices).T
    bias = rng.standard_normal(240).astype(np.float32)
    ran = run_product(gemms, pack(matrices), x, bias=bias, spare_columns=24)
    assert relative_error(ran.out[0], product + bias) < EXPECTED
    hidden = rng.standard_normal((37, 240)).astype(np.float32)
    ran = run_product(gemms, pack(matrices), x, add_to=hidden, runs=2)
    assert relative_error(ran.out[0], product + hidden) < EXPECTED
    assert np.array_equal(ran.out[0], ran.out[1])
    gate, up = (random_matrix("Q4_K", 200, k, rng) for _ in range(2))
    ran = run_product(gemms, pack([gate, up], gated=True), x, gate="swiglu", half=True)
    g, u = (x.astype(np.float64) @ dequantized([matrix]).T for matrix in (gate, up))
    assert relative_error(ran.out[0], g / (1 + np.exp(-g)) * u) < 2 * EXPECTED


def test_range(gemms: Gemms) -> None:
    """Activations of 1e6 and rows far apart in size: f16 operands never overflow (design section 5)."""
    rng = np.random.default_rng(8)
    matrix = random_matrix("Q6_K", 150, 1024, rng)
    x = rng.standard_normal((20, 1024)) * 10.0 ** np.arange(-8, 12)[:, None]
    x[:, 5] *= 1e3
    x = x.astype(np.float32)
    ran = run_product(gemms, pack([matrix]), x, half=True)
    assert worst_row_error(ran.out[0], x.astype(np.float64) @ dequantized([matrix]).T) < LIMIT


def test_which_products_they_are(gemms: Gemms) -> None:
    """Quantized weights of whole records and up to 64 rows, unless rows must not depend on each other's number."""
    from frink_numba.kernels.gemm import DeviceWeights

    def kind_of(device: Gemms, name: str, m: int, cols: int) -> bool:
        weights = DeviceWeights(name, 128, cols, False, (1.0,), 0, 0)
        return isinstance(device.product(weights, m), FewProduct)

    assert kind_of(gemms, "Q4_K", 32, 512)
    assert not kind_of(gemms, "Q4_1", 32, 1792)
    assert kind_of(gemms, "Q4_1", 32, 2048)
    assert not kind_of(gemms, "Q4_K", MOST_ROWS + 1, 512)
    assert not kind_of(gemms, "Q4_0", 16, 320)
    assert not kind_of(gemms, "half", 16, 512)
    invariant = Gemms("wgmma", (9, 0), gemms.multiprocessors, invariant=True)
    assert not kind_of(invariant, "Q4_K", 16, 512)
    invariant.close()
