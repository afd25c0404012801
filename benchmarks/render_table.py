"""Renders the generated parts of README.md: environment variables from settings.py, figures from the receipts.

    python benchmarks/render_table.py            rewrites README.md
    python benchmarks/render_table.py --check    exits 1 when it would change

A generated part stands between `<!-- NAME:begin -->` and `<!-- NAME:end -->`.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from frink_numba import settings

ROOT = Path(__file__).resolve().parent.parent
RECEIPTS = ROOT / "benchmarks" / "receipts"
KERNELS = ("gemm", "attention", "decode-kernels")  # figures of single kernels stand on their pages in docs/kernels


def figures_table(folder: Path = RECEIPTS) -> str:
    """One row a figure of whole models, receipts in the order of their file names; every cell comes from a receipt."""
    lines = [
        "| what | figure | p20 to p80 | backend | against | ratio | machine | receipt |",
        "| --- | ---: | ---: | --- | --- | ---: | --- | --- |",
    ]
    for path in sorted(folder.glob("*.json")):
        document = json.loads(path.read_text("utf-8"))
        if path.stem.startswith(KERNELS):
            continue
        lines += [_row(row, document["machine"], path.stem) for row in document["rows"]]
    return "\n".join(lines)


def _row(row: dict[str, Any], machine: str, receipt: str) -> str:
    served = f"{row['backend']} ({row['tier']})" if row.get("tier") else row["backend"]
    against, ratio = "", ""
    if row.get("baseline_value") is not None:
        against = f"{row['baseline']}: {_figure(row['baseline_value'])}"
        ratio = f"{row['ratio']:.2f}"
    spread = f"{_figure(row['p20'])} to {_figure(row['p80'])}"
    value = f"{_figure(row['value'])} {row['metric']}"
    cells = [
        row["case"],
        value,
        spread,
        served,
        against,
        ratio,
        machine,
        f"[{receipt}](benchmarks/receipts/{receipt}.json)",
    ]
    return "| " + " | ".join(cells) + " |"


def _figure(value: float) -> str:
    """Three significant digits at most below 1000, whole numbers above."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def rendered(text: str) -> str:
    """README `text` with its generated parts anew; ValueError when a part's marks are missing."""
    for name, table in (("settings", settings.markdown_table()), ("figures", figures_table())):
        pattern = re.compile(rf"(<!-- {name}:begin -->\n).*?(<!-- {name}:end -->)", re.DOTALL)
        text, count = pattern.subn(lambda match, table=table: f"{match[1]}{table}\n{match[2]}", text)
        if count != 1:
            raise ValueError(f"README.md needs one part between <!-- {name}:begin --> and <!-- {name}:end -->")
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, exit 1 when README.md is out of step")
    check = parser.parse_args().check
    path = ROOT / "README.md"
    before = path.read_text("utf-8")
    after = rendered(before)
    if after == before:
        return 0
    if check:
        print("README.md is out of step: run `make readme`")
        return 1
    path.write_text(after, "utf-8")
    print("README.md rendered")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
