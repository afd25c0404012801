"""Products of quantized rows with one or four columns, straight from the file's bytes: what numba compiles.

    out[r, c] = sum over k of W[r, k] x[c, k], W dequantized in registers, x and the sums float32

A kernel is called by every thread of a team with the address of one and the same job (`thin_products.Job`), and takes
rows in chunks from the job's counter until none is left: which thread computes a row never changes the row.
"""

from __future__ import annotations

from collections.abc import Callable

from frink_numba.host.lanes import fetch_and_add, floats, integer, multiply_add, no_floats, store_float, total
from frink_numba.host.thin_blocks import ThinBlock
from frink_numba.host.thin_products import Job

_NEXT, _CHUNK, _X, _OUT, _BLOCKS, _SEGMENTS, _FIRST = (8 * int(field) for field in Job)


def one_column(block: ThinBlock) -> Callable[[int], None]:
    """The kernel for one column, x [cols] and out [rows]."""
    expand, parts, block_bytes = block.expand, block.parts, block.nbytes

    def kernel(job: int) -> None:
        chunk, x, out, blocks = integer(job + _CHUNK), integer(job + _X), integer(job + _OUT), integer(job + _BLOCKS)
        segments_end = job + _FIRST + 24 * integer(job + _SEGMENTS)
        rows = integer(segments_end - 8)
        first = fetch_and_add(job + _NEXT, chunk)
        while first < rows:
            for segment in range(job + _FIRST, segments_end, 24):
                begin, end = integer(segment + 8), integer(segment + 16)
                for row in range(max(first, begin), min(first + chunk, end)):
                    at = integer(segment) + (row - begin) * blocks * block_bytes
                    here = x
                    even, odd = no_floats(), no_floats()
                    for _ in range(blocks):
                        for part in range(parts):
                            a, b = expand(at, part)
                            even = multiply_add(a, floats(here), even)
                            odd = multiply_add(b, floats(here + 64), odd)
                            here += 128
                        at += block_bytes
                    store_float(out + 4 * row, total(even) + total(odd))
            first = fetch_and_add(job + _NEXT, chunk)

    return kernel


def few_columns(block: ThinBlock) -> Callable[[int], None]:
    """The kernel for four columns, x [4, cols] and out [rows, 4]: each part of a block is expanded once."""
    expand, parts, block_bytes = block.expand, block.parts, block.nbytes

    def kernel(job: int) -> None:
        chunk, x, out, blocks = integer(job + _CHUNK), integer(job + _X), integer(job + _OUT), integer(job + _BLOCKS)
        segments_end = job + _FIRST + 24 * integer(job + _SEGMENTS)
        rows = integer(segments_end - 8)
        column_bytes = blocks * parts * 128
        first = fetch_and_add(job + _NEXT, chunk)
        while first < rows:
            for segment in range(job + _FIRST, segments_end, 24):
                begin, end = integer(segment + 8), integer(segment + 16)
                for row in range(max(first, begin), min(first + chunk, end)):
                    at = integer(segment) + (row - begin) * blocks * block_bytes
                    x0, x1, x2, x3 = x, x + column_bytes, x + 2 * column_bytes, x + 3 * column_bytes
                    sum0, sum1, sum2, sum3 = no_floats(), no_floats(), no_floats(), no_floats()
                    for _ in range(blocks):
                        for part in range(parts):
                            a, b = expand(at, part)
                            sum0 = multiply_add(b, floats(x0 + 64), multiply_add(a, floats(x0), sum0))
                            sum1 = multiply_add(b, floats(x1 + 64), multiply_add(a, floats(x1), sum1))
                            sum2 = multiply_add(b, floats(x2 + 64), multiply_add(a, floats(x2), sum2))
                            sum3 = multiply_add(b, floats(x3 + 64), multiply_add(a, floats(x3), sum3))
                            x0, x1, x2, x3 = x0 + 128, x1 + 128, x2 + 128, x3 + 128
                        at += block_bytes
                    here = out + 16 * row
                    store_float(here, total(sum0))
                    store_float(here + 4, total(sum1))
                    store_float(here + 8, total(sum2))
                    store_float(here + 12, total(sum3))
            first = fetch_and_add(job + _NEXT, chunk)

    return kernel
