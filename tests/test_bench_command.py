"""A receipt names the command that wrote it, flags included."""

from __future__ import annotations

from argparse import Namespace

from benchmarks.bench_prefill import command_of


def test_flags_and_values_stand_in_the_command() -> None:
    given = Namespace(shapes="3b", tokens="8192", runs=9, no_baseline=True, memory=False, block_rows=None)
    assert command_of(given, "prefill", ("shapes", "tokens", "runs", "no_baseline", "memory", "block_rows")) == (
        "python -m benchmarks.bench_prefill --shapes 3b --tokens 8192 --runs 9 --no-baseline"
    )


def test_a_value_of_zero_is_one() -> None:
    assert command_of(Namespace(runs=0), "decode", ("runs",)) == "python -m benchmarks.bench_decode --runs 0"
