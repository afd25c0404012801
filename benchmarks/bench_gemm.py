"""Quantized matrix products against torch.matmul in f16, same shapes, same run.

    python -m benchmarks.bench_gemm --receipt benchmarks/receipts/gemm-h200.json
    python -m benchmarks.bench_gemm Q4_K:8b:512,2048 --check
    python -m benchmarks.bench_gemm Q4_K:8b:512,2048 --tiles 12      every cut that the plan weighs, the 12 likeliest

Products of up to 8 rows are the thin ones, and those of up to 64 have kernels of their own, as in a model's step
(kernels/thin_gemm.py, kernels/few_gemm.py). Random data. Launches rotate
over copies of weights, activations and results that together exceed the L2 cache several times, and are captured in one
CUDA graph per contender, so that neither Python nor launch gaps count; graphs of both take turns, each replay is timed
with events, and the medians are compared. Operands in f16 are given to both. Kernels are compiled ahead, in parallel.
Cases go by their rows, the fewest first.
"""

from __future__ import annotations

import argparse
import functools
import math
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.command import exit_with
from benchmarks.gemm_cases import Case, cases, random_weights
from benchmarks.gemm_first_use import first_use
from benchmarks.torch_device import need_torch, timed
from frink_numba.driver import query_driver
from frink_numba.kernels.cubins import Source, Target, load
from frink_numba.kernels.decode_attention import MOST_ROWS
from frink_numba.kernels.few_gemm_plan import FewPlan, few_plans, why_not
from frink_numba.kernels.few_gemm_variant import FewGemm
from frink_numba.kernels.gemm import DeviceWeights, Gemms, HalfRows, source_of
from frink_numba.kernels.gemm_epilogue import Epilogue
from frink_numba.kernels.gemm_kinds import fragment_kind
from frink_numba.kernels.gemm_mma import MmaGemm
from frink_numba.kernels.gemm_pack import PackedMatrix, pack
from frink_numba.kernels.gemm_plan import TILES, Plan, layouts, mma_tokens
from frink_numba.kernels.gemm_variant import WgmmaGemm
from frink_numba.kernels.thin_gemm import ThinGemms, ThinProduct, variant_of
from frink_numba.kernels.thin_gemm import source_of as thin_source_of
from frink_numba.kernels.thin_gemm_plan import ThinDevice, thin_plan
from frink_numba.quant import KINDS
from frink_numba.receipt import Row, receipt, write_receipt

DEFAULT = [
    "F16,Q4_0,Q4_1,Q4_K,Q5_K,Q6_K,Q8_0:3b,8b,70b:16,64,512,2048,8192",
    "Q4_1:smollm2:512,2048",
]
ROTATED_BYTES = 192 << 20  # three times the L2 cache of an H200
_LAUNCHES = 24  # of a graph, at least, for products of up to _SHORT rows: a graph's begin takes as long as some of them
_SHORT = 512
_WARM_UPS = 3  # replays before the first that counts
_BASE_ROWS = 128  # rows that are really quantized; more rows repeat them


