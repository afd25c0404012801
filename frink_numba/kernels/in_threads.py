"""Work that is cut into pieces, in threads where any may begin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress


def in_threads(work: Callable[[int], object], pieces: Sequence[int], threads: int) -> None:
    """`work` of every piece, in any order, on so many threads; raises what one raises. A piece may be done twice.

    A process whose main thread has ended lets no pool begin anything: the calling thread does it all then.
    """
    begun: list[Future[object]] | None = None
    if threads > 1:
        with ThreadPoolExecutor(threads) as pool, suppress(RuntimeError):
            begun = [pool.submit(work, piece) for piece in pieces]
    if begun is None:
        for piece in pieces:
            work(piece)
    else:
        for future in begun:
            future.result()
