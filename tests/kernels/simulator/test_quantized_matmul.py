"""The quantized product in the simulator: every kind and every tile (R19)."""

from __future__ import annotations

import pytest

from frink_numba.kernels.kinds import PLANES
from frink_numba.kernels.quantized_matmul import TILES, Tile
from frink_numba.quant import KINDS
from tests.kernels import simt_checks as checks


@pytest.mark.parametrize("kind", sorted(PLANES))
def test_every_kind(kind: str) -> None:
    """Odd M and N, one block of K."""
    checks.check_matmul(kind, 3, 35, max(KINDS[kind].block, 32), TILES[-1])


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile(tile: Tile) -> None:
    """Four blocks of each tile, none whole."""
    checks.check_matmul("Q4_1", tile.height + 1, tile.width + 3, 64, tile)


@pytest.mark.parametrize("tile", [None, TILES[-1]], ids=str)
@pytest.mark.parametrize(("kind", "k"), [("F16", 37), ("F32", 20), ("BF16", 1)])
def test_ragged_k(kind: str, k: int, tile: Tile | None) -> None:
    """Kinds without blocks take any K."""
    checks.check_matmul(kind, 2, 5, k, tile)
