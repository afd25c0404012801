"""Blocks of columns at fixed positions: what makes results of the host independent of chunks (FRINK_INVARIANT).

The token at position p is always column p % WIDTH of a block of WIDTH columns; columns without a token of the step are
padding. Every array then has the same shape, and a token the same place in it, however a text was cut. What is left
is that no operation mixes columns, or chooses its way by another column's numbers.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from frink_numba.host.thin_products import FEW

WIDTH = FEW  # what products from quantized bytes take at a time


def aligned(start: int, n: int) -> Iterator[tuple[int, int, slice]]:
    """(first row, row after the last, their columns) of each block, for the rows of positions start .. start+n-1."""
    row = 0
    while row < n:
        column = (start + row) % WIDTH
        last = min(n, row + WIDTH - column)
        yield row, last, slice(column, column + last - row)
        row = last


def padded(rows: np.ndarray, columns: slice) -> np.ndarray:
    """`rows` [n, channels] as those columns of a block float32 [channels, WIDTH], zeros in the others."""
    block = np.zeros((rows.shape[1], WIDTH), np.float32)
    block[:, columns] = rows.T
    return block
