"""Runs that come again as one graph each: all their launches, and their K/V rows on the way down beside these.

Queueing a run piece by piece keeps the calling thread busy for some hundred microseconds, a graph for some ten. What is
captured includes where the rows go on the host, which cannot be changed afterwards; so a graph is made for a place when
rows go there the second time: a prompt at the beginning of a cache that was emptied, the next part of a text where
there was one before. A run whose rows go somewhere new is queued piece by piece.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from frink_numba.cuda.runtime import one_line
from frink_numba.log import warn_once

_KEPT = 8  # graphs, and keys of runs that have none yet


@dataclass(frozen=True, slots=True)
class StepGraph:
    """`replay` queues the run; `kv_down`: bytes of K/V rows that come down with it."""

    replay: Callable[[], None]
    kv_down: int


class StepGraphs:
    """The graphs of one device. A key holds what its graph's launches need."""

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, StepGraph | None] = OrderedDict()
        self._refused = False

    def find(self, key: Hashable, capture: Callable[[], StepGraph]) -> StepGraph | None:
        """The graph of a run that came before; None for one that did not, and where the driver makes no graph of it."""
        if self._refused:
            return None
        graph = self._known.get(key)
        if graph is None and key in self._known:
            try:
                graph = capture()
            except Exception as error:  # cuda.bindings has classes of its own; the run goes on without
                self._refused = True
                warn_once(f"steps are queued piece by piece, since they cannot be captured: {one_line(error)}")
                return None
        self._known[key] = graph
        self._known.move_to_end(key)
        if len(self._known) > _KEPT:
            self._known.popitem(last=False)
        return graph

    def clear(self) -> None:
        """Let go of all graphs, and of what they refer to."""
        self._known.clear()
