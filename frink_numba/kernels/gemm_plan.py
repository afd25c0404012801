"""How a product of given shape is cut into tiles and spread over a device's multiprocessors, by estimated time.

The plan depends on the shape and the device alone, so equal calls give equal bits.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

TOKEN_TILES = (16, 32, 64, 128, 256)

# Clocks, fitted to an H200: of a step (two slabs of 64 rows x 64 columns x T tokens), of a block's start, of a tile's end, of
# a partial tile written or added.
_STEP_LEAST = 330
_STEP_PER_TOKEN = 4
_START = 3000
_TILE_END, _TILE_END_PER_TOKEN = 700, 12
_PART, _PART_PER_TOKEN = 900, 6
_LEAST_GROUPS = 2  # of four steps, a block of a split tile

_BAND_BYTES = 24 << 20  # tokens walked through together stay in the L2 cache


@dataclass(frozen=True, slots=True)
class Plan:
    """tokens: of a tile. The first `split_tiles` tiles are cut along K as well; `swath` token tiles form a band."""

    tokens: int
    token_tiles: int
    slabs: int
    steps: int
    blocks: int
    split_tiles: int
    swath: int
    clocks: int  # the estimate


@functools.lru_cache(maxsize=4096)
def make_plan(m: int, rows: int, cols: int, multiprocessors: int, tokens: int | None = None) -> Plan:
    """The fastest plan for M tokens and `rows` packed weight rows of `cols`; `tokens` forces the tile."""
    candidates = [tokens] if tokens else [t for t in TOKEN_TILES if t < 2 * m or t == TOKEN_TILES[0]]
    plans = [
        plan for t in candidates for split in (False, True) for plan in _plan(m, rows, cols, multiprocessors, t, split)
    ]
    return min(plans, key=lambda plan: (plan.clocks, plan.tokens, plan.split_tiles))


def _plan(m: int, rows: int, cols: int, multiprocessors: int, tokens: int, split: bool) -> list[Plan]:
    token_tiles = -(-m // tokens)
    slabs = -(-rows // 64)
    steps = -(-cols // 64)
    groups = -(-steps // 4)
    tiles = token_tiles * -(-slabs // 2)
    step = max(_STEP_LEAST, _STEP_PER_TOKEN * tokens)
    tile_end = _TILE_END + _TILE_END_PER_TOKEN * tokens
    whole_tile = steps * step + tile_end
    swath = max(1, min(token_tiles, _BAND_BYTES // (tokens * cols * 2)))
    if not split:
        blocks = min(tiles, multiprocessors)
        clocks = _START + -(-tiles // blocks) * whole_tile
        return [Plan(tokens, token_tiles, slabs, steps, blocks, 0, swath, clocks)]
    blocks = multiprocessors
    if tiles % blocks == 0:
        return []
    # All tiles when they are fewer than blocks; else those of the last full wave and of the rest.
    split_tiles = tiles - max(0, tiles // blocks - 1) * blocks
    if tiles < blocks:
        blocks = max(tiles, min(blocks, split_tiles * groups // _LEAST_GROUPS))
    if blocks == tiles:
        return []
    own = -(-split_tiles * groups // blocks)
    part = _PART + _PART_PER_TOKEN * tokens
    parts = 1 + -(-blocks // split_tiles)  # written once, added by the tile's owner
    clocks = _START + own * 4 * step + parts * part + tile_end * -(-split_tiles // blocks)
    clocks += (tiles - split_tiles) // blocks * whole_tile
    return [Plan(tokens, token_tiles, slabs, steps, blocks, split_tiles, swath, clocks)]
