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
_UNIT_COST = 0.35  # what a unit costs beside its items, in items of a warp: sums of warps are added up


def item_steps(kind: FragmentKind) -> int:
    """Steps of 64 columns of an item."""
    if kind.group_steps == 4:
        return 4
    return 1 if kind.step_size > 6144 else 2


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
    """tokens: 2, 8 or 16, the most rows of x. row_groups: R. part_items: items of K a block holds, `k_parts` times."""

    tokens: int
    row_groups: int
    units: int
    blocks: int
    k_parts: int
    part_items: int
    part_columns: int

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


def thin_plan(name: str, m: int, rows: int, cols: int, multiprocessors: int, row_groups: int | None = None) -> ThinPlan:
    """The cut of y[m, rows] = x[m, cols] W^T. `row_groups` forces R (tests and benchmarks)."""
    steps_per_item = item_steps(FRAGMENT_KINDS[name])
    item_columns = STEP * steps_per_item
    steps = -(-cols // STEP)
    items = -(-steps // steps_per_item)
    most_items = max(1, (X_LIMIT // m - 16) // (2 * item_columns))
    k_parts = -(-items // most_items)
    part_items = -(-items // k_parts)
    k_parts = -(-items // part_items)
    quarters = -(-rows // 16)

    def cost(groups: int) -> tuple[float, int]:
        units = -(-quarters // groups)
        rounds = -(-units // max(1, multiprocessors // k_parts))
        return rounds * (-(-part_items // (WARPS // groups)) + _UNIT_COST), -groups

    chosen = row_groups or min((1, 2, 4), key=cost)
    units = -(-quarters // chosen)
    blocks = min(units, max(1, multiprocessors // k_parts)) * k_parts
    columns = min(part_items * item_columns, steps * STEP)
    return ThinPlan(token_class(m), chosen, units, blocks, k_parts, part_items, columns)
