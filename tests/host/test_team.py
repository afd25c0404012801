"""Threads that share compiled work: everything is done once, helpers sleep and wake, and nobody outstays a job."""

from __future__ import annotations

import ctypes
import threading
import time

import pytest

from frink_numba.host import team as module
from frink_numba.host.compiled import CompiledFunction, compiled
from frink_numba.host.team import Team, team

pytest.importorskip("numba", reason='needs numba: pip install "frink-numba[fast]"')

CHUNKS = 400


def _make():
    from frink_numba.host.lanes import fetch, fetch_and_add

    def kernel(job):
        """job: the next chunk, chunks, then how often each was done."""
        chunks = fetch(job + 8)
        chunk = fetch_and_add(job, 1)
        while chunk < chunks:
            fetch_and_add(job + 16 + 8 * chunk, 1)
            for _ in range(200):  # some work, so that helpers have the time to join
                fetch(job + 8)
            chunk = fetch_and_add(job, 1)

    return kernel


@pytest.fixture(scope="module")
def kernel() -> CompiledFunction:
    return compiled("test-count", _make, 1, ("lanes.py", "../../tests/host/test_team.py"))


def run(team: Team, kernel: CompiledFunction, threads: int) -> list[int]:
    job = (ctypes.c_int64 * (2 + CHUNKS))(0, CHUNKS)
    team.run(kernel, ctypes.addressof(job), threads)
    done = list(job[2:])
    job[1] = 10**9  # whoever is still at the job goes on, and shows
    time.sleep(0.0002)
    assert list(job[2:]) == done
    return done


@pytest.mark.parametrize("size", [1, 2, 3, 9])
def test_every_chunk_is_done_once(kernel: CompiledFunction, size: int) -> None:
    crew = Team(size)
    for threads in (1, 2, size, size + 5):
        for _ in range(20):
            assert run(crew, kernel, threads) == [1] * CHUNKS


def test_helpers_that_slept_wake_up(kernel: CompiledFunction) -> None:
    crew = Team(2)
    run(crew, kernel, 2)
    deadline = time.monotonic() + 20
    while not crew._asleep[0]:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert run(crew, kernel, 2) == [1] * CHUNKS
    assert run(crew, kernel, 2) == [1] * CHUNKS


def test_callers_at_the_same_time_all_get_their_work_done(kernel: CompiledFunction) -> None:
    crew = Team(3)
    wrong: list[int] = []

    def call() -> None:
        wrong.extend(1 for _ in range(40) if run(crew, kernel, 3) != [1] * CHUNKS)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_system_that_gives_no_more_threads(kernel: CompiledFunction, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    crew = Team(3)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert run(crew, kernel, 3) == [1] * CHUNKS
    assert crew.size == 1


def test_it_has_as_many_threads_as_the_blas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "usable_processors", lambda: 6)
    for openblas, openmp, want in (("", "", 6), ("2", "4", 2), ("", "3,2", 3), ("9", "", 6)):
        monkeypatch.setenv("OPENBLAS_NUM_THREADS", openblas)
        monkeypatch.setenv("OMP_NUM_THREADS", openmp)
        team.cache_clear()
        assert team().size == want
    team.cache_clear()
