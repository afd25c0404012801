"""Generation for one reader: tokens per second behind a prompt, greedy and with every token's logits on the host.

    python -m benchmarks.bench_decode --shapes smollm2,3b,8b,8b-q8 --receipt benchmarks/receipts/decode-h200.json

`greedy` is what `Decoder.generate` gives somebody who asks for nothing else: the device goes on by itself, in blocks
that grow to 32 tokens, and the ids and K/V rows of a block come down together. `one by one` brings each token's logits
to the host, which chooses, as sampling with a temperature does. Both push the K/V rows into the host's cache. A sample
is a whole answer, without its prompt. A named shape has random weights (see `bench_prefill.py`); `smollm2` is the real
model when its file is there, and then pieces of text are part of the greedy row.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.bench_prefill import SHAPES, opened, real_smollm2, record, share_packs
from benchmarks.command import exit_with
from frink_numba.backend import Step
from frink_numba.errors import ModelNotFoundError
from frink_numba.host.dequantize import dequantize_rows
from frink_numba.host.kv_cache import KVCache
from frink_numba.host.token_source import MOST_AHEAD
from frink_numba.receipt import Row

Answer = Callable[[int], float]
"""Called with a number of tokens to generate behind the prompt; answers tokens per second."""

ROWS = ("greedy", "one by one")


def shape_answers(name: str, prompt: int, backends: str) -> tuple[dict[str, Answer], str]:
    """(answers of a shape with random weights, who serves them)."""
    shape = SHAPES[name]
    layers, edges, walk = opened(shape, backends)
    cache = KVCache(layers, prompt + 4096, allocate=walk.host_bytes)

    def run(ids: np.ndarray, ahead: int = 0) -> list[int]:
        n = len(ids)
        cache.reserve(max(n, ahead))

        def lookup() -> np.ndarray:
            return dequantize_rows(edges.embedding, ids)

        rest = {"tokens": ids, "edges": edges, "lookup": lookup, "logits": 1}
        step = Step(layers, cache, cache.positions, n, **rest, ahead=ahead, choices=shape.vocabulary)  # type: ignore[arg-type]
        result = walk.run(step)
        cache.push(result.kv_rows)
        if result.tokens is not None:
            return [int(token) for token in result.tokens]
        assert result.logits is not None
        return [int(np.argmax(result.logits))]

    first = run(np.random.default_rng(1).integers(0, shape.vocabulary, prompt))

    def answer(most: int, tokens: int) -> float:
        cache.truncate(prompt)
        token, made, block = first[-1], 0, 1
        start = time.perf_counter()
        while made < tokens:
            chosen = run(np.array([token]), min(block, tokens - made) if most > 1 else 0)
            token, made, block = chosen[-1], made + len(chosen), min(4 * block, most)
        return tokens / (time.perf_counter() - start)

    row = walk.plan(Step(layers, cache, cache.positions, 1)).rows[0]
    answers = {"greedy": lambda n: answer(MOST_AHEAD, n), "one by one": lambda n: answer(1, n)}
    return answers, f"{row.backend}, {row.note}"


def smollm2_answers(prompt: int, backends: str) -> tuple[dict[str, Answer], str]:
    """The same with the real model. ModelNotFoundError when the file is not there."""
    decoder = real_smollm2(backends)
    ids = np.random.default_rng(1).integers(0, 40000, prompt).tolist()
    cache = decoder.new_cache()

    def greedy(tokens: int) -> float:
        cache.truncate(0)
        answer = decoder.generate(ids, max_new_tokens=tokens + 1, cache=cache)
        next(answer)  # it comes with the prompt
        start = time.perf_counter()
        made = sum(1 for _ in answer)
        return made / (time.perf_counter() - start)

    def one_by_one(tokens: int) -> float:
        cache.truncate(0)
        logits = decoder.prefill(ids, cache).logits
        start = time.perf_counter()
        for _ in range(tokens):
            assert logits is not None
            logits = decoder.decode(int(np.argmax(logits)), cache).logits
        return tokens / (time.perf_counter() - start)

    row = decoder.plan(batch=1).rows[0]
    return {"greedy": greedy, "one by one": one_by_one}, f"{row.backend}, {row.note}"


def measure(name: str, prompt: int, backends: str, tokens: int, runs: int) -> list[Row]:
    label = SHAPES[name].name
    try:
        if name != "smollm2":
            raise ModelNotFoundError("a shape")
        answers, served = smollm2_answers(prompt, backends)
    except ModelNotFoundError:
        answers, served = shape_answers(name, prompt, backends)
        label = SHAPES[name].drawn
    backend, _, note = served.partition(", ")
    tier = note.rpartition(", ")[2].removesuffix(" tier") or None
    made = []
    for kind in ROWS:
        answers[kind](tokens)
        samples = [answers[kind](tokens) for _ in range(runs)]
        case = f"{label} tg{tokens} after {prompt}, {kind}"
        made.append(Row.from_samples(case, "tok/s", samples, backend, tier=tier))
        row = made[-1]
        print(f"{case}: {row.value:.0f} tok/s ({row.p20:.0f} to {row.p80:.0f}) on {served}", flush=True)
    return made


def main() -> int:
    """Measure and print; write the receipt when asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", default="smollm2,3b,8b,8b-q8", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--prompts", default="1,512", help="their lengths; behind one token is what others call tg")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--receipt", type=Path)
    arguments = parser.parse_args()
    share_packs()
    rows = []
    for name in arguments.shapes.split(","):
        for prompt in arguments.prompts.split(","):
            rows += measure(name, int(prompt), arguments.backend, arguments.tokens, arguments.runs)
            if arguments.receipt is not None:  # what is cut off later keeps what there is
                record(arguments, "decode", rows, ("shapes", "prompts", "tokens", "runs", "backend"))
    return 0


if __name__ == "__main__":
    exit_with(main)
