"""The tensor-core kernels compile for their targets without a GPU: no spills, no remarks of lost speed, no hazard.

A few variants stand for all: what differs between kinds is the fragment code, compiled for every kind by itself.
"""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import pytest

from frink_numba.kernels.cubins import Cubin, Source, Target, compile_kernel
from frink_numba.kernels.gemm import source_of
from frink_numba.kernels.gemm_epilogue import Epilogue
from frink_numba.kernels.gemm_kinds import FRAGMENT_KINDS
from frink_numba.kernels.gemm_mma import TOKEN_TILES, MmaGemm, shared_memory
from frink_numba.kernels.gemm_plan import TILES
from frink_numba.kernels.gemm_variant import SHARED_LIMIT, WgmmaGemm
from tests.kernels.sass import disassemble, disassembler, operands_overwritten_in_flight

WGMMA = [
    WgmmaGemm("Q4_K", 256, Epilogue(), cluster=2),  # the widest tile of the main kind
    WgmmaGemm("half", 256, Epilogue(half=True), cluster=2),  # operands in shared memory
    WgmmaGemm("Q6_K", 128, Epilogue("swiglu", half=True), groups=3),  # the most registers for their number
    WgmmaGemm("Q4_1", 64, groups=1),  # two blocks a multiprocessor, tails of steps
    WgmmaGemm("Q4_K", 256, Epilogue(), second="Q6_K"),  # two main loops
    WgmmaGemm("Q8_0", 128, Epilogue(), groups=3, second="half"),  # one of them converts, the other does not
]
NORMS = [
    WgmmaGemm("Q4_K", 256, Epilogue(), 2, 2, 3072),  # rows ahead and weights beside a row
    WgmmaGemm("Q6_K", 128, Epilogue("swiglu", half=True), 1, 3, 4096),  # as many of them as there may be
    WgmmaGemm("Q4_K", 128, Epilogue(), 1, 2, 4096, "Q6_K"),  # of two kinds
    WgmmaGemm("Q6_K", 128, Epilogue(), 1, 3, 8192),  # the widest row of the fewest registers for many tokens
    WgmmaGemm("Q6_K", 32, Epilogue("swiglu", half=True), 1, 1, 8192),
    WgmmaGemm("Q4_0", 16, Epilogue("swiglu", half=True), 1, 2, 5120),  # and of the fewest for few tokens
    WgmmaGemm("half", 256, Epilogue("swiglu", half=True), 2, 2, 512),
]
MMA = [
    ("Q4_K", 128, Epilogue(), (8, 0)),
    ("Q6_K", 64, Epilogue("swiglu", half=True), (8, 6)),
    ("Q4_0", 16, Epilogue(half=True), (8, 9)),
    ("Q5_K", 128, Epilogue(half=True), (9, 0)),
    ("Q8_0", 64, Epilogue(), (10, 0)),
    ("half", 128, Epilogue(), (12, 0)),
]


def _sound(cubin: Cubin) -> None:
    assert cubin.spilled == 0
    assert cubin.remarks == (), "ptxas serialized something"


@functools.cache
def _wgmma(variant: WgmmaGemm) -> Cubin:
    return compile_kernel(source_of(variant, overlap=True), Target("90a"))


@pytest.mark.parametrize("variant", WGMMA, ids=lambda v: f"{v.kind}{v.second}-{v.tokens}")
def test_wgmma_kernels(variant: WgmmaGemm) -> None:
    _sound(_wgmma(variant))


@pytest.mark.parametrize("variant", NORMS, ids=lambda v: f"{v.kind}-{v.tokens}-{v.norm}")
def test_wgmma_kernels_that_norm(variant: WgmmaGemm) -> None:
    _sound(_wgmma(variant))


@pytest.mark.parametrize("variant", [*WGMMA, NORMS[0]], ids=lambda v: f"{v.kind}{v.second}-{v.tokens}-{v.norm}")
def test_no_operand_is_overwritten_in_flight(variant: WgmmaGemm, tmp_path: Path) -> None:
    """The hazard that ptxas does not speak of: see gemm_emit.keep."""
    tool = disassembler()
    if tool is None:
        pytest.skip("needs nvdisasm: pip install nvidia-cuda-nvdisasm")
    instructions = disassemble(tool, _wgmma(variant).code, tmp_path)
    assert sum("HGMMA" in line for line in instructions) >= 8
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


@pytest.mark.parametrize(
    ("kind", "tokens", "epilogue", "capability"), MMA, ids=lambda v: v if isinstance(v, str) else ""
)
def test_mma_kernels(kind: str, tokens: int, epilogue: Epilogue, capability: tuple[int, int]) -> None:
    variant = MmaGemm(kind, tokens, epilogue, shared_memory(capability))
    _sound(compile_kernel(source_of(variant, overlap=False), Target("{}{}".format(*capability))))


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

        header, load, steps = fragment_ops(name)
        first, last = steps[0], steps[3]

        def kernel(never):  # type: ignore[no-untyped-def]
            base = shared_address(cuda.shared.array(8192, types.uint8))
            thread = types.uint32(cuda.threadIdx.x)
            row = thread >> types.uint32(2)
            scales = header(base, row)
            codes = load(base, types.uint32(0), thread, row)
            keep(first(codes, scales), never, base)
            keep(last(codes, scales), never, base)

        return kernel, types.void(types.uint32)

    _sound(compile_kernel(Source(f"fragments {name}", build, 128), Target("90a")))


@pytest.mark.parametrize("name", FRAGMENT_KINDS)
def test_shared_memory_and_stages(name: str) -> None:
    """Every variant fits and has stages enough for the loads to run ahead, of groups a stage apart too."""
    epilogues = (Epilogue(), Epilogue(half=True), Epilogue("swiglu", True), Epilogue("geglu"))
    for groups, tiles in TILES.items():
        for tokens, epilogue, cluster in itertools.product(tiles, epilogues, (1, 2)):
            variant = WgmmaGemm(name, tokens, epilogue, cluster, groups)
            assert variant.shared <= SHARED_LIMIT // variant.resident
            assert variant.stages >= max(3, groups + 1)
            assert variant.buffers >= min(2, variant.epilogue.chunks(tokens))
            mixed = WgmmaGemm(name, tokens, epilogue, cluster, groups, 0, "Q6_K")
            assert mixed.shared <= SHARED_LIMIT // mixed.resident
            assert mixed.slot == max(variant.slot, WgmmaGemm("Q6_K", tokens).slot)
            assert mixed.stages >= max(3, groups + 1)
            assert variant.slot % 128 == variant.epilogue.buffer_size(tokens) % 1024 == 0
            # What consumers take on must have been given away by the producer, of the registers of the launch.
            launched = 65536 // (variant.resident * variant.threads) // 8 * 8
            taken = sum(r * n for r, n in zip(variant.registers, (128, 128 * groups), strict=True))
            assert taken <= launched * variant.threads
    for tokens, capability in itertools.product(TOKEN_TILES, [(8, 0), (8, 6), (9, 0), (12, 0)]):
        small = MmaGemm(name, tokens, memory=shared_memory(capability))
        assert small.resident * (small.shared + 1024) <= small.memory
        assert small.stages >= 2
