"""The ends of a generated token on the device: the embedding's row on the way in, the choice of the token on the way out.

    launch = samplers.embed(weights, ids, m, hidden, scale=1.0)   # hidden float32 [m, cols] = row ids[i] of a pack
    launch = samplers.argmax(logits, m, vocabulary, ids, workspace=address)   # ids int32 [m]

`ids` lies in device memory: a captured graph may read the ids that the graph before has written.
"""

from __future__ import annotations

from frink_numba.kernels.gemm import DeviceWeights


class Samplers:
    """The kernels of one device, loaded once each. Thread-safe."""

    def __init__(self, capability: tuple[int, int], multiprocessors: int) -> None:
        raise NotImplementedError

    def embed(self, weights: DeviceWeights, ids: int, m: int, hidden: int, *, scale: float = 1.0) -> object:
        """A launch that writes scale * row ids[i] of a (not gated) pack to hidden[i], float32 [m, cols]."""
        raise NotImplementedError

    def argmax(self, logits: int, m: int, count: int, ids: int, *, workspace: int) -> object:
        """A launch that writes the index of each row's largest logit (the first of equals) to `ids`, int32 [m].

        logits: float32 [m, count], dense. workspace: `argmax_workspace(m)` bytes, zeroed once.
        """
        raise NotImplementedError

    @staticmethod
    def argmax_workspace(m: int) -> int:
        raise NotImplementedError
