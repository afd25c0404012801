"""How runs are cut: blocks cover a step's rows, segments a run's layers, and the last ones are short."""

from __future__ import annotations

import numpy as np
import pytest

from frink_numba.cuda.tensor.cuts import Block, cut_layers, cut_rows, segment_layers


def test_blocks_cover_a_step_and_its_logits() -> None:
    """Whole blocks, then the rest; the last rows' logits fall where these rows are."""
    assert cut_rows(5, 2, 8) == [Block(0, 5, 2)]
    assert cut_rows(16, 0, 8) == [Block(0, 8, 0), Block(8, 8, 0)]
    assert cut_rows(20, 6, 8) == [Block(0, 8, 0), Block(8, 8, 2), Block(16, 4, 4)]
    rng = np.random.default_rng(0)
    for _ in range(200):
        batch, most = (int(n) for n in rng.integers(1, 50, 2))
        logits = int(rng.integers(0, batch + 1))
        blocks = cut_rows(batch, logits, most)
        wanted = [
            block.first + row for block in blocks for row in range(block.rows - block.logits, block.rows)
        ]  # rows of the step
        assert wanted == list(range(batch - logits, batch))
        assert [row for block in blocks for row in range(block.first, block.first + block.rows)] == list(range(batch))
        assert all(0 < block.rows <= most for block in blocks)


def test_segments_cover_all_layers_and_end_short() -> None:
    assert cut_layers(28, 28) == cut_layers(28, 40) == [(0, 28)]
    assert cut_layers(28, 4) == [*((first, first + 4) for first in range(0, 24, 4)), (24, 26), (26, 27), (27, 28)]
    assert cut_layers(5, 1) == [(layer, layer + 1) for layer in range(5)]
    for layers in range(1, 40):
        for most in range(1, layers):
            cut = cut_layers(layers, most)
            assert [layer for first, end in cut for layer in range(first, end)] == list(range(layers))
            lengths = [end - first for first, end in cut]
            assert max(lengths) <= most
            assert lengths[-1] == 1
            assert all(length <= sum(lengths[number + 1 :]) for number, length in enumerate(lengths[:-1]))


@pytest.mark.parametrize(
    ("layers", "row_bytes", "most"),
    [(28, 8 << 10, 28), (28, 8 << 18, 4), (28, 8 << 19, 2), (28, 8 << 20, 1), (30, 1536 * 512, 6), (2, 64 << 20, 1)],
)
def test_a_segment_is_worth_a_copy_and_no_longer_than_need_be(layers: int, row_bytes: int, most: int) -> None:
    """At least 4 MiB come down together, in eight parts unless they would pass 11 MiB; one layer in any case."""
    assert segment_layers(layers, row_bytes) == most
