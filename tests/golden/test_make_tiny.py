"""The tiny models' goldens are what transformers computes today, and their files what it reads."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.oracle
def test_the_committed_goldens_are_what_transformers_computes() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.golden.make_tiny", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
