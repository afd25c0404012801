"""Render docs/kernels/gemm.md's tables from the receipts: python -m benchmarks.gemm_table [--write]"""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.bench_gemm import cut
from frink_numba.kernels.gemm_kinds import fragment_kind
from frink_numba.kernels.gemm_plan import make_plan
from frink_numba.quant import KINDS

_ROOT = Path(__file__).resolve().parent
SWEEP = _ROOT / "receipts" / "gemm-tiles-h200.txt"
PAGE = _ROOT.parent / "docs" / "kernels" / "gemm.md"
_BEGIN, _END = "<!-- figures -->", "<!-- end of figures -->"


_CASE = re.compile(r"(\w+) \S+ (\w+) M=(\d+) N=(\d+) K=(\d+) torch ([\d.]+)us \d+ \| (.*)")
_CUT = re.compile(r"(\S+?):([\d.]+)\(")
_MMA = re.compile(r"\w+ \S+ (\w+) M=(\d+) .* TFLOP/s  ratio  ([\d.]+) ")


@dataclass(frozen=True)
class Timed:
    """A case of the sweep: torch's microseconds, ours with the planned cut (None: not timed), and with the fastest."""

    model: str
    kind: str
    m: int
    n: int
    k: int
    torch: float
    planned: float | None
    fastest: float


def sweep() -> list[Timed]:
    """What the sweep of cuts timed, and of that what the plan chooses today."""
    out = []
    for line in SWEEP.read_text("utf-8").splitlines():
        found = _CASE.match(line)
        if found is None:
            continue
        model, kind, m, n, k, torch, rest = found.groups()
        cuts = {name: float(us) for name, us in _CUT.findall(rest)}
        row = fragment_kind(kind)
        assert row is not None
        planned = cuts.get(cut(make_plan(int(m), int(n), int(k), row, 132)))
        out.append(Timed(model, kind, int(m), int(n), int(k), float(torch), planned, min(cuts.values())))
    return out


def _mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def table() -> str:
    """Ratios to torch.matmul by kind and M, and the bandwidth of few tokens."""
    groups: dict[tuple[str, str, int], list[Timed]] = {}
    few: dict[tuple[str, int], list[float]] = {}
    for timed in sweep():
        if timed.m <= 64:
            kind = KINDS[timed.kind]
            stored = timed.n * timed.k * kind.block_bytes / kind.block
            if timed.planned is not None:
                few.setdefault((timed.kind, timed.m), []).append(stored / timed.planned / 1e6)
            continue
        groups.setdefault(("SmolLM2" if timed.model == "smollm2" else "Llama", timed.kind, timed.m), []).append(timed)
    lines = [
        "| tier, shapes | kind | M | shapes | least | geometric mean | geometric mean, fastest cut |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (family, kind, m), cases in sorted(groups.items()):
        known = [case for case in cases if case.planned is not None]
        ratios = [case.torch / case.planned for case in known if case.planned is not None]
        best = [case.torch / case.fastest for case in known]
        counted = f"{len(known)} of {len(cases)}"
        figures = f"{min(ratios):.2f} | {_mean(ratios):.2f} | {_mean(best):.2f}"
        lines.append(f"| wgmma, {family} | {kind} | {m} | {counted} | {figures} |")
    mma: dict[tuple[str, int], list[float]] = {}
    for kind, m, ratio in _MMA.findall(SWEEP.read_text("utf-8")):
        mma.setdefault((kind, int(m)), []).append(float(ratio))
    for (kind, m), values in sorted(mma.items()):
        lines.append(f"| mma, Llama 8B | {kind} | {m} | {len(values)} | {min(values):.2f} | {_mean(values):.2f} | |")
    lines += ["", "| kind | M | TB/s of weights, least | most |", "| --- | --- | --- | --- |"]
    lines += [f"| {kind} | {m} | {min(v):.2f} | {max(v):.2f} |" for (kind, m), v in sorted(few.items())]
    return "\n".join(lines)


def main() -> None:
    text = table()
    if "--write" in sys.argv:
        page = PAGE.read_text("utf-8")
        head, _, rest = page.partition(_BEGIN)
        _, _, tail = rest.partition(_END)
        PAGE.write_text(f"{head}{_BEGIN}\n{text}\n{_END}{tail}", "utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
