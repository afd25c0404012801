"""Weights of two kinds in one launch, on a GPU: against float64, and to the bit what a launch for each kind gives."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from frink_numba.kernels.gemm import Gemms
from frink_numba.kernels.gemm_pack import pack
from tests.kernels.gemm_device import dequantized, relative_error, run_product, worst_row_error
from tests.kernels.packed_weights import random_matrix

pytestmark = pytest.mark.gpu

EXPECTED, LIMIT = 6e-4, 2e-3  # as in test_gemm_gpu.py

PAIRS = [("Q4_K", "Q6_K"), ("Q5_K", "Q6_K"), ("Q4_0", "Q6_K"), ("Q8_0", "F16"), ("F16", "Q4_K"), ("Q3_K", "Q5_K")]


@pytest.fixture(scope="module", params=[False, True], ids=["", "invariant"])
def gemms(request: pytest.FixtureRequest) -> Iterator[Gemms]:
    from numba import cuda

    device = cuda.get_current_device()
    if tuple(device.compute_capability) != (9, 0):
        pytest.skip("products of the wgmma tier alone are of two kinds")
    made = Gemms("wgmma", (9, 0), device.MULTIPROCESSOR_COUNT, invariant=request.param)
    yield made
    made.close()


def check(
    gemms: Gemms,
    kinds: tuple[str, str],
    rows: tuple[int, int],
    m: int,
    k: int,
    tokens: int | None = None,
    cluster: int | None = None,
    groups: int | None = None,
) -> None:
    """Bias and all: right, twice the same, and where no tile is cut along K the bits of two launches."""
    rng = np.random.default_rng(zlib.crc32(f"{kinds} {rows} {m} {k}".encode()))
    matrices = [random_matrix(kind, n, k, rng) for kind, n in zip(kinds, rows, strict=True)]
    first, second = (pack([matrix]) for matrix in matrices)
    x = rng.standard_normal((m, k)).astype(np.float32)
    bias = rng.standard_normal(sum(rows)).astype(np.float32)
    tile: dict[str, Any] = {"tokens": tokens, "cluster": cluster, "groups": groups}
    ran = run_product(gemms, (first, second), x, bias=bias, runs=2, spare_columns=4, **tile)
    reference = x.astype(np.float64) @ dequantized(matrices).T + bias
    for part in (np.s_[:, : rows[0]], np.s_[:, rows[0] :]):
        assert relative_error(ran.out[0][part], reference[part]) < EXPECTED
    assert worst_row_error(ran.out[0], reference) < LIMIT
    assert np.array_equal(ran.out[0], ran.out[1]), "two runs differ"
    if gemms.invariant:
        parts = zip((first, second), np.split(bias, rows[:1]), strict=True)
        alone = [run_product(gemms, packed, x, bias=own, **tile).out[0] for packed, own in parts]
        assert np.array_equal(ran.out[0], np.concatenate(alone, axis=1)), "not what a launch for each kind gives"


@pytest.mark.parametrize("kinds", PAIRS)
def test_every_pair(gemms: Gemms, kinds: tuple[str, str]) -> None:
    """Issue 4, QKV in one launch: kinds that occur together, in few rows and many, whole slabs and a part of one."""
    check(gemms, kinds, (256, 200), 21, 1792, 16, 1, 1)
    check(gemms, kinds, (384, 128), 300, 768, 256, 2, 2)


@pytest.mark.parametrize(
    ("groups", "tokens", "cluster"),
    [(1, 32, 1), (1, 128, 1), (2, 64, 1), (2, 128, 1), (2, 176, 1), (2, 256, 1), (3, 128, 1)],
)
def test_every_tile(gemms: Gemms, groups: int, tokens: int, cluster: int) -> None:
    """Sets that neither kind fills, more tiles than multiprocessors, and tiles cut along K."""
    kinds = "Q4_K", "Q6_K"
    check(gemms, kinds, (64 * 5, 64 * 4), 2 * tokens + 3, 768, tokens, cluster, groups)
    check(gemms, kinds, (64 * 2 * 100, 64 * 65 - 30), tokens - 1, 256, tokens, cluster, groups)
    check(gemms, kinds, (64 * 5, 64 * 2), tokens + 1, 3072, tokens, cluster, groups)


@pytest.mark.parametrize(
    ("rows", "m", "k"),
    [((64, 1), 1, 256), ((64, 64), 9, 512), ((768, 192), 33, 1024), ((4096, 1024), 100, 3072),
     ((4096, 1024), 515, 3072), ((5120, 1024), 700, 1024)],
)  # fmt: skip
def test_shapes_as_planned(gemms: Gemms, rows: tuple[int, int], m: int, k: int) -> None:
    """The plan's own tiles and splits."""
    check(gemms, ("Q4_K", "Q6_K"), rows, m, k)


@pytest.mark.parametrize("k", [32, 96, 352, 576])
def test_tails_of_steps(gemms: Gemms, k: int) -> None:
    """K a multiple of 32, of a kind that is converted and of one that is not."""
    check(gemms, ("Q8_0", "F16"), (192, 130), 77, k, 128, 1, 2)
