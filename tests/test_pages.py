"""Pages of docs/ show the receipts' figures and no others (design section 7)."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import gemm_table, invariant_table, speculation_table
from benchmarks.page import print_or_write, shows


def test_a_page_without_a_place_for_figures_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text("words\n")
    monkeypatch.setattr(sys, "argv", ["table", "--write"])
    with pytest.raises(SystemExit, match="no place for figures"):
        print_or_write(page, "figures")
    assert page.read_text() == "words\n"
    page.write_text("words\n<!-- figures -->\nold\n<!-- end of figures -->\nmore\n")
    print_or_write(page, "figures")
    assert page.read_text() == "words\n<!-- figures -->\nfigures\n<!-- end of figures -->\nmore\n"


@pytest.mark.parametrize("made", [gemm_table, invariant_table, speculation_table], ids=lambda made: made.PAGE.name)
def test_a_page_shows_the_receipts(made: ModuleType) -> None:
    assert shows(made.PAGE, made.table())
