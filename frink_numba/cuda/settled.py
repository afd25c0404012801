"""What is known of steps that are like one that just ran, so that they need not ask for everything again."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from frink_numba.backend import Edges, Step
from frink_numba.cuda.device import CudaDevice


@dataclass(frozen=True, slots=True)
class Settled:
    """Steps over all layers that ran, and what the next one over the same cache finds unchanged."""

    caches: weakref.ref[Any]
    sizes: set[tuple[int, int]]  # rows of each, and how many of them had logits
    positions: int  # for which the caches' K/V rows have room on the device
    state: tuple[int, int, int, int]  # of the device; nothing here keeps its memory
    edges: Edges | None  # of which logits and scratch have their sizes

    def holds(self, device: CudaDevice, step: Step) -> bool:
        sized = (step.batch, step.logits) in self.sizes and step.start_pos + step.rows <= self.positions
        return sized and self.alike(step, self.positions, device.state)

    def alike(self, step: Step, positions: int, state: tuple[int, int, int, int]) -> bool:
        same = self.caches() is step.caches and self.edges is step.edges
        return same and (self.positions, self.state) == (positions, state)
