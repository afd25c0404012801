"""The SIMT kernels on a GPU against float64: a grid of odd shapes, all kinds, guarded and poisoned outputs."""

from __future__ import annotations

import pytest

from frink_numba.kernels.kinds import PLANES
from frink_numba.kernels.quantized_matmul import TILES, Tile
from frink_numba.layer import RopeLayout
from frink_numba.quant import KINDS
from tests.kernels import simt_checks as checks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("n", [1, 31, 64, 80, 128, 512, 513, 576, 3072, 8191, 14336])
@pytest.mark.parametrize("rows", [1, 7, 8, 9, 519])
@pytest.mark.parametrize("in_place", [False, True])
def test_rms_norm(rows: int, n: int, in_place: bool) -> None:
    checks.check_rms_norm(rows, n, in_place=in_place)


@pytest.mark.parametrize("n", [1, 255, 256, 257, 960, 8192])
@pytest.mark.parametrize("rows", [1, 5, 3000, 70000])
def test_add_bias(rows: int, n: int) -> None:
    """Rows beyond the 65535 that a grid's second axis holds, too."""
    if rows * n < 1 << 26:
        checks.check_add_bias(rows, n)


@pytest.mark.parametrize(("rows", "n"), [(1, 1), (1, 3), (3, 5), (7, 1023), (512, 576), (513, 3072), (2048, 8192)])
def test_elementwise(rows: int, n: int) -> None:
    checks.check_residual_add(rows, n)
    checks.check_swiglu(rows, n)
    checks.check_swiglu(rows, n, in_place=True)


@pytest.mark.parametrize("start_pos", [0, 1, 3000, 131000])
@pytest.mark.parametrize(("rows", "pairs"), [(1, 1), (5, 20), (513, 64), (70000, 16)])
def test_rope_table(rows: int, pairs: int, start_pos: int) -> None:
    """R17, fault 12."""
    checks.check_rope_table(rows, pairs, start_pos, 1.1386)


@pytest.mark.parametrize("layout", list(RopeLayout))
@pytest.mark.parametrize(
    ("rows", "heads", "head_dim", "pairs"),
    [(1, 1, 2, 1), (5, 3, 64, 32), (33, 9, 64, 16), (512, 24, 128, 64), (7, 5, 80, 32), (9, 4, 256, 128)],
)
def test_rope(rows: int, heads: int, head_dim: int, pairs: int, layout: RopeLayout) -> None:
    """R17: both layouts, whole and partial width."""
    checks.check_rope(rows, heads, head_dim, pairs, layout)


@pytest.mark.parametrize("d", [1, 10, 32, 36, 64, 80, 96, 100, 128, 160, 192, 250, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (9, 3), (8, 1)])
@pytest.mark.parametrize(("n", "start_pos"), [(1, 0), (5, 3), (65, 62), (130, 257)])
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (48, 0.0), (0, 20.0), (5, 50.0)])
def test_attention(n: int, heads: int, kv_heads: int, d: int, start_pos: int, window: int, softcap: float) -> None:
    """R11, R18: multi-head, grouped and multi-query, prefixes, window, soft cap, every width of kernel."""
    checks.check_attention(n, heads, kv_heads, d, start_pos, window=window, softcap=softcap)


@pytest.mark.parametrize(
    ("n", "heads", "kv_heads", "d", "start_pos", "window"),
    [(512, 9, 3, 64, 0, 0), (512, 24, 8, 128, 512, 0), (700, 6, 2, 96, 1500, 512), (4, 9, 3, 64, 4000, 0)],
)
def test_long_attention(n: int, heads: int, kv_heads: int, d: int, start_pos: int, window: int) -> None:
    checks.check_attention(n, heads, kv_heads, d, start_pos, window=window)


@pytest.mark.parametrize("extreme", [False, True])
@pytest.mark.parametrize("kind", sorted(PLANES))
def test_weights_equal_the_gguf_package_bit_for_bit(kind: str, extreme: bool) -> None:
    """Zero tolerance (fault 21)."""
    checks.check_dequantization(kind, 67, max(4 * KINDS[kind].block, 100), extreme=extreme)


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("kind", sorted(PLANES))
def test_every_kind_with_every_tile(kind: str, tile: Tile) -> None:
    """R19: odd M and N around a tile and beyond, K of one block and of many."""
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


@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("kind", sorted(PLANES))
def test_few_rows(kind: str, m: int) -> None:
    """Every kind and height of the kernel for few rows, N odd, K of one block and of many."""
    block = max(KINDS[kind].block, 32)
    for n, k in [(1, block), (77, 5 * block), (1031, 3072)]:
        checks.check_matmul(kind, m, n, k)


@pytest.mark.parametrize("kind", ["Q4_1", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("m", [1, 2, 4, 5, 8, 9, 16, 33, 63, 64, 65, 512])
def test_layer_shapes(kind: str, m: int) -> None:
    """SmolLM2's and a 3B model's widths, with the tile that the launcher chooses."""
    shapes = [(576, 576), (192, 576), (1536, 576), (576, 1536)] if kind == "Q4_1" else [(1024, 3072), (3072, 8192)]
    for n, k in shapes:
        checks.check_matmul(kind, m, n, k)
