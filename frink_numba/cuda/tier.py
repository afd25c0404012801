"""Kernel tiers: what each needs of a device, and the choice of one per device."""

from __future__ import annotations

from dataclasses import dataclass

from frink_numba.errors import BackendUnavailable


@dataclass(frozen=True, slots=True)
class Tier:
    """A set of kernels; `needs` is the least compute capability, `exact` that only this major version has it."""

    name: str
    needs: tuple[int, int]
    exact: bool


# Best first: `auto` takes the first that the device has.
TIERS = (
    Tier("wgmma", (9, 0), exact=True),
    Tier("mma", (8, 0), exact=False),
    Tier("simt", (0, 0), exact=False),
)


def choose_tier(wanted: str, compute_capability: tuple[int, int]) -> str:
    """The tier for a device; `wanted` is FRINK_CUDA_TIER's value. BackendUnavailable when it cannot be had."""
    if wanted == "auto":
        return next(tier.name for tier in TIERS if _runs_on(tier, compute_capability))
    tier = next(tier for tier in TIERS if tier.name == wanted)
    if not _runs_on(tier, compute_capability):
        major, minor = compute_capability
        least = f"{tier.needs[0]}.{tier.needs[1]}"
        raise BackendUnavailable(
            f"FRINK_CUDA_TIER={wanted} needs compute capability {least}{'' if tier.exact else ' or newer'}, "
            f"the device has {major}.{minor}"
        )
    return wanted


def _runs_on(tier: Tier, compute_capability: tuple[int, int]) -> bool:
    if tier.exact:
        return compute_capability == tier.needs
    return compute_capability >= tier.needs
