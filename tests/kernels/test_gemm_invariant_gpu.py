"""Whole tiles of every size give the same bits on a GPU, for a row alone and among others (FRINK_INVARIANT).

The instructions promise no order of sums; that it does not depend on the tile is what these tests find out.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import numpy as np
import pytest

from frink_numba.kernels import gemm_mma
from frink_numba.kernels.gemm import Gemms
from frink_numba.kernels.gemm_kinds import FRAGMENT_KINDS
from frink_numba.kernels.gemm_pack import pack
from frink_numba.kernels.gemm_plan import COMMON, TILES
from tests.kernels.gemm_device import run_product
from tests.kernels.packed_weights import random_matrix

pytestmark = pytest.mark.gpu

KINDS = [*sorted(kind for kind in FRAGMENT_KINDS if kind != "half"), "F16"]
EVERY_TILE = ("Q4_K", "F16")
COMMON_TILES = ("Q4_1", "Q6_K", "Q8_0")


@pytest.fixture(scope="module", params=["wgmma", "mma"])
def gemms(request: pytest.FixtureRequest) -> Iterator[Gemms]:
    from numba import cuda

    device = cuda.get_current_device()
    capability = tuple(device.compute_capability)
    if capability < (8, 0) or (request.param == "wgmma" and capability != (9, 0)):
        pytest.skip(f"{request.param} does not run on compute capability {capability}")
    made = Gemms(request.param, capability, device.MULTIPROCESSOR_COUNT, invariant=True)
    yield made
    made.close()


def tiles_of(kind: str, tier: str) -> list[tuple[int, int | None, int | None]]:
    """(tokens, cluster, groups) of the tiles to compare."""
    if tier == "mma":
        return [(tokens, None, None) for tokens in gemm_mma.TOKEN_TILES]
    if kind in EVERY_TILE:
        tiles = [(t, 1, g) for g, sizes in TILES.items() for t in sizes]
    elif kind in COMMON_TILES:
        tiles = [(t, 1, g) for g, sizes in COMMON.items() for t in sizes]
    else:
        tiles = [(16, 1, 1), (128, 1, 3)]
    return [*tiles, (256, 2, 2)]


@pytest.mark.parametrize("kind", KINDS)
def test_tiles_of_every_size(kind: str, gemms: Gemms) -> None:
    """Of 300 rows, of three of them, and of one: what the first tile gives, added to a residual as well."""
    rng = np.random.default_rng(zlib.crc32(kind.encode()))
    packed = pack([random_matrix(kind, 328, 1536, rng)])
    x = rng.standard_normal((300, 1536)).astype(np.float32)
    before = rng.standard_normal((300, 328)).astype(np.float32)
    tiles = tiles_of(kind, gemms.tier)
    first = run_product(gemms, packed, x, add_to=before, tokens=16).out[0]
    for tokens, cluster, groups in tiles:
        for a, b in ((0, 300), (151, 154), (299, 300)):
            how = {"tokens": tokens, "cluster": cluster, "groups": groups}
            out = run_product(gemms, packed, x[a:b], add_to=before[a:b], **how).out[0]
            np.testing.assert_array_equal(out.view(np.uint32), first[a:b].view(np.uint32), err_msg=f"{how} {a}")


@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K", "F16"])
def test_gated_results_in_f16(kind: str, gemms: Gemms) -> None:
    """The powers of two and the numbers, as the plan chooses tiles for each number of rows."""
    rng = np.random.default_rng(zlib.crc32(kind.encode()))
    packed = pack([random_matrix(kind, 256, 1536, rng) for _ in "gu"], gated=True)
    x = rng.standard_normal((513, 1536)).astype(np.float32)
    whole = run_product(gemms, packed, x, gate="swiglu", half=True)
    for a, b in ((0, 1), (0, 64), (64, 129), (129, 512), (512, 513)):
        part = run_product(gemms, packed, x[a:b], gate="swiglu", half=True)
        np.testing.assert_array_equal(part.scale, whole.scale[a:b])
        np.testing.assert_array_equal(part.out[0].view(np.uint32), whole.out[0][a:b].view(np.uint32))
