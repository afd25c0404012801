"""Commands of benchmarks: a receipt names its own, flags included; what cannot be measured is said in one line."""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace

import pytest

from benchmarks.bench_prefill import command_of
from benchmarks.command import exit_with
from frink_numba.errors import BackendError


def test_flags_and_values_stand_in_the_command() -> None:
    given = Namespace(shapes="3b", tokens="8192", runs=9, no_baseline=True, memory=False, block_rows=None)
    assert command_of(given, "prefill", ("shapes", "tokens", "runs", "no_baseline", "memory", "block_rows")) == (
        "python -m benchmarks.bench_prefill --shapes 3b --tokens 8192 --runs 9 --no-baseline"
    )


def test_a_value_of_zero_is_one() -> None:
    assert command_of(Namespace(runs=0), "decode", ("runs",)) == "python -m benchmarks.bench_decode --runs 0"


def test_what_is_wrong_is_one_line() -> None:
    def fails() -> int:
        raise BackendError("no backend can run here")

    with pytest.raises(SystemExit, match=r"^error: no backend can run here$"):
        exit_with(fails)


@pytest.mark.parametrize("status", [0, 3])
def test_the_status_is_that_of_the_command_or_of_its_process(status: int) -> None:
    with pytest.raises(SystemExit) as ended:
        exit_with(lambda: status)
    assert ended.value.code == status
    fails = [sys.executable, "-c", f"raise SystemExit({status + 1})"]
    with pytest.raises(SystemExit) as ended:
        exit_with(lambda: subprocess.run(fails, check=True).returncode)
    assert ended.value.code == status + 1
