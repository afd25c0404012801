"""How the threads of a team work together, without GIL and locks: what numba compiles. See team.py for the board."""

from __future__ import annotations

from frink_numba.host.lanes import call, exchange, fetch, fetch_and_add, pause
from frink_numba.host.team import GENERATION, HELPERS, JOB, KERNEL, LINE


def lead(board: int, helpers: int, kernel: int, job: int) -> None:
    """Run a job here and in those of `helpers` that are awake. Only one thread may lead at a time."""
    exchange(board + JOB, job)
    fetch_and_add(board + GENERATION, 1)
    exchange(board + KERNEL, kernel)
    call(kernel, job)
    exchange(board + KERNEL, 0)
    for helper in range(helpers):
        while fetch(board + HELPERS + helper * LINE) != 0:
            pause()


def help_out(board: int, number: int, patience: int) -> None:
    """What helper `number` does: take part in one job after the other; return after `patience` looks without one."""
    mine = board + HELPERS + number * LINE
    seen = 0
    looks = 0
    while looks < patience:
        if fetch(board + GENERATION) != seen and fetch(board + KERNEL) != 0:
            exchange(mine, 1)
            kernel = fetch(board + KERNEL)  # again: the leader waits for this helper only from here on
            if kernel != 0:
                seen = fetch(board + GENERATION)
                call(kernel, fetch(board + JOB))
                looks = 0
            exchange(mine, 0)
        else:
            pause()
            looks += 1
