"""Scratch: laid out before the run, aligned, grown only between runs."""

from __future__ import annotations

import numpy as np
import pytest

from frink_numba.cuda.arena import ALIGNMENT, Arena, Carver, Layout, float_bytes
from frink_numba.cuda.shapes import LayerShape
from frink_numba.cuda.simt.scratch import ScratchShape
from tests.cuda.fake_gpu import OUT_OF_MEMORY, FakeCudaError, FakeRuntime


def test_parts_are_aligned_and_do_not_overlap():
    block = np.zeros(5000, np.uint8)
    carver = Carver(block)
    parts = [carver.array((3, 5)), carver.array((7,), np.float64), carver.array((1,), np.uint8), carver.array((2, 2))]
    start = block.__array_interface__["data"][0]
    assert all((part.__array_interface__["data"][0] - start) % ALIGNMENT == 0 for part in parts)
    for number, part in enumerate(parts):
        part[...] = number + 1
    assert [set(part.ravel().tolist()) for part in parts] == [{1}, {2}, {3}, {4}]


def test_a_layout_counts_what_a_carver_takes():
    layout = Layout()
    assert [layout.add(n) for n in (1, 256, 257, 0)] == [0, 256, 512, 1024]
    assert layout.nbytes == 1024
    assert float_bytes(1, 64, 65) == 256 + 256 + 512


def test_scratch_has_room_for_the_largest_of_unlike_layers():
    small, wide = LayerShape(40, 4, 2, 16, 56, 8), LayerShape(40, 2, 1, 64, 20, 0)
    parts = ScratchShape([small, wide], rope_tables=1).parts(batch=3, start_pos=5)
    assert parts["hidden"] == parts["normed"] == parts["projected"] == 3 * 40
    assert parts["queries"] == parts["attended"] == 3 * 128
    assert parts["gate"] == parts["up"] == 3 * 56
    assert parts["keys0"] == parts["values1"] == 8 * 64
    assert parts["cos0"] == parts["sin0"] == 3 * 8
    assert "keys1" not in ScratchShape([small], 1).parts(3, 5)


def test_memory_grows_with_the_rows_and_not_with_their_square():
    """R11 and the issue: scratch is linear in the batch and in the prefix."""
    shape = ScratchShape([LayerShape(4096, 32, 8, 128, 14336, 64)] * 2, 1)
    sizes = [shape.nbytes(batch, 0) for batch in (512, 1024, 2048)]
    assert sizes[1] - sizes[0] < 1.1 * sizes[0]
    assert sizes[2] - sizes[1] < 1.1 * (sizes[1] - sizes[0]) * 2
    assert shape.nbytes(512, 4096) - shape.nbytes(512, 0) == 4 * 4096 * 1024 * 4


def test_it_grows_by_a_quarter_more_only_into_spare_memory():
    runtime = FakeRuntime()
    arena = Arena(runtime)
    assert arena.reserve(1000, spare=10_000).nbytes == 1250
    assert arena.reserve(1200, spare=10_000).nbytes == 1250
    assert runtime.allocated() == 1250
    assert arena.reserve(4000, spare=100).nbytes == 4100
    assert arena.reserve(8000, spare=0).nbytes == 8000
    assert arena.nbytes == runtime.allocated() == 8000  # the smaller blocks are gone
    arena.clear()
    assert arena.nbytes == runtime.allocated() == 0


def test_a_failed_growth_leaves_it_empty_and_usable():
    runtime = FakeRuntime(memory_bytes=2000)
    arena = Arena(runtime)
    arena.reserve(1000, spare=0)
    with pytest.raises(FakeCudaError, match=OUT_OF_MEMORY):
        arena.reserve(4000, spare=0)
    assert arena.nbytes == runtime.allocated() == 0
    assert arena.reserve(1500, spare=0).nbytes == 1500
