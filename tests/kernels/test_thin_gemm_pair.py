"""Two thin products in one launch without a GPU: the cut, the kernel's registers, its PTX against float64 (R11)."""

from __future__ import annotations

from typing import Any

import pytest

from frink_numba.errors import ShapeError
from frink_numba.kernels.cubins import Target, compile_kernel
from frink_numba.kernels.gemm import DeviceWeights
from frink_numba.kernels.thin_gemm import NormRows, ThinGemms, source_of
from frink_numba.kernels.thin_gemm_pair import pair_plan, why_no_pair
from frink_numba.kernels.thin_gemm_plan import ThinDevice
from tests.kernels.attention_machine import MachineDevice
from tests.kernels.compiling import missing_tools
from tests.kernels.thin_machine import MachineThins
from tests.kernels.thin_pair_case import check

H200 = ThinDevice((9, 0), 132)
needs_tools = pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))


def weights(kind: str, rows: int, cols: int, gated: bool = False) -> DeviceWeights:
    return DeviceWeights(kind, rows, cols, gated, (1.0,), 0, 0)


class Kept(ThinGemms):
    """Keeps what would be compiled."""

    def __init__(self, capability: tuple[int, int] = (9, 0)) -> None:
        super().__init__(capability, 132)
        self.made: list[tuple[Any, int]] = []

    def _kernel(self, variant: Any, shared: int, early: bool) -> Any:
        self.made.append((variant, shared))
        return None


@pytest.mark.parametrize(("rows", "cols"), [((4096, 1024), 3072), ((5120, 1024), 4096), ((9216, 1024), 8192)], ids=str)
def test_the_cut(rows: tuple[int, int], cols: int) -> None:
    """Both have blocks by their bytes, all rows have a unit, and sums are made alike however many rows x has."""
    pair = weights("Q4_K", rows[0], cols), weights("Q6_K", rows[1], cols)
    plan = pair_plan(*pair, 1, H200)
    assert plan is not None
    assert plan.blocks == 132
    bytes_of = [w.rows * bits for w, bits in zip(pair, (4.5, 6.5625), strict=True)]
    assert abs(plan.bound / 132 - bytes_of[0] / sum(bytes_of)) < 0.1
    for side, w in zip((plan.first, plan.second), pair, strict=True):
        assert side.units * side.row_groups * 16 >= w.rows
        assert side.slots >= 2
    assert plan.first.k_groups == plan.second.k_groups
    thins = Kept()
    assert thins.pair_row_groups(*pair) == plan.first.row_groups
    for m in range(2, 17):
        more = pair_plan(*pair, m, H200)
        assert more is None or (more.first.k_groups, more.second.k_groups) == (plan.first.k_groups,) * 2
        if more is not None:
            assert thins.pair(*pair, m) is not None
            assert thins.made[-1][1] <= H200.shared_share
    assert pair_plan(*pair, 16, H200) is None


def test_blocks_where_launches_do_not_overlap() -> None:
    """No more blocks than units: nobody waits for those that do another's again."""
    plan = pair_plan(weights("Q4_K", 64, 2048), weights("Q6_K", 32, 2048), 1, ThinDevice((8, 0), 108))
    assert plan is not None
    assert plan.blocks == plan.first.units + plan.second.units
    assert plan.bound == plan.first.units


def test_who_has_a_launch_of_its_own() -> None:
    plain = weights("Q4_K", 64, 512)
    assert why_no_pair(plain, weights("Q6_K", 64, 512)) is None
    assert why_no_pair(weights("Q8_0", 64, 512), weights("Q4_0", 64, 512)) is None
    for other, reason in [
        (weights("Q6_K", 64, 512, gated=True), "gated"),
        (weights("Q6_K", 64, 1024), "512 and 1024 columns"),
        (weights("half", 64, 512), "not scaled alike"),
        (weights("Q3_K", 64, 512), "not scaled alike"),
        (weights("Q8_0", 64, 512), "different widths"),
    ]:
        why = why_no_pair(plain, other)
        assert why is not None
        assert reason in why
        assert Kept().pair(plain, other, 1) is None
        assert Kept().pair_row_groups(plain, other) is None
    wide = weights("Q4_K", 64, 16384), weights("Q6_K", 64, 16384)
    assert Kept().pair(*wide, 1) is None, "too wide for a norm"
    with pytest.raises(ShapeError, match="1 to 16 rows, got 17"):
        Kept().pair(plain, weights("Q6_K", 64, 512), 17)


def test_binding_what_it_was_not_made_for() -> None:
    pair = Kept().pair(weights("Q4_K", 64, 512), weights("Q6_K", 32, 512), 1)
    assert pair is not None
    rows = NormRows(0, 0, 1e-5)
    with pytest.raises(ShapeError, match="Q5_K 32 x 512"):
        pair.bind((weights("Q4_K", 64, 512), weights("Q5_K", 32, 512)), rows, (0, 0), 1024)
    with pytest.raises(ShapeError, match="pitch of 200"):
        pair.bind((weights("Q4_K", 64, 512), weights("Q6_K", 32, 512)), rows, (0, 0), 200)


@needs_tools
@pytest.mark.parametrize(
    ("kinds", "m", "arch"),
    [(("Q4_K", "Q6_K"), 1, "90a"), (("Q5_K", "Q6_K"), 4, "90a"), (("Q8_0", "Q4_0"), 1, "80")],
)
def test_it_compiles_without_spills(kinds: tuple[str, str], m: int, arch: str) -> None:
    thins = Kept((int(arch[0]), int(arch[1])))
    assert thins.pair(weights(kinds[0], 4096, 3072), weights(kinds[1], 1024, 3072), m) is not None
    cubin = compile_kernel(source_of(thins.made[0][0]), Target(arch))
    assert cubin.spilled == 0
    assert cubin.remarks == ()
    assert cubin.registers <= 128, "two blocks do not fit a multiprocessor"


@needs_tools
@pytest.mark.parametrize(
    ("kinds", "m", "rows", "blocks"),
    [(("Q4_K", "Q6_K"), 1, (325, 70), 5), (("Q4_K", "Q6_K"), 3, (100, 70), 4), (("Q4_1", "Q5_0"), 1, (40, 200), 7)],
    ids=["more units than blocks", "three rows", "the second is larger"],
)
def test_against_float64(kinds: tuple[str, str], m: int, rows: tuple[int, int], blocks: int) -> None:
    """Both results, and the very bits of two launches with the pair's cut; nothing beside them is written."""
    device = MachineDevice(32 << 20)
    check(MachineThins((9, 0), device, blocks), device, kinds, m, rows, 768)
