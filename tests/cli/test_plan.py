"""`frink-numba plan`: the dispatcher's plan, folded."""

from __future__ import annotations

from pathlib import Path

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
