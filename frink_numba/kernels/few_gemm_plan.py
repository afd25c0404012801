"""How a product of few rows is cut (few_gemm.py): slabs over groups and blocks, records over parts, by estimated time.

The plan depends on the shape and the device alone, so that equal calls give equal bits.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from frink_numba.kernels.few_gemm_variant import FLAG_BYTES, RECORD, TOKENS, FewGemm
from frink_numba.kernels.gemm_epilogue import Epilogue
from frink_numba.kernels.gemm_kinds import FRAGMENT_KINDS, GROUP_STEPS

MOST_ROWS = TOKENS[-1]
MOST_PARTS = 16
_GROUPS = (2, 3, 4)

# Nanoseconds on an H200, fitted to timings of all cuts: a launch, what parts and each byte of their sums cost, and a
# step of a slab, which waits for conversion and products alike; the memory gives a multiprocessor so many bytes in one.
_START, _START_FOUR = 1190.0, 1540.0
_MEETING, _MEETING_PART, _SUM_BYTE = 1190.0, 134.0, 6e-4
_STEP, _OPERATION, _TOKEN = 47.6, 0.584, 0.4
_BYTES = 37.0
_MANY_GROUPS = 1.031  # of a step, where more than two groups share the rows of x
_SHORT_RING = 1.155  # of a step, where a multiprocessor holds two stages
_FULL = 0.117  # of a step, what is added where all multiprocessors are full and share the memory


@dataclass(frozen=True, slots=True)
class FewPlan:
    """groups: slabs of a set; sets x parts pieces of work, which `blocks` blocks take in turns."""

    tokens: int
    groups: int
    slabs: int
    records: int
    sets: int
    parts: int
    blocks: int
    nanoseconds: float  # the estimate

    @property
    def workspace(self) -> int:
        """Bytes of the workspace: counts, and the sums of each part where records are shared out."""
        return FLAG_BYTES + _sum_bytes(self.tokens, self.groups, self.sets, self.parts) if self.parts > 1 else 0


def why_not(kind: str, m: int, cols: int) -> str | None:
    """The reason why a product cannot be one of few rows, or None."""
    if FRAGMENT_KINDS[kind].scales is None:
        return f"{kind} needs no conversion"
    if m > MOST_ROWS:
        return f"{m} rows are more than {MOST_ROWS}"
    if cols % RECORD:
        return f"{cols} columns are no multiple of {RECORD}"
    return None


@functools.lru_cache(maxsize=4096)
def few_plan(
    kind: str, m: int, rows: int, cols: int, multiprocessors: int, groups: int | None = None, parts: int | None = None
) -> FewPlan:
    """The fastest cut of y[m, rows] = x[m, cols] W^T. `groups` and `parts` force it."""
    plans = few_plans(kind, m, rows, cols, multiprocessors, groups, parts)
    return min(plans, key=lambda plan: (plan.nanoseconds, plan.groups))


def few_plans(
    kind: str, m: int, rows: int, cols: int, multiprocessors: int, groups: int | None = None, parts: int | None = None
) -> list[FewPlan]:
    """The cuts that have a kernel, one for each number of groups."""
    tokens = next(t for t in TOKENS if m <= t)
    slabs, records = -(-rows // 64), cols // RECORD

    def plan(g: int) -> FewPlan:
        sets = -(-slabs // g)
        places = multiprocessors * (2 if g <= 2 else 1)
        p = parts or _parts(records, min(MOST_PARTS, places // sets))
        time = _nanoseconds(kind, tokens, g, sets, p, records, multiprocessors)
        return FewPlan(tokens, g, slabs, records, sets, p, min(places, sets * p), time)

    plans = [plan(g) for g in ([groups] if groups else _GROUPS)]
    return [plan for plan in plans if groups or _fits(kind, plan)]


def _fits(kind: str, plan: FewPlan) -> bool:
    """Whether a plan's kernel has two stages, and registers for its sums: 64 rows of x leave few of 96 a thread."""
    wide, row = plan.tokens == TOKENS[-1], FRAGMENT_KINDS[kind]
    if wide and (plan.groups == 2 or (plan.groups == 4 and (plan.parts > 1 or row.scale_bytes == 8))):
        return False
    return FewGemm(kind, plan.tokens, Epilogue(half=True), plan.groups, plan.parts > 1).stages >= 2


def _nanoseconds(
    kind: str, tokens: int, groups: int, sets: int, parts: int, records: int, multiprocessors: int
) -> float:
    """The estimate of so many sets' `records`, shared out over `parts` blocks."""
    row, variant = FRAGMENT_KINDS[kind], FewGemm(kind, tokens, Epilogue(half=True), groups, parts > 1)
    most = -(-sets * parts // multiprocessors) * -(-records // parts)  # records of the busiest multiprocessor
    step = _STEP + _OPERATION * row.operations + _TOKEN * tokens
    if groups > 2:
        step *= _MANY_GROUPS
    step = max(step, row.step_size / _BYTES)
    if variant.stages * variant.resident < 3:
        step *= _SHORT_RING
    start = _START + (_START_FOUR if groups == _GROUPS[-1] else 0.0)
    if parts > 1:
        start += _MEETING + _MEETING_PART * parts + _SUM_BYTE * _sum_bytes(tokens, groups, sets, parts)
    full = min(1.0, sets * parts / (multiprocessors * variant.resident))
    return start + most * groups * GROUP_STEPS * step * (1 + _FULL * full**2)


def _sum_bytes(tokens: int, groups: int, sets: int, parts: int) -> int:
    """What parts write for each other, in float32."""
    return sets * parts * groups * 64 * tokens * 4


def _parts(records: int, most: int) -> int:
    """The fewest parts of which the largest is as small as it can be."""
    most = max(1, min(most, records))
    return -(-records // -(-records // most))
