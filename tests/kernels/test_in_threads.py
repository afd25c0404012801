"""Work in pieces: all of it once, errors to the caller, also where no thread begins any more."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from frink_numba.kernels.in_threads import in_threads


@pytest.mark.parametrize("threads", [1, 3])
def test_all_pieces_are_done_and_an_error_is_the_callers(threads: int) -> None:
    done: list[int] = []
    in_threads(done.append, range(7), threads)
    assert sorted(done) == list(range(7))
    with pytest.raises(ZeroDivisionError):
        in_threads(lambda piece: 1 // piece, range(-2, 2), threads)


def test_a_pool_that_begins_nothing_leaves_it_to_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    done: list[int] = []
    in_threads(done.append, range(4), 2)
    assert done == [0, 1, 2, 3]


def test_a_process_whose_main_thread_has_ended_still_packs() -> None:
    """Its other threads may work for days."""
    code = (
        "import threading\n"
        "from frink_numba.kernels.in_threads import in_threads\n"
        "def work():\n"
        "    threading.main_thread().join()\n"
        "    in_threads(print, range(3), 2)\n"
        "threading.Thread(target=work).start()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["0", "1", "2"]
    assert not done.stderr
