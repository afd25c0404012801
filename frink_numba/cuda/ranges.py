"""Named ranges for NVIDIA's profilers (NVTX), behind FRINK_NVTX=1.

A step normally replays a few graphs, in which a profiler sees kernels and no layers. With ranges, the launches are made
one by one instead, each inside a range of its name inside one of its layer: slower for the host by some microseconds a
launch, the same results. The package `nvtx` talks to the profiler; it is the extra `profile`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from frink_numba import settings
from frink_numba.log import warn_once

DOMAIN = "frink_numba"


class Named(Protocol):
    """A launch and what it does; `layer` counts within the run, None for one between layers."""

    @property
    def name(self) -> str: ...

    @property
    def layer(self) -> int | None: ...

    def __call__(self, stream: int) -> None: ...


class Ranges:
    """Makes launches inside ranges. `push(name)` and `pop()` are the profiler's."""

    def __init__(self, push: Callable[[str], Any], pop: Callable[[], Any]) -> None:
        self._push, self._pop = push, pop

    def launch(self, ops: Sequence[Named], stream: int, first: int) -> None:
        """Make every launch of `ops` in the stream with this handle; layer 0 of the run is the model's `first`."""
        for layer, group in itertools.groupby(ops, lambda op: op.layer):
            if layer is not None:
                self._push(f"layer {first + layer}")
            try:
                for op in group:
                    self._push(op.name)
                    try:
                        op(stream)
                    finally:
                        self._pop()
            finally:
                if layer is not None:
                    self._pop()


def open_ranges() -> Ranges | None:
    """Ranges when FRINK_NVTX asks for them and the package is there; else None, and once a word why."""
    if not settings.get("FRINK_NVTX"):
        return None
    try:
        import nvtx
    except ImportError:
        warn_once("FRINK_NVTX=1, but the package nvtx is not installed: pip install 'frink-numba[profile]'")
        return None
    return Ranges(lambda name: nvtx.push_range(name, domain=DOMAIN), lambda: nvtx.pop_range(domain=DOMAIN))
