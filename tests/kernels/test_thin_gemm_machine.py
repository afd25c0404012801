"""The thin products' own PTX against float64 without a GPU (R11), a few shapes of all sorts of kinds."""

from __future__ import annotations

import re

import numpy as np
import pytest

from frink_numba.kernels.gemm_pack import pack
from tests.kernels.attention_machine import MachineDevice
from tests.kernels.compiling import missing_tools
from tests.kernels.gemm_device import dequantized, relative_error, worst_row_error
from tests.kernels.packed_weights import random_matrix
from tests.kernels.thin_device import run_thin
from tests.kernels.thin_machine import MachineThins

pytestmark = pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))

LIMIT = 6e-4


def case(
    kind: str,
    m: int,
    n: int,
    k: int,
    *,
    norm: bool = False,
    row_groups: int | None = None,
    capability: tuple[int, int] = (9, 0),
    change: tuple[str, str] | None = None,
) -> None:
    rng = np.random.default_rng(k + n)
    matrix = random_matrix(kind, n, k, rng)
    x = rng.standard_normal((m, k)).astype(np.float32)
    weight = (1 + rng.standard_normal(k)).astype(np.float32) if norm else None
    device = MachineDevice(32 << 20)

    def changed(text: str) -> str:
        if change is None:
            return text
        text, count = re.subn(*change, text)
        assert count
        return text

    thins = MachineThins(capability, device, change=changed)
    ran = run_thin(thins, pack([matrix]), x, norm=weight, row_groups=row_groups, device=device)
    out = ran.out[0]
    operand = x.astype(np.float64)
    if weight is not None:
        operand = operand / np.sqrt((operand**2).mean(axis=1, keepdims=True) + 1e-5) * weight
    reference = operand @ dequantized([matrix]).T
    assert relative_error(out, reference) < LIMIT
    assert worst_row_error(out, reference) < 2e-3


@pytest.mark.parametrize(
    ("kind", "m", "n", "k", "norm", "row_groups"),
    [
        ("Q4_K", 1, 325, 1280, True, 2),  # units wider than W, more units than blocks
        ("Q6_K", 1, 70, 768, False, None),
        ("Q6_K", 5, 250, 512, True, 8),
        ("Q5_K", 11, 70, 512, False, None),
        ("Q8_0", 1, 70, 352, True, None),
        ("Q4_1", 1, 70, 96, False, 4),  # a step without its neighbour
        ("Q4_0", 8, 70, 672, False, None),
        ("Q3_K", 2, 70, 512, True, None),  # whole weights are scaled
        ("F16", 1, 70, 352, False, None),
    ],
)
def test_against_float64(kind: str, m: int, n: int, k: int, norm: bool, row_groups: int | None) -> None:
    case(kind, m, n, k, norm=norm, row_groups=row_groups)


@pytest.mark.parametrize(("kind", "norm"), [("Q4_K", True), ("Q6_K", False)])
def test_x_in_parts(kind: str, norm: bool) -> None:
    """More rows than shared memory holds (99 KB)."""
    case(kind, 8, 40, 6144, norm=norm, capability=(8, 6))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (r"cp\.async\.wait_group \d+;", "cp.async.wait_group 8;"),  # weights are not waited for
        (r"bar\.sync\s+0;", ""),  # nor x, and the sums of other warps
        (r"m16n8k16(\.row\.col\S*) (\{[^}]*\}), (\{[^}]*\}), \{(%r\d+), ?(%r\d+)\}", r"m16n8k16\1 \2, \3, {\5,\4}"),
    ],
    ids=["copies", "barriers", "halves of x"],
)
def test_the_machine_finds_faults(before: str, after: str) -> None:
    """What these tests rest on: kernels made wrong on purpose fail."""
    with pytest.raises(AssertionError):
        case("Q4_K", 1, 400, 1280, norm=True, row_groups=2, change=(before, after))
