"""A backend that serves layers through the host's arithmetic, and fails where it is told to.

FRINK_LOOPBACK       which layers it serves: "all", or numbers and ranges such as "0-3,7"; unset: it is unavailable
FRINK_LOOPBACK_FAIL  where it fails: "factory", "factory_answer", "can_serve", "can_serve_answer", "mutation" (can_serve
                     changes the step), "start" (before any work), "layer:K" (after K layers of the run), "none" (run
                     answers None), "hidden" (a hidden batch of the wrong shape), "rows" (K/V rows of the wrong shape),
                     "missing" (rows of too few layers), "close"
FRINK_LOOPBACK_EXIT  if set, it calls sys.exit where it would raise
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from frink_numba.backend import Decline, Run, Serve, Step
from frink_numba.errors import BackendUnavailable
from frink_numba.layer import Layer


def create(layers: Sequence[Layer]) -> Loopback:
    if "FRINK_LOOPBACK" not in os.environ:
        raise BackendUnavailable("FRINK_LOOPBACK is not set", absent=True)
    _fail_at("factory")
    if os.environ.get("FRINK_LOOPBACK_FAIL") == "factory_answer":
        return object()  # type: ignore[return-value]
    return Loopback(layers)


create.priority = 60  # type: ignore[attr-defined]


class Loopback:
    """See the module."""

    name = "loopback"

    def __init__(self, layers: Sequence[Layer]) -> None:
        from frink_numba.host.backend import HostBackend
        from frink_numba.host.weights import WeightStore

        self._host = HostBackend(layers, WeightStore())
        self.runs: list[tuple[int, int]] = []

    def can_serve(self, l: int, step: Step) -> Serve | Decline:  # noqa: E741
        _fail_at("can_serve")
        if os.environ.get("FRINK_LOOPBACK_FAIL") == "can_serve_answer":
            return True  # type: ignore[return-value]
        if os.environ.get("FRINK_LOOPBACK_FAIL") == "mutation":
            step.start_pos, step.batch, step.hidden, step.layers = 7, 1, None, ()
        if not _named(l, os.environ.get("FRINK_LOOPBACK", "")):
            return Decline("FRINK_LOOPBACK does not name the layer")
        return self._host.can_serve(l, step)

    def run(self, l: int, length: int, step: Step) -> Run | None:  # noqa: E741
        mode, _, count = os.environ.get("FRINK_LOOPBACK_FAIL", "").partition(":")
        _fail_at("start")
        if mode == "none":
            return None
        if mode == "layer" and int(count) < length:
            self._host.run(l, int(count), step)
            _fail(f"told to fail after {count} layers")
        run = self._host.run(l, length, step)
        assert run is not None
        if mode == "hidden":
            run.hidden = run.hidden[:-1]
        elif mode == "rows":
            run.kv_rows[-1] = (run.kv_rows[-1][0][:, :, :-1], run.kv_rows[-1][1])
        elif mode == "missing":
            run.kv_rows.pop()
        else:
            self.runs.append((l, length))
        return run

    def close(self) -> None:
        _fail_at("close")
        self._host.close()


def _fail_at(point: str) -> None:
    if os.environ.get("FRINK_LOOPBACK_FAIL") == point:
        _fail(f"told to fail at {point}")


def _fail(message: str) -> NoReturn:
    if "FRINK_LOOPBACK_EXIT" in os.environ:
        sys.exit(message)
    raise RuntimeError(message)


def _named(layer: int, ranges: str) -> bool:
    """Whether "all", or numbers and ranges such as "0-3,7", name `layer`."""
    if ranges == "all":
        return True
    for part in filter(None, ranges.split(",")):
        first, _, last = part.partition("-")
        if int(first) <= layer <= int(last or first):
            return True
    return False
