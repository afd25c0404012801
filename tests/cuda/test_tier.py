"""The choice of a kernel tier."""

from __future__ import annotations

import pytest

from frink_numba.cuda.tier import TIERS, choose_tier
from frink_numba.errors import BackendUnavailable


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_auto_takes_the_best_that_is_built(capability: tuple[int, int]):
    built = [tier.name for tier in TIERS if tier.built]
    assert choose_tier("auto", capability) in built
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


@pytest.mark.parametrize("tier", [tier for tier in TIERS if not tier.built], ids=lambda tier: tier.name)
def test_a_forced_tier_that_is_not_built_is_named(tier):
    with pytest.raises(BackendUnavailable, match=f"FRINK_CUDA_TIER={tier.name} is not built"):
        choose_tier(tier.name, tier.needs)
