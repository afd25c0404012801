"""The thin products on a GPU against float64 (design section 5): kinds, rows, shapes, epilogues, range (issue 7)."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import numpy as np
import pytest

from frink_numba.kernels.gemm_epilogue import GATES
from frink_numba.kernels.gemm_pack import pack
from frink_numba.kernels.thin_gemm import ThinGemms
from frink_numba.kernels.thin_gemm_plan import MOST_ROWS
from tests.kernels.gate_case import check_activation, exact_operands, true_activation
from tests.kernels.gemm_device import dequantized, relative_error, worst_row_error
from tests.kernels.packed_weights import random_matrix
from tests.kernels.thin_device import run_thin

pytestmark = pytest.mark.gpu

LIMIT = 2e-3  # tensor-core kernels, whole result
EXPECTED = 6e-4  # f16 operands and nothing else: a kernel that loses a step or a scale is far above

BLOCK_32 = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "F16", "BF16", "F32")
BLOCK_256 = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")


@pytest.fixture(scope="module")
def thins() -> Iterator[ThinGemms]:
    from numba import cuda

    device = cuda.get_current_device()
    capability = tuple(device.compute_capability)
    if capability < (8, 0):
        pytest.skip(f"thin products do not run on compute capability {capability}")
    made = ThinGemms(capability, device.MULTIPROCESSOR_COUNT)
    yield made
    made.close()


def normalized(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    wide = x.astype(np.float64)
    return wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + eps) * weight


def check(
    thins: ThinGemms, kind: str, m: int, n: int, k: int, *, row_groups: int | None = None, norm: bool = False
) -> None:
    rng = np.random.default_rng(zlib.crc32(f"{kind} {m} {n} {k}".encode()))
    matrix = random_matrix(kind, n, k, rng)
    x = rng.standard_normal((m, k)).astype(np.float32)
    weight = (1 + rng.standard_normal(k)).astype(np.float32) if norm else None
    ran = run_thin(thins, pack([matrix]), x, norm=weight, row_groups=row_groups, runs=2)
    operand = x.astype(np.float64) if weight is None else normalized(x, weight, 1e-5)
    reference = operand @ dequantized([matrix]).T
    assert relative_error(ran.out[0], reference) < EXPECTED < LIMIT
    assert worst_row_error(ran.out[0], reference) < LIMIT
    assert np.array_equal(ran.out[0], ran.out[1]), "two runs differ"


@pytest.mark.parametrize("row_groups", [1, 4])
@pytest.mark.parametrize("kind", [*BLOCK_32, *BLOCK_256])
def test_every_kind_against_float64(thins: ThinGemms, kind: str, row_groups: int) -> None:
    """Issue 7, kinds: odd N, K of several items and a tail, one and eight rows."""
    check(thins, kind, 1, 325, 1792 if kind in BLOCK_256 else 1760, row_groups=row_groups)
    check(thins, kind, 8, 77, 2560 if kind in BLOCK_256 else 2528, row_groups=row_groups)


@pytest.mark.parametrize("m", range(1, MOST_ROWS + 1))
def test_every_row_count(thins: ThinGemms, m: int) -> None:
    check(thins, "Q4_K", m, 1000, 4096)
    check(thins, "Q4_0", m, 210, 3072)
    check(thins, "Q6_K", m, 5000, 512, norm=True)


@pytest.mark.parametrize("row_groups", [1, 2, 8])
@pytest.mark.parametrize("k", [32, 64, 96, 160, 256, 352, 576, 1536, 3072])
def test_widths(thins: ThinGemms, k: int, row_groups: int) -> None:
    """K a multiple of 32: warps without work, half steps, tails."""
    check(thins, "Q4_1", 3, 131, k, row_groups=row_groups)
    check(thins, "Q8_0", 1, 70, k, row_groups=row_groups, norm=True)


@pytest.mark.parametrize(
    ("kind", "m", "n", "k"),
    [("Q4_K", 1, 6144, 4096), ("Q4_K", 1, 4096, 14336), ("Q6_K", 1, 4096, 14336), ("Q4_K", 5, 3072, 8192),
     ("Q6_K", 8, 1024, 14336), ("Q8_0", 16, 512, 14336), ("F16", 2, 640, 14336), ("Q6_K", 1, 32003, 1024)],
)  # fmt: skip
def test_large_shapes(thins: ThinGemms, kind: str, m: int, n: int, k: int) -> None:
    """The plan's own cuts: more units than blocks, x in parts."""
    check(thins, kind, m, n, k)


@pytest.mark.parametrize("m", [1, 2, 7, 16])
@pytest.mark.parametrize("k", [576, 2048, 4096, 8192])
def test_fused_norm(thins: ThinGemms, m: int, k: int) -> None:
    """RMS norm on the way in."""
    check(thins, "Q8_0" if k == 576 else "Q4_K", m, 272, k, norm=True)


@pytest.mark.parametrize(("m", "k"), [(1, 768), (2, 14336), (8, 14336), (13, 4096)])
def test_bias_and_residual(thins: ThinGemms, m: int, k: int) -> None:
    """y = x W^T + bias, and hidden += x W^T, with three matrices in one launch (Q, K, V)."""
    rng = np.random.default_rng(3)
    matrices = [random_matrix("Q4_K", rows, k, rng) for rows in (160, 40, 41)]
    x = rng.standard_normal((m, k)).astype(np.float32)
    product = x.astype(np.float64) @ dequantized(matrices).T
    bias = rng.standard_normal(241).astype(np.float32)
    ran = run_thin(thins, pack(matrices), x, bias=bias)
    assert relative_error(ran.out[0], product + bias) < EXPECTED
    hidden = rng.standard_normal((m, 241)).astype(np.float32)
    ran = run_thin(thins, pack(matrices), x, add_to=hidden, runs=2)
    assert relative_error(ran.out[0], product + hidden) < EXPECTED
    assert np.array_equal(ran.out[0], ran.out[1])


