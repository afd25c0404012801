"""The thin products without a GPU: they compile without spills, their cuts cover everything, bad requests say why."""

from __future__ import annotations

from typing import Any

import pytest

from frink_numba.errors import BackendUnavailable, ShapeError
from frink_numba.kernels.cubins import Target, compile_kernel
from frink_numba.kernels.gemm import DeviceWeights
from frink_numba.kernels.gemm_epilogue import Epilogue
from frink_numba.kernels.gemm_kinds import FRAGMENT_KINDS
from frink_numba.kernels.thin_gemm import ThinGemms, source_of, variant_of
from frink_numba.kernels.thin_gemm_ops import item_regions
from frink_numba.kernels.thin_gemm_plan import (
    ThinDevice,
    item_bytes,
    item_steps,
    sum_columns,
    sums_bytes,
    thin_plan,
)
from frink_numba.kernels.thin_gemm_scales import SCHEMES

H200 = ThinDevice((9, 0), 132)
VARIANTS = [
    # kind, m, rows, cols, gate, half, norm, architecture
    ("Q4_K", 1, 28672, 4096, "swiglu", True, True, "90a"),
    ("Q6_K", 1, 4096, 14336, "", False, False, "90a"),
    ("Q4_K", 8, 4096, 14336, "", False, False, "90a"),
    ("Q8_0", 1, 28672, 4096, "swiglu", True, True, "90a"),
    ("Q3_K", 8, 4096, 4096, "", False, True, "80"),
    ("half", 16, 4096, 8192, "geglu", True, True, "120"),
]


@pytest.mark.parametrize("case", VARIANTS, ids=lambda c: f"{c[0]}-{c[1]}-{c[-1]}")
def test_kernels_compile_without_spills(case: tuple[Any, ...]) -> None:
    kind, m, rows, cols, gate, half, norm, arch = case
    capability = (int(arch.rstrip("a")[:-1]), int(arch.rstrip("a")[-1]))
    plan = thin_plan(kind, m, rows, cols, ThinDevice(capability, 132))
    variant = variant_of(plan, kind, cols, Epilogue(gate, half), norm, arch.startswith("90"))
    cubin = compile_kernel(source_of(variant), Target(arch))
    assert cubin.spilled == 0
    assert cubin.remarks == ()
    assert cubin.registers <= 128, "two blocks do not fit a multiprocessor"


@pytest.mark.parametrize("name", FRAGMENT_KINDS)
def test_regions_cover_an_item(name: str) -> None:
    """The four quarters of the regions are all bytes of a slab's item, each once, in pieces of 16 bytes."""
    seen = bytearray(item_bytes(name))
    for at, size, _ in item_regions(name):
        assert at % 16 == size % 16 == 0
        for i in range(at, at + 4 * size):
            seen[i] += 1
    assert set(seen) == {1}


@pytest.mark.parametrize("name", FRAGMENT_KINDS)
@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (12, 0)])
def test_cuts_cover_everything(name: str, capability: tuple[int, int]) -> None:
    for m in (1, 2, 5, 8, 16):
        for rows, cols in ((1, 32), (960, 576), (4096, 4096), (4096, 14336), (128256, 2048)):
            _check_cut(ThinDevice(capability, 132), name, m, rows, cols)


def _check_cut(device: ThinDevice, name: str, m: int, rows: int, cols: int) -> None:
    """Every row in a unit, every item of K in a part; two launches fit a multiprocessor while x is small."""
    kind = FRAGMENT_KINDS[name]
    if kind.group_steps == 4:
        cols = -(-cols // 256) * 256
    plan = thin_plan(name, m, rows, cols, device)
    quarters, steps = -(-rows // 16), -(-cols // 64)
    items = -(-steps // item_steps(kind))
    assert plan.units * plan.row_groups >= quarters > (plan.units - 1) * plan.row_groups
    assert plan.parts * plan.part_items >= items > (plan.parts - 1) * plan.part_items
    assert plan.part_columns == min(plan.part_items * 64 * item_steps(kind), -(-cols // 64) * 64)
    assert plan.parts == 1 or plan.part_items % plan.k_groups == 0 or device.block_shared < 100 << 10, (
        "warps wait for each other"
    )
    assert plan.blocks == (132 if device.capability >= (9, 0) else min(plan.units, 132))
    variant = variant_of(plan, name, cols, Epilogue(), False, True)
    shared = variant.shared(m, plan)
    assert shared <= device.block_shared
    if device == H200 and m * plan.part_columns * 2 <= 29 * 1024 and name != "half":
        assert shared <= device.shared_share
        assert 2 * (device.shared_share + 1024) <= 228 * 1024


@pytest.mark.parametrize("name", FRAGMENT_KINDS)
def test_sums_do_not_depend_on_the_number_of_rows(name: str) -> None:
    """K is shared by as many warps, in the same turns, whatever m is."""
    for rows, cols in ((1024, 4096), (28672, 4096), (4096, 14336), (960, 768)):
        plans = [thin_plan(name, m, rows, cols, H200) for m in range(1, 17)]
        assert len({plan.k_groups for plan in plans}) == 1
        assert plans[0].parts == 1


@pytest.mark.parametrize("name", [name for name, scheme in SCHEMES.items() if scheme])
def test_sums_of_an_item_have_room(name: str) -> None:
    """Rows of sums lie in different banks, whole items in their rows."""
    columns = sum_columns(name)
    for part in (64, 320, 4096, 14336):
        size = sums_bytes(name, part)
        assert size % 32 == 16
        assert size >= -(-part // 256) * 256 // columns * 4


def test_requests_that_make_no_sense() -> None:
    with pytest.raises(BackendUnavailable, match=r"7\.5"):
        ThinGemms((7, 5), 40)
    thins = ThinGemms((9, 0), 132)
    weights = DeviceWeights("Q4_K", 64, 16384, False, (1.0,), 0, 0)
    with pytest.raises(ShapeError, match="1 to 16 rows, got 17"):
        thins.product(weights, 17)
    with pytest.raises(ShapeError, match="not gated"):
        thins.product(weights, 1, gate="swiglu")
    with pytest.raises(ShapeError, match="at most 8192 columns, got 16384"):
        thins.product(weights, 1, norm=True)


def test_large_products_start_alone_where_asked() -> None:
    """Behind attention: see ThinPlan.blocks. Small ones start early all the same."""
    early: list[bool] = []

    class Recorded(ThinGemms):
        def _kernel(self, variant: Any, shared: int, starts_early: bool) -> Any:
            early.append(starts_early)
            return None

    thins = Recorded((9, 0), 132)
    for rows, alone in ((4096, False), (4096, True), (512, True)):
        thins.product(DeviceWeights("Q4_K", rows, 4096, False, (1.0,), 0, 0), 1, alone=alone)
    assert early == [True, False, True]
