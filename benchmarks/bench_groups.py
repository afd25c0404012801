"""Several sequences in one step: many short texts against one long prompt, and tokens of several answers together.

    python -m benchmarks.bench_groups --shapes smollm2,8b --receipt benchmarks/receipts/groups-h200.json

Texts: 64 prompts of 64 tokens, each to its last logits, or to the probabilities of all its tokens; nobody keeps their
K/V rows. The baseline is one prompt of 4096 tokens in chunks, whose rows are kept. Tokens: S answers together behind 64
tokens each, greedy, rows pushed; the device chooses 16 of each at a time. The baseline is one answer alone, likewise.
Shapes have random weights (see `bench_prefill.py`).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bench_prefill import SHAPES, opened, record, share_packs
from benchmarks.command import exit_with
from frink_numba.backend import Step
from frink_numba.dispatch import StepResult
from frink_numba.host.kv_cache import KVCache
from frink_numba.receipt import Row

TEXTS, TEXT_TOKENS = 64, 64
CHUNK = 2048
AHEAD = 16


class Bench:
    """Steps over a shape's random layers, without a decoder around them."""

    def __init__(self, name: str, backends: str) -> None:
        self.shape = SHAPES[name]
        self.layers, self.edges, self.walk = opened(self.shape, backends)
        self._rng = np.random.default_rng(0)
        self.blank = KVCache(self.layers, CHUNK, allocate=self.walk.host_bytes)
        served = self.walk.plan(Step(self.layers, self.blank, 0, TEXT_TOKENS)).rows[0]
        self.backend, self.note = str(served.backend), served.note

    def cache(self, positions: int) -> KVCache:
        return KVCache(self.layers, positions, allocate=self.walk.host_bytes)

    def run(self, caches: Sequence[KVCache], n: int, **fields: Any) -> list[StepResult]:
        """One group of `n` random tokens behind each cache; their rows are pushed where they are kept."""
        results = list(self.walk.run_group([self.step(cache, n, **fields) for cache in caches]))
        for cache, result in zip(caches, results, strict=True):
            assert len(result.served) == 1, "a step was cut"
            if fields.get("keep", True):
                cache.push(result.kv_rows)
        return results

    def step(self, cache: KVCache, n: int, **fields: Any) -> Step:
        ids = self._rng.integers(0, self.shape.vocabulary, n)
        what = {"tokens": ids, "edges": self.edges, "lookup": self._no_lookup, **fields}
        return Step(self.layers, cache, cache.positions, n, **what)

    def prompt(self) -> Callable[[], None]:
        """One prompt as long as all texts together."""
        cache = self.cache(TEXTS * TEXT_TOKENS)

        def step() -> None:
            cache.truncate(0)
            for _ in range(TEXTS * TEXT_TOKENS // CHUNK):
                cache.push(self.walk.run(self.step(cache, CHUNK, logits=1)).kv_rows)

        return step

    def texts(self, scored: bool) -> Callable[[], None]:
        """The texts, as many at a time as make a chunk."""
        together = CHUNK // TEXT_TOKENS
        fields: dict[str, Any] = {"keep": False, "logits": 1}
        if scored:
            fields |= {"logits": TEXT_TOKENS, "targets": np.zeros(TEXT_TOKENS, np.int64)}

        def step() -> None:
            for _ in range(TEXTS // together):
                self.run([self.blank] * together, TEXT_TOKENS, **fields)

        return step

    def alone(self) -> Callable[[], None]:
        """AHEAD greedy tokens of one answer."""
        cache = self.cache(1024)
        self.run([cache], TEXT_TOKENS, logits=1)

        def step() -> None:
            if cache.positions > 200:
                cache.truncate(TEXT_TOKENS)
            result = self.walk.run(self.step(cache, 1, logits=1, ahead=AHEAD, choices=self.shape.vocabulary))
            assert result.tokens is not None, "the device does not go ahead"
            cache.push(result.kv_rows)

        return step

    def tokens(self, count: int) -> Callable[[], None]:
        """AHEAD greedy tokens of each of `count` answers."""
        caches = [self.cache(1024) for _ in range(count)]
        self.run(caches, TEXT_TOKENS, logits=1)

        def step() -> None:
            if caches[0].positions > 200:
                for cache in caches:
                    cache.truncate(TEXT_TOKENS)
            results = self.run(caches, 1, logits=1, ahead=AHEAD, choices=self.shape.vocabulary)
            assert all(result.tokens is not None and len(result.tokens) == AHEAD for result in results)

        return step

    @staticmethod
    def _no_lookup() -> np.ndarray:
        raise AssertionError("the device looks tokens up")


def seconds(step: Callable[[], None], runs: int) -> list[float]:
    for _ in range(3):
        step()
    taken = []
    for _ in range(runs):
        begin = time.perf_counter()
        step()
        taken.append(time.perf_counter() - begin)
    return taken


def measure(name: str, backends: str, what: Sequence[str], counts: Sequence[int], runs: int) -> list[Row]:
    bench, rows = Bench(name, backends), []
    tier = bench.note.rpartition(", ")[2].removesuffix(" tier") or None

    def add(case: str, tokens: int, step: Callable[[], None], baseline: str, than: float | None) -> float:
        samples = [tokens / taken for taken in seconds(step, runs)]
        row = Row.from_samples(
            f"{bench.shape.drawn} {case}", "tok/s", samples, bench.backend,
            tier=tier, baseline=baseline if than else None, baseline_value=than,
        )  # fmt: skip
        rows.append(row)
        of = f", {row.value / than:.2f} times {baseline}" if than else ""
        print(f"{row.case}: {row.value:.0f} tok/s ({row.p20:.0f} to {row.p80:.0f}){of}", flush=True)
        return float(row.value)

    total = TEXTS * TEXT_TOKENS
    if "texts" in what:
        whole = add(f"pp{total}", total, bench.prompt(), "", None)
        add(f"{TEXTS} x {TEXT_TOKENS}, last logits", total, bench.texts(False), f"pp{total}", whole)
        add(f"{TEXTS} x {TEXT_TOKENS}, scored", total, bench.texts(True), f"pp{total}", whole)
    if "tokens" in what:
        single = add("one answer alone", AHEAD, bench.alone(), "", None)
        for count in counts:
            add(f"{count} answers together", AHEAD * count, bench.tokens(count), "one answer alone", single)
    bench.walk.close()
    return rows


def main() -> int:
    """Measure and print; write the receipt when asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", default="smollm2,8b", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--what", default="texts,tokens")
    parser.add_argument("--sequences", default="1,8,32,64")
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--receipt", type=Path)
    arguments = parser.parse_args()
    share_packs()
    counts = [int(count) for count in arguments.sequences.split(",")]
    rows: list[Row] = []
    for name in arguments.shapes.split(","):
        rows += measure(name, arguments.backend, arguments.what.split(","), counts, arguments.runs)
        if arguments.receipt is not None:  # what was measured stays, should time run out
            record(arguments, "groups", rows, ("shapes", "what", "sequences", "runs", "backend"))
    return 0


if __name__ == "__main__":
    exit_with(main)
