"""How a product of given shape is cut into tiles and spread over a device's multiprocessors, by estimated time.

The plan depends on the shape and the device alone, so equal calls give equal bits. Where no tile is cut along K, a
row's sums are taken in one order whatever the tile: its result is then the same whatever rows are beside it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from frink_numba.errors import ShapeError
from frink_numba.kernels.gemm_epilogue import chunk_tokens
from frink_numba.kernels.gemm_kinds import FragmentKind

# Consumer groups of a block, and the tokens of its tile.
TILES = {
    1: (16, 32, 64, 96, 128),
    2: (32, 64, 104, 128, 160, 176, 192, 256),
    3: (64, 128),
}
# Each tile is a kernel to compile, for each kind and epilogue that meets it. Those beside the common ones serve numbers
# of tokens that come again, as whole chunks of a prompt do, and must gain something.
COMMON = {1: (16, 32, 64, 128), 2: (64, 128, 256), 3: (128,)}
_COMES_AGAIN = 128  # a multiple of it
_RARE = 1.01

TOKEN_TILES = tuple(sorted({t for tiles in TILES.values() for t in tiles}))

# Nanoseconds on an H200, from timings of every tile and from clocks read inside the kernel. A step of a slab takes the
# tensor cores so long for each token (the power limit counts, not their clock); alone a group takes twice the tokens,
# and what its conversions cost, in clocks. A tile's end takes time for each chunk of tokens that is staged.
_TOKEN, _FEWER, _FEWER_DIRECT = 1.33, 8.0, 20.0
_IDLE_GAIN = 0.4  # of a step, as idle multiprocessors leave their power to the others
_CLOCK = 1 / 1.75
_STEP, _OPERATION = 182.0, 2.48  # clocks of a group's step beside its products, and what each operation adds
_CROWDED = 1.43  # with three groups, which leave each other fewer issue slots
_NORM = 6  # how sharply the larger of the two counts
_BYTE = 1 / 95  # from the L2 cache to a multiprocessor
_LATENCY = 1150.0  # of a stage, all others of the ring being on their way
_WEIGHT_BYTE = 1 / 29.2  # from memory, of all weights, shared by all multiprocessors
_START, _START_SHARED = 3000.0, 2200.0  # a launch; where two blocks share a multiprocessor, so that launches overlap
_TILE_END, _CHUNK, _CHUNK_TOKEN = 250.0, 120.0, 4.5
_PART, _PART_PER_TOKEN = 1400.0, 2.3  # a partial tile, written or added
_PART_SHARED = 1.6  # where two blocks share a multiprocessor
_REST_CUT = 1.02  # codes to be converted, and some blocks are idle while others cut the rest
_UNEVEN = {1: 1.045, 2: 1.0}  # blocks out of step share less of what the L2 cache holds
_SPLIT_BYTES, _SPLIT_PENALTY = 24 << 20, 1.04  # still less where the activations alone are as large as half of it
_MANY_TOKENS, _OTHER_CLUSTER = 4096, 1.01  # two blocks share tokens where there are many, else not
_LONE_SLAB = 1.03  # a slab that shares its tokens with no other
_LEAST_GROUPS = 2  # of four steps, a block of a split tile

_SHARED = 226 * 1024  # bytes of a multiprocessor's rings and staging buffers
_BAND_BYTES = 24 << 20  # tokens walked through together stay in the L2 cache


def blocks_on_multiprocessor(cluster: int, groups: int) -> int:
    """Blocks that a multiprocessor holds at a time."""
    return 2 if groups == 1 and cluster == 1 else 1


class Behind(NamedTuple):
    """Weights of a second kind: the last `rows` of a product's."""

    kind: FragmentKind
    rows: int


@dataclass(frozen=True, slots=True)
class Plan:
    """tokens: of a tile; cluster: blocks that share a tile's tokens; groups: slabs of each block.

    The first `split_tiles` tiles are cut along K as well, for the first `workers` clusters; `swath` token tiles form a
    band. `blocks` is the grid.
    """

    tokens: int
    cluster: int
    groups: int
    token_tiles: int
    slabs: int
    steps: int
    blocks: int
    split_tiles: int
    workers: int
    swath: int
    nanoseconds: float  # the estimate


@functools.lru_cache(maxsize=4096)
def make_plan(
    m: int,
    rows: int,
    cols: int,
    kind: FragmentKind,
    multiprocessors: int,
    tokens: int | None = None,
    cluster: int | None = None,
    groups: int | None = None,
    whole: bool = False,
    behind: Behind | None = None,
) -> Plan:
    """The fastest plan for M tokens and `rows` packed weight rows of `cols`.

    `tokens`, `cluster` and `groups` force the tile (ShapeError where there is none such); `whole`: no tile is cut along
    K. behind: those of the rows that are of another kind.
    """
    plans = [
        plan
        for g, tiles in TILES.items()
        for t in tiles
        if (groups or g) == g
        and (tokens or t) == t
        and (tokens or t < 2 * m or t == tiles[0])
        and (tokens or t > 16 or m <= 32)
        and (tokens or groups or t in COMMON[g] or m % _COMES_AGAIN == 0)
        # Two blocks share the widest tiles only: smaller ones wait more for each other than they save, and so do those
        # of two kinds.
        for c in ([cluster] if cluster else [2, 1] if t == TOKEN_TILES[-1] and not behind else [1])
        for plan in layouts(m, rows, cols, kind, multiprocessors, t, c, g, behind)
        if not (whole and plan.split_tiles)
    ]

    def cost(plan: Plan) -> tuple[float, ...]:
        rare = 1.0 if plan.tokens in COMMON[plan.groups] else _RARE
        return (plan.nanoseconds * rare, plan.cluster, plan.groups, plan.tokens, plan.split_tiles)

    if not plans:
        raise ShapeError(f"no tile has {groups} slabs and {tokens} tokens: those of so many slabs have {TILES}")
    return min(plans, key=cost)


