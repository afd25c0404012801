"""The kernels of generation: bytes of weights a second against a copy measured in the same run, and whole layers.

    python benchmarks/bench_decode_kernels.py --receipt benchmarks/receipts/decode-kernels-h200.json
    python benchmarks/bench_decode_kernels.py --models 8b --rows 1 --products

A layer's launches are captured in one CUDA graph, over several layers whose weights together exceed the L2 cache, and
the graph is timed with events. Random data. With `--products`, each product of a layer by itself as well, in a graph of
its own copies.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bench_gemm import random_weights
from benchmarks.command import exit_with
from benchmarks.torch_device import need_torch, timed
from frink_numba.driver import query_driver
from frink_numba.kernels.decode_attention import DecodeAttentions, DecodeShape
from frink_numba.kernels.fused_attention import sequence_table
from frink_numba.kernels.gemm import DeviceWeights, HalfRows
from frink_numba.kernels.gemm_pack import pack
from frink_numba.kernels.thin_gemm import NormRows, ThinGemms
from frink_numba.quant import KINDS
from frink_numba.receipt import Row, receipt, write_receipt

ROTATED_BYTES = 256 << 20  # several times the L2 cache of an H200
_BASE_ROWS = 512  # rows that are really quantized; more rows repeat them


@dataclass(frozen=True)
class Model:
    """Widths of a model. `layers`: kinds of (q and k, v, o, gate and up, down) of its sorts of layers, equally many.

    head: kind and rows of the product that gives the logits.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    layers: tuple[tuple[str, str, str, str, str], ...]
    head: tuple[str, int] = ("Q6_K", 128256)


_K_M = (("Q4_K", "Q4_K", "Q4_K", "Q4_K", "Q4_K"), ("Q4_K", "Q6_K", "Q4_K", "Q4_K", "Q6_K"))
MODELS = {
    "smollm2 Q4_1": Model(576, 9, 3, 64, 1536, (("Q4_1",) * 5,), ("Q8_0", 49152)),
    "3b Q4_K_M": Model(3072, 24, 8, 128, 8192, _K_M),
    "8b Q4_K_M": Model(4096, 32, 8, 128, 14336, _K_M),
    "8b Q8_0": Model(4096, 32, 8, 128, 14336, (("Q8_0",) * 5,), ("Q8_0", 128256)),
}


@dataclass(frozen=True)
class Step:
    """One product of a layer."""

    name: str
    kind: str
    n: int
    k: int
    gated: bool = False

    @property
    def stored(self) -> float:
        """Bytes of the weights in the file."""
        return self.n * self.k * KINDS[self.kind].block_bytes / KINDS[self.kind].block


def steps_of(model: Model, kinds: tuple[str, str, str, str, str]) -> list[Step]:
    """The products of a layer in their order: one for Q, K and V where their kinds are equal, else two."""
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    first = [Step("qkv", kinds[0], q + 2 * kv, model.hidden)]
    if kinds[0] != kinds[1]:
        first = [Step("qk", kinds[0], q + kv, model.hidden), Step("v", kinds[1], kv, model.hidden)]
    return [
        *first,
        Step("o", kinds[2], model.hidden, q),
        Step("gate+up", kinds[3], 2 * model.ffn, model.hidden, gated=True),
        Step("down", kinds[4], model.hidden, model.ffn),
    ]


