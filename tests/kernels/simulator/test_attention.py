"""Causal attention in the simulator (R11, R18)."""

from __future__ import annotations

import pytest

from tests.kernels import simt_checks as checks


@pytest.mark.parametrize(
    ("n", "heads", "kv_heads", "d", "start_pos", "window", "softcap"),
    [
        (5, 4, 2, 16, 0, 0, 0.0),
        (3, 3, 1, 80, 61, 0, 0.0),  # the batch crosses a block of keys
        (2, 2, 2, 10, 130, 70, 30.0),  # elements guarded one by one; blocks before the window skipped
        (23, 6, 2, 64, 40, 0, 0.0),  # two blocks of rows
        (6, 1, 1, 36, 0, 4, 0.0),  # fault 5: query 5 must not see key 1
    ],
)
def test_attention(n: int, heads: int, kv_heads: int, d: int, start_pos: int, window: int, softcap: float) -> None:
    checks.check_attention(n, heads, kv_heads, d, start_pos, window=window, softcap=softcap)
