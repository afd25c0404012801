"""Another engine on frink_numba's GPU backend: its own weights, its own cache, public names only.

    python examples/third_party_engine.py

Without a GPU it says why, and the NumPy backend serves. Run it with NUMBA_ENABLE_CUDASIM=1 to see the GPU's code run
on the CPU, slowly.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import frink_numba as fn
from frink_numba import cuda
from frink_numba.backend import Backend, Step
from frink_numba.dispatch import Dispatcher
from frink_numba.host.backend import HostBackend
from frink_numba.layer import Activation, AttentionSpec, Expert, FeedForward, Layer, Rope, RopeLayout
from frink_numba.quant import QuantMatrix

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN = 16, 2, 1, 8, 24


class GrowingCache:
    """This engine's cache of one layer: an array that each chunk makes longer."""

    n_kv_heads, key_dim, value_dim = KV_HEADS, HEAD_DIM, HEAD_DIM

    def __init__(self) -> None:
        self.keys = self.values = np.empty((0, KV_HEADS, HEAD_DIM), np.float32)

    @property
    def positions(self) -> int:
        return len(self.keys)

    rows = positions  # nothing is ever evicted

    def prefix(self) -> tuple[np.ndarray, np.ndarray]:
        return self.keys, self.values

    def append(self, keys: np.ndarray, values: np.ndarray) -> None:
        self.keys, self.values = np.concatenate([self.keys, keys]), np.concatenate([self.values, values])


class Engine:
    """Two layers of random weights behind whatever backends it is given."""

    def __init__(self, backends: str) -> None:
        rng = np.random.default_rng(0)

        def matrix(rows: int, cols: int) -> QuantMatrix:
            return QuantMatrix.from_float32(rng.normal(0, cols**-0.5, (rows, cols)))

        def layer() -> Layer:
            width, kv_width, ones = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, np.ones(HIDDEN, np.float32)
            q, k, v = matrix(width, HIDDEN), matrix(kv_width, HIDDEN), matrix(kv_width, HIDDEN)
            rope = Rope(10_000.0, HEAD_DIM, RopeLayout.NEOX)
            attention = AttentionSpec(HEADS, KV_HEADS, HEAD_DIM, q, k, v, matrix(HIDDEN, width), rope)
            expert = Expert(matrix(FFN, HIDDEN), matrix(FFN, HIDDEN), matrix(HIDDEN, FFN))
            return Layer(ones, attention, ones, FeedForward(Activation.SWIGLU, (expert,)), norm_eps=1e-5)

        self.layers = [layer(), layer()]
        self.caches = [GrowingCache() for _ in self.layers]
        self.dispatcher = Dispatcher(self.layers, host=HostBackend, backends=backends)

    def feed(self, hidden: np.ndarray) -> np.ndarray:
        """Take the next chunk [n, HIDDEN] through the layers, and keep its K/V rows."""
        step = Step(self.layers, self.caches, self.caches[0].positions, len(hidden), hidden)
        result = self.dispatcher.run(step)
        for cache, (keys, values) in zip(self.caches, result.kv_rows, strict=True):
            cache.append(keys, values)
        print("served by", ", ".join(f"{run.backend} ({run.length} layers)" for run in result.served))
        return result.hidden


def accelerator(layers: Sequence[Layer]) -> Backend:
    """The GPU backend under this engine's own name; raises BackendUnavailable with the reason why there is none."""
    backend = cuda.create(layers)
    backend.name = "accelerator"
    return backend


def main() -> None:
    fn.register_backend("accelerator", accelerator)
    text = np.random.default_rng(1).normal(size=(9, HIDDEN)).astype(np.float32)
    answers = []
    for backends in ("accelerator,host", "host"):
        engine = Engine(backends)
        for missing in engine.dispatcher.unavailable:
            print(f"{missing.name} is unavailable: {missing.reason}")
        answers.append(np.concatenate([engine.feed(text[:4]), engine.feed(text[4:])]))
        engine.dispatcher.close()
    difference = np.linalg.norm(answers[0] - answers[1]) / np.linalg.norm(answers[1])
    print(f"relative difference to the NumPy backend: {difference:.1e}")


if __name__ == "__main__":
    main()
