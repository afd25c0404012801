"""Causal attention on a GPU against float64 (R11, R18)."""

from __future__ import annotations

import pytest

from tests.kernels import simt_checks as checks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("d", [1, 10, 32, 36, 64, 80, 96, 100, 128, 160, 192, 250, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (9, 3), (8, 1)])
@pytest.mark.parametrize(("n", "start_pos"), [(1, 0), (5, 3), (65, 62), (130, 257)])
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (48, 0.0), (0, 20.0), (5, 50.0)])
def test_attention(n: int, heads: int, kv_heads: int, d: int, start_pos: int, window: int, softcap: float) -> None:
    """Multi-head, grouped and multi-query, prefixes, window, soft cap, every width of kernel."""
    checks.check_attention(n, heads, kv_heads, d, start_pos, window=window, softcap=softcap)


@pytest.mark.parametrize(
    ("n", "heads", "kv_heads", "d", "start_pos", "window"),
    [(512, 9, 3, 64, 0, 0), (512, 24, 8, 128, 512, 0), (700, 6, 2, 96, 1500, 512), (4, 9, 3, 64, 4000, 0)],
)
def test_long_attention(n: int, heads: int, kv_heads: int, d: int, start_pos: int, window: int) -> None:
    checks.check_attention(n, heads, kv_heads, d, start_pos, window=window)
