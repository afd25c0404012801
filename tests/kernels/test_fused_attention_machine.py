"""The fused attention's own PTX against float64 without a GPU, a few shapes of every kind (R11, R18): `ptx_machine`."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from frink_numba.kernels.fused_attention import HeadShape
from tests.kernels.attention_device import attention_case, run_attention
from tests.kernels.attention_machine import MachineAttentions, MachineDevice, stand_in_maps
from tests.kernels.compiling import missing_tools

pytestmark = pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))

LIMIT = 6e-4
WGMMA, MMA, SMALL = ("wgmma", (9, 0)), ("mma", (8, 0)), ("mma", (8, 6))
SINKS = np.asarray([0.5, -3.0, 4.0, 1.0], np.float32)


@pytest.mark.parametrize(
    ("tier", "heads", "lengths", "options"),
    [
        (WGMMA, (2, 1, 128), [(140, 70)], {}),
        (WGMMA, (4, 2, 64), [(100, 90), (0, 1), (7, 0), (64, 5)], {"window": 50, "sinks": SINKS}),
        (WGMMA, (2, 1, 256), [(81, 20)], {"q_scale": 2.0}),
        (WGMMA, (2, 1, 100), [(0, 40)], {"softcap": 5.0, "q_size": 4.0}),
        (MMA, (2, 1, 128), [(140, 70)], {}),
        (MMA, (4, 2, 64), [(100, 90), (0, 1), (7, 0), (64, 5)], {"window": 50, "sinks": SINKS}),
        (MMA, (2, 1, 256), [(85, 20)], {"k_scale": 2.0}),
        (SMALL, (2, 1, 136), [(3, 20)], {"softcap": 5.0, "q_size": 4.0}),
    ],
    ids=[
        "wgmma prefix",
        "wgmma window sinks ragged",
        "wgmma 256",
        "wgmma soft cap",
        "mma prefix",
        "mma window sinks ragged",
        "mma 256",
        "mma soft cap",
    ],
)
def test_against_float64(
    tier: tuple[str, tuple[int, int]],
    heads: tuple[int, int, int],
    lengths: list[tuple[int, int]],
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_in_maps(monkeypatch)
    device = MachineDevice()
    attention_case(MachineAttentions(*tier, device), device, heads, lengths, limit=LIMIT, runs=1, spare=9, **options)


@pytest.mark.parametrize("tier", [WGMMA, MMA], ids=lambda v: v[0])
def test_not_a_number_stays_with_those_who_see_it(
    tier: tuple[str, tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A spoilt row of K reaches the rows from its position on, of its head alone."""
    stand_in_maps(monkeypatch)
    rng = np.random.default_rng(2)
    q = rng.standard_normal((20, 2, 64)).astype(np.float16)
    k, v = (rng.standard_normal((50, 2, 64)).astype(np.float16) for _ in range(2))
    k[40, 1] = np.nan
    v[40, 1] = 0
    device = MachineDevice()
    out = run_attention(MachineAttentions(*tier, device), device, HeadShape(2, 2, 64), q, [(k, v, 20)], runs=1)[0]
    assert np.isnan(out[10:, 1]).all()
    assert np.isfinite(out[:10]).all()
    assert np.isfinite(out[:, 0]).all()


@pytest.mark.parametrize(
    ("tier", "before", "after"),
    [
        # The scores are read before their products are complete.
        (WGMMA, r"wgmma\.wait_group\.sync\.aligned 1;", "wgmma.wait_group.sync.aligned 2;"),
        # Nobody passes the turn at the tensor cores on.
        (WGMMA, r"bar\.arrive [^;]*;", "bar.warp.sync 0xffffffff;"),
        # The producer fills stages that are still in use.
        (WGMMA, r"xor\.b32 (\s*%r\d+, %r\d+), 1;", r"xor.b32 \1, 0;"),
        # Copies are not waited for.
        (MMA, r"cp\.async\.wait_group 0;", "cp.async.wait_group 1;"),
        # A fragment is multiplied untransposed.
        (MMA, r"\.x4\.trans\.", ".x4."),
    ],
    ids=["scores", "turns", "stages", "copies", "transposed"],
)
def test_the_machine_finds_faults(
    tier: tuple[str, tuple[int, int]], before: str, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What these tests rest on: kernels made wrong on purpose fail."""
    stand_in_maps(monkeypatch)
    device = MachineDevice()

    def change(text: str) -> str:
        changed, count = re.subn(before, after, text)
        assert count
        return changed

    wrong = MachineAttentions(*tier, device, change)
    with pytest.raises((AssertionError, KeyError)):
        attention_case(wrong, device, (2, 1, 64), [(200, 30)], limit=LIMIT, runs=1, spare=9)
