"""How a product of given shape is cut into tiles and spread over a device's multiprocessors, by estimated time.

The plan depends on the shape and the device alone, so equal calls give equal bits.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

TOKEN_TILES = (16, 32, 64, 128, 256)

# Nanoseconds on an H200: a step (two slabs of 64 rows x 64 columns) and what each token adds; its least, that with
# codes spliced from two planes, with two blocks on a multiprocessor, and with 256 tokens and no cluster; what a byte
# from the L2 cache costs a multiprocessor; a launch; a tile's end; a partial tile.
_STEP, _STEP_PER_TOKEN = 60.0, 2.55
_STEP_LEAST, _STEP_LEAST_SPLICED, _STEP_LEAST_SHARED, _STEP_ALONE = 220.0, 415.0, 350.0, 735.0
_BYTE = 1 / 95
_START = 3000.0
_TILE_END, _TILE_END_PER_TOKEN = 700.0, 8.0
_PART, _PART_PER_TOKEN = 450.0, 4.5
_SPLIT_RISK = 1.06  # a gain smaller than this is not worth a split
_PART_SHARED = 3500.0  # a split over blocks that share multiprocessors, once
# Blocks of a split are at different columns at a time: activations beyond this leave the L2 cache, and steps take
# longer.
_SPLIT_BYTES, _SPLIT_PENALTY = 40 << 20, 1.2
_LEAST_GROUPS = 2  # of four steps, a block of a split tile

_BAND_BYTES = 24 << 20  # tokens walked through together stay in the L2 cache


def blocks_on_multiprocessor(tokens: int, cluster: int) -> int:
    """Blocks that a multiprocessor holds at a time: the smallest tile is short of warps, not of registers."""
    return 2 if tokens <= 16 and cluster == 1 else 1


@dataclass(frozen=True, slots=True)
class Plan:
    """tokens: of a tile; cluster: blocks that share a tile's tokens, each with two slabs of its own.

    The first `split_tiles` tiles are cut along K as well; `swath` token tiles form a band. `blocks` is the grid.
    """

    tokens: int
    cluster: int
    token_tiles: int
    slabs: int
    steps: int
    blocks: int
    split_tiles: int
    swath: int
    nanoseconds: float  # the estimate


@functools.lru_cache(maxsize=4096)
def make_plan(
    m: int,
    rows: int,
    cols: int,
    step_bytes: int,
    multiprocessors: int,
    tokens: int | None = None,
    cluster: int | None = None,
    spliced: bool = False,
) -> Plan:
    """The fastest plan for M tokens and `rows` packed weight rows of `cols`; `step_bytes` is a slab's step.

    `tokens` and `cluster` force the tile; `spliced` as in FragmentKind.
    """
    # No tile twice as wide as M, and small ones only for as few tokens: they read the weights for each tile.
    fitting = [t for t in TOKEN_TILES if (t < 2 * m or t == TOKEN_TILES[0]) and (t >= 64 or m <= 32)]
    tiles = [tokens] if tokens else fitting
    plans: list[Plan | None] = []
    for t in tiles:
        # Two blocks share the widest tiles only: smaller ones wait more for each other than they save.
        for c in [cluster] if cluster else [2, 1] if t == TOKEN_TILES[-1] else [1]:
            least = _STEP_LEAST_SPLICED if spliced else _STEP_LEAST
            if t == TOKEN_TILES[-1] and c == 1:
                least = _STEP_ALONE
            transfer = (t * 128 / c + 2 * step_bytes) * _BYTE
            step = max(least, _STEP + _STEP_PER_TOKEN * t, transfer)
            plans += [
                _plan(m, rows, cols, multiprocessors, multiprocessors, t, c, step, split) for split in (False, True)
            ]
            if blocks_on_multiprocessor(t, c) == 2:
                step = max(_STEP_LEAST_SHARED, 2 * transfer)
                plans += [
                    _plan(m, rows, cols, multiprocessors, 2 * multiprocessors, t, c, step, split)
                    for split in (False, True)
                ]
    return min(
        (p for p in plans if p is not None),
        key=lambda plan: (plan.nanoseconds, plan.cluster, plan.tokens, plan.split_tiles),
    )


def _plan(
    m: int, rows: int, cols: int, multiprocessors: int, places: int, tokens: int, cluster: int, step: float, split: bool
) -> Plan | None:
    token_tiles = -(-m // tokens)
    slabs = -(-rows // 64)
    steps = -(-cols // 64)
    groups = -(-steps // 4)
    tiles = token_tiles * -(-slabs // (2 * cluster))
    workers = places // cluster
    tile_end = _TILE_END + _TILE_END_PER_TOKEN * tokens
    whole_tile = steps * step + tile_end
    swath = max(1, min(token_tiles, _BAND_BYTES // (tokens * cols * 2)))
    if not split:
        workers = min(tiles, workers)
        time = _START + -(-tiles // workers) * whole_tile
        return Plan(tokens, cluster, token_tiles, slabs, steps, workers * cluster, 0, swath, time)
    if tiles % workers == 0:
        return None
    # All tiles when they are fewer than workers; else those of the last full wave and of the rest.
    split_tiles = tiles - max(0, tiles // workers - 1) * workers
    if tiles < workers:
        workers = max(tiles, min(workers, split_tiles * groups // _LEAST_GROUPS))
    if workers == tiles:
        return None
    own = -(-split_tiles * groups // workers)
    if m * cols * 2 > _SPLIT_BYTES:
        step *= _SPLIT_PENALTY
    part = _PART + _PART_PER_TOKEN * tokens
    parts = 1 + -(-workers // split_tiles)  # written once, added by the tile's owner
    time = _SPLIT_RISK * (_START + own * 4 * step) + parts * part + tile_end * -(-split_tiles // workers)
    time += (tiles - split_tiles) // workers * whole_tile
    if workers * cluster > multiprocessors:
        time += _PART_SHARED
    return Plan(tokens, cluster, token_tiles, slabs, steps, workers * cluster, split_tiles, swath, time)


def mma_tokens(m: int, rows: int, multiprocessors: int) -> int:
    """Tokens of a tile of the `mma` tier: wide ones where they still give every multiprocessor a tile."""
    if m <= 16:
        return 16
    wide = -(-m // 128) * -(-rows // 128)
    return 64 if m <= 64 or wide < multiprocessors else 128
