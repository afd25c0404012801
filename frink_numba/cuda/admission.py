"""Which layers of a model fit into a device's memory: decided from descriptions, step by step, without device work.

Layers are admitted in the order in which a walk over the layers first asks for them, as long as their weights and the
step's scratch stay within the budget. Two devices can thus share a model: the second is only asked for what the first
declined, and counts from there.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

from frink_numba.backend import Edges, Step
from frink_numba.cuda.body import ScratchSize
from frink_numba.cuda.device import CudaDevice
from frink_numba.layer import Layer
from frink_numba.plan import in_units


@dataclass(slots=True)
class _Walk:
    """What was answered for one step so far, with the step's scratch and the bytes of others added in."""

    step: weakref.ref[Step] | None = None
    limit: int = 0
    others: int = 0
    scratch: int = 0
    admitted: dict[int, bool] = field(default_factory=dict)
    nbytes: int = 0


class Admission:
    """Answers for one backend; `layers`: all of its model's, `served`: the numbers of those that kernels serve."""

    def __init__(self, device: CudaDevice, layers: Sequence[Layer], served: Sequence[int], holder: object) -> None:
        self._device = device
        self._holder = holder
        self._layers = layers
        self._bytes = {number: device.body.layer_bytes(layers[number]) for number in served}
        self.total = sum(self._bytes.values())
        self._scratch = device.body.scratch([layers[number] for number in served]) if served else None
        self._local = threading.local()  # steps of several threads do not disturb each other

    def reason(self, number: int, step: Step) -> str | None:
        """Why layer `number` has no room on the device in this step; None when it is admitted."""
        walk, limit, others = self._walk(), self._device.memory.bytes(), self._others()
        if walk.step is None or walk.step() is not step or (walk.limit, walk.others) != (limit, others):
            walk = self._local.walk = _Walk(weakref.ref(step), limit, others, self.scratch(step))
        if number not in walk.admitted:
            own = self._bytes[number] + self.mirror(number, step)
            need = walk.nbytes + own + walk.scratch + walk.others
            walk.admitted[number] = need <= walk.limit
            walk.nbytes += own if need <= walk.limit else 0
        if walk.admitted[number]:
            return None
        return (
            f"no room for its weights: the layers take {in_units(self.total)} beside scratch, "
            f"the device memory budget is {in_units(walk.limit)}"
        )

    def scratch(self, step: Step) -> int:
        """Bytes of scratch that a run of any of the layers needs at most, and no less than there is."""
        need = self.run_scratch(self._scratch, step) if self._scratch else 0
        return max(need, self._device.arena_bytes)

    def most_scratch(self, step: Step) -> int:
        """Bytes of scratch of the largest chunk at the step's position."""
        rows = max(step.batch, self._device.body.chunk_size)
        return self.run_scratch(self._scratch, step, rows) if self._scratch else 0

    def run_scratch(self, size: ScratchSize, step: Step, rows: int | None = None) -> int:
        """Bytes of scratch of a run of the step over layers of this `size`; of another with so many `rows`."""
        edges = self._edges(step) if step.logits else None
        return size.nbytes(rows or step.batch, step.start_pos, edges, step.logits)

    def mirror(self, number: int, step: Step) -> int:
        """Bytes of layer `number`'s K/V rows on the device after the step."""
        positions = step.start_pos + step.rows
        return self._device.body.mirror_bytes(self._layers[number], step.caches[number], positions)

    def admitted(self) -> set[int]:
        """The layers that the calling thread's last step was promised."""
        return {number for number, admitted in self._walk().admitted.items() if admitted}

    def spare(self, step: Step) -> int:
        """Bytes of the budget left, at least 0, if all layers, edges and K/V rows were there beside what is."""
        body = self._device.body
        rows, positions = body.mirrored_bytes, step.start_pos + step.rows
        for number in self._bytes:
            cache = step.caches[number]
            rows += self.mirror(number, step)
            if body.room(cache) >= positions:  # else they move, and what they leave is kept for other caches
                rows -= body.mirror_held(cache)
        return max(0, self._device.memory.bytes() - self.total - self._edge_bytes(step) - self._others() - rows)

    def edges_held(self, step: Step) -> int:
        """Bytes of the embedding and the output matrix, where these are on the device already."""
        edges = step.edges
        return self._edge_bytes(step) if edges is not None and self._device.bank.holds(edges, self._holder) else 0

    def _edge_bytes(self, step: Step) -> int:
        """Bytes of the embedding and the output matrix, there or not yet; 0 where the device does not do them."""
        edges = self._edges(step)
        return 0 if edges is None else self._device.body.edges_bytes(edges)

    def _edges(self, step: Step) -> Edges | None:
        """The step's edges, where the device does them."""
        edges = step.edges
        return None if edges is None or self._device.body.why_not_edges(edges) is not None else edges

    def _others(self) -> int:
        return self._device.bank.bytes_of_others(self._holder)

    def _walk(self) -> _Walk:
        walk = getattr(self._local, "walk", None)
        return walk if walk is not None else _Walk()
