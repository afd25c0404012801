"""Runs the command line for real, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


# Installed plugins, one of them broken on purpose, would have their say on stderr.
ENVIRONMENT = {"PYTHONIOENCODING": "utf-8", "FRINK_BACKEND": "host"}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "frink_numba", *arguments]


def frink(
    *arguments: str, stdin: str | bytes = b"", environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """One command with `stdin` as its input (never a terminal) and `environment` added to this one's."""
    done = subprocess.run(
        command(*arguments),
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT, **(environment or {})},
        input=stdin.encode() if isinstance(stdin, str) else stdin,
        capture_output=True,
        timeout=120,
        check=False,
    )
    out, err = done.stdout.decode("utf-8"), done.stderr.decode("utf-8")
    return subprocess.CompletedProcess(done.args, done.returncode, out, err)


def frink_json(*arguments: str, **options: Any) -> Any:
    """The document of a command that must succeed, say nothing on stderr and write one JSON document."""
    done = frink(*arguments, "--json", **options)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def one_line_error(done: subprocess.CompletedProcess[str], status: int = 1) -> str:
    """The message of a command that must fail with one line on stderr and nothing on stdout."""
    assert done.returncode == status, done.stderr
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("frink-numba: error: "), done.stderr
    return done.stderr.removeprefix("frink-numba: error: ").rstrip("\n")
