"""The figures of docs/invariant.md, from the receipts of `bench_invariant`."""

from __future__ import annotations

import json

from benchmarks import RECEIPTS, ROOT

PAGE = ROOT / "docs" / "invariant.md"


def table() -> str:
    """A row a measured case: tokens a second without and with the setting."""
    lines = [
        "| case | backend | tok/s without | with | ratio | receipt |",
        "| --- | --- | ---: | ---: | ---: | --- |",
    ]
    for path in sorted(RECEIPTS.glob("invariant-*.json")):
        document = json.loads(path.read_text("utf-8"))
        for row in document["rows"]:
            case = row["case"].partition(", FRINK_INVARIANT")[0]
            served = f"{row['backend']} ({row['tier']})" if row.get("tier") else row["backend"]
            figures = f"{row['baseline_value']:.0f} | {row['value']:.0f} | {row['ratio']:.2f}"
            link = f"[{path.stem}](../benchmarks/receipts/{path.name})"
            lines.append(f"| {case} | {served}, {document['machine']} | {figures} | {link} |")
    return "\n".join(lines)
