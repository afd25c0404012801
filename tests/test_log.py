"""R23: one line per distinct message per process, from any thread."""

from __future__ import annotations

import logging
import threading

import pytest

from frink_numba import log


def test_equal_messages_from_many_threads_are_one_line(monkeypatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(log, "_said", set())
    start = threading.Barrier(8)

    def say() -> None:
        start.wait()
        for i in range(50):
            log.warn_once(f"message {i % 5} with 100 % in it")

    threads = [threading.Thread(target=say) for _ in range(8)]
    with caplog.at_level(logging.WARNING, "frink_numba"):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(r.getMessage() for r in caplog.records) == [f"message {i} with 100 % in it" for i in range(5)]
