"""Where the host body's time goes: synthetic layers of SmolLM2's shapes, against the products alone.

    python -m benchmarks.bench_host_body [--layers 30] [--prefill 512] [--prefix 128] [--runs 7] [--receipt PATH]

The floor is the same run's matrix products and nothing else, by float32 weights: what NumPy's BLAS allows on this
machine at this moment. Decoding with numba goes below it, since it reads the quantized bytes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.command import exit_with
from frink_numba.backend import Step
from frink_numba.host.backend import HostBackend
from frink_numba.host.kv_cache import KVCache
from frink_numba.host.weights import WeightStore
from frink_numba.layer import Activation, AttentionSpec, Expert, FeedForward, Layer, Rope, RopeLayout
from frink_numba.quant import KINDS, QuantMatrix
from frink_numba.receipt import Row, cpu_name, receipt, write_receipt

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 576, 1536, 9, 3, 64, 49152


def q4_1(rng: np.random.Generator, rows: int, cols: int) -> QuantMatrix:
    """Random Q4_1 weights of mean 0 and a deviation near 0.05."""
    blocks = np.empty((rows, cols // 32, 20), np.uint8)
    blocks[..., :2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    blocks[..., 2:4] = np.frombuffer(np.float16(-0.075).tobytes(), np.uint8)
    blocks[..., 4:] = rng.integers(0, 256, (rows, cols // 32, 16), np.uint8)
    return QuantMatrix(KINDS["Q4_1"], blocks.reshape(rows, -1), rows, cols)


def smollm2_layer(rng: np.random.Generator, rope: Rope) -> Layer:
    """A layer of SmolLM2-135M's shapes."""
    width, kv_width = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    norm = np.ones(HIDDEN, np.float32)
    attention = AttentionSpec(
        HEADS,
        KV_HEADS,
        HEAD_DIM,
        q4_1(rng, width, HIDDEN),
        q4_1(rng, kv_width, HIDDEN),
        q4_1(rng, kv_width, HIDDEN),
        q4_1(rng, HIDDEN, width),
        rope,
    )
    expert = Expert(q4_1(rng, FFN, HIDDEN), q4_1(rng, FFN, HIDDEN), q4_1(rng, HIDDEN, FFN))
    return Layer(norm, attention, norm, FeedForward(Activation.SWIGLU, (expert,)), 1e-5)


class Model:
    """Layers, vocabulary and a weight store that holds them all."""

    def __init__(self, layers: int) -> None:
        rng = np.random.default_rng(0)
        rope = Rope(100000.0, HEAD_DIM, RopeLayout.NORM)
        self.layers = [smollm2_layer(rng, rope) for _ in range(layers)]
        self.output = q4_1(rng, VOCABULARY, HIDDEN)
        self.store = WeightStore()
        self.backend = HostBackend(self.layers, self.store)

    def step(self, cache: KVCache, hidden: np.ndarray) -> np.ndarray:
        """Hidden rows through all layers, rows pushed; logits of the last."""
        run = self.backend.run(0, len(self.layers), Step(self.layers, cache, cache.positions, hidden.shape[0], hidden))
        cache.push(run.kv_rows)
        return self.store.matmul(run.hidden[-1:], self.output)

    def products(self, n: int) -> Callable[[], None]:
        """The matrix products of a step of `n` tokens, as one call."""
        sets = []
        for layer in self.layers:
            spec, expert = layer.attention, layer.ffn.experts[0]
            sets += [(spec.q, spec.k, spec.v), (spec.o,), (expert.gate, expert.up), (expert.down,)]
        weights = [self.store.get(*matrices) for matrices in sets]
        rng = np.random.default_rng(1)
        inputs = {w.shape[1]: rng.standard_normal((w.shape[1], n), dtype=np.float32) for w in weights}
        outputs = {w.shape[0]: np.empty((w.shape[0], n), np.float32) for w in weights}
        last, logits = rng.standard_normal(HIDDEN, dtype=np.float32), np.empty(VOCABULARY, np.float32)
        vocabulary = self.store.get(self.output)

        def run() -> None:
            for w in weights:
                np.dot(w, inputs[w.shape[1]], out=outputs[w.shape[0]])
            np.dot(vocabulary, last, out=logits)

        return run


def rates(tokens: int, step: Callable[[], object], products: Callable[[], object], runs: int) -> list[list[float]]:
    """Tokens per second of `step` and of `products`, in turns, so that both meet the machine in the same state."""
    calls = (step, products)
    for call in calls:
        call()
    samples: list[list[float]] = [[], []]
    for _ in range(runs):
        for call, taken in zip(calls, samples, strict=True):
            start = time.perf_counter()
            call()
            taken.append(tokens / (time.perf_counter() - start))
    return samples


def measure(layers: int, prefill: int, prefix: int, runs: int) -> list[Row]:
    """One row of prefill and one of decode, each with the products alone as its baseline."""
    model = Model(layers)
    rng = np.random.default_rng(2)
    cache = KVCache(model.layers, prefill + prefix + 16)

    def hidden(n: int) -> np.ndarray:
        return rng.standard_normal((n, HIDDEN), dtype=np.float32)

    def run_from(position: int, batch: np.ndarray, steps: int) -> None:
        cache.truncate(position)
        for _ in range(steps):
            model.step(cache, batch)

    def row(case: str, tokens: int, step: Callable[[], object], products: Callable[[], object]) -> Row:
        taken, limit = rates(tokens, step, products, runs)
        return Row.from_samples(
            f"SmolLM2-135M shapes, {layers} layers, {case}",
            "tok/s",
            taken,
            "host",
            baseline="its products alone, float32 in NumPy",
            baseline_value=statistics.median(limit),
        )

    batch, one = hidden(prefill), hidden(1)
    rows = [row(f"pp{prefill}", prefill, lambda: run_from(0, batch, 1), model.products(prefill))]
    cache.truncate(0)
    model.step(cache, hidden(prefix))
    products = model.products(1)
    case = f"tg16 after {prefix}"
    rows.append(row(case, 16, lambda: run_from(prefix, one, 16), lambda: [products() for _ in range(16)]))
    return rows


def main() -> int:
    """Measure and print; write the receipt when asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--prefix", type=int, default=128)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--receipt", type=Path)
    arguments = parser.parse_args()
    rows = measure(arguments.layers, arguments.prefill, arguments.prefix, arguments.runs)
    for entry in rows:
        print(
            f"{entry.case}: {entry.value:.1f} tok/s ({entry.p20:.1f} to {entry.p80:.1f}), "
            f"products alone {entry.baseline_value:.1f}, ratio {entry.ratio:.3f}"
        )
    if arguments.receipt:
        command = f"python -m benchmarks.bench_host_body {' '.join(sys.argv[1:])}".strip()
        write_receipt(arguments.receipt, receipt("host_body", command, rows, machine=cpu_name()))
    return 0


if __name__ == "__main__":
    exit_with(main)
