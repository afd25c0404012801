"""`frink-numba plan`: the dispatcher's plan, folded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from frink_numba.cli.plan import _write_memory
from frink_numba.plan import Memory
from tests.cli.runner import frink, frink_json, one_line_error


def test_the_host_serves_every_layer(smollm2_path: Path) -> None:
    document = frink_json("plan", "smollm2-135m", "--batch", "64")
    assert (document["batch"], document["start_pos"]) == (64, 0)
    assert [(run["first"], run["last"], run["backend"]) for run in document["runs"]] == [(0, 29, "host")]
    shown = frink("plan", "smollm2-135m", "--batch", "64")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "a step of 64 rows" in shown.stdout
    row = next(line for line in shown.stdout.splitlines() if "0-29" in line)
    assert "host" in row


def test_a_text_ends_with_the_step(smollm2_path: Path) -> None:
    """--length says where; on the host alone no device's memory is told."""
    document = frink_json("plan", "smollm2-135m", "--batch", "64", "--length", "1000")
    assert (document["batch"], document["start_pos"], document["memory"]) == (64, 936, [])
    done = frink("plan", "smollm2-135m", "--batch", "64", "--length", "63")
    assert done.returncode == 2
    assert "cannot end with a step of 64 rows" in done.stderr
    assert "8192" in one_line_error(frink("plan", "smollm2-135m", "--length", "9000"), 2)


def test_a_step_is_within_the_context(smollm2_path: Path) -> None:
    assert frink_json("plan", "smollm2-135m", "--context", "100")["batch"] == 100
    message = one_line_error(frink("plan", "smollm2-135m", "--batch", "4", "--context", "3"), 2)
    assert "--batch 4 is beyond the context of 3 positions" in message


def test_memory_is_a_table_of_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    """Units for people, and every byte; page-locked memory only where there is some."""
    memory = Memory("cuda", 1 << 30, 3, 1024, 5000, 0, 2 << 30, 77)
    _write_memory(memory)
    shown = capsys.readouterr().out
    for cells in (("weights of the layers", "1.0 GiB", "1,073,741,824"), ("in all", "1.0 GiB", "1,073,747,851"),
                  ("budget", "2.0 GiB", "2,147,483,648"), ("page-locked host memory", "77 B", "77")):  # fmt: skip
        assert any(all(cell in line for cell in cells) for line in shown.splitlines()), cells
    _write_memory(replace(memory, page_locked=0))
    assert "page-locked" not in capsys.readouterr().out


def test_a_backend_that_is_absent_is_explained(smollm2_path: Path) -> None:
    """A named backend that cannot run here is said on stderr and in the plan; without host there is no plan."""
    done = frink("plan", "smollm2-135m", "--backend", "cuda:99,host")
    assert done.returncode == 0
    assert done.stderr.startswith("frink-numba: backend cuda:99 is unavailable: ")
    assert "cuda:99 is unavailable: " in done.stdout
    alone = frink("plan", "smollm2-135m", "--backend", "cuda:99")
    assert alone.returncode == 1
    assert alone.stderr.splitlines()[-1].startswith("frink-numba: error: ")
    assert "add 'host' to the list" in alone.stderr
    assert "Traceback" not in alone.stderr


def test_a_context_beyond_the_models_is_one_line(smollm2_path: Path) -> None:
    assert "8192" in one_line_error(frink("plan", "smollm2-135m", "--context", "9000"))
