"""Generation, one token after the other: tokens per second behind a prompt.

    python -m benchmarks.bench_decode --shapes smollm2,3b,8b --receipt benchmarks/receipts/decode-h200.json

A step takes one token id through every layer to its logits on the host, where the largest is chosen, and pushes the K/V
rows: what the decoder does for a greedy answer. A named shape has random weights (see `bench_prefill.py`); `smollm2` is
the real model when its file is there.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.bench_prefill import SHAPES, Shape, opened, real_smollm2, share_packs
from frink_numba.backend import Step
from frink_numba.driver import query_driver
from frink_numba.errors import ModelNotFoundError
from frink_numba.host.dequantize import dequantize_rows
from frink_numba.host.kv_cache import KVCache
from frink_numba.receipt import Row, cpu_name, receipt, write_receipt


def shape_tokens(shape: Shape, prompt: int, backends: str) -> tuple[Callable[[], None], str]:
    """(a step of one token behind `prompt` others, who serves it)."""
    layers, edges, walk = opened(shape, backends)
    cache = KVCache(layers, prompt + 4096, allocate=walk.host_bytes)

    def run(ids: np.ndarray) -> int:
        n = len(ids)
        cache.reserve(n)

        def lookup() -> np.ndarray:
            return dequantize_rows(edges.embedding, ids)

        step = Step(layers, cache, cache.positions, n, tokens=ids, edges=edges, lookup=lookup, logits=1)
        result = walk.run(step)
        assert result.logits is not None
        cache.push(result.kv_rows)
        return int(np.argmax(result.logits))

    token = [run(np.random.default_rng(1).integers(0, shape.vocabulary, prompt))]

    def step() -> None:
        token[0] = run(np.array(token))

    row = walk.plan(Step(layers, cache, cache.positions, 1)).rows[0]
    return step, f"{row.backend}, {row.note}"


def smollm2_tokens(prompt: int, backends: str) -> tuple[Callable[[], None], str]:
    """The same with the real model. ModelNotFoundError when the file is not there."""
    decoder = real_smollm2(backends)
    cache = decoder.new_cache()
    last = [decoder.prefill(np.random.default_rng(1).integers(0, 40000, prompt), cache)]

    def step() -> None:
        logits = last[0].logits
        assert logits is not None
        last[0] = decoder.decode(int(np.argmax(logits)), cache)

    row = decoder.plan(batch=1).rows[0]
    return step, f"{row.backend}, {row.note}"


def measure(name: str, prompt: int, backends: str, tokens: int) -> Row:
    shape = SHAPES[name]
    case = f"{shape.name} tg{tokens} after {prompt}"
    try:
        if name != "smollm2":
            raise ModelNotFoundError("a shape")
        step, served = smollm2_tokens(prompt, backends)
    except ModelNotFoundError:
        step, served = shape_tokens(shape, prompt, backends)
        case = case.replace("135M", "135M shape")
    for _ in range(8):
        step()
    samples = []
    for _ in range(tokens):
        start = time.perf_counter()
        step()
        samples.append(1 / (time.perf_counter() - start))
    backend, _, note = served.partition(", ")
    tier = note.rpartition(", ")[2].removesuffix(" tier") or None
    row = Row.from_samples(case, "tok/s", samples, backend, tier=tier)
    print(f"{case}: {row.value:.0f} tok/s ({row.p20:.0f} to {row.p80:.0f}) on {served}", flush=True)
    return row


def main() -> int:
    """Measure and print; write the receipt when asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", default="smollm2,3b,8b", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--receipt", type=Path)
    arguments = parser.parse_args()
    share_packs()
    rows = [
        measure(name, arguments.prompt, arguments.backend, arguments.tokens) for name in arguments.shapes.split(",")
    ]
    if arguments.receipt is not None:
        driver = query_driver()
        machine = driver.devices[0].name if driver.devices and arguments.backend != "host" else cpu_name()
        command = "python -m benchmarks.bench_decode " + " ".join(
            f"--{name} {getattr(arguments, name)}" for name in ("shapes", "prompt", "tokens", "backend")
        )
        write_receipt(arguments.receipt, receipt("decode", command, rows, machine=machine, driver=driver.version))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
