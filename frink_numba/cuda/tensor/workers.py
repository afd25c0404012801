"""Threads that end when there is nothing left to do, and do not keep a process that wants to end.

The standard library's pool does all that is queued before a process may end: gigabytes of weights, for somebody who has
left. Here each thread ends with the piece that it is at.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class Workers:
    """At most `most` threads that do what is submitted, in its order. `name`: what the threads' names begin with."""

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name = most, name
        self._tasks: deque[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = deque()
        self._threads: set[threading.Thread] = set()
        self._lock = threading.RLock()  # the collector may stop them anywhere
        self._stopped = False

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """What becomes of a call. RuntimeError when they were stopped, the process is ending, or there is no thread."""
        future: Future[Any] = Future()
        with self._lock:
            if self._stopped or _ending():
                raise RuntimeError("these threads were stopped")
            self._tasks.append((future, call, arguments))
            if len(self._threads) < self._most:
                thread = threading.Thread(target=self._work, name=f"{self._name}-{len(self._threads)}")
                try:
                    thread.start()
                except RuntimeError:
                    if not self._threads:
                        self._cancel()
                        raise
                else:
                    self._threads.add(thread)
        return future

    def stop(self) -> None:
        """Cancel what nobody is at, and wait for the rest; one of the threads itself does not wait."""
        with self._lock:
            self._stopped = True
            self._cancel()
            threads = list(self._threads)
        if threading.current_thread() not in threads:
            for thread in threads:
                thread.join()

    def _work(self) -> None:
        while True:
            with self._lock:
                if _ending():
                    self._cancel()
                if not self._tasks:
                    self._threads.discard(threading.current_thread())
                    return
                future, call, arguments = self._tasks.popleft()
            try:
                future.set_result(call(*arguments))
            except BaseException as error:  # whoever asks for the result gets it
                future.set_exception(error)
            del future, call, arguments

    def _cancel(self) -> None:
        while self._tasks:
            self._tasks.popleft()[0].cancel()


def _ending() -> bool:
    return not threading.main_thread().is_alive()
