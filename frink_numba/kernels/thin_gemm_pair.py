"""Two thin products of the same rows in one launch: weights of two kinds, such as Q and K beside V of a better kind.

    y[M, N1] = f(x)[M, K] W1[N1, K]^T,   z[M, N2] = f(x)[M, K] W2[N2, K]^T,   f: an RMS norm of float32 rows

Blocks below a bound work on W1, those from there on on W2, each as in a launch of its own (`thin_gemm_kernel.py`). A
launch costs about two microseconds in which little is read; behind one another, the smaller product takes little more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from frink_numba.errors import ShapeError
from frink_numba.kernels.gemm import DeviceWeights
from frink_numba.kernels.gemm_kinds import FRAGMENT_KINDS
from frink_numba.kernels.launch import Launch, LoadedKernel
from frink_numba.kernels.thin_gemm_kernel import ThinGemm
from frink_numba.kernels.thin_gemm_plan import (
    ThinDevice,
    ThinPlan,
    fixed_bytes,
    item_bytes,
    item_steps,
    ring_slot,
    row_cost,
    row_cuts,
    sums_bytes,
    thin_plan,
    x_bytes,
)
from frink_numba.kernels.thin_gemm_scales import SCHEMES

if TYPE_CHECKING:
    from frink_numba.kernels.thin_gemm import NormRows


def why_no_pair(first: DeviceWeights, second: DeviceWeights) -> str | None:
    """The reason why two matrices cannot share a launch, or None."""
    if first.gated or second.gated:
        return "a gated pack has a launch of its own"
    if first.cols != second.cols:
        return f"rows of {first.cols} and {second.cols} columns are not the same rows"
    kinds = [FRAGMENT_KINDS[weights.kind] for weights in (first, second)]
    if any(weights.kind not in SCHEMES for weights in (first, second)):
        return f"sums of {first.kind} and {second.kind} are not scaled alike"
    if len({(kind.group_steps, item_steps(kind)) for kind in kinds}) > 1:
        return f"items of {first.kind} and {second.kind} have different widths"
    return None


@dataclass(frozen=True, slots=True)
class PairPlan:
    """The cuts of both, which share K alike: the first has the blocks below `bound`, the second the rest of them."""

    first: ThinPlan
    second: ThinPlan
    bound: int
    blocks: int


def pair_cut(first: DeviceWeights, second: DeviceWeights, blocks: int) -> tuple[int, int]:
    """(R of both, blocks of the first), with which one row is done first. As in `thin_plan`, rows of x do not count."""
    items = -(-first.cols // (64 * item_steps(FRAGMENT_KINDS[first.kind])))

    def cost(groups: int, bound: int) -> float:
        """Of the slower side."""
        sides = ((first, bound), (second, blocks - bound))
        return max(row_cost(w.rows, items, item_bytes(w.kind) // 4, count, groups) for w, count in sides)

    cuts = [(groups, bound) for groups in row_cuts(items) for bound in range(1, blocks)]
    return min(cuts, key=lambda cut: (cost(*cut), cut))


def pair_plan(first: DeviceWeights, second: DeviceWeights, m: int, device: ThinDevice) -> PairPlan | None:
    """The cut of both for `m` rows; None where a block of them leaves no room for one of the next launch."""
    groups, bound = pair_cut(first, second, device.multiprocessors)
    one, two = (thin_plan(w.kind, m, w.rows, w.cols, device, groups) for w in (first, second))
    if one.parts > 1 or two.parts > 1:
        return None
    # x and its sums have the larger size of both, so that a ring may have to be shorter.
    rows = m * max(x_bytes(w.kind, one.part_columns) for w in (first, second)) + fixed_bytes(first.kind, one.tokens, 0)
    room = device.shared_share - rows
    slots = [min(plan.slots, room // ring_slot(w.kind)) for plan, w in ((one, first), (two, second))]
    if min(slots) < 2:
        return None
    blocks = device.multiprocessors
    if device.capability < (9, 0):
        bound = min(bound, one.units)
        blocks = bound + min(blocks - bound, two.units)
    return PairPlan(replace(one, slots=slots[0]), replace(two, slots=slots[1]), bound, blocks)


@dataclass(frozen=True, slots=True)
class ThinPair:
    """The kernel and the cut of two products of `m` rows."""

    m: int
    kinds: tuple[str, str]
    shapes: tuple[tuple[int, int], tuple[int, int]]  # outputs and columns
    kernel: LoadedKernel
    variant: ThinGemm
    plan: PairPlan

    def bind(
        self, weights: tuple[DeviceWeights, DeviceWeights], x: NormRows, outs: tuple[int, int], pitch: int
    ) -> Launch:
        """A launch with these buffers. outs: where the float32 rows of each result begin, `pitch` bytes apart."""
        shapes = tuple((w.outputs, w.cols) for w in weights)
        if tuple(w.kind for w in weights) != self.kinds or shapes != self.shapes:
            raise ShapeError(
                f"the pair is for {self.kinds} {self.shapes}, the weights are "
                f"{', '.join(f'{w.kind} {w.outputs} x {w.cols}' for w in weights)}"
            )
        if pitch % 4 or pitch < 4 * max(w.outputs for w in weights):
            raise ShapeError(f"rows of float32 results do not fit a pitch of {pitch} bytes")
        (first, second), plan = weights, self.plan.first
        addresses = (x.hidden, x.weight, 0, outs[0], first.data, first.row_scale, first.bias, 0)
        shape = (self.m, first.outputs, pitch, first.cols, -(-first.rows // 16), plan.units)
        parts = (1, plan.part_items, plan.part_columns, sums_bytes(first.kind, plan.part_columns))
        behind = (second.data, second.row_scale, second.bias, outs[1], second.outputs)
        return self.kernel.bind(
            self.plan.blocks, *addresses, x.eps, *first.bounds(), *shape, *parts,
            -(-(1 << 32) // (plan.part_columns // 8)), 0, *behind,
            sums_bytes(second.kind, plan.part_columns), self.plan.bound,
        )  # fmt: skip
