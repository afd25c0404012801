"""Where things go: progress on stderr and only on a terminal, tables that fit a pipe, text in any encoding."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from frink_numba.cli import output
from tests.cli.runner import ENVIRONMENT, ROOT, command, frink


def test_progress_is_shown_on_a_terminal_and_stdout_stays_clean(smollm2_path: Path) -> None:
    """stderr is a pseudo-terminal, stdout a pipe: the bar is drawn there, the JSON document here."""
    pty = pytest.importorskip("pty", reason="Windows has no pseudo-terminals")
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        command("bench", "smollm2-135m", "-p", "4", "-n", "0", "-r", "2", "--json"),
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT, "TERM": "xterm"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=theirs,
    ) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                part = os.read(ours, 4096)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            shown += part
        assert process.stdout is not None
        document = json.loads(process.stdout.read())
    os.close(ours)
    assert process.returncode == 0
    assert b"pp4" in shown
    assert b"/3" in shown  # runs of it, the one before the measured ones included
    assert document["benchmark"] == "bench"


@pytest.mark.parametrize("columns", ["0", "", "40", "wide"])
def test_a_table_on_a_terminal_of_any_width(columns: str) -> None:
    """A COLUMNS of 0, which some programs leave behind, once left nothing of it."""
    pty = pytest.importorskip("pty", reason="Windows has no pseudo-terminals")
    ours, theirs = pty.openpty()
    done = subprocess.run(
        command("fetch", "--list"),
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT, "TERM": "xterm", "NO_COLOR": "1", "COLUMNS": columns},
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=subprocess.PIPE,
        timeout=60,
    )
    os.close(theirs)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", os.read(ours, 65536).decode())
    os.close(ours)
    assert (done.returncode, done.stderr) == (0, b"")
    assert "smo" in shown
    assert max(map(len, shown.splitlines())) <= (40 if columns == "40" else 80)


def test_no_progress_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: False, raising=False)
    with output.progress_bar() as report:
        assert report is None


def test_short_work_shows_no_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A call that tells of finished work alone draws nothing."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with output.progress_bar() as report:
        assert report is not None
        report("prompt", 5, 5)
    assert capsys.readouterr().err == ""


def test_text_beyond_the_terminals_encoding_is_no_error(smollm2_path: Path) -> None:
    """An ASCII terminal gets "?" for what it lacks, JSON stays UTF-8."""
    ascii_only = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    done = frink("score", "smollm2-135m", "naïve 🦙 – yes", environment=ascii_only)
    assert (done.returncode, done.stderr) == (0, "")
    assert "?" in done.stdout
    document = json.loads(frink("score", "smollm2-135m", "naïve", "--json", environment=ascii_only).stdout)
    assert "".join(token["text"] for token in document["tokens"]).startswith("na")
    table = frink("plan", "smollm2-135m", environment=ascii_only)
    assert (table.returncode, table.stderr) == (0, "")


def test_a_wide_table_is_not_cut(capsys: pytest.CaptureFixture[str]) -> None:
    """A long cell wraps; no character is lost, and markup in a cell is text."""
    cell = "[bold]" + "x" * 300
    output.write_table("a title", ("one", "two"), [(cell, 7)], right=("two",))
    shown = capsys.readouterr().out
    assert shown.count("x") == 300
    assert "[bold]" in shown
    assert "a title" in shown
