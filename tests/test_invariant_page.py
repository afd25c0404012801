"""docs/invariant.md shows the receipts' figures and no others (design section 7)."""

from __future__ import annotations

from benchmarks.invariant_table import BEGIN, END, PAGE, table


def test_the_page_shows_the_receipts() -> None:
    assert f"{BEGIN}\n{table()}\n{END}" in PAGE.read_text("utf-8")
