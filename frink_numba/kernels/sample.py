"""The ends of a generated token on the device: the embedding's row on its way in, the choice of the token.

    samplers = Samplers((9, 0))                                               # per device
    launch = samplers.embed(weights, ids, m, hidden, scale=1.0)               # hidden[i] = scale * row ids[i] of a pack
    launch = samplers.argmax(logits, m, vocabulary, ids, workspace=address)   # ids[i] = index of row i's largest logit
    launch = samplers.argmax(..., next_step=NextStep(...))                    # and the device goes on by itself
    launch(stream)

`ids` lies in device memory: a graph may read what the graph before has written, so that a greedy step needs no host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from frink_numba.errors import ShapeError
from frink_numba.kernels import sample_kernels
from frink_numba.kernels.cubins import Source
from frink_numba.kernels.gemm import DeviceWeights
from frink_numba.kernels.launch import KernelShelf, Launch, LoadedKernel


@dataclass(frozen=True, slots=True)
class NextStep:
    """What the choice of a token changes, so that the next step of its sequence goes one position further; addresses.

    answers: int32 [m, most], where the chosen id goes, -1 when its logits are not numbers (0: no step follows). done:
    int32 [m], steps so far. positions: int32 [m]. records: SEQUENCE [layers, m], whose start_pos and kv_row grow.
    """

    answers: int = 0
    done: int = 0
    positions: int = 0
    records: int = 0
    layers: int = 0
    most: int = 0


NO_STEP = NextStep()


class Samplers:
    """The kernels of one device, loaded once each. Thread-safe."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self._shelf = KernelShelf(capability)

    def embed(self, weights: DeviceWeights, ids: int, m: int, hidden: int, *, scale: float = 1.0) -> Launch:
        """A launch that writes scale * row ids[i] of a pack that is not gated to hidden[i], float32 [m, cols].

        ids: int32 [m]. Elements are the file's values, rounded to float32 once (F32 and BF16 were rounded to f16 when
        they were packed). An id beyond the last row gives the last row.
        """
        if weights.gated or m < 1:
            raise ShapeError(f"an embedding is a plain pack and a launch has at least one row, got {m}")
        # A step begins here. Nothing of it may start before the step in front has ended: launches behind this one read
        # what a choice leaves (positions, records) ahead of their own wait.
        source = sample_kernels.embed_source(weights.kind, overlap=False)
        kernel = self._shelf.kernel(source, sample_kernels.EMBED_ARGUMENTS)
        return kernel.bind(m, ids, weights.data, weights.row_scale, hidden, scale, weights.rows, weights.cols)

    def argmax(
        self,
        logits: int,
        m: int,
        count: int,
        ids: int,
        *,
        workspace: int,
        pitch: int | None = None,
        next_step: NextStep = NO_STEP,
    ) -> Launch:
        """A launch that writes the index of each row's largest logit (the first of equals) to `ids`, int32 [m].

        logits: float32 [m, pitch] (None: dense), of which the first `count` of a row; a not-a-number counts as the
        largest. workspace: `argmax_workspace(m)` bytes, zeroed once; launches leave it zero. next_step: what the step
        behind this one begins with, each row a sequence of its own.
        """
        pitch = count if pitch is None else pitch
        if m < 1 or not 1 <= count <= pitch:
            raise ShapeError(f"a choice needs rows and logits, got {m} x {count} of {pitch}")
        source = sample_kernels.argmax_source(self._shelf.overlap)
        kernel = self._kernel(source, sample_kernels.ARGMAX_ARGUMENTS)
        step = next_step
        addresses = (step.answers, step.done, step.positions, step.records)
        return kernel.bind(
            m * sample_kernels.ARGMAX_BLOCKS, logits, ids, workspace, count, pitch, *addresses, step.layers, step.most
        )

    @staticmethod
    def argmax_workspace(m: int) -> int:
        """Bytes of the workspace for m rows."""
        return 16 * m

    def _kernel(self, source: Source, arguments: Any) -> LoadedKernel:
        return self._shelf.kernel(source, arguments, overlap=self._shelf.overlap)

    def settle(self) -> None:
        """Load the kernels that were asked for so far; what the compiler or the driver raises."""
        self._shelf.settle()

    def close(self) -> None:
        """Unload the kernels; their launches must not run any more."""
        self._shelf.close()
