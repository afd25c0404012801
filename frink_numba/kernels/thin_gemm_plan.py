"""How a thin product is cut: rows of W over blocks, K over the warps of a block, and over blocks where x is too large.

A *quarter* is 16 rows of W, the height of one `mma`. A block of 8 warps works on a *unit* of R quarters: R warps side
by side, 8 / R that share K's *items* in turns. An item is what a warp fetches at a time: a record of 256 columns, or
one or two steps of 64 where the kind has no super-blocks. Blocks take units in turns.
"""

from __future__ import annotations

from dataclasses import dataclass

from frink_numba.kernels.gemm_kinds import FRAGMENT_KINDS, STEP, FragmentKind

WARPS = 8
MOST_ROWS = 16  # rows of x
X_LIMIT = 60 * 1024  # bytes of x in a block's shared memory
_MOST_SLOTS = 8
_UNIT_COST = 0.35  # what a unit costs beside its items, in items of a warp: sums of warps are added up


@dataclass(frozen=True, slots=True)
class ThinDevice:
    """What a plan needs to know of a device."""

    capability: tuple[int, int]
    multiprocessors: int

    @property
    def block_shared(self) -> int:
        """The most bytes of shared memory that a block may have."""
        if self.capability in ((8, 0), (8, 7)):
            return 163 * 1024
        return 227 * 1024 if self.capability[0] in (9, 10) else 99 * 1024

    @property
    def shared_share(self) -> int:
        """Bytes of a block that leave room for one of the next launch (sm_90: 228 KB, 1 KB of each block reserved)."""
        return 113 * 1024 - 256 if self.block_shared > 200 * 1024 else min(self.block_shared, 99 * 1024)


def item_steps(kind: FragmentKind) -> int:
    """Steps of 64 columns of an item."""
    if kind.group_steps == 4:
        return 4
    return 1 if kind.step_size > 6144 else 2


def item_bytes(name: str) -> int:
    """Bytes of a slab's item."""
    kind = FRAGMENT_KINDS[name]
    return kind.header_size + item_steps(kind) * kind.step_size


def ring_slot(name: str) -> int:
    """Bytes of one slot of all warps."""
    return WARPS // 4 * item_bytes(name)


def row_bytes(part_columns: int) -> int:
    """Bytes from row to row of x in shared memory: an odd multiple of 16, so that eight rows lie in different banks."""
    return part_columns * 2 + 16


def fixed_bytes(name: str, tokens: int, slots: int) -> int:
    """Bytes of shared memory beside x: rings; sums of all warps twice; sums and scales of the norm."""
    return slots * ring_slot(name) + 2 * WARPS * partial_room(tokens) + 16 * WARPS * 16 + 16 * 16


def sum_registers(tokens: int) -> int:
    """Sums of a lane: rows g and g + 8 of two tokens of each eight."""
    return 8 if tokens == 16 else 4


def partial_room(tokens: int) -> int:
    """Bytes of a warp's sums of 16 rows: 16 a lane and eight tokens; with two tokens only the lanes t = 0 have some."""
    return {2: 128, 8: 512, 16: 1024}[tokens]


def token_class(m: int) -> int:
    """The variant that serves m rows of x: 2, 8 or 16."""
    return 2 if m <= 2 else 8 if m <= 8 else 16


@dataclass(frozen=True, slots=True)
class ThinPlan:
    """tokens: 2, 8 or 16, the most rows of x. row_groups: R. part_items: items of K a block holds, `k_parts` times.

    slots: items of a warp's ring.
    """

    tokens: int
    row_groups: int
    units: int
    blocks: int
    k_parts: int
    part_items: int
    part_columns: int
    slots: int

    @property
    def quarters(self) -> int:
        return self.units * self.row_groups

    @property
    def counters(self) -> int:
        """Bytes of the workspace's counters: one for each quarter."""
        return -(-self.quarters * 4 // 256) * 256

    @property
    def workspace(self) -> int:
        if self.k_parts == 1:
            return 0
        return self.counters + self.k_parts * self.quarters * partial_room(self.tokens)


def thin_plan(name: str, m: int, rows: int, cols: int, device: ThinDevice, row_groups: int | None = None) -> ThinPlan:
    """The cut of y[m, rows] = x[m, cols] W^T. `row_groups` forces R (tests and benchmarks)."""
    steps_per_item = item_steps(FRAGMENT_KINDS[name])
    item_columns = STEP * steps_per_item
    steps = -(-cols // STEP)
    items = -(-steps // steps_per_item)
    tokens = token_class(m)
    x_limit = min(X_LIMIT, device.block_shared - fixed_bytes(name, tokens, 2))
    most_items = max(1, (x_limit // m - 16) // (2 * item_columns))
    k_parts = -(-items // most_items)
    part_items = -(-items // k_parts)
    k_parts = -(-items // part_items)
    quarters = -(-rows // 16)

    def cost(groups: int) -> tuple[float, int]:
        units = -(-quarters // groups)
        rounds = -(-units // max(1, device.multiprocessors // k_parts))
        return rounds * (-(-part_items // (WARPS // groups)) + _UNIT_COST), -groups

    chosen = row_groups or min((1, 2, 4), key=cost)
    units = -(-quarters // chosen)
    blocks = min(units, max(1, device.multiprocessors // k_parts)) * k_parts
    columns = min(part_items * item_columns, steps * STEP)
    room = device.shared_share - fixed_bytes(name, tokens, 0) - m * row_bytes(columns)
    slots = max(2, min(_MOST_SLOTS, room // ring_slot(name)))
    return ThinPlan(tokens, chosen, units, blocks, k_parts, part_items, columns, slots)
