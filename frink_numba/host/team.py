"""Threads that share the work of a compiled function: the caller's and a few helpers.

Helpers watch for jobs without the GIL for a fraction of a millisecond after each, since waking a sleeping thread takes
as long as a small product; then they sleep. They are made when they are first needed, once a process.

The board is memory that the threads share, 64-bit integers a cache line apart: `GENERATION` counts the jobs, `KERNEL`
and `JOB` are the addresses of the job under way (KERNEL is 0 when there is none), and one integer a helper, from
`HELPERS` on, is 1 while that helper may be looking at a job. The leader waits for these to be 0 before it returns, so
that nobody touches a job's memory afterwards.
"""

from __future__ import annotations

import ctypes
import os
import threading
from functools import cache
from types import ModuleType

from frink_numba import settings
from frink_numba.host.compiled import CompiledFunction, compiled
from frink_numba.processors import usable_processors

LINE = 64  # bytes
GENERATION, KERNEL, JOB, HELPERS = 0, LINE, 2 * LINE, 3 * LINE

_MOST = 16  # threads: the products of one token have no work for more
_PATIENCE = 4000  # looks for a job before a helper sleeps: about 0.2 ms
_SOURCES = ("lanes.py", "team.py", "team_kernels.py")


class Team:
    """The calling thread and `size - 1` helpers. Threads that call at the same time work alone."""

    def __init__(self, size: int) -> None:
        """CannotCompile when there is no numba, or when it cannot compile for this processor."""
        self.size = size
        self._lead = compiled("lead", lambda: _kernels().lead, 4, _SOURCES)
        self._help_out = compiled("help_out", lambda: _kernels().help_out, 3, _SOURCES)
        self._memory = (ctypes.c_byte * (HELPERS + (size + 1) * LINE))()
        self._board = -(-ctypes.addressof(self._memory) // LINE) * LINE
        self._busy = threading.Lock()
        self._alarms: list[threading.Lock] = []  # one a helper: held while there is nothing to wake up for
        self._asleep: list[bool] = []

    def run(self, kernel: CompiledFunction, job: int, threads: int) -> None:
        """Call `kernel` with the address `job` here and in helpers, `threads` in all at most.

        It must take its work from the job bit by bit, and return when there is none left: helpers that are asleep may
        come late or not at all. When this returns, none of them is at the job.
        """
        helpers = min(threads, self.size) - 1
        if helpers < 1 or not self._busy.acquire(blocking=False):
            kernel(job)
            return
        try:
            self._hire(helpers)
            for number in range(min(helpers, len(self._alarms))):
                if self._asleep[number]:
                    self._asleep[number] = False
                    self._alarms[number].release()
            self._lead(self._board, len(self._alarms), kernel.address, job)
        finally:
            self._busy.release()

    def _hire(self, helpers: int) -> None:
        """Make helpers until there are that many, or as many as the system lets there be."""
        while len(self._alarms) < helpers:
            number, alarm = len(self._alarms), threading.Lock()
            alarm.acquire()
            thread = threading.Thread(target=self._serve, args=(number, alarm), name=f"frink {number}", daemon=True)
            self._asleep.append(False)
            self._alarms.append(alarm)
            try:
                thread.start()
            except RuntimeError:  # no more threads
                self._asleep.pop()
                self._alarms.pop()
                self.size = number + 1
                return

    def _serve(self, number: int, alarm: threading.Lock) -> None:
        while True:
            self._help_out(self._board, number, _PATIENCE)
            self._asleep[number] = True
            alarm.acquire()


@cache
def team() -> Team:
    """This process's team: as many threads as NumPy's BLAS has. CannotCompile as in `Team`."""
    processors = usable_processors()
    wanted = settings.get("OPENBLAS_NUM_THREADS") or settings.get("OMP_NUM_THREADS") or processors
    return Team(min(wanted, processors, _MOST))


def _kernels() -> ModuleType:
    from frink_numba.host import team_kernels

    return team_kernels


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=team.cache_clear)  # threads do not survive a fork
