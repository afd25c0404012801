"""Fused causal attention beside torch's scaled_dot_product_attention (FlashAttention-2 and cuDNN), in the same run.

    python benchmarks/bench_attention.py --receipt benchmarks/receipts/attention-h200.json
    python benchmarks/bench_attention.py --tier mma 128:32:32:8192 64:32:8:512+16384 --check

A case is head_dim:heads:kv_heads:rows, +prefix and @window if any. Random data, f16. Launches rotate over copies of the
buffers that together exceed the L2 cache, captured in one CUDA graph per contender; the graphs take turns, each replay
is timed with events. TFLOP/s count the visible pairs of rows and keys alone: 4 * head_dim operations each. torch has no
windows and no prefix of this kind here: those rows stand without a baseline.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.command import exit_with
from benchmarks.torch_device import need_torch, timed
from frink_numba.driver import query_driver
from frink_numba.kernels.fused_attention import Attentions, HeadShape, Mirror, sequence_table
from frink_numba.receipt import Row, receipt, write_receipt

DEFAULT = [
    "128:32:32:8192",
    "128:32:32:16384",
    "128:32:8:8192",
    "128:32:8:16384",
    "64:32:32:2048",
    "64:32:32:8192",
    "64:32:32:16384",
    "256:16:16:2048",
    "256:16:16:8192",
    "256:16:16:16384",
    "96:32:32:8192",
    "80:32:32:8192",
    "128:32:32:512",
    "128:32:8:512",
    "128:32:32:2048",
    "64:9:3:512",
    "128:32:32:16384@4096",
    "128:32:32:512+16384",
]
ROTATED_BYTES = 192 << 20  # three times the L2 cache of an H200


@dataclass(frozen=True)
class Case:
    head_dim: int
    heads: int
    kv_heads: int
    rows: int
    prefix: int
    window: int

    @classmethod
    def parse(cls, text: str) -> Case:
        found = re.fullmatch(r"(\d+):(\d+):(\d+):(\d+)(?:\+(\d+))?(?:@(\d+))?", text)
        if found is None:
            raise SystemExit(f"{text}: a case is head_dim:heads:kv_heads:rows[+prefix][@window]")
        return cls(*(int(part or 0) for part in found.groups()))

    @property
    def label(self) -> str:
        more = f" over a prefix of {self.prefix}" if self.prefix else ""
        more += f", window {self.window}" if self.window else ""
        return f"head_dim {self.head_dim}, {self.heads} over {self.kv_heads} heads, n={self.rows}{more}"

    @property
    def operations(self) -> float:
        """4 * head_dim for each pair of a row and a key that it sees."""
        seen = self.prefix + np.arange(1, self.rows + 1, dtype=np.float64)
        if self.window:
            seen = np.minimum(seen, self.window)
        return float(seen.sum()) * 4 * self.head_dim * self.heads


class Bench:
    def __init__(self, tier: str, replays: int) -> None:
        import torch

        self.torch, self.replays = torch, replays
        properties = torch.cuda.get_device_properties(0)
        self.machine = properties.name
        torch.zeros(1, device="cuda")
        self.attentions = Attentions(tier, (properties.major, properties.minor), properties.multi_processor_count)

    def measure(self, case: Case, check: bool, baselines: bool) -> dict[str, list[float]]:
        """Seconds of each contender: "ours", and of torch's backends where they serve the case."""
        torch = self.torch
        shape = HeadShape(case.heads, case.kv_heads, case.head_dim)
        total = case.prefix + case.rows
        sizes = (2 * case.rows * case.heads + 2 * total * case.kv_heads) * case.head_dim * 2
        copies = max(2, min(16, math.ceil(ROTATED_BYTES / sizes)))
        q, out = (
            torch.randn(copies, case.rows, case.heads, case.head_dim, device="cuda", dtype=torch.float16)
            for _ in range(2)
        )
        k, v = (
            torch.randn(copies, total, case.kv_heads, case.head_dim, device="cuda", dtype=torch.float16)
            for _ in range(2)
        )
        out.fill_(math.nan)
        attention = self.attentions.attention(shape, case.rows, windowed=case.window > 0)
        workspace = torch.zeros(max(128, attention.workspace), dtype=torch.uint8, device="cuda")
        kept, launches = [], []
        for i in range(copies):
            at = (k[i].data_ptr(), v[i].data_ptr())
            table = sequence_table([(0, case.rows, case.prefix, *at)])
            maps = attention.maps([Mirror(*at, total)]) or bytes(128)
            pair = [torch.frombuffer(bytearray(x), dtype=torch.uint8).cuda() for x in (table, maps)]
            kept.append(pair)
            launches.append(
                attention.bind(
                    q[i].data_ptr(),
                    out[i].data_ptr(),
                    pair[0].data_ptr(),
                    1,
                    maps=pair[1].data_ptr(),
                    workspace=workspace.data_ptr(),
                    window=case.window,
                )
            )
        for launch in launches:
            launch(torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        if check:
            for i in (0, copies - 1):
                self._check(case, q[i], k[i], v[i], out[i])
        contenders = {"ours": self._capture(lambda: [f(torch.cuda.current_stream().cuda_stream) for f in launches])}
        if baselines and not case.window and not case.prefix:
            for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION"):
                graph = self._baseline(name, case, q, k, v, copies)
                if graph is not None:
                    contenders[name] = graph
        return self._time(contenders, copies)

    def _baseline(self, name: str, case: Case, q: Any, k: Any, v: Any, copies: int) -> Any:
        torch = self.torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        queries, keys, values = (x.transpose(1, 2).contiguous() for x in (q, k, v))

        def run() -> None:
            with sdpa_kernel(getattr(SDPBackend, name)):
                for i in range(copies):
                    torch.nn.functional.scaled_dot_product_attention(
                        queries[i : i + 1],
                        keys[i : i + 1],
                        values[i : i + 1],
                        is_causal=True,
                        enable_gqa=case.heads != case.kv_heads,
                    )

        try:
            run()
            torch.cuda.synchronize()
            return self._capture(run)
        except RuntimeError as error:
            print(f"  {name}: {str(error).splitlines()[0][:100]}")
            return None

    def _check(self, case: Case, q: Any, k: Any, v: Any, out: Any) -> None:
        torch = self.torch
        picked = torch.randperm(case.rows, device="cuda")[:64]
        position = case.prefix + picked
        keys = torch.arange(k.shape[0], device="cuda")
        visible = keys[None] <= position[:, None]
        if case.window:
            visible &= keys[None] > position[:, None] - case.window
        if torch.isnan(out).any().item():
            raise RuntimeError(f"{case}: {torch.isnan(out).sum().item()} results are not a number")
        for head in range(case.heads):
            group = head // (case.heads // case.kv_heads)
            scores = q[picked, head].double() @ k[:, group].double().T * case.head_dim**-0.5
            weights = torch.softmax(scores.masked_fill(~visible, -math.inf), dim=1)
            reference = weights @ v[:, group].double()
            error = ((out[picked, head].double() - reference).norm() / reference.norm()).item()
            if not error < 2e-3:
                raise RuntimeError(f"{case}: head {head}: relative error {error}")

    def _capture(self, run: Any) -> Any:
        torch = self.torch
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph

    def _time(self, contenders: dict[str, Any], copies: int) -> dict[str, list[float]]:
        samples: dict[str, list[float]] = {name: [] for name in contenders}
        for graph in contenders.values():
            graph.replay()
        for _ in range(self.replays):
            for name, graph in contenders.items():
                samples[name].append(timed(graph.replay) / copies)
        return samples


def _write(path: Path, rows: list[Row], bench: Bench) -> None:
    command = " ".join(["python", "-m", "benchmarks.bench_attention", *sys.argv[1:]])
    document = receipt("attention", command, rows, machine=bench.machine, driver=query_driver().version)
    document["versions"]["torch"] = bench.torch.__version__
    write_receipt(path, document)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=DEFAULT)
    parser.add_argument("--tier", choices=["wgmma", "mma"], default="wgmma")
    parser.add_argument("--replays", type=int, default=9)
    parser.add_argument("--no-baseline", action="store_true")
    parser.add_argument("--check", action="store_true", help="compare with float64 first")
    parser.add_argument("--receipt", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    need_torch(parser)
    bench = Bench(arguments.tier, arguments.replays)
    rows: list[Row] = []
    for case in map(Case.parse, arguments.cases):
        samples = bench.measure(case, arguments.check, not arguments.no_baseline)
        medians = {name: float(np.median(values)) for name, values in samples.items()}
        rates = [case.operations / s / 1e12 for s in samples["ours"]]
        line = f"{case.label:60} {medians['ours'] * 1e6:9.1f} us {float(np.median(rates)):6.1f} TFLOP/s"
        baselines: list[str | None] = [name for name in samples if name != "ours"]
        for name in baselines or [None]:
            more: dict[str, Any] = {}
            if name is not None:
                value = case.operations / medians[name] / 1e12
                more = {"baseline": f"torch SDPA {name}", "baseline_value": value}
                line += f"  {name} {value:6.1f} ratio {medians[name] / medians['ours']:.2f}"
            rows.append(Row.from_samples(case.label, "TFLOP/s", rates, "cuda", tier=arguments.tier, **more))
        microseconds = [1e6 * s for s in samples["ours"]]
        rows.append(Row.from_samples(case.label, "us", microseconds, "cuda", tier=arguments.tier))
        print(line, flush=True)
        if arguments.receipt:  # after each case: a run that is cut short leaves what it measured
            _write(arguments.receipt, rows, bench)
    return 0


if __name__ == "__main__":
    exit_with(main)
