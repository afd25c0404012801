"""The choice of a kernel tier."""

from __future__ import annotations

import pytest

from frink_numba.cuda.tier import choose_tier
from frink_numba.errors import BackendUnavailable


@pytest.mark.parametrize(
    ("capability", "best"),
    [((7, 5), "simt"), ((8, 0), "mma"), ((8, 9), "mma"), ((9, 0), "wgmma"), ((10, 0), "mma"), ((12, 0), "mma")],
)
def test_auto_takes_the_best_that_the_device_has(capability: tuple[int, int], best: str):
    assert choose_tier("auto", capability) == best
    assert choose_tier("simt", capability) == "simt"


@pytest.mark.parametrize(
    ("wanted", "capability", "reason"),
    [
        ("wgmma", (8, 0), "needs compute capability 9.0, the device has 8.0"),
        ("wgmma", (12, 0), "needs compute capability 9.0, the device has 12.0"),
        ("mma", (7, 5), "needs compute capability 8.0 or newer, the device has 7.5"),
    ],
)
def test_a_forced_tier_that_the_device_lacks_is_named(wanted: str, capability: tuple[int, int], reason: str):
    """FRINK_CUDA_TIER is never exchanged for another tier in silence."""
    with pytest.raises(BackendUnavailable, match=f"FRINK_CUDA_TIER={wanted} {reason}"):
        choose_tier(wanted, capability)
