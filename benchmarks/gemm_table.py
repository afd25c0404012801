"""Render docs/kernels/gemm.md's tables from the receipts: python benchmarks/gemm_table.py [--write]"""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parent
PAGE = _ROOT.parent / "docs" / "kernels" / "gemm.md"
_BEGIN, _END = "<!-- figures -->", "<!-- end of figures -->"


def _rows(name: str) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = json.loads((_ROOT / "receipts" / name).read_text("utf-8"))["rows"]
    return rows


def table() -> str:
    """Ratios to torch.matmul by kind and M, and the bandwidth of few tokens."""
    groups: dict[tuple[str, str, int], list[float]] = {}
    bandwidth: dict[tuple[str, int], list[float]] = {}
    for name in ("gemm-h200.json", "gemm-mma-h200.json"):
        for row in _rows(name):
            found = re.match(r"(\w+) \S+ (\w+) M=(\d+) ", str(row["case"]))
            if found is None:
                continue
            model, kind, m = found.group(1), found.group(2), int(found.group(3))
            if row["metric"] == "TB/s of weights":
                bandwidth.setdefault((kind, m), []).append(float(str(row["value"])))
            elif "ratio" in row and m > 64:
                family = "SmolLM2" if model == "smollm2" else "3B, 8B, 70B" if kind in ("F16", "Q4_K") else "8B"
                group = (f"{row['tier']}, {family if row['tier'] == 'wgmma' else '8B'}", kind, m)
                groups.setdefault(group, []).append(float(str(row["ratio"])))
    lines = ["| tier, shapes | kind | M | least | geometric mean |", "| --- | --- | --- | --- | --- |"]
    for (family, kind, m), ratios in sorted(groups.items()):
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        lines.append(f"| {family} | {kind} | {m} | {min(ratios):.2f} | {mean:.2f} |")
    lines += ["", "| kind | M | TB/s of weights, least | most |", "| --- | --- | --- | --- |"]
    lines += [f"| {kind} | {m} | {min(v):.2f} | {max(v):.2f} |" for (kind, m), v in sorted(bandwidth.items())]
    first = [row for row in _rows("gemm-h200.json") if row["metric"] == "s"]
    lines += ["", *(f"{row['case']}: {float(str(row['value'])):.2f} s." for row in first)]
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
