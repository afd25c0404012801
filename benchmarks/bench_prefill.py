"""Prefill through a backend's layers, against transformers' Llama in bf16 in a CUDA graph, same shapes, same run.

    python -m benchmarks.bench_prefill --receipt benchmarks/receipts/prefill-h200.json
    python -m benchmarks.bench_prefill --shapes 3b --tokens 512,2048 --backend cuda --runs 15
    python -m benchmarks.bench_prefill --shapes 3b --tokens 2048 --no-baseline --block-rows 2048

A step is what the engine does with a prompt: from token ids through every layer to the last logits, and each layer's
K/V rows are pushed into the host's cache. A named shape has random weights of the kinds that llama.cpp's quantizer
gives it (speed does not depend on the values). `smollm2` is the real model when its file is there. The baseline has no
cache to fill and stops before logits.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.command import exit_with
from frink_numba.backend import Edges, Step
from frink_numba.cuda.device import open_device
from frink_numba.cuda.tensor import weights
from frink_numba.dispatch import Dispatcher
from frink_numba.driver import query_driver
from frink_numba.errors import ModelNotFoundError
from frink_numba.host.backend import HostBackend
from frink_numba.host.decoder import Decoder
from frink_numba.host.dequantize import dequantize_rows
from frink_numba.host.kv_cache import KVCache
from frink_numba.host.load import load
from frink_numba.layer import Activation, AttentionSpec, Expert, FeedForward, Layer, Rope, RopeLayout
from frink_numba.quant import KINDS, QuantMatrix
from frink_numba.receipt import Row, cpu_name, receipt, write_receipt

_SCALES = {"Q4_K": (0, 2), "Q6_K": (208,), "Q4_0": (0,), "Q4_1": (0, 2), "Q8_0": (0,)}


@dataclass(frozen=True)
class Shape:
    """A model by its sizes; `kinds` as llama.cpp's quantizer mixes them."""

    name: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    theta: float
    kind: str
    better_kind: str  # of v and down in half of the layers
    edge_kind: str  # of the embedding, which is the output matrix too

    @property
    def drawn(self) -> str:
        """Its name in figures, where its weights are random."""
        return self.name if "shape" in self.name else self.name.replace("135M", "135M shape")


SHAPES = {
    "smollm2": Shape("SmolLM2-135M Q4_1", 30, 576, 1536, 9, 3, 64, 49152, 1e5, "Q4_1", "Q4_1", "Q8_0"),
    "3b": Shape("Llama-3.2-3B shape Q4_K_M", 28, 3072, 8192, 24, 8, 128, 128256, 5e5, "Q4_K", "Q6_K", "Q6_K"),
    "8b": Shape("Llama-3.1-8B shape Q4_K_M", 32, 4096, 14336, 32, 8, 128, 128256, 5e5, "Q4_K", "Q6_K", "Q6_K"),
    "8b-q8": Shape("Llama-3.1-8B shape Q8_0", 32, 4096, 14336, 32, 8, 128, 128256, 5e5, "Q8_0", "Q8_0", "Q8_0"),
    "8b-q4": Shape("Llama-3.1-8B shape Q4_0", 32, 4096, 14336, 32, 8, 128, 128256, 5e5, "Q4_0", "Q4_0", "Q6_K"),
}


