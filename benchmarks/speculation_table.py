"""The figures of docs/speculation.md, from the receipts of `bench_speculation`."""

from __future__ import annotations

import json
import re

from benchmarks import RECEIPTS, ROOT

PAGE = ROOT / "docs" / "speculation.md"
_NAMES = "speculation-host.json", "speculation-h200.json"
_CASE = re.compile(r"\S+ (.+), \d+ tokens, drafts of (\d+)")


def table() -> str:
    """A row a question, a column a receipt: tokens a second with drafts, of those without."""
    columns: dict[str, dict[str, float]] = {}
    for name in _NAMES:
        document = json.loads((RECEIPTS / name).read_text("utf-8"))
        for row in document["rows"]:
            if (case := _CASE.fullmatch(row["case"])) is not None:
                column = columns.setdefault(f"{row['backend']}, {document['machine']}, drafts of {case[2]}", {})
                column[case[1]] = row["ratio"]
    questions = sorted({question for ratios in columns.values() for question in ratios})
    lines = ["| answer | " + " | ".join(columns) + " |", "| --- |" + " ---: |" * len(columns)]
    for question in questions:
        ratios = [f"{column[question]:.2f}" if question in column else "" for column in columns.values()]
        lines.append(f"| {question} | " + " | ".join(ratios) + " |")
    return "\n".join(lines)
