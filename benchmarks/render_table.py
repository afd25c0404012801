"""Renders the generated parts of README.md and of pages in docs/, and the chart, from settings.py and the receipts.

    python -m benchmarks.render_table            rewrites the pages and docs/prefill.svg
    python -m benchmarks.render_table --check    exits 1 when it would change one

A generated part stands between `<!-- NAME:begin -->` and `<!-- NAME:end -->`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import RECEIPTS, ROOT, chart, gemm_table, invariant_table, speculation_table
from frink_numba import settings

CHART = ROOT / "docs" / "prefill.svg"
FIGURES = ROOT / "docs" / "figures.md"
KERNELS = ("gemm", "read-floor", "attention", "decode-kernels")  # single kernels stand on pages in docs/kernels
TIMELINE = "timeline"
SANITIZER = "sanitizer"  # no figures


def figures_table(folder: Path = RECEIPTS) -> str:
    """One row a figure of whole models, receipts in the order of their file names; every cell comes from a receipt."""
    lines = [
        "| what | figure | p20 to p80 | backend | against | ratio | machine | receipt |",
        "| --- | ---: | ---: | --- | --- | ---: | --- | --- |",
    ]
    for path, document, row in chart.receipts_rows(folder):
        if not path.stem.startswith((*KERNELS, TIMELINE, SANITIZER)):
            lines.append(_row(row, document["machine"], path.stem))
    return "\n".join(lines)


def speed_table(folder: Path = RECEIPTS) -> str:
    """Ours beside other engines, tokens per second: a row for each test of the baselines that a receipt of ours has."""
    baselines = json.loads((folder / chart.BASELINES).read_text("utf-8"))
    engines = [name for name in baselines["engines"] if any(name in row for row in baselines["rows"])]
    lines = [
        "| model | test | frink_numba | " + " | ".join(engines) + " |",
        "| --- | --- | ---: |" + " ---: |" * len(engines),
    ]
    mine = chart.ours(folder)
    for row in baselines["rows"]:
        point = mine.get((row["model"], row["test"]))
        if point is not None:
            others = [f"{row[name]:,} ({point.value / row[name]:.1f} times)" if name in row else "" for name in engines]
            value = f"[{_figure(point.value)}](benchmarks/receipts/{point.source})"
            lines.append("| " + " | ".join([row["model"], row["test"], value, *others]) + " |")
    return "\n".join(lines)


def timeline_table(folder: Path = RECEIPTS) -> str:
    """Where steps spend their time: one row a case of the timelines' receipts, in microseconds."""
    cases: dict[str, dict[str, float]] = {}
    places: dict[str, str] = {}
    for path, document, row in chart.receipts_rows(folder):
        if path.stem.startswith(TIMELINE):
            case, _, part = row["case"].partition(": ")
            cases.setdefault(case, {})[part] = row["value"]
            places[case] = f"{document['machine']}, [{path.stem}](benchmarks/receipts/{path.name})"
    lines = [
        "| step | µs | kernels alone | step / kernels | gaps | copies that nothing hides | host share | where |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for case, parts in cases.items():
        gaps = parts["all launches"] - parts["kernels alone"]
        copies = parts["step"] - parts["without rows"]
        figures = [parts["step"], parts["kernels alone"], gaps, copies]
        step, alone, between, down = (f"{figure:,.0f}" for figure in figures)
        ratio, host = f"{parts['step / kernels alone']:.2f}", f"{parts['host share']:.1f} %"
        lines.append("| " + " | ".join([case, step, alone, ratio, between, down, host, places[case]]) + " |")
    return "\n".join(lines)


def chart_part(folder: Path = RECEIPTS) -> str:
    """The chart's image and where its points are from."""
    return f"![Prefill speed by prompt length, ours and other engines]({CHART.relative_to(ROOT)})\n\n" + chart.caption(
        folder
    )


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


def parts_of_readme(folder: Path = RECEIPTS) -> dict[str, str]:
    """The generated parts of README.md by name."""
    return {"settings": settings.markdown_table(), "chart": chart_part(folder), "speed": speed_table(folder)}


def parts_of_figures(folder: Path = RECEIPTS) -> dict[str, str]:
    """Those of docs/figures.md, whose links begin a folder further down."""
    parts = {"figures": figures_table(folder), "timeline": timeline_table(folder)}
    return {name: table.replace("](benchmarks/", "](../benchmarks/") for name, table in parts.items()}


def pages() -> dict[Path, dict[str, str]]:
    """Every page with its generated parts by name."""
    tables = {made.PAGE: {"figures": made.table()} for made in (gemm_table, invariant_table, speculation_table)}
    return {ROOT / "README.md": parts_of_readme(), FIGURES: parts_of_figures(), **tables}


def rendered(text: str, parts: Mapping[str, str]) -> str:
    """A page's `text` with its generated parts anew; ValueError when a part's marks are missing."""
    for name, table in parts.items():
        begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
        before, first, rest = text.partition(begin)
        _, last, after = rest.partition(end)
        if not (first and last):
            raise ValueError(f"the page needs a part between {begin.strip()} and {end}")
        text = f"{before}{begin}{table}\n{end}{after}"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, exit 1 when something is out of step")
    check = parser.parse_args().check
    wanted = {path: rendered(path.read_text("utf-8"), parts) for path, parts in pages().items()}
    wanted[CHART] = chart.draw(chart.points(RECEIPTS))
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text("utf-8") != text]
    for path in stale:
        name = path.relative_to(ROOT)
        if check:
            print(f"{name} is out of step: run `make readme`")
            continue
        path.write_text(wanted[path], "utf-8")
        print(f"{name} rendered")
    return 1 if check and stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
