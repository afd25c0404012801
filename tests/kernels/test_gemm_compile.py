"""The tensor-core kernels compile for their targets without a GPU: no spills, no remarks of lost speed, no hazard.

A few variants stand for all: what differs between kinds is the fragment code, compiled for every kind by itself.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from frink_numba.kernels.cubins import Cubin, Source, Target, compile_kernel
from frink_numba.kernels.gemm import source_of
from frink_numba.kernels.gemm_epilogue import Epilogue
from frink_numba.kernels.gemm_kinds import FRAGMENT_KINDS
from frink_numba.kernels.gemm_mma import MmaGemm
from frink_numba.kernels.gemm_wgmma import SHARED_LIMIT, WgmmaGemm
from tests.kernels.sass import disassemble, disassembler, operands_overwritten_in_flight

WGMMA = [
    WgmmaGemm("Q4_K", 256, Epilogue(), cluster=2),  # the widest tile of the main kind
    WgmmaGemm("half", 256, Epilogue(half=True), cluster=2),  # the most registers
    WgmmaGemm("Q6_K", 128, Epilogue("swiglu", half=True)),
    WgmmaGemm("Q4_1", 16),  # two blocks a multiprocessor, tails of steps
]
MMA = [
    (MmaGemm("Q4_K", 128), "80"),
    (MmaGemm("Q6_K", 64, Epilogue("swiglu", half=True)), "86"),
    (MmaGemm("Q4_0", 16, Epilogue(half=True)), "89"),
    (MmaGemm("Q5_K", 128), "90"),
    (MmaGemm("Q8_0", 64), "100"),
    (MmaGemm("half", 128), "120"),
]


def _sound(cubin: Cubin) -> None:
    assert cubin.spilled == 0
    assert cubin.remarks == (), "ptxas serialized something"


@functools.cache
def _wgmma(variant: WgmmaGemm) -> Cubin:
    return compile_kernel(source_of(variant, overlap=True), Target("90a"))


@pytest.mark.parametrize("variant", WGMMA, ids=lambda v: f"{v.kind}-{v.tokens}")
def test_wgmma_kernels(variant: WgmmaGemm) -> None:
    _sound(_wgmma(variant))


@pytest.mark.parametrize("variant", WGMMA, ids=lambda v: f"{v.kind}-{v.tokens}")
def test_no_operand_is_overwritten_in_flight(variant: WgmmaGemm, tmp_path: Path) -> None:
    """The hazard that ptxas does not speak of: see gemm_emit.keep."""
    tool = disassembler()
    if tool is None:
        pytest.skip("needs nvdisasm: pip install nvidia-cuda-nvdisasm")
    instructions = disassemble(tool, _wgmma(variant).code, tmp_path)
    assert sum("HGMMA" in line for line in instructions) >= 16
    assert operands_overwritten_in_flight(instructions) == []


def test_the_check_finds_an_overwritten_operand() -> None:
    """Registers of a group in flight, also around a loop; not after its wait."""
    multiply = "HGMMA.64x256x16.F32 R24, R168, gdesc[UR4], R24, gsb0"
    wait = "WARPGROUP.DEPBAR.LE gsb0, 0x0"
    load = "LDS.128 R168, [R2]"
    assert operands_overwritten_in_flight([load, multiply, wait, load]) == []
    assert len(operands_overwritten_in_flight([multiply, "LDS.64 R170, [R2]", wait])) == 1
    loop = [".L_x_1:", load, multiply, "@P0 BRA `(.L_x_1)", wait]
    assert len(operands_overwritten_in_flight(loop)) == 1


@pytest.mark.parametrize(("variant", "arch"), MMA, ids=lambda v: getattr(v, "kind", v))
def test_mma_kernels(variant: MmaGemm, arch: str) -> None:
    _sound(compile_kernel(source_of(variant, overlap=False), Target(arch)))


@pytest.mark.parametrize(("arch", "overlap"), [("80", False), ("90a", True)])
def test_conversion_of_rows(arch: str, overlap: bool) -> None:
    _sound(compile_kernel(source_of(None, overlap=overlap), Target(arch)))


@pytest.mark.parametrize("name", FRAGMENT_KINDS)
def test_fragment_code_of_every_kind(name: str) -> None:
    """Each kind's header and fragments alone, with little around them."""

    def build() -> tuple[object, object]:
        from numba import cuda, types

        from frink_numba.kernels.gemm_emit import fragment_ops, keep
        from frink_numba.kernels.ptx import shared_address

        header, steps = fragment_ops(name)
        first, last = steps[0], steps[3]

        def kernel(never):  # type: ignore[no-untyped-def]
            base = shared_address(cuda.shared.array(8192, types.uint8))
            thread = types.uint32(cuda.threadIdx.x)
            row = thread >> types.uint32(2)
            scales = header(base, row)
            keep(first(base, thread, row, scales), never, base)
            keep(last(base, thread, row, scales), never, base)

        return kernel, types.void(types.uint32)

    _sound(compile_kernel(Source(f"fragments {name}", build, 128), Target("90a")))


@pytest.mark.parametrize("name", FRAGMENT_KINDS)
def test_shared_memory_and_stages(name: str) -> None:
    """Every variant fits and has stages enough for the loads to run ahead."""
    for tokens in (16, 32, 64, 128, 256):
        for epilogue in (Epilogue(), Epilogue(half=True), Epilogue("swiglu", True), Epilogue("geglu")):
            for cluster in (1, 2):
                variant = WgmmaGemm(name, tokens, epilogue, cluster)
                assert variant.shared * variant.resident <= SHARED_LIMIT
                assert variant.stages >= 4
                assert variant.slot % 128 == variant.epilogue.buffer_size(tokens) % 1024 == 0
    for tokens in (16, 64, 128):
        small = MmaGemm(name, tokens)
        assert small.shared <= 99 * 1024
        assert small.stages >= 2
