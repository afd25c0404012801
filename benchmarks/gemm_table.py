"""The figures of docs/kernels/gemm.md, from the receipts of `bench_gemm`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

from benchmarks import RECEIPTS, ROOT
from benchmarks.bench_gemm import cut
from frink_numba.kernels.decode_attention import MOST_ROWS
from frink_numba.kernels.gemm import Gemms
from frink_numba.kernels.gemm_kinds import fragment_kind

PAGE = ROOT / "docs" / "kernels" / "gemm.md"
_CASE = re.compile(r"(\w+) (\S+) (\w+) M=(\d+) N=(\d+) K=(\d+) \S+ (\S+)")
_MULTIPROCESSORS = 132
_FEW = 64  # tokens and fewer: the bandwidth counts


def _rows(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((RECEIPTS / name).read_text("utf-8"))["rows"]
    return rows


def _planned(name: str) -> Iterator[tuple[dict[str, Any], str, str, str, int]]:
    """(row, model, part, kind, M) of the products that were timed with the cut that the plan chooses today."""
    gemms = Gemms("wgmma", (9, 0), _MULTIPROCESSORS)
    for row in _rows(name):
        case = _CASE.match(row["case"])
        if case is None:
            continue
        model, part, kind, m, n, k, timed = case.groups()
        fragment = fragment_kind(kind)
        assert fragment is not None
        chosen = "thin" if int(m) <= MOST_ROWS else cut(gemms.plan(fragment.name, int(m), int(n), int(k)))
        if "T=" not in timed and timed != chosen:
            continue
        yield row, model, part, kind, int(m)


def _mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def _ratios(name: str, tier: str) -> list[str]:
    """A line for each family of shapes, kind and M: the least ratio with its shape, and the geometric mean."""
    found: dict[tuple[str, str, int], list[tuple[float, str]]] = {}
    for row, model, part, kind, m in _planned(name):
        if m > _FEW:
            family = "SmolLM2" if model == "smollm2" else "Llama"
            found.setdefault((family, kind, m), []).append((row["ratio"], f"{model} {part}"))
    lines = []
    for (family, kind, m), cases in sorted(found.items()):
        least, where = min(cases)
        mean = _mean([ratio for ratio, _ in cases])
        lines.append(f"| {tier}, {family} | {kind} | {m} | {len(cases)} | {least:.2f} | {where} | {mean:.2f} |")
    return lines


def _bandwidth(name: str) -> list[str]:
    """A line for each kind and M: the bandwidth of each part of a layer, over the models."""
    found: dict[tuple[str, int], dict[str, float]] = {}
    for row, model, part, kind, m in _planned(name):
        if row["metric"] == "TB/s of weights" and model != "smollm2":
            found.setdefault((kind, m), {})[f"{model} {part}"] = row["value"]
    lines = []
    for (kind, m), values in sorted(found.items()):
        least, most = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
        mean = _mean(list(values.values()))
        figures = f"{values[least]:.2f} | {least} | {values[most]:.2f} | {most} | {mean:.2f}"
        lines.append(f"| {kind} | {m} | {figures} |")
    return lines


def table() -> str:
    """Ratios to torch.matmul by kind and M, the bandwidth of few tokens, and the time of the first use."""
    lines = [
        "| tier, shapes | kind | M | shapes | least | where | geometric mean |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *_ratios("gemm-h200.json", "wgmma"),
        *_ratios("gemm-mma-h200.json", "mma"),
        "",
        "| kind | M | TB/s of weights, least | where | most | where | geometric mean |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *_bandwidth("gemm-h200.json"),
        "",
        "| first use | seconds |",
        "| --- | --- |",
    ]
    for row in _rows("gemm-h200.json"):
        if row["case"].startswith("first use of "):
            lines.append(f"| {row['case'].removeprefix('first use of ')} | {row['value']:.2f} |")
    return "\n".join(lines)
