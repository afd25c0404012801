"""The ends of a generated token on the device: the embedding's row on its way in, the choice of the token.

    samplers = Samplers((9, 0))                                               # per device
    launch = samplers.embed(weights, ids, m, hidden, scale=1.0)               # hidden[i] = scale * row ids[i] of a pack
    launch = samplers.argmax(logits, m, vocabulary, ids, workspace=address)   # ids[i] = index of row i's largest logit
    launch(stream)

`ids` lies in device memory: a graph may read what the graph before has written, so that a greedy step needs no host.
"""

from __future__ import annotations

from frink_numba.errors import ShapeError
from frink_numba.kernels import sample_kernels
from frink_numba.kernels.gemm import DeviceWeights
from frink_numba.kernels.launch import KernelShelf, Launch


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
        shelf = self._shelf
        source = sample_kernels.embed_source(weights.kind, shelf.overlap)
        kernel = shelf.kernel(source, sample_kernels.EMBED_ARGUMENTS, overlap=shelf.overlap)
        return kernel.bind(m, ids, weights.data, weights.row_scale, hidden, scale, weights.rows, weights.cols)

    def argmax(self, logits: int, m: int, count: int, ids: int, *, workspace: int) -> Launch:
        """A launch that writes the index of each row's largest logit (the first of equals) to `ids`, int32 [m].

        logits: float32 [m, count], dense; a not-a-number counts as the largest. workspace: `argmax_workspace(m)` bytes,
        zeroed once; launches leave it zero.
        """
        if m < 1 or count < 1:
            raise ShapeError(f"a choice needs rows and logits, got {m} x {count}")
        shelf = self._shelf
        source = sample_kernels.argmax_source(shelf.overlap)
        kernel = shelf.kernel(source, sample_kernels.ARGMAX_ARGUMENTS, overlap=shelf.overlap)
        return kernel.bind(m * sample_kernels.ARGMAX_BLOCKS, logits, ids, workspace, count)

    @staticmethod
    def argmax_workspace(m: int) -> int:
        """Bytes of the workspace for m rows."""
        return 16 * m

    def close(self) -> None:
        """Unload the kernels; their launches must not run any more."""
        self._shelf.close()
