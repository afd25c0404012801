"""Mirrors of more than 4 GB each on a GPU, with rows where a wrapped address would lead, and zeros between them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

_REGION = 200  # rows of a place that holds values


@dataclass
class FarMirrors:
    """K and V f16 [positions, heads, width]; `held`, a side: first position to the rows there. All others are zero."""

    arrays: list[Any]
    heads: int
    width: int
    held: list[dict[int, np.ndarray]] = field(default_factory=lambda: [{}, {}])

    @property
    def k(self) -> int:
        return self._address(0)

    @property
    def v(self) -> int:
        return self._address(1)

    def _address(self, side: int) -> int:
        return int(self.arrays[side].__cuda_array_interface__["data"][0])

    def put(self, side: int, first: int, rows: np.ndarray) -> None:
        self.arrays[side][first : first + len(rows)].copy_to_device(np.ascontiguousarray(rows))
        self.held[side][first] = rows

    def read(self, side: int, first: int, rows: int) -> np.ndarray:
        back: np.ndarray = self.arrays[side][first : first + rows].copy_to_host()
        return back

    def attended(self, q: np.ndarray, position: int) -> np.ndarray:
        """float64 [heads, width]: attention of q [heads, width] over all keys up to `position`, heads one to one."""
        seen = [{at: rows[: max(0, position + 1 - at)] for at, rows in side.items()} for side in self.held]
        keys, values = (np.concatenate([side[at] for at in sorted(side)]).astype(np.float64) for side in seen)
        zeros = position + 1 - len(keys)  # keys of zeros, each with the score 0 and the value 0
        scores = np.einsum("hc,nhc->hn", q.astype(np.float64), keys) * self.width**-0.5
        top = np.maximum(scores.max(axis=1), 0.0)
        weights = np.exp(scores - top[:, None])
        total = weights.sum(axis=1) + zeros * np.exp(-top)
        return np.einsum("hn,nhc->hc", weights, values) / total[:, None]


@contextmanager
def far_mirrors(positions: int, heads: int, width: int) -> Iterator[FarMirrors]:
    """Skips where the GPU lacks the memory."""
    from numba import cuda

    nbytes = 2 * positions * heads * width
    assert nbytes > 1 << 32
    free, _ = cuda.current_context().get_memory_info()
    if free < 3 * nbytes:
        pytest.skip(f"{3 * nbytes >> 30} GB of device memory are needed, {free >> 30} GB are free")
    made = FarMirrors([cuda.device_array((positions, heads, width), np.float16) for _ in "kv"], heads, width)
    for array in made.arrays:
        cuda.cudadrv.driver.device_memset(array, 0, array.nbytes)
    rng = np.random.default_rng(7)
    row = 2 * heads * width
    last = positions - 300
    wrapped = ((last * row) % (1 << 32) // row, (last * row) % (1 << 31) // row)
    places = {0, last, *(max(0, place - 20) for place in wrapped if place > 2 * _REGION)}
    for side in range(2):
        for place in places:
            rows = rng.standard_normal((_REGION, heads, width)) * (2.0 if side else 1.0)
            made.put(side, place, rows.astype(np.float16))
    cuda.synchronize()
    yield made
    made.arrays.clear()
