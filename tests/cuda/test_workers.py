"""Threads that repack: in order, errors to whoever asks, ended with their work, and no longer than the process."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError

import pytest

from frink_numba.cuda.tensor.workers import Workers


def named(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(name)]


def test_all_is_done_in_order_and_the_threads_end() -> None:
    workers, begun = Workers(1, "w-order"), []
    futures = [workers.submit(lambda n: begun.append(n) or n * n, number) for number in range(20)]
    assert [future.result(10) for future in futures] == [number * number for number in range(20)]
    assert begun == list(range(20))
    for thread in named("w-order"):
        thread.join(10)
    assert not named("w-order")
    assert workers.submit(int, "7").result(10) == 7, "another thread begins"


def test_no_more_threads_than_asked_for_work_at_once() -> None:
    workers, inside, most, lock = Workers(3, "w-most"), [], [], threading.Lock()

    def work() -> None:
        with lock:
            inside.append(1)
            most.append(len(inside))
        time.sleep(0.01)
        with lock:
            inside.pop()

    for future in [workers.submit(work) for _ in range(12)]:
        future.result(10)
    assert 1 < max(most) <= 3


def test_an_error_is_told_to_who_asks_and_stops_nobody() -> None:
    workers = Workers(1, "w-error")
    failed, fine = workers.submit(int, "x"), workers.submit(int, "3")
    with pytest.raises(ValueError, match="invalid literal"):
        failed.result(10)
    assert fine.result(10) == 3


def test_stopping_cancels_what_nobody_is_at_and_waits_for_the_rest() -> None:
    workers, begun, go = Workers(1, "w-stop"), threading.Event(), threading.Event()
    first = workers.submit(lambda: (begun.set(), go.wait(10)))
    second = workers.submit(int, "1")
    assert begun.wait(10)
    threading.Timer(0.05, go.set).start()
    workers.stop()
    assert first.done()
    assert not named("w-stop")
    with pytest.raises(CancelledError):
        second.result(0)
    with pytest.raises(RuntimeError, match="stopped"):
        workers.submit(int, "1")


def test_one_of_the_threads_may_stop_them() -> None:
    """The collector comes by anywhere."""
    workers = Workers(2, "w-own")
    assert workers.submit(workers.stop).result(10) is None


def test_a_process_that_ends_waits_for_nothing_that_is_queued() -> None:
    """Nobody has closed anything: a hundred pieces of a quarter second are waiting."""
    code = (
        "import time\n"
        "from frink_numba.cuda.tensor.workers import Workers\n"
        "workers = Workers(2, 'w')\n"
        "for _ in range(100):\n"
        "    workers.submit(time.sleep, 0.25)\n"
        "print(time.monotonic())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert time.monotonic() - float(done.stdout) < 4, "all would take 12 s"
    assert not done.stderr
