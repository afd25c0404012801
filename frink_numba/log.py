"""The `frink_numba` logger, and warnings that are said once per process (R23)."""

from __future__ import annotations

import logging
import threading

logger = logging.getLogger("frink_numba")

_said: set[str] = set()
_lock = threading.Lock()


def warn_once(message: str) -> None:
    """Log `message` at WARNING the first time this process meets it; thread-safe."""
    say_once(logging.WARNING, message)


def say_once(level: int, message: str) -> None:
    """Log `message` at `level` the first time this process meets it; thread-safe."""
    with _lock:
        if message in _said:
            return
        _said.add(message)
    logger.log(level, "%s", message)
