"""Pages of docs/ show the receipts' figures and no others (design section 7)."""

from __future__ import annotations

from types import ModuleType

import pytest

from benchmarks import gemm_table, invariant_table, speculation_table
from benchmarks.page import shows


@pytest.mark.parametrize("made", [gemm_table, invariant_table, speculation_table], ids=lambda made: made.PAGE.name)
def test_a_page_shows_the_receipts(made: ModuleType) -> None:
    assert shows(made.PAGE, made.table())
