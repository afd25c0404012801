"""The quantized product in the simulator: every kind, every tile, and the weights bit for bit."""

from __future__ import annotations

import pytest

from frink_numba.kernels.kinds import PLANES
from frink_numba.kernels.quantized_matmul import TILES, Tile
from frink_numba.quant import KINDS
from tests.kernels import simt_checks as checks


def two_blocks(kind: str) -> int:
    return max(2 * KINDS[kind].block, 24)


@pytest.mark.parametrize("extreme", [False, True])
@pytest.mark.parametrize("kind", sorted(PLANES))
def test_weights_equal_the_gguf_package_bit_for_bit(kind: str, extreme: bool) -> None:
    """Zero tolerance (fault 21): every block random, with scales of weights and with any finite scale."""
    checks.check_dequantization(kind, 5, two_blocks(kind), extreme=extreme)


@pytest.mark.parametrize("kind", sorted(PLANES))
def test_every_kind(kind: str) -> None:
    """R19: odd M and N, one block of K."""
    checks.check_matmul(kind, 3, 35, max(KINDS[kind].block, 32), TILES[-1])


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile(tile: Tile) -> None:
    """Four blocks of each tile, none whole."""
    checks.check_matmul("Q4_1", tile.height + 1, tile.width + 3, 64, tile)


@pytest.mark.parametrize("kind", sorted(PLANES))
def test_few_rows(kind: str) -> None:
    """One row of x, an octet for most threads of a row and none for the others."""
    checks.check_matmul(kind, 1, 5, max(KINDS[kind].block, 32))


@pytest.mark.parametrize("m", [2, 3, 4, 5, 8])
def test_few_rows_by_their_number(m: int) -> None:
    """Each height of the kernel, filled and not; more octets than the threads of a row take in one round."""
    checks.check_matmul("Q4_0", m, 9, 1056)


@pytest.mark.parametrize("tile", [None, TILES[-1]], ids=str)
@pytest.mark.parametrize(("kind", "k"), [("F16", 37), ("F32", 20), ("BF16", 1)])
def test_ragged_k(kind: str, k: int, tile: Tile | None) -> None:
    """Kinds without blocks take any K."""
    checks.check_matmul(kind, 2, 5, k, tile)
