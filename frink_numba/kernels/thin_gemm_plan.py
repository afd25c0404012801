"""How a thin product is cut: rows of W over blocks and warps, K over the warps of a block.

A *quarter* is 16 rows of W, the height of one `mma`. A block of 8 warps works on a *unit* of R quarters: R warps side
by side, P = 8 / R that share K's *items* in turns. An item is what a warp fetches at a time: a record of 256 columns,
or one or two steps of 64 where the kind has no super-blocks. Blocks take units in turns.

P follows from the weights alone, whatever the number of rows of x, and each sum is made by the same operations in the
same order: a row's result does not depend, to the bit, on how many other rows a launch has.
"""

from __future__ import annotations

from dataclasses import dataclass

from frink_numba.kernels.gemm_kinds import FRAGMENT_KINDS, STEP, FragmentKind
from frink_numba.kernels.thin_gemm_scales import SCHEMES

MOST_ROWS = 16  # of x
WARPS = 8  # of a block: they keep a multiprocessor busy
_MOST_SLOTS = 8
_UNIT_COST = 0.8  # what a unit costs beside its items, in items: sums of warps are added up
# Of a multiprocessor, in microseconds: a byte of weights, a unit's end, and what counts of the busiest one's share, as
# the rings hold much of it before the launch may begin.
_BYTE, _UNIT, _UNEVEN = 2.08e-5, 0.2, 0.7
_MORE_UNITS = 1.05


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


def sum_columns(name: str) -> int:
    """Columns whose x is summed up for a kind (16 or 32), 0 where no sums are needed."""
    scheme = SCHEMES.get(name)
    return scheme.columns if scheme else 0


def sums_bytes(name: str, part_columns: int) -> int:
    """Bytes from row to row of the sums of x in shared memory: an odd multiple of 16, and room for a whole item."""
    columns = sum_columns(name)
    if not columns:
        return 0
    pieces = -(-part_columns // 256) * 256 // columns * 4 // 16
    return (pieces | 1) * 16


def fixed_bytes(name: str, tokens: int, slots: int) -> int:
    """Bytes of shared memory beside x: rings; sums of all warps twice; what is known of each row."""
    return slots * ring_slot(name) + 2 * WARPS * partial_room(tokens) + 16 * MOST_ROWS


def x_bytes(name: str, part_columns: int) -> int:
    """Bytes of shared memory of a row of x and its sums."""
    return row_bytes(part_columns) + sums_bytes(name, part_columns)


def sum_registers(tokens: int) -> int:
    """Sums of a lane: rows g and g + 8 of its tokens: one, two, or two of each eight."""
    return {1: 2, 8: 4, 16: 8}[tokens]


def partial_room(tokens: int) -> int:
    """Bytes of a warp's sums of 16 rows: 16 a lane and eight tokens; with one token the lanes t = 0 have 8."""
    return 64 if tokens == 1 else 64 * tokens


def token_class(m: int) -> int:
    """The variant that serves m rows of x: 1, 8 or 16."""
    return 1 if m == 1 else 8 if m <= 8 else 16


@dataclass(frozen=True, slots=True)
class ThinPlan:
    """tokens: 1, 8 or 16, the most rows of x. row_groups: R. slots: items of a warp's ring.

    blocks: where launches overlap, one a multiprocessor even if there are fewer units. Else the next launch finds twice
    as much room on some multiprocessors as on others, puts two blocks there, and takes twice as long. Those without a
    unit of their own do another's once more, so that they stay as long as it does, and write nothing.

    x lies in shared memory in `parts` parts of `part_items` items, one after the other, `part_columns` columns each.
    """

    tokens: int
    row_groups: int
    units: int
    blocks: int
    parts: int
    part_items: int
    part_columns: int
    slots: int

    @property
    def k_groups(self) -> int:
        """P: what the order of a sum depends on."""
        return WARPS // self.row_groups


def row_cuts(items: int) -> tuple[int, ...]:
    """R that are worth considering: with few items some warps have nothing to do where all share K."""
    return (1, 2, 4, 8) if items < WARPS else (1, 2)


def row_cost(rows: int, items: int, item: int, blocks: int, groups: int) -> float:
    """What one row of x takes with R = `groups` and so many blocks; `item`: bytes of a quarter's.

    Microseconds by timings on an H200, or turns of the busiest warp where there are few items: to be compared among
    cuts of the same K alone.
    """
    units = -(-rows // (16 * groups))
    rounds = -(-units // blocks)
    if items < WARPS:
        return rounds * (-(-items * groups // WARPS) + _UNIT_COST)
    mean = max(units, blocks) / blocks  # a block without a unit of its own does another's
    time = max(mean, _UNEVEN * rounds) * groups * items * item * _BYTE + rounds * _UNIT
    # More units of fewer rows must gain something: where x comes in parts, each unit reads all of them.
    return time * (_MORE_UNITS if groups == 1 else 1.0)


def _fastest(rows: int, items: int, item: int, multiprocessors: int) -> int:
    """R: the cut with which one row is done first."""
    return min(row_cuts(items), key=lambda groups: (row_cost(rows, items, item, multiprocessors, groups), groups))


def thin_plan(name: str, m: int, rows: int, cols: int, device: ThinDevice, row_groups: int | None = None) -> ThinPlan:
    """The cut of y[m, rows] = x[m, cols] W^T. `row_groups` forces R (tests and benchmarks)."""
    steps_per_item = item_steps(FRAGMENT_KINDS[name])
    item_columns = STEP * steps_per_item
    steps = -(-cols // STEP)
    items = -(-steps // steps_per_item)
    tokens = token_class(m)
    groups = row_groups or _fastest(rows, items, item_bytes(name) // 4, device.multiprocessors)
    k_groups = WARPS // groups
    quarters = -(-rows // 16)
    units = -(-quarters // groups)

    def size(columns: int, slots: int) -> int:
        return fixed_bytes(name, tokens, slots) + m * x_bytes(name, columns)

    # All of x where it fits, else parts in which all warps have equally many items.
    columns, parts = steps * STEP, 1
    while size(columns, 2) > device.block_shared and columns > item_columns * k_groups:
        parts += 1
        columns = -(-items // (parts * k_groups)) * k_groups * item_columns
    while size(columns, 2) > device.block_shared and columns > item_columns:
        columns -= item_columns
    parts = -(-steps * STEP // columns)
    # Half of a multiprocessor where that is enough, for the next launch's sake.
    limit = device.shared_share if size(columns, 2) <= device.shared_share else device.block_shared
    slots = max(2, min(_MOST_SLOTS, (limit - size(columns, 0)) // ring_slot(name)))
    blocks = device.multiprocessors if device.capability >= (9, 0) else min(units, device.multiprocessors)
    part_items = -(-columns // item_columns)
    return ThinPlan(tokens, groups, units, blocks, parts, part_items, columns, slots)
