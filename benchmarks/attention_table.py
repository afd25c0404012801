"""Render docs/kernels/attention.md's table from the receipts: python benchmarks/attention_table.py [--write]"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent
PAGE = _ROOT.parent / "docs" / "kernels" / "attention.md"
_BEGIN, _END = "<!-- figures -->", "<!-- end of figures -->"


def table() -> str:
    """A row a case: microseconds, TFLOP/s, and the ratios to torch's two backends."""
    lines = ["| tier | case | us | TFLOP/s | to FlashAttention-2 | to cuDNN |", "| --- | --- | --- | --- | --- | --- |"]
    for name in ("attention-h200.json", "attention-mma-h200.json"):
        cases: dict[tuple[str, str], dict[str, Any]] = {}
        for row in json.loads((_ROOT / "receipts" / name).read_text("utf-8"))["rows"]:
            found = cases.setdefault((row["tier"], row["case"]), {})
            found[row["metric"]] = row["value"]
            if "ratio" in row:
                found[row["baseline"].rpartition(" ")[2]] = row["ratio"]
        for (tier, case), found in cases.items():
            ratios = [f"{found[key]:.2f}" if key in found else "" for key in ("FLASH_ATTENTION", "CUDNN_ATTENTION")]
            figures = (f"{found['us']:.1f}", f"{found['TFLOP/s']:.0f}", *ratios)
            lines.append(f"| {tier} | {case} | {' | '.join(figures)} |")
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
