"""Kernels that are compiled side by side: the same code whoever compiles it, and never less than one process does."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from frink_numba.kernels import cubins, gather_rows, half_rows, rope_rows, scatter_bytes
from frink_numba.kernels.compile_apart import CompileQueue
from frink_numba.kernels.cubins import Source, Target
from tests.kernels.compiling import missing_tools

pytestmark = pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))

TARGET = Target("90")
SOURCES = [half_rows.source(True), rope_rows.source(True), gather_rows.source(True), scatter_bytes.source(True)]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRINK_CACHE_DIR", str(tmp_path))


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that this process compiles."""
    names: list[str] = []
    compiled = cubins.compile_kernel

    def recorded(source: Source, target: Target) -> Any:
        names.append(source.name)
        return compiled(source, target)

    monkeypatch.setattr(cubins, "compile_kernel", recorded)
    return names


@pytest.fixture
def queue() -> Iterator[CompileQueue]:
    made = CompileQueue(2)
    yield made
    made.end()


def test_helpers_compile_what_nobody_has_come_for(queue: CompileQueue, here: list[str]) -> None:
    """All but the first come from the helpers, which end; the code is like this process's own."""
    pending = [queue.begin(source, TARGET) for source in SOURCES]
    end = time.monotonic() + 240
    while any(cubins.find(source, TARGET) is None for source in SOURCES[1:]) and time.monotonic() < end:
        time.sleep(0.05)
    got = [each.cubin() for each in pending]
    assert here == [SOURCES[0].name]
    while queue._helpers and time.monotonic() < end:
        time.sleep(0.05)
    assert not queue._helpers
    assert not queue._processes
    own = cubins.compile_kernel(SOURCES[2], TARGET)  # the name has a count of the process's compilations
    assert (got[2].registers, got[2].spilled, got[2].remarks) == (own.registers, own.spilled, own.remarks)


def test_who_needs_a_kernel_does_not_wait_for_a_helper_to_come(queue: CompileQueue, here: list[str]) -> None:
    pending = [queue.begin(source, TARGET) for source in SOURCES[:2]]
    assert pending[0].cubin() == pending[0].cubin()
    assert here[:1] == [SOURCES[0].name]
    assert pending[1].cubin().code == cubins.load(SOURCES[1], TARGET).code


def test_one_kernel_alone_starts_no_process(
    queue: CompileQueue, here: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "_start", pytest.fail)
    for source in SOURCES[:2]:  # one after the other
        queue.begin(source, TARGET).cubin()
    assert here == [source.name for source in SOURCES[:2]]


@pytest.mark.parametrize("code", ["pass", "import sys; sys.stdin.buffer.read(8); sys.stdout.write('.')"])
def test_a_helper_that_ends_or_does_nothing(
    queue: CompileQueue, here: list[str], monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    monkeypatch.setattr(queue, "_start", start)
    pending = [queue.begin(source, TARGET) for source in SOURCES[:3]]
    for each in pending:
        assert each.cubin().code
    assert sorted(here) == sorted(source.name for source in SOURCES[:3])


def test_a_helper_that_cannot_begin(queue: CompileQueue, here: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "")
    pending = [queue.begin(source, TARGET) for source in SOURCES[:2]]
    assert all(each.cubin().code for each in pending)
    assert len(here) == 2


def test_a_source_that_cannot_be_sent(queue: CompileQueue, here: list[str]) -> None:
    local = Source("of a lambda", lambda: gather_rows.source(True).build(), SOURCES[2].threads)
    pending = [queue.begin(source, TARGET) for source in (SOURCES[0], local)]
    assert all(each.cubin().code for each in pending)
    assert "of a lambda" in here


def _fails(what: str) -> Any:
    raise ZeroDivisionError(what)


def test_who_asks_gets_the_error(queue: CompileQueue) -> None:
    """Each time, and nobody else."""
    broken = Source("broken", partial(_fails, "no such kernel"), 32)
    pending = [queue.begin(source, TARGET) for source in (SOURCES[0], broken)]
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="no such kernel"):
            pending[1].cubin()
    assert pending[0].cubin().code


def test_behind_the_end_everything_is_compiled_here(queue: CompileQueue, here: list[str]) -> None:
    queue.end()
    pending = [queue.begin(source, TARGET) for source in SOURCES[:2]]
    assert not queue._helpers
    assert all(each.cubin().code for each in pending)
    assert len(here) == 2


def test_a_process_that_ends_with_kernels_under_way(tmp_path: Path) -> None:
    """It ends at once, and its helpers with it."""
    code = (
        "from frink_numba.kernels import half_rows, rope_rows, gather_rows\n"
        "from frink_numba.kernels.compile_apart import CompileQueue, QUEUE\n"
        "from frink_numba.kernels.cubins import Target\n"
        "import time\n"
        "QUEUE._most = 2\n"
        "for made in (half_rows, rope_rows, gather_rows): QUEUE.begin(made.source(True), Target('90'))\n"
        "end = time.monotonic() + 60\n"
        "while not QUEUE._processes and time.monotonic() < end: time.sleep(0.01)\n"
        "print(*(process.pid for process in QUEUE._processes))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stderr == ""
    pids = [int(pid) for pid in done.stdout.split()]
    assert pids
    end = time.monotonic() + 30
    while any(_lives(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(_lives(pid) for pid in pids)


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
