"""The `wgmma` tier's own PTX against float64 without a GPU (issue 4): tiles, cuts along K, kinds and epilogues."""

from __future__ import annotations

import numpy as np
import pytest

from frink_numba.kernels import gemm
from frink_numba.kernels.gemm_kinds import fragment_kind
from frink_numba.kernels.gemm_pack import pack
from frink_numba.kernels.gemm_plan import Behind, Plan, layouts
from tests.kernels.compiling import missing_tools
from tests.kernels.gemm_device import dequantized, relative_error, worst_row_error
from tests.kernels.gemm_machine import run_on_machine, stand_in_map
from tests.kernels.packed_weights import random_matrix

pytestmark = pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))

LIMIT = 8e-4  # f16 operands, and an f16 result


@pytest.fixture(autouse=True)
def _maps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "tensor_map", stand_in_map)


def plan_of(kind: str, m: int, n: int, k: int, groups: int, tokens: int, *, split: bool = False) -> Plan:
    row = fragment_kind(kind)
    assert row is not None
    plan = list(layouts(m, n, k, row, 3, tokens, 1, groups))[-1 if split else 0]
    assert bool(plan.split_tiles) == split
    return plan


def rounded(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """float32 that f16 holds."""
    return rng.standard_normal(shape).astype(np.float16).astype(np.float32)


@pytest.mark.parametrize(
    ("kind", "m", "n", "k", "groups", "tokens", "split", "half"),
    [
        ("Q4_0", 37, 200, 576, 1, 32, False, True),  # a tail of steps, odd edges, several tiles a block
        ("Q4_K", 50, 300, 1024, 3, 64, True, False),  # tiles cut along K
        ("Q6_K", 110, 150, 512, 2, 104, False, True),  # a chunk that is not a power of two
        ("Q5_K", 130, 200, 768, 3, 128, True, True),
        ("Q4_K", 256, 100, 512, 2, 256, False, True),  # more chunks than buffers
        ("Q8_0", 30, 100, 352, 2, 16, False, False),
        ("F16", 120, 130, 320, 2, 112, False, True),
        ("Q4_0", 70, 65, 32, 3, 64, False, False),  # fewer steps than groups that begin a stage apart: one
        ("Q8_0", 70, 400, 96, 3, 64, False, False),  # two, and several tiles a block
    ],
)
def test_products(kind: str, m: int, n: int, k: int, groups: int, tokens: int, split: bool, half: bool) -> None:
    """Copies, products and stores come as late as they may: a stage or buffer that is given back early shows."""
    rng = np.random.default_rng(k + n)
    matrix = random_matrix(kind, n, k, rng)
    x = rounded(rng, m, k)
    out = run_on_machine(pack([matrix]), x, plan_of(kind, m, n, k, groups, tokens, split=split), half=half)
    reference = x.astype(np.float64) @ dequantized([matrix]).T
    assert relative_error(out, reference) < LIMIT
    assert worst_row_error(out, reference) < 2e-3


@pytest.mark.parametrize(
    ("kinds", "m", "rows", "k", "groups", "tokens", "split"),
    [
        (("Q4_K", "Q6_K"), 50, (128, 100), 512, 2, 64, False),
        (("Q4_K", "Q6_K"), 37, (192, 150), 1024, 2, 64, True),  # an odd slab before the border; tiles cut along K
        (("Q5_K", "Q6_K"), 20, (256, 64), 512, 3, 64, False),  # sets that neither kind fills
        (("Q4_0", "Q8_0"), 40, (64, 70), 352, 1, 32, False),  # tails of steps
        (("Q8_0", "F16"), 40, (128, 70), 352, 2, 32, True),  # one kind is converted, the other is not
        (("F16", "Q4_K"), 30, (64, 64), 512, 1, 32, False),
        (("Q4_0", "Q6_K"), 30, (192, 130), 1024, 2, 64, True),  # records of one step, and of four
    ],
)
def test_two_kinds_in_one_launch(
    kinds: tuple[str, str], m: int, rows: tuple[int, int], k: int, groups: int, tokens: int, split: bool
) -> None:
    """Issue 4, QKV in one launch: each tile is of one kind, and has the bits that a launch of its own kind gives."""
    rng = np.random.default_rng(k + m)
    matrices = [random_matrix(kind, n, k, rng) for kind, n in zip(kinds, rows, strict=True)]
    x, bias = rounded(rng, m, k), rounded(rng, sum(rows))
    packs = pack(matrices[:1]), pack(matrices[1:])
    first, second = (packed.kind for packed in packs)
    plans = layouts(m, sum(rows), k, first, 3, tokens, 1, groups, Behind(second, rows[1]))
    plan = list(plans)[-1 if split else 0]
    assert bool(plan.split_tiles) == split
    out = run_on_machine(packs, x, plan, bias=bias)
    reference = x.astype(np.float64) @ dequantized(matrices).T + bias
    assert relative_error(out, reference) < LIMIT
    assert worst_row_error(out, reference) < 2e-3
    if split:
        return
    alone = [
        run_on_machine(packed, x, plan_of(kind, m, n, k, groups, tokens), bias=part)
        for packed, kind, n, part in zip(packs, kinds, rows, np.split(bias, rows[:1]), strict=True)
    ]
    assert np.array_equal(out, np.concatenate(alone, axis=1))


def test_gate_and_up() -> None:
    """SwiGLU over interleaved rows, as f16 with a power of two a token."""
    rng = np.random.default_rng(5)
    gate, up = (random_matrix("Q4_K", 72, 512, rng) for _ in range(2))
    x = rounded(rng, 40, 512)
    plan = plan_of("Q4_K", 40, 144, 512, 2, 64)
    out = run_on_machine(pack([gate, up], gated=True), x, plan, gate="swiglu", half=True)
    g, u = (x.astype(np.float64) @ dequantized([matrix]).T for matrix in (gate, up))
    assert relative_error(out, g / (1 + np.exp(-g)) * u) < LIMIT


def test_bias_and_a_residual_sum() -> None:
    rng = np.random.default_rng(6)
    matrix, bias, hidden = random_matrix("Q4_1", 90, 192, rng), rounded(rng, 90), rounded(rng, 20, 90)
    x = rounded(rng, 20, 192)
    out = run_on_machine(pack([matrix]), x, plan_of("Q4_1", 20, 90, 192, 1, 32), bias=bias, add_to=hidden)
    assert relative_error(out, x.astype(np.float64) @ dequantized([matrix]).T + bias + hidden) < LIMIT
