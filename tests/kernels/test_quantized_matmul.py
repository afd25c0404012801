"""The quantized product on a GPU against float64: all kinds, all tiles, odd shapes (R19)."""

from __future__ import annotations

import pytest

from frink_numba.kernels.kinds import PLANES
from frink_numba.kernels.quantized_matmul import TILES, Tile
from frink_numba.quant import KINDS
from tests.kernels import simt_checks as checks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("kind", sorted(PLANES))
def test_every_kind_with_every_tile(kind: str, tile: Tile) -> None:
    """Odd M and N around a tile and beyond, K of one block and of many."""
    block = max(KINDS[kind].block, 32)
    for m, n, k in [
        (1, 1, block),
        (tile.height - 1, tile.width + 1, 3 * block),
        (tile.height, 2 * tile.width, 1536),
        (2 * tile.height + 5, 3 * tile.width - 7, 5 * block),
    ]:
        checks.check_matmul(kind, m, n, k, tile)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("k", [1, 3, 4, 12, 17, 36, 577, 1020])
def test_ragged_k(kind: str, k: int) -> None:
    """Kinds without blocks take any K."""
    for m, n in [(3, 5), (10, 5), (130, 70)]:
        checks.check_matmul(kind, m, n, k)


@pytest.mark.parametrize("kind", ["Q4_1", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("m", [1, 2, 4, 5, 8, 9, 16, 33, 63, 64, 65, 512])
def test_layer_shapes(kind: str, m: int) -> None:
    """SmolLM2's and a 3B model's widths, with the kernel that the launcher chooses."""
    shapes = [(576, 576), (192, 576), (1536, 576), (576, 1536)] if kind == "Q4_1" else [(1024, 3072), (3072, 8192)]
    for n, k in shapes:
        checks.check_matmul(kind, m, n, k)
