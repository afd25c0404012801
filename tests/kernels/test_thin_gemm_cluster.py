"""Products whose K a cluster of blocks shares: their own PTX against float64 and against one row's, without a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

from frink_numba.kernels.gemm_pack import pack
from frink_numba.kernels.thin_gemm_plan import thin_plan
from tests.kernels.attention_machine import MachineDevice
from tests.kernels.compiling import missing_tools
from tests.kernels.gemm_device import dequantized, relative_error, worst_row_error
from tests.kernels.packed_weights import random_matrix
from tests.kernels.thin_device import run_thin
from tests.kernels.thin_machine import MachineThins

pytestmark = pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))

LIMIT = 6e-4


def case(
    kind: str, m: int, n: int, k: int, *, norm: bool, gate: str = "", change: Callable[[str], str] = lambda text: text
) -> None:
    """m rows are right, and the first has the bits that it has alone."""
    rng = np.random.default_rng(k + n)
    matrices = [random_matrix(kind, n, k, rng) for _ in range(2 if gate else 1)]
    packed = pack(matrices, gated=bool(gate))
    x = rng.standard_normal((m, k)).astype(np.float32)
    weight = (1 + rng.standard_normal(k)).astype(np.float32) if norm else None

    def run(rows: int, how: Callable[[str], str]) -> np.ndarray:
        device = MachineDevice(32 << 20)
        thins = MachineThins((9, 0), device, multiprocessors=9, change=how, clusters=True)
        plan = thin_plan(packed.kind.name, rows, packed.rows, k, thins.device)
        assert (plan.cluster > 1) == (rows > 1)
        return run_thin(thins, packed, x[:rows], norm=weight, gate=gate, half=bool(gate), device=device).out[0]

    out = run(m, change)
    operand = x.astype(np.float64)
    if weight is not None:
        operand = operand / np.sqrt((operand**2).mean(axis=1, keepdims=True) + 1e-5) * weight
    sides = [operand @ dequantized([matrix]).T for matrix in matrices]
    reference = sides[0] / (1 + np.exp(-sides[0])) * sides[1] if gate else sides[0]
    assert relative_error(out, reference) < (1.5e-3 if gate else LIMIT)
    if not gate:
        assert worst_row_error(out, reference) < 2e-3
    assert np.array_equal(out[:1], run(1, lambda text: text))


@pytest.mark.parametrize(
    ("kind", "m", "n", "k", "norm"),
    [
        ("Q4_K", 5, 550, 1280, False),  # more units than clusters, items for one block alone
        ("Q4_K", 20, 250, 1024, True),
        ("Q6_K", 4, 70, 2048, True),  # eight blocks
        ("Q8_0", 11, 170, 672, True),  # a step without its neighbour
        ("Q4_1", 2, 70, 96, False),  # blocks without an item
        ("Q3_K", 3, 70, 768, False),  # whole weights are scaled
        ("F16", 31, 150, 352, False),
    ],
)
def test_against_float64_and_one_row(kind: str, m: int, n: int, k: int, norm: bool) -> None:
    """Design section 5, and a row's bits do not depend on the rows beside it."""
    case(kind, m, n, k, norm=norm)


def test_gated() -> None:
    """An f16 result with its powers of two, told by one block."""
    case("Q4_K", 6, 152, 768, norm=True, gate="swiglu")


@pytest.mark.parametrize(
    ("before", "after", "count"),
    [
        (r"barrier\.cluster\.wait\.acquire\.aligned;", "", 1),  # sums are not waited for
        (
            r"mapa\.shared::cluster\.u32 (%r\d+), (%r\d+), %r\d+;",
            r"mapa.shared::cluster.u32 \1, \2, 0;",
            0,
        ),  # one block
    ],
    ids=["waits", "targets"],
)
def test_the_machine_finds_faults(before: str, after: str, count: int) -> None:
    """What these tests rest on: kernels made wrong on purpose fail."""

    def change(text: str) -> str:
        changed, found = re.subn(before, after, text, count=count)
        assert found
        return changed

    with pytest.raises(AssertionError):
        case("Q4_K", 3, 550, 1280, norm=False, change=change)
