"""The sanitizer's choice of tests: a renamed test must not drop out of it unseen."""

from __future__ import annotations

import re
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


def chooses(clause: str, name: str) -> bool:
    """What -k makes of a clause: its words are parts of a name, in any case, joined by `and`, `or` and brackets."""
    words = re.findall(r"[()]|[^\s()]+", clause)
    joined = [word if word in ("(", ")", "and", "or") else str(word.lower() in name.lower()) for word in words]
    return bool(eval(" ".join(joined)))


@pytest.mark.parametrize("clause", CLAUSES)
def test_every_clause_chooses_a_few_tests(clause: str, names: list[str]):
    chosen = [name for name in names if chooses(clause, name)]
    assert 1 <= len(chosen) <= 20, (clause, len(chosen))


def test_a_clause_is_read_as_k_reads_it():
    assert chooses("(a and (b or (c and d)))", "tests/A.py::c[d]")
    assert not chooses("(a and (b or (c and d)))", "tests/A.py::c[e]")


def test_a_tool_that_did_not_run_is_not_clean():
    assert Finding("memcheck", 0, 29).clean
    assert not Finding("memcheck", 1, 29).clean
    assert not Finding("memcheck", None, 29).clean
    assert not Finding("memcheck", 0, None).clean
    assert not Finding("memcheck", 0, 0).clean
