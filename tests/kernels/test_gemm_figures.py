"""docs/kernels/gemm.md shows the receipts' figures and no others (design section 7)."""

from __future__ import annotations

from benchmarks.gemm_table import PAGE, table


def test_the_page_shows_the_receipts() -> None:
    assert f"<!-- figures -->\n{table()}\n<!-- end of figures -->" in PAGE.read_text("utf-8")
