"""Several sequences at once: which tokens of which go through the layers together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

MOST_SEQUENCES = 64
"""Sequences of a group."""


def packed(lengths: Sequence[int], rows: int) -> Iterator[list[tuple[int, int, int]]]:
    """Groups of at most `rows` tokens and MOST_SEQUENCES sequences: (sequence, first, last) each.

    In order. A sequence longer than `rows` is cut, and its last piece may share a group with those behind it; one that
    is not is never cut, so that its group holds all of it.
    """
    group: list[tuple[int, int, int]] = []
    held = 0
    for number, length in enumerate(lengths):
        first = 0
        if group and (held + length > rows or len(group) == MOST_SEQUENCES):
            yield group
            group, held = [], 0
        while length - first > rows:
            yield [(number, first, first + rows)]
            first += rows
        group.append((number, first, length))
        held += length - first
    if group:
        yield group
