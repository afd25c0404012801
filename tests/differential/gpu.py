"""Helpers of the tests that need a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest

from frink_numba.backend import Step
from frink_numba.cuda.backend import CudaBackend
from frink_numba.cuda.device import CudaDevice, make_body, make_runtime, visible_devices
from frink_numba.cuda.tier import choose_tier
from frink_numba.errors import BackendUnavailable
from frink_numba.layer import Layer


@dataclass
class RowCache:
    """A layer cache that is just two arrays."""

    keys: np.ndarray
    values: np.ndarray

    @property
    def positions(self) -> int:
        return len(self.keys)

    @property
    def rows(self) -> int:
        return len(self.keys)

    @property
    def n_kv_heads(self) -> int:
        return self.keys.shape[1]

    @property
    def key_dim(self) -> int:
        return self.keys.shape[2]

    @property
    def value_dim(self) -> int:
        return self.values.shape[2]

    def prefix(self) -> tuple[np.ndarray, np.ndarray]:
        return self.keys, self.values


TIERS = ("simt", "mma", "wgmma")


@cache
def device_of(tier: str) -> CudaDevice:
    """The first device, run by `tier`; skips where the device lacks it."""
    info = visible_devices()[0]
    try:
        choose_tier(tier, info.compute_capability)
    except BackendUnavailable as error:
        pytest.skip(str(error))
    runtime = make_runtime(tier, info.number)
    return CudaDevice(info, runtime, make_body(tier, info, runtime))


def bound_of(tier: str) -> float:
    """The most that a layer may be off (design: numerics)."""
    return 1e-5 if tier == "simt" else 2e-3


def step_over(layers: Sequence[Layer], hidden: np.ndarray, prefixes) -> Step:
    caches = [RowCache(keys, values) for keys, values in prefixes]
    return Step(layers, caches, len(prefixes[0][0]), len(hidden), hidden)


def poison(device: CudaDevice) -> None:
    """All scratch and all page-locked memory that is not lent becomes NaN."""
    with device.working():
        work = device.workspace
        block = work.arena.reserve(0, 0)
        if block is not None:
            device.runtime.upload(block, np.full(block.nbytes, 0xFF, np.uint8), work.compute)
            device.runtime.synchronize(work.compute)
        device.body.dropped()  # what a body knew of its scratch is no longer so
        for free in list(work.pinned._free):
            free.fill(0xFF)


def take(run) -> list[np.ndarray]:
    """A run's hidden batch and rows, as copies."""
    assert run is not None, "the run failed; see the log"
    return [run.hidden.copy(), *(part.copy() for pair in run.kv_rows for part in pair)]


def run_twice(backend: CudaBackend, step: Step) -> list[np.ndarray]:
    """The answer over poisoned memory, which must be the first one's bits."""
    length = len(step.layers)
    first = take(backend.run(0, length, step))
    poison(backend.device)
    second = take(backend.run(0, length, step))
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)
    return second