class Bench:
    """Buffers and timing of one device, through torch."""

    def __init__(self, replays: int, rows: int) -> None:
        import torch

        self.torch, self.replays, self.rows = torch, replays, rows
        properties = torch.cuda.get_device_properties(0)
        self.machine = properties.name
        torch.zeros(1, device="cuda")
        self.thins = ThinGemms((properties.major, properties.minor), properties.multi_processor_count)
        self.attentions = DecodeAttentions((properties.major, properties.minor), properties.multi_processor_count)
        self._bases: dict[tuple[str, int, bool], tuple[Any, Any, Any]] = {}
        self.kept: list[Any] = []

    def weights(self, step: Step) -> DeviceWeights:
        """A fresh copy of a product's weights on the device."""
        torch, key = self.torch, (step.kind, step.k, step.gated)
        if key not in self._bases:
            rng = np.random.default_rng(step.k)
            matrices = [
                random_weights(step.kind, _BASE_ROWS // (1 + step.gated), step.k, rng) for _ in range(1 + step.gated)
            ]
            packed = pack(matrices, gated=step.gated)
            self._bases[key] = (packed, torch.from_numpy(packed.data).cuda(), torch.from_numpy(packed.row_scale).cuda())
        packed, data, scale = self._bases[key]
        repeats, slabs = -(-step.n // _BASE_ROWS), -(-step.n // 64)
        data = data.view(_BASE_ROWS // 64, -1).repeat(repeats, 1)[:slabs].contiguous()
        scale = scale.repeat(repeats)[: slabs * 64].contiguous()
        self.kept += [data, scale]
        return DeviceWeights(
            packed.kind.name, step.n, step.k, step.gated, packed.norm_bounds, data.data_ptr(), scale.data_ptr()
        )

    def zeros(self, *shape: int, kind: Any = None) -> Any:
        made = self.torch.zeros(*shape, device="cuda", dtype=kind or self.torch.float32)
        self.kept.append(made)
        return made

    def launch(
        self, step: Step, hidden: Any, operand: Any, scale: Any, out: Any, out_scale: Any, *, alone: bool = False
    ) -> Any:
        """A launch of one product as a layer has it; `alone`: behind attention."""
        weights = self.weights(step)
        norm = step.name in ("qkv", "qk", "v", "gate+up", "head")
        product = self.thins.product(
            weights, self.rows, gate="swiglu" if step.gated else "", half=step.gated, norm=norm, alone=alone
        )
        ones = self.zeros(step.k) + 1
        self.kept.append(ones)
        x = NormRows(hidden.data_ptr(), ones.data_ptr(), 1e-5)
        rows = HalfRows(operand.data_ptr(), scale.data_ptr(), scale.data_ptr())
        adds = step.name in ("o", "down")
        target = hidden if adds else out
        return product.bind(
            weights, x if norm else rows, target.data_ptr(), add=adds,
            out_scale=out_scale.data_ptr() if step.gated else 0,
        )  # fmt: skip

    def attention(self, model: Model, context: int, qkv: Any, out: Any) -> Any:
        """A launch of a layer's attention over `context` keys, the rows' own among them, with a mirror of its own."""
        torch, m = self.torch, self.rows
        shape = DecodeShape(model.heads, model.kv_heads, model.head_dim, rot_dim=model.head_dim)
        attention = self.attentions.attention(shape, sequences=1, most_rows=m)
        mirrors = [self.zeros(context, model.kv_heads, model.head_dim, kind=torch.float16) for _ in range(2)]
        record = sequence_table([(0, m, context - m, mirrors[0].data_ptr(), mirrors[1].data_ptr())])
        table = torch.frombuffer(bytearray(record), dtype=torch.uint8).cuda()
        angles = self.zeros(m, model.head_dim // 2)
        workspace = self.zeros(attention.workspace, kind=torch.uint8)
        rows = self.zeros(2, m, model.kv_heads * model.head_dim)
        self.kept.append(table)
        return attention.bind(
            qkv.data_ptr(), out.data_ptr(), table.data_ptr(), workspace=workspace.data_ptr(), cos=angles.data_ptr(),
            sin=angles.data_ptr(), k_rows=rows[0].data_ptr(), v_rows=rows[1].data_ptr(),
        )  # fmt: skip

    def layer(self, model: Model, steps: list[Step], context: int = 0) -> list[Any]:
        """The launches of a layer's products, on buffers of their own; with its attention where there is a context."""
        torch, m = self.torch, self.rows
        width = max((model.heads + 2 * model.kv_heads) * model.head_dim, *(s.n for s in steps))
        hidden, qkv = self.zeros(m, model.hidden), self.zeros(m, width)
        hidden.normal_()
        attended = self.zeros(m, model.heads * model.head_dim, kind=torch.float16)
        gated, scale = self.zeros(m, model.ffn, kind=torch.float16), self.zeros(256) + 1
        self.kept.append(scale)
        operands = {"o": attended, "down": gated}
        launches = []
        for s in steps:
            if s.name == "o" and context:
                launches.append(self.attention(model, context, qkv, attended))
            target = gated if s.gated else qkv
            alone = s.name == "o" and context > 0
            launches.append(self.launch(s, hidden, operands.get(s.name, attended), scale, target, scale, alone=alone))
        return launches

    def time(self, launches: list[Any]) -> list[float]:
        """Seconds of the launches one after the other, per replay of their graph."""
        torch = self.torch
        stream = torch.cuda.current_stream().cuda_stream
        for launch in launches:
            launch(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            current = torch.cuda.current_stream().cuda_stream
            for launch in launches:
                launch(current)
        return self.replay(graph.replay)

    def replay(self, run: Callable[[], Any]) -> list[float]:
        for _ in range(2):
            run()
        return [timed(run) for _ in range(self.replays)]

    def copy_rate(self) -> list[float]:
        """Bytes a second that a copy moves, counting each byte once read and once written."""
        source = self.torch.empty(1 << 30, dtype=self.torch.uint8, device="cuda")
        target = self.torch.empty_like(source)
        return [2 * source.numel() / s for s in self.replay(lambda: target.copy_(source))]

    def read_rate(self) -> list[float]:
        """Bytes a second of a sum over 1 GB: what reading alone reaches."""
        source = self.torch.zeros(1 << 28, dtype=self.torch.float32, device="cuda")
        return [source.numel() * 4 / s for s in self.replay(lambda: source.sum())]

    def forget(self) -> None:
        self.kept.clear()
        self.torch.cuda.empty_cache()


def median(values: list[float]) -> float:
    return float(np.median(values))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="", help="comma-separated beginnings of names, all by default")
    parser.add_argument("--rows", default="1", help="comma-separated rows of a step")
    parser.add_argument("--contexts", default="128,1024,16384", help="comma-separated keys of the attention")
    parser.add_argument("--replays", type=int, default=15)
    parser.add_argument("--products", action="store_true", help="each product by itself as well")
    parser.add_argument("--receipt", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    need_torch(parser)
    contexts = [int(text) for text in arguments.contexts.split(",")]
    wanted = tuple(arguments.models.split(","))
    rows: list[Row] = []
    for m in (int(text) for text in arguments.rows.split(",")):
        bench = Bench(arguments.replays, m)
        copy = bench.copy_rate()
        read = bench.read_rate()
        print(f"copy {median(copy) / 1e12:.2f} TB/s, reading alone {median(read) / 1e12:.2f} TB/s")
        rows.append(Row.from_samples("copy", "TB/s", [r / 1e12 for r in copy], "cuda"))
        for name, model in MODELS.items():
            if not name.startswith(wanted):
                continue
            sorts = [steps_of(model, kinds) for kinds in model.layers]
            stored = sum(step.stored for steps in sorts for step in steps) / len(sorts)
            for context in (0, *contexts):
                mirrors = 4 * context * model.kv_heads * model.head_dim
                count = max(2, int(ROTATED_BYTES // (stored + mirrors)) + 1)
                count = -(-min(count, 30) // len(sorts)) * len(sorts)
                launches = [x for i in range(count) for x in bench.layer(model, sorts[i % len(sorts)], context)]
                seconds = [s / count for s in bench.time(launches)]
                moved = stored + mirrors
                what = f"with attention over {context}" if context else "products"
                print(
                    f"{name} M={m} {what}: {median(seconds) * 1e6:.2f} us a layer "
                    f"({len(launches) / count:.1f} launches), {moved / median(seconds) / 1e12:.2f} TB/s, "
                    f"{moved / median(seconds) / median(copy):.2f} of the copy",
                    flush=True,
                )
                label = f"{name} M={m}, a layer {what}"
                rows.append(Row.from_samples(label, "us", [s * 1e6 for s in seconds], "cuda"))
                shares = [moved / s / median(copy) for s in seconds]
                rows.append(Row.from_samples(label, "share of the copy", shares, "cuda"))
                bench.forget()
            for context in contexts if arguments.products else ():
                size = 4 * context * model.kv_heads * model.head_dim
                copies = max(8, min(64, int(ROTATED_BYTES // size)))
                qkv = bench.zeros(m, (model.heads + 2 * model.kv_heads) * model.head_dim)
                out = bench.zeros(m, model.heads * model.head_dim, kind=bench.torch.float16)
                seconds = [
                    s / copies for s in bench.time([bench.attention(model, context, qkv, out) for _ in range(copies)])
                ]
                print(
                    f"    attention over {context}: {median(seconds) * 1e6:6.2f} us "
                    f"{size / median(seconds) / 1e12:.2f} TB/s",
                    flush=True,
                )
                bench.forget()
            if arguments.products:
                products = {(s.name, s.kind): s for steps in sorts for s in steps}
                products["head", ""] = Step("head", model.head[0], model.head[1], model.hidden)
                for step in products.values():
                    copies = min(64, max(2, int(ROTATED_BYTES // step.stored) + 1))
                    launches = [launch for _ in range(copies) for launch in bench.layer(model, [step])]
                    seconds = [s / copies for s in bench.time(launches)]
                    print(
                        f"    {step.name:8} {step.kind} N={step.n} K={step.k}: {median(seconds) * 1e6:6.2f} us "
                        f"{step.stored / median(seconds) / 1e12:.2f} TB/s, "
                        f"{step.stored / median(seconds) / median(copy):.2f} of the copy",
                        flush=True,
                    )
                    label = f"{name} M={m}, {step.name} {step.kind} {step.n} x {step.k}"
                    rows.append(Row.from_samples(label, "us", [s * 1e6 for s in seconds], "cuda"))
                    shares = [step.stored / s / median(copy) for s in seconds]
                    rows.append(Row.from_samples(label, "share of the copy", shares, "cuda"))
                    bench.forget()
    if arguments.receipt:
        import torch

        command = " ".join(["python", "benchmarks/bench_decode_kernels.py", *sys.argv[1:]])
        document = receipt("decode-kernels", command, rows, machine=bench.machine, driver=query_driver().version)
        document["versions"]["torch"] = torch.__version__
        write_receipt(arguments.receipt, document)
    return 0


if __name__ == "__main__":
    exit_with(main)
