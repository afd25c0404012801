"""The least time in which a kernel of a chain can read a matrix: what bounds products of few rows.

    python -m benchmarks.bench_read_floor --receipt benchmarks/receipts/read-floor-h200.json

The kernel only copies the packed weights into shared memory, each byte once, and drops them. It fetches its first
stages before its predecessors have ended, as the products do, and is launched like them: one behind the other in a CUDA
graph, over copies that exceed the L2 cache several times. It has no rows to wait for, converts nothing, multiplies
nothing and writes nothing: a floor under the time of a product of these weights behind another kernel. The best of
several grids and stages counts.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.command import exit_with
from benchmarks.gemm_cases import SHAPES
from benchmarks.torch_device import need_torch, timed
from frink_numba.driver import query_driver
from frink_numba.kernels.cubins import Source, Target, load
from frink_numba.kernels.gemm_kinds import fragment_kind
from frink_numba.kernels.launch import LoadedKernel
from frink_numba.quant import KINDS
from frink_numba.receipt import Row, receipt, write_receipt

ROTATED_BYTES = 384 << 20
_ARGUMENTS = (("weights", "u64"), ("chunks", "u32"))


class Reader(NamedTuple):
    """Blocks on a multiprocessor, bytes of a copy, stages of a block."""

    resident: int
    chunk: int
    stages: int

    @property
    def shared(self) -> int:
        return self.stages * (self.chunk + 8)


READERS = [Reader(1, 8192, 26), Reader(1, 16384, 13), Reader(2, 8192, 13), Reader(2, 4096, 26), Reader(4, 4096, 13)]


def build(reader: Reader) -> Any:
    """The kernel and its signature: block b reads chunks b, b + blocks, ..."""
    from numba import cuda, types

    from frink_numba.kernels.instructions import (
        fence_barrier_init,
        launch_dependents,
        mbarrier_init,
        mbarrier_wait,
        wait_for_predecessors,
    )
    from frink_numba.kernels.ptx import instruction, numba_type, shared_address

    fetch = instruction(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$2], $3;\n"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $3, [$2];",
        None,
        "u32",
        "u64",
        "u32",
        "u32",
    )
    CHUNK, STAGES = reader.chunk, reader.stages
    u32, u64 = types.uint32, types.uint64

    def read_floor(weights, chunks):
        shared = cuda.shared.array(0, types.uint8, alignment=1024)
        base = shared_address(shared)
        barriers = u32(base + u32(STAGES * CHUNK))
        if cuda.threadIdx.x == 0:
            for s in range(STAGES):
                mbarrier_init(barriers + u32(8 * s), u32(1))
            fence_barrier_init()
            launch_dependents()
            blocks = u32(cuda.gridDim.x)
            coming = u32(cuda.blockIdx.x)
            held = u32(0)
            while held < u32(STAGES) and coming < chunks:
                fetch(
                    base + held * u32(CHUNK), weights + u64(coming) * u64(CHUNK), barriers + held * u32(8), u32(CHUNK)
                )
                held = u32(held + u32(1))
                coming = u32(coming + blocks)
            wait_for_predecessors()
            stage = u32(0)
            phase = u32(0)
            chunk = u32(cuda.blockIdx.x)
            while chunk < chunks:
                mbarrier_wait(barriers + stage * u32(8), phase)
                if coming < chunks:
                    at = base + stage * u32(CHUNK)
                    fetch(at, weights + u64(coming) * u64(CHUNK), barriers + stage * u32(8), u32(CHUNK))
                    coming = u32(coming + blocks)
                chunk = u32(chunk + blocks)
                stage = u32(stage + u32(1))
                if stage == u32(STAGES):
                    stage = u32(0)
                    phase = phase ^ u32(1)

    return read_floor, types.void(*(numba_type(kind) for _, kind in _ARGUMENTS))


def source(reader: Reader) -> Source:
    return Source(f"read_floor {reader!r}", functools.partial(build, reader), 32, reader.resident)


def measure(kernel: LoadedKernel, reader: Reader, size: int, blocks: int, replays: int) -> list[float]:
    """Seconds of a launch that reads `size` bytes, a replay of the graph each."""
    import torch

    chunks = -(-size // reader.chunk)
    copies = max(8, min(64, math.ceil(ROTATED_BYTES / size)))
    weights = torch.randint(0, 255, (copies, chunks * reader.chunk), dtype=torch.uint8, device="cuda")
    launches = [kernel.bind(min(blocks, chunks), weights[i].data_ptr(), chunks) for i in range(copies)]
    for launch in launches:
        launch(torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch(torch.cuda.current_stream().cuda_stream)
    graph.replay()
    return [timed(graph.replay) / copies for _ in range(replays)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default="Q4_0,Q4_K,Q6_K,Q8_0,F16")
    parser.add_argument("--models", default="3b,8b,70b")
    parser.add_argument("--replays", type=int, default=15)
    parser.add_argument("--receipt", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    need_torch(parser)
    import torch

    properties = torch.cuda.get_device_properties(0)
    torch.zeros(1, device="cuda")
    target = Target(
        "90a" if (properties.major, properties.minor) == (9, 0) else f"{properties.major}{properties.minor}"
    )
    kernels = [
        LoadedKernel(load(source(reader), target), [kind for _, kind in _ARGUMENTS], 32, reader.shared, overlap=True)
        for reader in READERS
    ]
    rows = []
    for model in arguments.models.split(","):
        for part, (n, k) in SHAPES[model].items():
            for name in arguments.kinds.split(","):
                kind = fragment_kind(name)
                assert kind is not None
                stored = n * k * KINDS[name].block_bytes / KINDS[name].block
                timed = []
                for kernel, reader in zip(kernels, READERS, strict=True):
                    blocks = properties.multi_processor_count * reader.resident
                    seconds = measure(kernel, reader, kind.slab_bytes(k) * -(-n // 64), blocks, arguments.replays)
                    timed.append((sorted(seconds)[len(seconds) // 2], seconds, reader))
                best, seconds, reader = min(timed, key=lambda each: each[0])
                label = f"{model} {part} {name} N={n} K={k} {reader.resident}x{reader.stages}x{reader.chunk}"
                rows.append(Row.from_samples(label, "us", [s * 1e6 for s in seconds], "cuda"))
                rows.append(Row.from_samples(label, "TB/s of weights", [stored / s / 1e12 for s in seconds], "cuda"))
                every = " ".join(f"{s * 1e6:.2f}" for s, _, _ in timed)
                print(f"{label:50} {best * 1e6:7.2f} us {stored / best / 1e12:5.2f} TB/s | {every}", flush=True)
    if arguments.receipt:
        command = " ".join(["python", "-m", "benchmarks.bench_read_floor", *sys.argv[1:]])
        write_receipt(
            arguments.receipt,
            receipt("read floor", command, rows, machine=properties.name, driver=query_driver().version),
        )
    return 0


if __name__ == "__main__":
    exit_with(main)
