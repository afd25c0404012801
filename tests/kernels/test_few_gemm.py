"""Products of few rows without a GPU: sizes and cuts of every kind, and compiled kernels without spills or hazards."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import pytest

from frink_numba.kernels.cubins import Cubin, Target, compile_kernel
from frink_numba.kernels.few_gemm_plan import MOST_PARTS, MOST_ROWS, FewPlan, few_plan, why_not
from frink_numba.kernels.few_gemm_variant import FLAG_BYTES, RECORD, TOKENS, FewGemm
from frink_numba.kernels.gemm import Gemms, source_of
from frink_numba.kernels.gemm_epilogue import Epilogue
from frink_numba.kernels.gemm_kinds import FRAGMENT_KINDS
from tests.kernels.compiling import missing_tools
from tests.kernels.sass import disassemble, disassembler, operands_overwritten_in_flight

KINDS = [name for name, row in FRAGMENT_KINDS.items() if row.scales is not None]
MULTIPROCESSORS = 132
SHAPES = [(5120, 3072), (3072, 3072), (16384, 3072), (6144, 4096), (1024, 4096), (28672, 4096), (4096, 14336),
          (57344, 8192), (8192, 28672), (128256, 4096), (64, 256), (70, 512)]  # fmt: skip

COMPILED = [
    FewGemm("Q4_K", 64, Epilogue("swiglu", half=True), 4),
    FewGemm("Q6_K", 32, Epilogue(), 4, split=True),
    FewGemm("Q8_0", 64, Epilogue(half=True), 3, split=True),
    FewGemm("Q4_1", 16, Epilogue(), 2, split=True),  # two blocks a multiprocessor
]


@functools.cache
def _compiled(variant: FewGemm) -> Cubin:
    return compile_kernel(source_of(variant, overlap=True), Target("90a"))


@pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))
@pytest.mark.parametrize("variant", COMPILED, ids=lambda v: f"{v.kind}-{v.tokens}")
def test_kernels(variant: FewGemm, tmp_path: Path) -> None:
    """No spills, no remarks of lost speed, and no operand written while a product reads it: see gemm_emit.keep."""
    cubin = _compiled(variant)
    assert cubin.spilled == 0
    assert cubin.remarks == (), "ptxas serialized something"
    tool = disassembler()
    if tool is not None:
        instructions = disassemble(tool, cubin.code, tmp_path)
        assert sum("HGMMA" in line for line in instructions) >= 16
        assert operands_overwritten_in_flight(instructions) == []


@pytest.mark.parametrize("kind", KINDS)
def test_sizes(kind: str) -> None:
    """What plans choose fits its share of a multiprocessor, with two stages or more, aligned as copies want it."""
    for m, (rows, cols) in itertools.product((9, 16, 17, 32, 33, 64), SHAPES):
        plan = few_plan(kind, m, rows, cols, MULTIPROCESSORS)
        for epilogue in (Epilogue(), Epilogue(half=True), Epilogue("swiglu", True), Epilogue("geglu")):
            variant = FewGemm(kind, plan.tokens, epilogue, plan.groups, plan.parts > 1)
            assert (variant.shared + 1024) * variant.resident <= 228 * 1024
            assert variant.stages >= 2
            assert variant.record_bytes % 16 == variant.slot % 128 == variant.staging % 1024 == 0
            # A warp's registers come from its quarter of the multiprocessor.
            assert variant.resident * (variant.threads // 32) <= 20


@pytest.mark.parametrize(("rows", "cols"), SHAPES)
@pytest.mark.parametrize("m", [9, 16, 32, 64])
def test_cuts(m: int, rows: int, cols: int) -> None:
    """Every record is in one part; blocks that wait for each other are on the device at once; counts have room."""
    for groups, parts in [(None, None), (2, None), (3, None), (4, 1), (4, MOST_PARTS)]:
        plan = few_plan("Q4_K", m, rows, cols, MULTIPROCESSORS, groups, parts)
        assert plan.tokens in TOKENS
        assert plan.tokens >= m
        assert plan.sets * plan.groups * 64 >= rows > (plan.sets - 1) * plan.groups * 64
        assert plan.records * RECORD == cols
        assert 1 <= plan.blocks <= plan.sets * plan.parts
        if parts is None and plan.parts > 1:
            resident = FewGemm("Q4_K", plan.tokens, groups=plan.groups, split=True).resident
            assert plan.blocks == plan.sets * plan.parts <= resident * MULTIPROCESSORS
            assert plan.parts <= min(MOST_PARTS, plan.records)
            assert plan.workspace == FLAG_BYTES + plan.blocks * plan.groups * plan.tokens * 256
            assert 4 * plan.sets * plan.groups <= FLAG_BYTES
        if plan.parts == 1:
            assert plan.workspace == 0
    assert few_plan("Q4_K", m, rows, cols, MULTIPROCESSORS) == few_plan("Q4_K", m, rows, cols, MULTIPROCESSORS)


def test_narrow_products_that_stay_with_tiles() -> None:
    """Affine kinds of blocks of 32 have their kernel from 2048 columns on, others from one record on."""
    gemms = Gemms("wgmma", (9, 0), MULTIPROCESSORS)
    for kind, cols, few in [("Q4_1", 1792, False), ("Q4_1", 2048, True), ("Q5_1", 1792, False), ("Q5_1", 2048, True),
                            ("Q4_0", 256, True), ("Q4_K", 1792, True)]:  # fmt: skip
        assert isinstance(gemms.plan(kind, 16, 576, cols), FewPlan) == few


def test_what_is_served() -> None:
    """Quantized weights, whole records, up to 64 rows."""
    assert why_not("Q4_K", MOST_ROWS, 512) is None
    assert "64" in str(why_not("Q4_K", MOST_ROWS + 1, 512))
    assert "256" in str(why_not("Q4_0", 16, 576))
    assert "half" in str(why_not("half", 16, 512))