@pytest.mark.parametrize("m", [1, 8, 16])
@pytest.mark.parametrize("gate", GATES[1:])
def test_each_activation_is_its_own(thins: ThinGemms, gate: str, m: int) -> None:
    """R4: exact GELU is not its tanh form, which the tolerance of f16 operands would not tell from it."""
    x, matrices, (gate_side, up_side) = exact_operands(m, 96)
    ran = run_thin(thins, pack(matrices, gated=True), x, gate=gate)
    check_activation(gate, ran.out[0], gate_side, up_side)


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(
    ("gate", "half", "m", "k"),
    [
        ("swiglu", True, 1, 1280),
        ("swiglu", True, 8, 8192),
        ("swiglu", False, 3, 1280),
        ("geglu", True, 16, 1280),
        ("geglu_erf", True, 8, 1280),
    ],
)
def test_gated(thins: ThinGemms, gate: str, half: bool, m: int, k: int, norm: bool) -> None:
    """act(gate x) * (up x) in the epilogue; an f16 result comes with powers of two and never overflows."""
    rng = np.random.default_rng(5)
    matrices = [random_matrix("Q4_K", 328, k, rng) for _ in range(2)]
    x = rng.standard_normal((m, k)).astype(np.float32)
    weight = np.exp2(rng.integers(-3, 6, k)).astype(np.float32) if norm else None
    if not norm:
        x *= np.exp2(rng.integers(-12, 12, (m, 1))).astype(np.float32)
    operand = x.astype(np.float64) if weight is None else normalized(x, weight, 1e-5)
    gate_side, up_side = (operand @ dequantized([matrix]).T for matrix in matrices)
    reference = true_activation(gate, gate_side) * up_side
    ran = run_thin(thins, pack(matrices, gated=True), x, gate=gate, half=half, norm=weight, runs=2)
    # Where exp underflows the result vanishes on both sides; the error counts over the whole.
    assert relative_error(ran.out[0], reference) < 1.5e-3
    assert np.array_equal(ran.out[0], ran.out[1])
    if ran.scale is not None:
        assert (np.log2(ran.scale) % 1 == 0).all()


def test_large_and_small_rows(thins: ThinGemms) -> None:
    """Rows of 1e-20 and of 1e20, of zeros and of one infinity: each stays in its own row."""
    rng = np.random.default_rng(6)
    matrix = random_matrix("Q4_K", 96, 512, rng)
    x = rng.standard_normal((6, 512)).astype(np.float32)
    x *= np.array([1e-20, 1e15, 1, 0, 1, 1], np.float32)[:, None]
    x[4, 7] = np.nan
    dense = dequantized([matrix])
    good = [0, 1, 2, 5]
    ran = run_thin(thins, pack([matrix]), x)
    assert worst_row_error(ran.out[0][good], x[good].astype(np.float64) @ dense.T) < LIMIT
    assert (ran.out[0][3] == 0).all()
    assert np.isnan(ran.out[0][4]).all()
    weight = np.full(512, 3000, np.float32)
    ran = run_thin(thins, pack([matrix]), x, norm=weight)
    expected = normalized(x[good], weight, 1e-5) @ dense.T
    assert worst_row_error(ran.out[0][good], expected) < LIMIT
    assert (ran.out[0][3] == 0).all()
    assert np.isnan(ran.out[0][4]).all()


def test_half_result_without_a_gate(thins: ThinGemms) -> None:
    """A plain f16 result with its powers of two, K over blocks."""
    rng = np.random.default_rng(7)
    matrix = random_matrix("Q6_K", 300, 8192, rng)
    x = rng.standard_normal((9, 8192)).astype(np.float32) * 1e4
    ran = run_thin(thins, pack([matrix]), x, half=True)
    assert worst_row_error(ran.out[0], x.astype(np.float64) @ dequantized([matrix]).T) < LIMIT


@pytest.mark.parametrize(
    ("kind", "n", "k", "norm"),
    [("Q4_K", 640, 4096, True), ("Q6_K", 300, 14336, False), ("Q8_0", 300, 8192, True), ("Q4_1", 960, 576, True),
     ("Q3_K", 200, 4096, False), ("F16", 200, 1088, False), ("Q5_K", 4000, 1024, True)],
)  # fmt: skip
def test_a_row_does_not_depend_on_the_rows_beside_it(thins: ThinGemms, kind: str, n: int, k: int, norm: bool) -> None:
    """To the bit, whatever their number and values: speculation rests on it."""
    rng = np.random.default_rng(8)
    packed = pack([random_matrix(kind, n, k, rng)])
    x = rng.standard_normal((MOST_ROWS, k)).astype(np.float32)
    weight = (1 + rng.standard_normal(k)).astype(np.float32) if norm else None
    everyone = run_thin(thins, packed, x, norm=weight).out[0]
    for m in (1, 2, 3, 8, 9, 16):
        assert np.array_equal(run_thin(thins, packed, x[:m], norm=weight).out[0], everyone[:m]), f"{m} rows"
    other = x.copy()
    other[1:] *= 100
    assert np.array_equal(run_thin(thins, packed, other[:4], norm=weight).out[0][0], everyone[0])
