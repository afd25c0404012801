"""The SIMT tier's quantized matrix product on a GPU, with torch's float32 product beside it where torch is installed.

    python -m benchmarks.bench_simt_gemm --receipt benchmarks/receipts/simt-gemm-h200.json
    python -m benchmarks.bench_simt_gemm --shapes 3b --kinds Q4_K --m 512 --tiles 128x64,64x64

Random data. Launches rotate over copies of x, W and the result that together exceed the L2 cache, and are captured in a
CUDA graph, so that neither Python nor launch gaps count; each replay is timed with events after a warm-up.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.command import exit_with
from frink_numba.driver import query_driver
from frink_numba.kernels.device_matrix import DeviceMatrix, pack
from frink_numba.quant import KINDS, QuantMatrix
from frink_numba.receipt import Row, receipt, write_receipt

# (N, K) of one token's products.
SHAPES = {
    "smollm2": {"q": (576, 576), "kv": (192, 576), "gate": (1536, 576), "down": (576, 1536)},
    "3b": {"q": (3072, 3072), "kv": (1024, 3072), "gate": (8192, 3072), "down": (3072, 8192)},
}
KINDS_OF = {"smollm2": "Q4_1", "3b": "Q4_K,Q6_K"}
ROTATED_BYTES = 192 << 20  # three times the L2 cache of an H200
_SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2))}


def random_weights(name: str, rows: int, cols: int, rng: np.random.Generator) -> QuantMatrix:
    """Random codes, and scales of weights."""
    kind = KINDS[name]
    if name in ("F32", "F16"):
        values = (rng.standard_normal((rows, cols)) * 0.02).astype(np.float32 if name == "F32" else np.float16)
        return QuantMatrix(kind, values.view(np.uint8), rows, cols)
    data = rng.integers(0, 256, (rows, kind.row_bytes(cols)), dtype=np.uint8)
    blocks = data.reshape(-1, kind.block_bytes)
    for at in _SCALES.get(name, (0,)):
        scale = rng.uniform(1e-3, 4e-3, len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = scale.view(np.uint8).reshape(-1, 2)
    return QuantMatrix(kind, data, rows, cols)


class Graph:
    """Launches on a stream, captured once and replayed; times are of one launch, in seconds."""

    def __init__(self, launches: list[Callable[[Any], None]]) -> None:
        from cuda.bindings import driver
        from numba import cuda

        self._driver, self._cuda, self._count = driver, cuda, len(launches)
        self._stream = cuda.stream()
        for launch in launches[:1]:
            launch(self._stream)  # compiles and loads: not allowed during a capture
        self._stream.synchronize()
        handle = self._stream.handle
        self._handle = driver.CUstream(int(getattr(handle, "value", handle)))
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._ask(driver.cuStreamBeginCapture(self._handle, mode))
        for launch in launches:
            launch(self._stream)
        graph = self._ask(driver.cuStreamEndCapture(self._handle))
        self._graph = self._ask(driver.cuGraphInstantiate(graph, 0))

    @staticmethod
    def _ask(answer: tuple[Any, ...]) -> Any:
        if int(answer[0]) != 0:
            raise RuntimeError(f"CUDA: {answer[0]}")
        return answer[1] if len(answer) > 1 else None

    def times(self, warm_up: int, replays: int) -> list[float]:
        samples = []
        for i in range(warm_up + replays):
            start, end = self._cuda.event(), self._cuda.event()
            start.record(self._stream)
            self._ask(self._driver.cuGraphLaunch(self._graph, self._handle))
            end.record(self._stream)
            end.synchronize()
            if i >= warm_up:
                samples.append(start.elapsed_time(end) / 1e3 / self._count)
        return samples


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """Infinite when anything is NaN, so that no bound holds."""
    if np.isnan(got).any():
        return math.inf
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def measure(kind: str, m: int, n: int, k: int, tile: Any, runs: int) -> tuple[list[float], Any]:
    """(seconds of a product in each run, the tile); RuntimeError when a product is wrong."""
    import gguf
    from numba import cuda

    from frink_numba.kernels.quantized_matmul import choose_tile, quantized_matmul

    rng = np.random.default_rng((m, n, k))
    matrix = random_weights(kind, n, k, rng)
    packed = pack(matrix)
    copies = max(2, min(64, math.ceil(ROTATED_BYTES / (packed.nbytes + 4 * m * (n + k)))))
    x = rng.standard_normal((m, k)).astype(np.float32)
    rows = [cuda.to_device(x) for _ in range(copies)]
    weights = [DeviceMatrix(matrix.kind, cuda.to_device(packed), n, k) for _ in range(copies)]
    results = [cuda.to_device(np.full((m, n), np.nan, np.float32)) for _ in range(copies)]

    def launch(i: int) -> Callable[[Any], None]:
        return lambda stream: quantized_matmul(rows[i], weights[i], results[i], stream, tile=tile)

    graph = Graph([launch(i) for i in range(copies)])
    samples = graph.times(3, runs)
    dense = gguf.quants.dequantize(matrix.data, gguf.GGMLQuantizationType[kind]).reshape(n, k)
    want = x[: min(m, 64)].astype(np.float64) @ dense.astype(np.float64).T
    for result in (results[0], results[-1]):
        error = relative_error(result.copy_to_host()[: len(want)], want)
        if not error < 1e-5:
            raise RuntimeError(f"{kind} {m} x {n} x {k}: relative error {error}")
    return samples, tile or choose_tile(m, n, cuda.get_current_device().MULTIPROCESSOR_COUNT)


def torch_float32(m: int, n: int, k: int, runs: int) -> list[float] | None:
    """Seconds of torch's float32 product (no TF32) of the same shape, captured and rotated the same way."""
    try:
        import torch
    except ImportError:
        return None
    torch.backends.cuda.matmul.allow_tf32 = False
    copies = max(2, min(64, math.ceil(ROTATED_BYTES / (4 * (n * k + m * (n + k))))))
    x = torch.randn(copies, m, k, device="cuda")
    w = torch.randn(copies, n, k, device="cuda")
    out = torch.empty(copies, m, n, device="cuda")
    torch.matmul(x[0], w[0].T, out=out[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(copies):
            torch.matmul(x[i], w[i].T, out=out[i])
    samples = []
    for i in range(3 + runs):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i >= 3:
            samples.append(start.elapsed_time(end) / 1e3 / copies)
    return samples


def cases(options: argparse.Namespace) -> Iterator[tuple[str, str, int, int, int, Any]]:
    from frink_numba.kernels.quantized_matmul import TILES

    tiles = [None]
    if options.tiles:
        tiles = [next(t for t in TILES if str(t) == name) for name in options.tiles.split(",")]
    for model in options.shapes.split(","):
        for m, (part, (n, k)) in itertools.product(map(int, options.m.split(",")), SHAPES[model].items()):
            for kind in (options.kinds or KINDS_OF[model]).split(","):
                for tile in tiles:
                    yield f"{model} {part}", kind, m, n, k, tile


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="smollm2,3b")
    parser.add_argument("--kinds", help="default: the kinds of each model")
    parser.add_argument("--m", default="16,512,2048", help="tokens")
    parser.add_argument("--tiles", help="force these tiles, such as 128x64,32x32; default: the launcher's choice")
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--receipt", type=Path, help="write the figures here")
    options = parser.parse_args()
    driver = query_driver()
    if driver.problem:
        print(driver.problem, file=sys.stderr)
        return 1
    rows, baselines = [], {}
    for part, kind, m, n, k, forced in cases(options):
        samples, tile = measure(kind, m, n, k, forced, options.runs)
        if (m, n, k) not in baselines:
            baselines[m, n, k] = None if options.no_torch else torch_float32(m, n, k, options.runs)
        work = 2e-12 * m * n * k
        rates = [work / seconds for seconds in samples]
        other = baselines[m, n, k]
        extra = {}
        if other is not None:
            extra = {"baseline": "torch float32", "baseline_value": work / float(np.median(other))}
        row = Row.from_samples(
            f"{part} {kind} M={m} N={n} K={k}, tile {tile}", "TFLOP/s", rates, "cuda", tier="simt", **extra
        )
        rows.append(row)
        ratio = f", {row.ratio:.2f} of torch float32" if row.ratio is not None else ""
        print(f"{row.case}: {row.value:.2f} TFLOP/s ({1e6 * work / row.value:.1f} us){ratio}", flush=True)
    if options.receipt:
        command = " ".join(["python -m benchmarks.bench_simt_gemm", *sys.argv[1:]])
        document = receipt("simt-gemm", command, rows, machine=driver.devices[0].name, driver=driver.version)
        if "torch" in sys.modules:
            document["versions"]["torch"] = sys.modules["torch"].__version__
        write_receipt(options.receipt, document)
    return 0


if __name__ == "__main__":
    exit_with(main)