class Bench:
    """Buffers, products and timing of one device, through torch."""

    def __init__(
        self, replays: int, tier: str, tokens: int | None = None, cluster: int | None = None, half: bool = True
    ) -> None:
        import torch

        self.torch = torch
        self.replays, self.tokens, self.cluster, self.half = replays, tokens, cluster, half
        properties = torch.cuda.get_device_properties(0)
        self.machine = properties.name
        torch.zeros(1, device="cuda")
        capability = (properties.major, properties.minor)
        self.target = Target("90a" if capability == (9, 0) and tier == "wgmma" else f"{capability[0]}{capability[1]}")
        self.gemms = Gemms(tier, capability, properties.multi_processor_count)
        self.thins = ThinGemms(capability, properties.multi_processor_count)
        self.workspace = torch.zeros(80 << 20, dtype=torch.uint8, device="cuda")
        self._weights: dict[tuple[str, int], tuple[PackedMatrix, Any]] = {}

    def _base(self, kind: str, k: int) -> tuple[PackedMatrix, Any]:
        """(pack of a few rows, the same rows dequantized as float64 on the device)."""
        import gguf

        if (kind, k) not in self._weights:
            matrix = random_weights(kind, _BASE_ROWS, k, np.random.default_rng(k))
            values = gguf.quants.dequantize(matrix.data, gguf.GGMLQuantizationType(matrix.kind.ggml_id))
            device = self.torch.from_numpy(values.reshape(_BASE_ROWS, k).astype(np.float64)).cuda()
            self._weights[kind, k] = (pack([matrix]), device)
        return self._weights[kind, k]

    def measure(
        self, case: Case, *, check: bool, baseline: bool, forced: Plan | FewPlan | None = None
    ) -> tuple[list[float], list[float] | None, Any]:
        """(seconds of a product per replay, those of torch, the product); `forced` is the cut to be timed."""
        torch = self.torch
        base, values = self._base(case.kind, case.k)
        repeats = -(-case.n // _BASE_ROWS)
        slabs = -(-case.n // 64)
        bytes_packed = base.kind.slab_bytes(case.k) * slabs
        per_copy = bytes_packed + 2 * case.m * case.k + 4 * case.m * case.n
        copies = max(2, min(64, math.ceil(ROTATED_BYTES / per_copy)))
        if copies * per_copy > 40 << 30:
            copies = 2
        data = torch.from_numpy(base.data).cuda().view(_BASE_ROWS // 64, -1).repeat(repeats, 1)[:slabs].contiguous()
        data = data.view(1, -1).repeat(copies, 1)
        row_scale = torch.from_numpy(base.row_scale).cuda().repeat(repeats)[: slabs * 64].contiguous()
        x = torch.randn(copies, case.m, case.k, device="cuda", dtype=torch.float32)
        filled = -(-case.m // 256) * 256
        half = torch.empty(copies, case.m, case.k, device="cuda", dtype=torch.float16)
        scale, norm = (torch.empty(copies, filled, device="cuda") for _ in range(2))
        pitch = -(-case.n // 8) * 8
        kind = torch.float16 if self.half else torch.float32
        out = torch.full((copies, case.m, pitch), float("nan"), device="cuda", dtype=kind)
        out_scale = torch.ones(copies, filled, device="cuda")
        maps = torch.empty(copies, 256, dtype=torch.uint8, device="cuda")
        launches = []
        stream = torch.cuda.current_stream().cuda_stream
        plan: Any = None
        for i in range(copies):
            weights = DeviceWeights(
                base.kind.name, case.n, case.k, False, base.norm_bounds, data[i].data_ptr(), row_scale.data_ptr()
            )
            rows = HalfRows(half[i].data_ptr(), scale[i].data_ptr(), norm[i].data_ptr())
            self.gemms.half_rows(x[i].data_ptr(), case.m, case.k, rows)(stream)
            scales = out_scale[i].data_ptr() if self.half else 0
            if self.thin(case) and forced is None:
                thin = plan = self.thins.product(weights, case.m, half=self.half)
                target, row = out[i].data_ptr(), pitch * out.element_size()
                launches.append(thin.bind(weights, rows, target, row, out_scale=scales))
                continue
            product = self.gemms.product(
                weights, case.m, half=self.half, tokens=self.tokens, cluster=self.cluster, plan=forced
            )
            plan = product
            made = product.maps(rows, out[i].data_ptr(), pitch * out.element_size())
            if made:
                maps[i].copy_(torch.frombuffer(bytearray(made), dtype=torch.uint8))
            if product.workspace > self.workspace.numel():
                raise RuntimeError(f"the workspace needs {product.workspace} bytes")
            launches.append(
                product.bind(
                    weights,
                    rows,
                    out[i].data_ptr(),
                    pitch * out.element_size(),
                    maps=maps[i].data_ptr(),
                    workspace=self.workspace.data_ptr(),
                    out_scale=scales,
                )
            )
        for launch in launches:
            launch(stream)
        torch.cuda.synchronize()
        if check:
            self._check(case, x, out, out_scale, values, copies)
            before = out[0].clone()
            launches[0](stream)
            torch.cuda.synchronize()
            if not torch.equal(before, out[0]):
                raise RuntimeError(f"{case}: two runs differ")

        rounds = -(-_LAUNCHES // copies) if case.m <= _SHORT else 1

        def run() -> None:
            for launch in launches * rounds:
                launch(torch.cuda.current_stream().cuda_stream)

        graph = self._capture(run)
        other = None
        if baseline:
            dense = values.half().repeat(repeats, 1)[: case.n].contiguous()
            dense_copies = max(2, min(copies, math.ceil(ROTATED_BYTES / (dense.nbytes + per_copy - bytes_packed))))
            dense = dense[None].repeat(dense_copies, 1, 1)
            x16 = x.half()
            results = [torch.empty(case.m, case.n, device="cuda", dtype=torch.float16) for _ in range(copies)]

            def multiply() -> None:
                for i in list(range(copies)) * rounds:
                    torch.matmul(x16[i], dense[i % dense_copies].T, out=results[i])

            multiply()
            torch.cuda.synchronize()
            other = self._capture(multiply)
        ours, theirs = self._time(graph, other, copies * rounds)
        return ours, theirs, plan

    def thin(self, case: Case) -> bool:
        """Whether a case is a thin product's."""
        return self.gemms.tier == "wgmma" and case.m <= MOST_ROWS and self.tokens is None

    def _check(self, case: Case, x: Any, out: Any, out_scale: Any, values: Any, copies: int) -> None:
        torch = self.torch
        picked = torch.randperm(case.m, device="cuda")[:64]
        for i in (0, copies - 1):
            reference = x[i][picked].double() @ values.T
            reference = reference.repeat(1, -(-case.n // _BASE_ROWS))[:, : case.n]
            got = out[i][picked][:, : case.n].double() * out_scale[i][picked][:, None].double()
            error = ((got - reference).norm() / reference.norm()).item()
            if not error < 2e-3 or torch.isnan(out[i][:, : case.n]).any().item():
                raise RuntimeError(
                    f"{case}: relative error {error}, not a number: {torch.isnan(out[i][:, : case.n]).sum().item()}"
                )

    def _capture(self, run: Any) -> Any:
        torch = self.torch
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph

    def _time(self, ours: Any, theirs: Any, launches: int) -> tuple[list[float], list[float] | None]:
        contenders = [ours] if theirs is None else [ours, theirs]
        samples: list[list[float]] = [[] for _ in contenders]
        for contender in contenders * _WARM_UPS:
            contender.replay()
        for _ in range(self.replays):
            for graph, into in zip(contenders, samples, strict=True):
                into.append(timed(graph.replay) / launches)
        return samples[0], samples[1] if theirs is not None else None


def median(values: list[float]) -> float:
    return float(np.median(values))


def describe(product: Any) -> str:
    """The tile and the spread of a product."""
    if isinstance(product, ThinProduct):
        return "thin"
    variant = product.variant
    if isinstance(variant, MmaGemm):
        return f"T={variant.tokens}"
    return cut(product.plan)


def cut(plan: Plan | FewPlan) -> str:
    """A plan's name: slabs x tokens / blocks of a cluster, and what splits along K: s workers / tiles.

    Of few rows: few, slabs x tokens / parts along K.
    """
    if isinstance(plan, FewPlan):
        return f"few{plan.groups}x{plan.tokens}/{plan.parts}"
    split = f"s{plan.workers}/{plan.split_tiles}" if plan.split_tiles else ""
    return f"{plan.groups}x{plan.tokens}/{plan.cluster}{split}"


def time_tiles(bench: Bench, case: Case, most: int) -> str:
    """A line of the case: torch's time, then every cut's with its ratio, the fastest first."""
    row = fragment_kind(case.kind)
    assert row is not None
    plans = [
        plan
        for groups, tiles in TILES.items()
        for tokens in tiles
        for cluster in ((1, 2) if tokens >= 128 else (1,))
        for plan in layouts(case.m, case.n, case.k, row, bench.gemms.multiprocessors, tokens, cluster, groups)
    ]
    plans.sort(key=lambda plan: plan.nanoseconds)
    timed, baselines = [], []
    for plan in plans[:most]:
        ours, theirs, _ = bench.measure(case, check=True, baseline=True, forced=plan)
        assert theirs is not None
        baselines += theirs
        timed.append((median(ours) * 1e6, cut(plan)))
    baseline = median(baselines) * 1e6
    work = 2e-6 * case.m * case.n * case.k
    cuts = " ".join(f"{name}:{us:.1f}({baseline / us:.2f})" for us, name in sorted(timed))
    return f"{case.label} torch {baseline:.1f}us {work / baseline:.0f} | {cuts}"


def sources(bench: Bench, wanted: Sequence[Case], more: int) -> list[Source]:
    """The kernels that the cases need with the plans' own tiles, and `more` other cuts of each."""
    found: dict[str, Source] = {}
    multiprocessors = bench.gemms.multiprocessors
    for case in wanted:
        row, epilogue = fragment_kind(case.kind), Epilogue("", bench.half)
        assert row is not None
        if bench.gemms.tier == "wgmma" and case.m <= MOST_ROWS:
            thin = thin_plan(row.name, case.m, case.n, case.k, ThinDevice((9, 0), multiprocessors))
            source = thin_source_of(variant_of(thin, row.name, case.k, epilogue, False, True))
        elif bench.gemms.tier == "mma":
            tokens = mma_tokens(case.m, case.n, multiprocessors)
            source = source_of(MmaGemm(row.name, tokens, epilogue, bench.gemms._memory), overlap=True)
        else:
            for plan in likeliest(bench, case, more):
                if isinstance(plan, FewPlan):
                    few = FewGemm(row.name, plan.tokens, epilogue, plan.groups, plan.parts > 1)
                    source = source_of(few, overlap=True)
                else:
                    tile = WgmmaGemm(row.name, plan.tokens, epilogue, plan.cluster, plan.groups)
                    source = source_of(tile, overlap=True)
                found[source.name] = source
            continue
        found[source.name] = source
    return list(found.values())


def likeliest(bench: Bench, case: Case, most: int) -> list[Plan | FewPlan]:
    """The plan of a case, then the next cuts by estimated time, one for each tile and way of cutting."""
    row = fragment_kind(case.kind)
    assert row is not None
    multiprocessors = bench.gemms.multiprocessors
    chosen = bench.gemms.plan(row.name, case.m, case.n, case.k)
    plans: list[Plan | FewPlan] = [
        plan
        for groups, tiles in TILES.items()
        for tokens in tiles
        for cluster in ((1, 2) if tokens >= 256 else (1,))
        for plan in layouts(case.m, case.n, case.k, row, multiprocessors, tokens, cluster, groups)
        if plan.tokens < 2 * case.m
    ]
    found = [chosen]
    if why_not(row.name, case.m, case.k) is None:
        plans += few_plans(row.name, case.m, case.n, case.k, multiprocessors)
    for plan in sorted(plans, key=lambda plan: plan.nanoseconds):
        if cut(plan) not in map(cut, found):
            found.append(plan)
    return found[: 1 + most]


def compile_all(wanted: Sequence[Source], target: Target) -> None:
    """Kernels into the folder of compiled ones, a process for each processor."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(min(len(wanted), os.cpu_count() or 1) or 1) as pool:
        for _ in pool.imap_unordered(functools.partial(_compile, target), wanted):
            pass


def _compile(target: Target, source: Source) -> None:
    load(source, target)


def main() -> int:
    start = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=DEFAULT, help='such as "Q4_K,F16:8b,70b:512,2048"')
    parser.add_argument("--tier", choices=["wgmma", "mma"], default="wgmma")
    parser.add_argument("--replays", type=int, default=9)
    parser.add_argument("--result", choices=["f16", "f32"], default="f16", help="torch's is f16")
    parser.add_argument("--tokens", type=int, help="force the tokens of a tile")
    parser.add_argument("--cluster", type=int, help="force the blocks of a cluster")
    parser.add_argument("--tiles", type=int, help="time so many cuts of each case, the likeliest ones")
    parser.add_argument("--cuts", type=int, default=0, help="time so many other cuts of each case too, for the receipt")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no case later than that after the start")
    parser.add_argument("--no-baseline", action="store_true")
    parser.add_argument("--check", action="store_true", help="compare with float64 first")
    parser.add_argument(
        "--first-use", action="store_true", help="time the compilation and loading of a model's kernels"
    )
    parser.add_argument("--receipt", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    need_torch(parser)

    half = arguments.result == "f16"
    bench = Bench(arguments.replays, arguments.tier, arguments.tokens, arguments.cluster, half)
    if arguments.tiles:
        for case in (case for text in arguments.cases for case in cases(text)):
            print(time_tiles(bench, case, arguments.tiles), flush=True)
        return 0
    # Few rows first: what many take of the power limit lowers the clock of those behind them.
    wanted = sorted((case for text in arguments.cases for case in cases(text)), key=lambda case: case.m)
    if arguments.tokens is None and arguments.cluster is None:
        compile_all(sources(bench, wanted, arguments.cuts), bench.target)
        print("kernels are compiled", flush=True)
    failed = 0
    rows: list[Row] = []
    ratios: dict[tuple[str, int], list[float]] = {}
    if arguments.first_use:
        # Beside the measurements: it computes nothing on the device.
        pool = ThreadPoolExecutor(1)
        first = pool.submit(first_use)
    for case in wanted:
        if time.perf_counter() - start > arguments.seconds:
            print(f"out of time before {case.label}", flush=True)
            break
        tiled = arguments.tier == "wgmma" and not bench.thin(case) and not (arguments.tokens or arguments.cluster)
        for i, plan in enumerate(likeliest(bench, case, arguments.cuts) if tiled else [None]):
            try:
                ours, theirs, product = bench.measure(
                    case, check=arguments.check, baseline=not arguments.no_baseline, forced=plan
                )
            except RuntimeError as error:  # a wrong result or too little memory: the other cases still count
                print(f"FAILED {case.label}: {error}", flush=True)
                failed += 1
                continue
            work = 2e-12 * case.m * case.n * case.k
            stored = case.n * case.k * KINDS[case.kind].block_bytes / KINDS[case.kind].block
            more: dict[str, Any] = {}
            ratio = float("nan")
            if theirs:
                more = {"baseline": "torch.matmul f16", "baseline_value": work / median(theirs)}
                ratio = median(theirs) / median(ours)
                if i == 0:
                    ratios.setdefault((case.kind, case.m), []).append(ratio)
            label = f"{case.label} {arguments.result} {describe(product)}"
            rates = [work / s for s in ours]
            rows.append(Row.from_samples(label, "TFLOP/s", rates, "cuda", tier=arguments.tier, **more))
            if case.m <= 64:
                bandwidth = [stored / s / 1e12 for s in ours]
                rows.append(Row.from_samples(label, "TB/s of weights", bandwidth, "cuda", tier=arguments.tier))
            print(
                f"{label:60} {median(ours) * 1e6:8.1f} us {work / median(ours):5.0f} TFLOP/s  ratio {ratio:5.2f} "
                f"{stored / median(ours) / 1e12:5.2f} TB/s",
                flush=True,
            )
    for (kind, m), values in sorted(ratios.items()):
        print(f"{kind} M={m}: ratio least {min(values):.2f}, geometric mean {math.exp(np.log(values).mean()):.2f}")
    if arguments.first_use:
        try:
            rows += first.result()
        except subprocess.CalledProcessError as error:
            print(f"FAILED first use: {error.stderr}", flush=True)
            failed += 1
    if arguments.receipt:
        import torch

        command = " ".join(["python", "-m", "benchmarks.bench_gemm", *sys.argv[1:]])
        document = receipt("gemm", command, rows, machine=bench.machine, driver=query_driver().version)
        document["versions"]["torch"] = torch.__version__
        write_receipt(arguments.receipt, document)
    return 1 if failed else 0


if __name__ == "__main__":
    exit_with(main)
