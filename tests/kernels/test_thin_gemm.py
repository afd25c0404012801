"""The thin products without a GPU: they compile without spills, their cuts cover everything, bad requests say why."""

from __future__ import annotations

import pytest

from frink_numba.errors import BackendUnavailable, ShapeError
from frink_numba.kernels.cubins import Target, compile_kernel
from frink_numba.kernels.gemm import DeviceWeights
from frink_numba.kernels.gemm_epilogue import Epilogue
from frink_numba.kernels.gemm_kinds import FRAGMENT_KINDS
from frink_numba.kernels.thin_gemm import ThinGemms, source_of, variant_of
from frink_numba.kernels.thin_gemm_ops import item_regions
from frink_numba.kernels.thin_gemm_plan import ThinDevice, item_bytes, thin_plan

H200 = ThinDevice((9, 0), 132)
VARIANTS = [
    # kind, m, rows, cols, gate, half, norm, architecture
    ("Q4_K", 1, 28672, 4096, "swiglu", True, True, "90a"),
    ("Q6_K", 1, 4096, 14336, "", False, False, "90a"),
    ("Q3_K", 8, 4096, 4096, "", False, True, "80"),
    ("half", 16, 4096, 8192, "geglu", True, True, "120"),
]


@pytest.mark.parametrize("case", VARIANTS, ids=lambda c: f"{c[0]}-{c[1]}-{c[-1]}")
def test_kernels_compile_without_spills(case: tuple[str, int, int, int, str, bool, bool, str]) -> None:
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
    if FRAGMENT_KINDS[name].group_steps == 4:
        cols = -(-cols // 256) * 256
    plan = thin_plan(name, m, rows, cols, device)
    item_columns = plan.part_columns // plan.part_items if plan.part_items * 64 <= cols else 64
    assert plan.quarters * 16 >= rows > (plan.units - 1) * plan.row_groups * 16
    assert plan.k_parts * plan.part_columns >= cols > (plan.k_parts - 1) * plan.part_items * item_columns
    assert plan.blocks % plan.k_parts == 0
    assert plan.k_parts <= plan.blocks <= 132
    variant = variant_of(plan, name, cols, Epilogue(), False, True)
    shared = variant.shared(m, plan.part_columns)
    assert shared <= device.block_shared
    if device == H200 and m * plan.part_columns * 2 <= 29 * 1024:
        assert shared <= device.shared_share
        assert 2 * (device.shared_share + 1024) <= 228 * 1024
    if plan.k_parts > 1:
        assert plan.workspace >= plan.counters + plan.k_parts * rows * min(m, 8) * 4


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