def layouts(
    m: int,
    rows: int,
    cols: int,
    kind: FragmentKind,
    multiprocessors: int,
    tokens: int,
    cluster: int,
    groups: int,
    behind: Behind | None = None,
) -> Iterator[Plan]:
    """The plans with one tile: whole tiles; those beyond full waves cut into equal parts; equal ends for all."""
    token_tiles = -(-m // tokens)
    slabs = -(-rows // 64)
    steps = -(-cols // 64)
    step_groups = -(-steps // 4)
    # Tiles are of one kind each: of slabs of the first kind, then of those behind them.
    last = -(-behind.rows // 64) if behind else 0
    tiles = token_tiles * sum(-(-count // (groups * cluster)) for count in (slabs - last, last))
    resident = blocks_on_multiprocessor(cluster, groups)
    places = max(1, multiprocessors * resident // cluster)
    swath = max(1, min(token_tiles, _BAND_BYTES // (tokens * cols * 2)))
    crowd = min(resident, -(-tiles // multiprocessors))
    busy = min(1.0, tiles * cluster / multiprocessors)

    def step_of(busy: float) -> float:
        step = _step(kind, tokens, cluster, groups, crowd, busy)
        if behind:
            step += (_step(behind.kind, tokens, cluster, groups, crowd, busy) - step) * last / slabs
        elif (cluster == 1) == (m >= _MANY_TOKENS and tokens == TOKEN_TILES[-1]):
            step *= _OTHER_CLUSTER
        return step * (_LONE_SLAB if groups == 1 else 1.0)

    step = step_of(1.0)
    chunk = chunk_tokens(tokens, 128)
    tile_end = _TILE_END + tokens // chunk * (_CHUNK + _CHUNK_TOKEN * chunk)
    start = _START_SHARED if resident > 1 else _START

    weight_bytes = steps * sum(
        count * part.step_size for count, part in ((slabs - last, kind), (last, behind.kind if behind else kind))
    )
    memory = weight_bytes * _WEIGHT_BYTE / multiprocessors

    def plan(clusters: int, split_tiles: int, workers: int, time: float) -> Plan:
        blocks = clusters * cluster
        time = float(time**_NORM + memory**_NORM) ** (1 / _NORM)
        return Plan(
            tokens, cluster, groups, token_tiles, slabs, steps, blocks, split_tiles, workers, swath, start + time
        )

    whole_tile = steps * step + tile_end
    uneven = _UNEVEN[cluster] * (_SPLIT_PENALTY if m * cols * 2 > _SPLIT_BYTES else 1.0)
    waves, rest = divmod(tiles, places)
    yield plan(min(tiles, places), 0, 1, -(-tiles // places) * (steps * step_of(busy) + tile_end))
    part = (1.0 if resident == 1 else _PART_SHARED) * (_PART + _PART_PER_TOKEN * groups * tokens)
    if not rest:
        return
    for parts in range(2, min(places // rest, step_groups // _LEAST_GROUPS) + 1):
        own = -(-step_groups // parts) * 4 * step
        time = waves * whole_tile + own + tile_end + part * (1 + parts) / 2
        if waves and max(kind.operations, behind.kind.operations if behind else 0):
            time *= _REST_CUT
        yield plan(places if waves else rest * parts, rest, rest * parts, time)
    split_tiles = tiles if waves <= 1 else rest + places
    workers = min(places, split_tiles * step_groups // _LEAST_GROUPS)
    if workers > split_tiles or (waves and workers == places):
        own = -(-split_tiles * step_groups // workers) * 4 * step
        parts = 1 + -(-workers // split_tiles)
        time = (tiles - split_tiles) // places * whole_tile + own + parts * part + 2 * tile_end
        yield plan(workers if not waves else places, split_tiles, workers, time * uneven)


def _step(kind: FragmentKind, tokens: int, cluster: int, groups: int, crowd: int, busy: float) -> float:
    """A block's step, with `crowd` blocks on its multiprocessor and such a part of all multiprocessors busy."""
    transfer = crowd * (tokens * 128 / cluster + groups * kind.step_size) * _BYTE
    latency = _LATENCY / max(1, ring_stages(kind, tokens, cluster, groups) - 1)
    transfer = float(transfer**_NORM + latency**_NORM) ** (1 / _NORM)
    fewer = _FEWER if kind.operations else _FEWER_DIRECT
    products = crowd * groups * (tokens * _TOKEN + fewer) * (1 - _IDLE_GAIN * (1 - busy))
    if kind.operations == 0:
        return max(products, transfer)
    alone = (2 * tokens + _STEP + _OPERATION * kind.operations) * _CLOCK * (_CROWDED if groups > 2 else 1.0)
    return max(float(products**_NORM + alone**_NORM) ** (1 / _NORM), transfer)


def ring_stages(kind: FragmentKind, tokens: int, cluster: int, groups: int) -> int:
    """About as many as a block's ring has: one off at most where they are few (`gemm_variant.py` counts them).

    Those of a product of two kinds are as large as the larger kind's: each kind has too many here.
    """
    room = _SHARED // blocks_on_multiprocessor(cluster, groups) - 2 * groups * chunk_tokens(tokens, 128) * 128
    return room // (tokens * 128 + groups * kind.step_size)


def mma_tokens(m: int, rows: int, multiprocessors: int) -> int:
    """Tokens of a tile of the `mma` tier: wide ones where they still give every multiprocessor a tile."""
    if m <= 16:
        return 16
    wide = -(-m // 128) * -(-rows // 128)
    return 64 if m <= 64 or wide < multiprocessors else 128
