"""The machine's memory, and a control group's limit below it."""

from __future__ import annotations

from pathlib import Path

from frink_numba.host.memory import machine_memory


def test_the_machine_has_memory() -> None:
    assert machine_memory(()) >= 256 << 20


def test_a_control_groups_limit_counts(tmp_path: Path) -> None:
    limit, unlimited, absent = tmp_path / "memory.max", tmp_path / "none", tmp_path / "absent"
    limit.write_text("1048576\n")
    unlimited.write_text("max\n")
    assert machine_memory((absent, unlimited, limit)) == 1 << 20
    assert machine_memory((absent, unlimited)) == machine_memory(())
