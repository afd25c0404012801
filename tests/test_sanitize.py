"""The sanitizer's choice of tests: a renamed test must not drop out of it unseen."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.sanitize import CLAUSES, TESTS, Finding

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def names() -> list[str]:
    """The ids of all GPU tests that it chooses from."""
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", "-m", "gpu", *TESTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    return [line for line in done.stdout.splitlines() if "::" in line]


@pytest.mark.parametrize("clause", CLAUSES)
def test_every_clause_chooses_a_few_tests(clause: str, names: list[str]):
    """Each word of a clause stands in the ids that it chooses; -k takes the words as parts of names, in any case."""
    test, *rest = clause.strip("()").split(" and ")
    words = [word.strip("()").split(" or ") for word in rest]
    chosen = [
        name for name in names if f"::{test}" in name and all(any(w in name for w in choices) for choices in words)
    ]
    assert 1 <= len(chosen) <= 20, (clause, len(chosen))


def test_a_tool_that_did_not_run_is_not_clean():
    assert Finding("memcheck", 0, 29).clean
    assert not Finding("memcheck", 1, 29).clean
    assert not Finding("memcheck", None, 29).clean
    assert not Finding("memcheck", 0, None).clean
    assert not Finding("memcheck", 0, 0).clean
