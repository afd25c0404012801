"""The tiles of the `wgmma` attention: which it takes for a head_dim, and where they lie in shared memory."""

from __future__ import annotations

from dataclasses import dataclass

LOG2E = 1.4426950408889634
_L2_BYTES = 32 << 20  # of K and V that are walked through together
# head_dim up to: keys of a block, compute groups, stages of K and of V, stages of Q.
_TILES = {64: (128, 3, 4, 2), 128: (128, 2, 2, 2), 256: (80, 2, 2, 1)}


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of one compiled variant, and where things lie in shared memory.

    keys: of a block; head_dim: as stored; groups: compute groups of 64 rows; stages: of K and of V; q_stages: of Q.
    """

    head_dim: int
    keys: int
    groups: int
    stages: int
    q_stages: int
    windowed: bool = False
    capped: bool = False

    @property
    def width(self) -> int:
        """Channels that are multiplied."""
        return -(-self.head_dim // 16) * 16

    @property
    def chunks(self) -> int:
        """Boxes of 64 channels that a tile of K, V or Q consists of."""
        return -(-self.width // 64)

    @property
    def rows(self) -> int:
        return 64 * self.groups

    @property
    def threads(self) -> int:
        return 128 * (self.groups + 1)

    @property
    def q_group(self) -> int:
        """Bytes of a group's rows of Q."""
        return self.chunks * 64 * 128

    @property
    def block(self) -> int:
        """Bytes of a block of K or of V."""
        return self.chunks * self.keys * 128

    @property
    def k_at(self) -> int:
        return self.q_stages * self.groups * self.q_group

    @property
    def v_at(self) -> int:
        return self.k_at + self.stages * self.block

    @property
    def tiles_at(self) -> int:
        """Two slots of 32 bytes: which tile comes."""
        return self.v_at + self.stages * self.block

    # Barriers, 8 bytes each: K full and free, V full and free, Q full and free, tile known and its slot free.

    @property
    def k_full(self) -> int:
        return self.tiles_at + 64

    @property
    def k_free(self) -> int:
        return self.k_full + 8 * self.stages

    @property
    def v_full(self) -> int:
        return self.k_free + 8 * self.stages

    @property
    def v_free(self) -> int:
        return self.v_full + 8 * self.stages

    @property
    def q_full(self) -> int:
        return self.v_free + 8 * self.stages

    @property
    def q_free(self) -> int:
        return self.q_full + 8 * self.q_stages * self.groups

    @property
    def tile_full(self) -> int:
        return self.q_free + 8 * self.q_stages * self.groups

    @property
    def tile_free(self) -> int:
        return self.tile_full + 16

    @property
    def shared(self) -> int:
        return self.tile_free + 16

    @property
    def sums(self) -> int:
        """Registers of O; behind them lie those of P, then maxima and sums."""
        return self.width // 2

    @property
    def carried(self) -> int:
        return self.sums + self.keys // 4 + 4

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a thread after `setmaxnreg`: (producer, compute groups).

        All together no more than the block is launched with (168 a thread with two compute groups): who asks for more
        waits for ever, or until a neighbour of the block on its multiprocessor has gone.
        """
        if self.groups == 2:
            return (40, 232) if self.width <= 128 else (24, 240)
        return (32, 160) if self.groups == 3 else (56, 240)


@dataclass(frozen=True, slots=True)
class MmaLayout:
    """One compiled variant of the `mma` tier: keys of a block, warps of 16 * row_groups rows, head_dim as stored."""

    head_dim: int
    keys: int
    warps: int
    row_groups: int
    blocks: int
    windowed: bool = False
    capped: bool = False

    @property
    def width(self) -> int:
        return -(-self.head_dim // 16) * 16

    @property
    def chunks(self) -> int:
        return -(-self.width // 64)

    @property
    def rows(self) -> int:
        return 16 * self.row_groups * self.warps

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def k_at(self) -> int:
        return self.chunks * self.rows * 128

    @property
    def v_at(self) -> int:
        return self.k_at + self.chunks * self.keys * 128

    @property
    def slot_at(self) -> int:
        return self.v_at + self.chunks * self.keys * 128

    @property
    def totals_at(self) -> int:
        return self.slot_at + 32

    @property
    def shared(self) -> int:
        return self.totals_at + 8 * self.threads * self.row_groups


def make_layout(head_dim: int, *, windowed: bool, capped: bool) -> Layout:
    keys, groups, stages, q_stages = next(tile for width, tile in _TILES.items() if head_dim <= width)
    return Layout(head_dim, keys, groups, stages, q_stages, windowed, capped)


def resident_positions(pitch: int) -> int:
    """Positions times K/V heads whose tiles are walked through together: their K and V stay in the L2 cache."""
    return _L2_BYTES // (4 * pitch)


# head_dim up to: keys of a block, warps, row groups of a warp, blocks on a multiprocessor.
_MMA_TILES = {64: (64, 4, 2, 2), 128: (64, 4, 2, 2), 256: (64, 8, 1, 1)}
_LARGE_SHARED = ((8, 0), (9, 0), (10, 0), (10, 3))  # a block may use 160 KB there, 99 KB elsewhere


def make_mma_layout(head_dim: int, capability: tuple[int, int], *, windowed: bool, capped: bool) -> MmaLayout:
    keys, warps, row_groups, blocks = next(tile for width, tile in _MMA_TILES.items() if head_dim <= width)
    if head_dim > 128 and capability not in _LARGE_SHARED:
        warps = 4
    return MmaLayout(head_dim, keys, warps, row_groups, blocks, windowed, capped)
