"""The SIMT body: float32 throughout, on every GPU that numba-cuda serves and in its simulator."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from frink_numba.backend import Edges
from frink_numba.cuda.body import WHOLE, Answer, Ends, KvSource, Member, ScratchSize, Share
from frink_numba.cuda.runtime import Runtime
from frink_numba.cuda.simt.launchers import Launchers
from frink_numba.cuda.simt.run import run_layers
from frink_numba.cuda.simt.scratch import ScratchShape
from frink_numba.cuda.simt.weights import SimtLayer, layer_bytes, upload_layer
from frink_numba.cuda.traffic import Traffic
from frink_numba.layer import Layer

if TYPE_CHECKING:
    from frink_numba.cuda.device import Workspace


class SimtBody:
    """See `frink_numba.cuda.body.Body`. Prefix rows go up with every step: it keeps none of them."""

    tier = "simt"
    mirrored_bytes = 0
    changes = 0
    chunk_size = 512
    most_ahead = 0
    mirrors_rows = False

    def __init__(self, runtime: Runtime, launchers: Launchers, *, invariant: bool = False) -> None:
        """invariant: matrix products sum in one order for any number of rows, and serve a single one too."""
        self.runtime = runtime
        self.launchers = launchers
        self.invariant = invariant
        # Below four rows the matrix products read all weights for next to no work (R2).
        self.least_batch = 1 if invariant else 4

    def judged(self, layer: Layer) -> Layer:
        return layer

    def why_not(self, layer: Layer) -> str | None:
        return None

    def layer_bytes(self, layer: Layer) -> int:
        return layer_bytes(layer)

    def scratch(self, layers: Sequence[Layer]) -> ScratchSize:
        return ScratchShape.of(layers)

    def mirror_bytes(self, layer: Layer, cache: Any, positions: int) -> int:
        return 0

    def room(self, cache: Any) -> int:
        return 0  # the scratch grows with the positions

    def mirror_held(self, cache: Any) -> int:
        return 0

    def forget(self, nbytes: int, keep: Sequence[Any] = ()) -> None:
        """There is nothing to forget."""

    most_sequences = 0

    def group_bytes(self, layers: Sequence[Layer], edges: Edges, members: Sequence[Member]) -> int:
        raise NotImplementedError  # it runs no groups

    def group_room(self, cache: Any) -> int:
        raise NotImplementedError

    def run_group(
        self,
        work: Workspace,
        layers: Sequence[Any],
        edges: Any,
        members: Sequence[Member],
        block: Any,
        traffic: Traffic,
        hidden: bool,
    ) -> list[Share]:
        raise NotImplementedError

    def forget_unused(self) -> None:
        """As `forget`."""

    def few_rows(self, layers: Sequence[Layer], edges: Edges) -> None:
        return None

    def why_not_edges(self, edges: Edges) -> str | None:
        return "the simt tier serves layers only"

    def edges_bytes(self, edges: Edges) -> int:
        raise NotImplementedError  # `why_not_edges` has a reason

    def upload_edges(self, edges: Edges, stream: Any, traffic: Traffic) -> SimtLayer:
        raise NotImplementedError

    def dropped(self) -> None:
        """Nothing refers to layers or scratch between runs."""

    def expect(self, owner: object, layers: Sequence[Layer], edges: Edges | None) -> None:
        """A layer's own bytes go up, but for their order."""

    def unexpect(self, owner: object) -> None:
        """Nothing was begun."""

    def preparing(self, layers: Sequence[Layer]) -> AbstractContextManager[None]:
        return nullcontext()

    def upload(self, layer: Layer, stream: Any, traffic: Traffic) -> SimtLayer:
        return upload_layer(self.runtime, self.launchers, layer, stream, traffic)

    def run(
        self,
        work: Workspace,
        layers: Sequence[SimtLayer],
        hidden: np.ndarray | None,
        sources: Sequence[KvSource],
        start_pos: int,
        block: Any,
        traffic: Traffic,
        ends: Ends = WHOLE,
    ) -> Answer:
        assert hidden is not None  # there are no edges
        prefixes = [source.prefix for source in sources]
        answer = run_layers(self.runtime, self.launchers, work, layers, hidden, prefixes, start_pos, block, traffic)
        return Answer(*answer)
