"""The RMS norm in front of a `wgmma` product, in the product's own launch: float32 rows become its f16 operands.

    y[m, k] = x[m, k] * weight[k] / sqrt(mean_k x[m, k]**2 + eps)
    half[m, k] = y[m, k] / scale[m],   scale[m] = 2**e with max_k |half[m, k]| in [2**14, 2**15),   norm[m] >= |y[m]|_2

Before its tiles, each consumer group (128 threads) norms rows, a few with each ticket (`row_tickets.py`), and the copy
engine reads what groups of any block wrote. A row is read once and stays in registers; where there is room, the next
one is on its way meanwhile, and the weights stay too.

A row's bits are those of `norm_half.py`: its sums are taken in the order of a block of `row_threads` threads. A thread
here stands for two of them where those are 256, and half of the threads are idle where those are 64.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

from frink_numba.kernels import gemm_wgmma
from frink_numba.kernels.gemm_variant import WgmmaGemm
from frink_numba.kernels.row_threads import row_threads

GROUP = 128  # threads
MOST_NORM_COLUMNS = 8192  # what registers hold of a row
_MOST_KEPT = 8  # float4 of a thread's row, of which there may be three at once: this row, the next one, the weights
_MOST_TURN = 4  # rows of a ticket


@dataclass(frozen=True, slots=True)
class RowShares:
    """How a group shares a row: thread t takes float4 t, t + apart, t + 2 apart, ..., `vectors` of them.

    threads: whose order of sums is kept; shares: how many of them one thread stands for.
    """

    threads: int
    apart: int
    vectors: int
    shares: int

    @classmethod
    def of(cls, columns: int) -> RowShares:
        """Of rows of up to so many columns."""
        threads = row_threads(columns)
        apart = min(threads, GROUP)
        return cls(threads, apart, -(-columns // (4 * apart)), threads // apart)


def norm_columns(cols: int) -> int:
    """The columns that a kernel for rows of `cols` is made for: all threads of a group take as many."""
    row = RowShares.of(cols)
    return 4 * row.apart * row.vectors


def turns_of(m: int, tokens: int, parties: int) -> tuple[int, int, int]:
    """(rows of a turn, turns of a tile of `tokens` rows, turns in all): as many for each of the parties, or nearly."""
    rounds = -(-m // (parties * _MOST_TURN))
    rows = min(tokens, -(-m // (parties * rounds)))
    of_tile = -(-tokens // rows)
    whole, rest = divmod(m, tokens)
    return rows, of_tile, whole * of_tile + -(-rest // rows)


class NormOps(NamedTuple):
    """What `gemm_wgmma.build` takes for a norm.

    The ops of gemm_norm_ops.row_ops; whether a thread has registers for `ahead`, the row after, and for the weights;
    bytes of scratch of a row, of which two lie apart by that bit.
    """

    load: Any
    measure: Any
    put: Any
    ahead: bool
    scratch: int


@functools.cache
def build(gemm: WgmmaGemm) -> Any:
    """The kernel of a variant with a norm, as `gemm_wgmma.build` gives it."""
    from frink_numba.kernels.gemm_norm_ops import row_ops

    room = RowShares.of(gemm.norm).vectors <= _MOST_KEPT
    return gemm_wgmma.build(gemm, NormOps(*row_ops(gemm.norm, room), room, 128))
