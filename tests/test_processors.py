"""How many processors there are to use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from frink_numba.processors import usable_processors


@pytest.mark.parametrize(
    ("text", "want"),
    [("max 100000", 8), ("150000 100000", 2), ("10000 100000", 1), ("9900000 100000", 8), ("", 8), ("1 0", 8)],
)
def test_the_control_groups_share_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, want: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    quota = tmp_path / "cpu.max"
    quota.write_text(text)
    assert usable_processors(quota) == want


def test_a_system_that_tells_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_processors(tmp_path / "absent") == 1
