"""Kernels that are missing on disk, compiled side by side: most of a compilation is Python's, and one process does that
for one kernel at a time.

A step's kernels are asked for one after the other and needed together. Whoever asks gets a `Pending` and goes on.
Helper processes take from one end of the queue; who needs a kernel that nobody is at compiles it in place. So a single
kernel costs what it did, and a helper that cannot begin, or ends, costs nothing else. Helpers are for kernels beyond
the first, end when there is nothing left to do, and leave what they compile in the folder of kernels (cubins.py).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import subprocess
import sys
import threading
from collections import deque
from typing import IO

from frink_numba.kernels import cubins
from frink_numba.kernels.cubins import Cubin, Source, Target
from frink_numba.processors import usable_processors

_MOST_HELPERS = 8  # processes of some 300 MB each
_SIZE_BYTES = 8


class Pending:
    """A kernel that will be compiled: `cubin()` waits for it, or compiles it. Thread-safe."""

    def __init__(self, queue: CompileQueue, source: Source, target: Target) -> None:
        self.source, self.target = source, target
        self._queue = queue
        self._lock = threading.Lock()
        self._taken = threading.Event()  # a helper that has it is done with it, or nobody has it
        self._taken.set()
        self._cubin: Cubin | None = None

    def cubin(self) -> Cubin:
        """The machine code; what the compiler raises, where it does."""
        self.withdraw()
        self._taken.wait()
        with self._lock:
            if self._cubin is None:
                self._cubin = cubins.load(self.source, self.target)
            return self._cubin

    def withdraw(self) -> None:
        """Let no helper begin with it: who asked compiles it, or nobody wants it any more."""
        self._queue.withdraw(self)


class CompileQueue:
    """Kernels to compile, and the helper processes that do: `most`, or None for what the machine has room for."""

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self._waiting: deque[Pending] = deque()
        self._helpers: set[threading.Thread] = set()
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._ended = False

    def begin(self, source: Source, target: Target) -> Pending:
        """The kernel, which is compiled from now on where there is a helper to do it."""
        pending = Pending(self, source, target)
        with self._lock:
            if self._most is None:
                self._most = min(_MOST_HELPERS, usable_processors() - 1)
            self._waiting.append(pending)
            # The first in the queue is for who asked.
            if not self._ended and len(self._helpers) < min(self._most, len(self._waiting) - 1):
                thread = threading.Thread(target=self._help, name="frink-compile", daemon=True)
                with contextlib.suppress(RuntimeError):  # no more threads: who asked compiles
                    thread.start()
                    self._helpers.add(thread)
        return pending

    def withdraw(self, pending: Pending) -> None:
        """Take a kernel out of the queue, unless a helper has it."""
        with self._lock, contextlib.suppress(ValueError):
            self._waiting.remove(pending)

    def end(self) -> None:
        """Stop the helpers; what they are at is compiled by who needs it."""
        with self._lock:
            self._ended = True
            processes = list(self._processes)
        for process in processes:
            process.kill()

    def _take(self) -> Pending | None:
        """The last kernel of the queue; None where the first alone is left, and no helper any more then."""
        with self._lock:
            if self._ended or len(self._waiting) < 2:
                self._helpers.discard(threading.current_thread())
                return None
            pending = self._waiting.pop()
            pending._taken.clear()
            return pending

    def _help(self) -> None:
        """Have one process compile kernels until there are none; a thread."""
        process: subprocess.Popen[bytes] | None = None
        try:
            while (pending := self._take()) is not None:
                try:
                    if process is None:
                        process = self._start()
                    _ask(process, pending)
                except Exception:  # no process, or it has ended, or a source that cannot be sent: who asked compiles
                    with self._lock:
                        self._helpers.discard(threading.current_thread())
                    return
                finally:
                    pending._taken.set()
        finally:
            if process is not None:
                with self._lock:
                    self._processes.discard(process)
                process.kill()
                with contextlib.suppress(OSError), process:  # closes its pipes, and waits
                    pass

    def _start(self) -> subprocess.Popen[bytes]:
        if not sys.executable:
            raise OSError("this interpreter has no name")
        code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve()"
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        with self._lock:
            self._processes.add(process)
            ended = self._ended
        if ended:
            process.kill()
        return process


def _ask(process: subprocess.Popen[bytes], pending: Pending) -> None:
    """Have a kernel compiled. EOFError when the process has ended, RuntimeError when nothing is in the folder then."""
    assert process.stdin is not None
    assert process.stdout is not None
    task = pickle.dumps((pending.source, pending.target))
    process.stdin.write(len(task).to_bytes(_SIZE_BYTES, "little") + task)
    process.stdin.flush()
    if not process.stdout.read(1):
        raise EOFError("the process has ended")
    if cubins.find(pending.source, pending.target) is None:
        raise RuntimeError("the kernel cannot be compiled, or the folder cannot be written")


def serve() -> None:
    """Compile what comes on standard input into the folder of compiled kernels, and tell of each by a byte."""
    tasks, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb", 0)
    os.dup2(2, 1)  # what a compiler prints is no answer
    while True:
        try:
            source, target = pickle.loads(_read(tasks))
        except EOFError:
            return
        with contextlib.suppress(Exception):  # who asked compiles it again, and gets the error
            cubins.load(source, target)
        answers.write(b".")


def _read(stream: IO[bytes]) -> bytes:
    size = stream.read(_SIZE_BYTES)
    task = stream.read(int.from_bytes(size, "little"))
    if not task:
        raise EOFError("no more tasks")
    return task


QUEUE = CompileQueue()
atexit.register(QUEUE.end)