def random_matrix(rng: np.random.Generator, name: str, rows: int, cols: int) -> QuantMatrix:
    """Random codes, and scales that keep the size of what is multiplied."""
    kind = KINDS[name]
    blocks = rng.integers(0, 256, (rows, cols // kind.block, kind.block_bytes), dtype=np.uint8)
    for at in _SCALES[name]:
        scale = rng.uniform(0.5, 1.5, blocks.shape[:2]) * (1e-5 if kind.block == 256 else 2e-3)
        blocks[..., at : at + 2] = scale.astype(np.float16)[..., None].view(np.uint8)
    return QuantMatrix(kind, blocks.reshape(rows, -1), rows, cols)


def random_layers(shape: Shape) -> list[Layer]:
    """Layers whose bytes come from two drawn ones, since drawing billions takes minutes; each is uploaded by itself."""
    rng = np.random.default_rng(0)
    norm = np.ones(shape.hidden, np.float32)
    rope = Rope(shape.theta, shape.head_dim, RopeLayout.NORM)
    width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    drawn = []
    for better in (shape.better_kind, shape.kind):
        q, k = (random_matrix(rng, shape.kind, rows, shape.hidden) for rows in (width, kv_width))
        v, o = random_matrix(rng, better, kv_width, shape.hidden), random_matrix(rng, shape.kind, shape.hidden, width)
        attention = AttentionSpec(shape.heads, shape.kv_heads, shape.head_dim, q, k, v, o, rope)
        gate, up = (random_matrix(rng, shape.kind, shape.ffn, shape.hidden) for _ in "gu")
        drawn.append((attention, Expert(gate, up, random_matrix(rng, better, shape.hidden, shape.ffn))))
    return [
        Layer(norm, attention, norm, FeedForward(Activation.SWIGLU, (expert,)), 1e-5)
        for attention, expert in (drawn[number % 2] for number in range(shape.layers))
    ]


def random_edges(shape: Shape) -> Edges:
    matrix = random_matrix(np.random.default_rng(2), shape.edge_kind, shape.vocabulary, shape.hidden)
    return Edges(matrix, 1.0, np.ones(shape.hidden, np.float32), 1e-5, matrix)


def share_packs() -> None:
    """Repack equal bytes once: the layers of a shape are copies of two, each uploaded by itself all the same."""
    real, made = weights.pack, {}

    def pack(matrices: Sequence[QuantMatrix], *, gated: bool = False, threads: int | None = None) -> Any:
        key = (*(id(matrix.data) for matrix in matrices), gated)
        if key not in made:
            made[key] = (matrices, real(matrices, gated=gated))  # what has an id must stay
        return made[key][1]

    weights.pack = pack


@functools.lru_cache(maxsize=1)
def opened(shape: Shape, backends: str) -> tuple[list[Layer], Edges, Dispatcher]:
    """Layers, edges and dispatcher of a shape, for all lengths that are measured one after the other."""
    layers = random_layers(shape)
    return layers, random_edges(shape), Dispatcher(layers, host=HostBackend, backends=backends)


def layers_step(shape: Shape, tokens: int, backends: str) -> tuple[Callable[[], None], str]:
    """(a step over random layers, who serves it)."""
    layers, edges, walk = opened(shape, backends)
    cache = KVCache(layers, tokens, allocate=walk.host_bytes)
    cache.reserve(tokens)
    ids = np.random.default_rng(1).integers(0, shape.vocabulary, tokens)

    def step() -> None:
        cache.truncate(0)
        asked = Step(layers, cache, 0, tokens, tokens=ids, edges=edges, lookup=lookup, logits=1)
        result = walk.run(asked)
        assert result.logits is not None or backends != "cuda"
        cache.push(result.kv_rows)

    def lookup() -> np.ndarray:
        return dequantize_rows(edges.embedding, ids)

    served = walk.plan(Step(layers, cache, 0, tokens)).rows[0]
    return step, f"{served.backend}, {served.note}"


@functools.lru_cache(maxsize=1)
def real_smollm2(backends: str) -> Decoder:
    return Decoder(load("smollm2-135m"), backends)


def smollm2_step(tokens: int, backends: str) -> tuple[Callable[[], None], str]:
    """(the real model's prefill, who serves it). ModelNotFoundError when the file is not there."""
    decoder = real_smollm2(backends)
    cache = decoder.new_cache()
    ids = np.random.default_rng(1).integers(0, 40000, tokens)

    def step() -> None:
        cache.truncate(0)
        decoder.prefill(ids, cache, chunk_size=tokens)

    served = decoder.plan(batch=tokens).rows[0]
    return step, f"{served.backend}, {served.note}"


@functools.lru_cache(maxsize=1)
def torch_model(shape: Shape) -> Any:
    """transformers' Llama of this shape in bf16 on the GPU."""
    import torch
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocabulary,
        max_position_embeddings=8192,
        attn_implementation="sdpa",
    )
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaModel(config).eval()
    torch.set_default_dtype(torch.float32)
    return model


def torch_step(shape: Shape, tokens: int) -> Callable[[], None] | None:
    """The model captured in a CUDA graph; None where torch, transformers or a GPU is missing."""
    try:
        import torch
        import transformers  # noqa: F401
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    model = torch_model(shape)
    ids = torch.randint(0, 40000, (1, tokens), device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            model(ids, use_cache=False)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(ids, use_cache=False)

    def step() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return step


def seconds(step: Callable[[], None], runs: int) -> list[float]:
    """Durations of `runs` steps after two to warm up; every step ends with the host holding its answer."""
    step()
    step()
    taken = []
    for _ in range(runs):
        start = time.perf_counter()
        step()
        taken.append(time.perf_counter() - start)
    return taken


def force_blocks(rows: int) -> None:
    """Let so many rows of a step go through the layers together, whatever that takes; before any backend is made."""
    body: Any = open_device(0).body
    body.block_rows = rows


def measure_memory(name: str, tokens: int, backends: str) -> Row:
    """Device memory that a first step takes, as the driver counts it, by the bytes of the weights in the file.

    Kernels and graphs are in it, and K/V rows of all positions; other processes must leave the device alone.
    """
    shape, device = SHAPES[name], open_device(0)
    with device.working():
        _ = device.workspace
        before = device.runtime.memory()[0]
    step, served = layers_step(shape, tokens, backends)
    step()
    with device.working():
        taken = before - device.runtime.memory()[0]
    layers, edges, _ = opened(shape, backends)
    nbytes = edges.embedding.data.nbytes + sum(
        matrix.data.nbytes
        for layer in layers
        for part in (layer.attention, layer.ffn.experts[0])
        for matrix in matrices_of(part)
    )
    ours, case = device.held_bytes, f"{shape.drawn} pp{tokens}: device memory"
    print(f"{case}: {taken} bytes, {ours} of them ours, {taken / nbytes:.4f} and {ours / nbytes:.4f} of the weights")
    backend, _, note = served.partition(", ")
    ratio = taken / nbytes
    tier = note.rpartition(", ")[2].removesuffix(" tier") or None
    return Row(case, "of the weights", ratio, ratio, ratio, 1, backend, tier=tier)


def matrices_of(part: AttentionSpec | Expert) -> list[QuantMatrix]:
    """The matrices of a part of a layer."""
    return [value for field in fields(part) if isinstance(value := getattr(part, field.name), QuantMatrix)]


def measure(name: str, tokens: int, backends: str, runs: int, baseline: bool) -> Row:
    """One row; baseline and backend take turns."""
    shape = SHAPES[name]
    more: dict[str, Any] = {}
    replay = torch_step(shape, tokens) if baseline else None
    if replay is not None:
        times = sorted(seconds(replay, runs))
        more = {"baseline": "torch bf16 graph", "baseline_value": tokens / times[len(times) // 2]}
        del replay
    case = f"{shape.name} pp{tokens}"
    if name == "smollm2":
        try:
            step, served = smollm2_step(tokens, backends)
        except ModelNotFoundError:
            step, served = layers_step(shape, tokens, backends)
            case = f"{shape.drawn} pp{tokens}"
    else:
        step, served = layers_step(shape, tokens, backends)
    samples = [tokens / taken for taken in seconds(step, runs)]
    backend, _, note = served.partition(", ")
    tier = note.rpartition(", ")[2].removesuffix(" tier") or None
    row = Row.from_samples(case, "tok/s", samples, backend, tier=tier, **more)
    print(f"{case}: {row.value:.0f} tok/s ({row.p20:.0f} to {row.p80:.0f}) on {served}; {more}", flush=True)
    return row


def command_of(arguments: argparse.Namespace, benchmark: str, options: Sequence[str]) -> str:
    """The command of `benchmarks.bench_BENCHMARK` with these options of `arguments`, without those off or unset."""
    words = ["python", "-m", f"benchmarks.bench_{benchmark}"]
    for option in options:
        value = getattr(arguments, option)
        if value is not None and value is not False:
            words += [f"--{option.replace('_', '-')}", *([] if value is True else [str(value)])]
    return " ".join(words)


def record(arguments: argparse.Namespace, benchmark: str, rows: Sequence[Row], options: Sequence[str]) -> None:
    """Write the receipt of `benchmarks.bench_BENCHMARK`, whose command these options of `arguments` make up."""
    driver = query_driver()
    machine = driver.devices[0].name if driver.devices and arguments.backend != "host" else cpu_name()
    command = command_of(arguments, benchmark, options)
    write_receipt(arguments.receipt, receipt(benchmark, command, rows, machine=machine, driver=driver.version))


def main() -> int:
    """Measure and print; write the receipt when asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", default="smollm2,3b", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--tokens", default="512")
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--no-baseline", action="store_true")
    parser.add_argument("--block-rows", type=int, help="rows of a step that go through the layers together")
    parser.add_argument("--memory", action="store_true", help="measure the first case's device memory too")
    parser.add_argument("--receipt", type=Path)
    arguments = parser.parse_args()
    share_packs()
    if arguments.block_rows:
        force_blocks(arguments.block_rows)
    first = arguments.shapes.split(",")[0], int(arguments.tokens.split(",")[0])
    rows = [measure_memory(*first, arguments.backend)] if arguments.memory else []
    options = ("shapes", "tokens", "backend", "runs", "no_baseline", "block_rows", "memory")
    for name in arguments.shapes.split(","):
        for tokens in arguments.tokens.split(","):
            rows.append(measure(name, int(tokens), arguments.backend, arguments.runs, not arguments.no_baseline))
            if arguments.receipt:  # what is cut off later keeps what there is
                record(arguments, "prefill", rows, options)
    return 0


if __name__ == "__main__":
    exit_with(main)
