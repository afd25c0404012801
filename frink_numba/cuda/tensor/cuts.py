"""How a run is cut: the rows of a step into blocks, and the layers into segments."""

from __future__ import annotations

from typing import NamedTuple

_SEGMENT_BYTES = 4 << 20  # of K/V rows that come down together, at least
_SEGMENTS = 8  # at most, unless their rows are larger than this
_MOST_SEGMENT_BYTES = 11 << 20


class Block(NamedTuple):
    """Rows of a step that go through the layers together, from `first` on; the last `logits` of them want logits."""

    first: int
    rows: int
    logits: int


def cut_rows(batch: int, logits: int, most: int) -> list[Block]:
    """Blocks of `most` rows, and the rest, where the last `logits` rows of a step want logits."""
    blocks = []
    for first in range(0, batch, most):
        rows = min(most, batch - first)
        blocks.append(Block(first, rows, max(0, min(rows, first + rows - (batch - logits)))))
    return blocks


def segment_layers(layers: int, row_bytes: int) -> int:
    """Layers of a segment at most, where one layer's new K/V rows have `row_bytes`."""
    segments = max(1, min(_SEGMENTS, layers * row_bytes // _SEGMENT_BYTES))
    return max(1, min(-(-layers // segments), _MOST_SEGMENT_BYTES // row_bytes))


def cut_layers(layers: int, most: int) -> list[tuple[int, int]]:
    """(first layer, end) of each segment: its K/V rows come down together, while the next one runs.

    The last ones are short, so that little is left to come down behind the last launch. One segment where all fit.
    """
    if most >= layers:
        return [(0, layers)]
    end, cut = layers, list[tuple[int, int]]()
    while end:
        length = min(most, end, max(1, layers - end))
        cut.append((end - length, end))
        end -= length
    return cut[::-1]
