"""Closed standard streams: what is missing is said where there is still somewhere to say it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.cli.runner import ENVIRONMENT, ROOT, command

pytestmark = pytest.mark.skipif(os.name == "nt", reason="descriptors are closed by a POSIX shell")


def shell(redirections: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """One command under `redirections` of the shell; pipes are where nothing is redirected."""
    line = f'exec "$@" {redirections}'
    return subprocess.run(
        ["sh", "-c", line, "sh", *command(*arguments)],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("arguments", [("--help",), ("fetch", "--list"), ("fetch", "--list", "--json")])
def test_a_closed_stdout_is_an_error(arguments: tuple[str, ...]) -> None:
    done = shell(">&-", *arguments)
    assert done.returncode == 1
    assert done.stderr.startswith("frink-numba: error: stdout is closed")
    assert done.stderr.count("\n") == 1


def test_a_closed_stderr_loses_messages_only(smollm2_path: Path) -> None:
    done = shell("2>&-", "generate", "smollm2-135m", "The", "--max-new-tokens", "1")
    assert (done.returncode, done.stdout.count("\n")) == (0, 1)
    done = shell("2>&-", "inspect", "absent")
    assert (done.returncode, done.stdout) == (1, "")
    assert shell("2>&-", "inspect").returncode == 2


def test_a_closed_stdin_matters_to_those_who_read_it(smollm2_path: Path) -> None:
    done = shell("<&-", "score", "smollm2-135m")
    assert done.returncode == 1
    assert done.stderr == (
        "frink-numba: error: no text: stdin is closed; give the text as an argument or with --file\n"
    )
    assert shell("<&-", "score", "smollm2-135m", "The capital").returncode == 0


def test_all_of_them_closed() -> None:
    assert shell("<&- >&- 2>&-", "fetch", "--list").returncode == 1
    assert shell("<&- 2>&-", "fetch", "--list").stdout != ""
