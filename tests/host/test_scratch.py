"""Scratch: one memory per name, views by shape, content undefined."""

from __future__ import annotations

import numpy as np

from frink_numba.host import scratch as module
from frink_numba.host.scratch import Scratch


def test_a_name_is_one_memory() -> None:
    scratch = Scratch()
    big = scratch.array("a", 4, 6)
    small = scratch.array("a", 3, 2)
    other = scratch.array("b", 3, 2)
    assert big.shape == (4, 6)
    assert small.flags.c_contiguous
    assert np.shares_memory(big, small)
    assert not np.shares_memory(small, other)
    assert scratch.array("a", 4, 6) is big


def test_growth_replaces_the_memory_and_its_views() -> None:
    scratch = Scratch()
    small = scratch.array("a", 2)
    big = scratch.array("a", 1000)
    again = scratch.array("a", 2)
    assert np.shares_memory(big, again)
    assert not np.shares_memory(small, again)
    assert scratch.nbytes == scratch.buffers["a"].nbytes >= 4000


def test_a_shape_that_grows_by_one_a_step_allocates_seldom(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """Scores of a decode step grow by one key each time; remembered views are bounded."""
    monkeypatch.setattr(module, "_MOST_VIEWS", 16)
    scratch = Scratch()
    buffers = set()
    for keys in range(100, 300):
        scratch.array("scores", 9, keys)
        buffers.add(id(scratch.buffers["scores"]))
    assert len(buffers) <= 6
    assert len(scratch._views) <= 16
