"""Products that norm their rows themselves, without a GPU: several blocks, by turns, that meet behind the norm."""

from __future__ import annotations

import re

import numpy as np
import pytest

from frink_numba.kernels import gemm
from frink_numba.kernels.gemm_pack import pack
from frink_numba.kernels.gemm_plan import Behind, layouts
from tests.kernels.compiling import missing_tools
from tests.kernels.gemm_device import dequantized, relative_error
from tests.kernels.gemm_machine import run_on_machine, stand_in_map
from tests.kernels.packed_weights import random_matrix
from tests.kernels.test_gemm_machine import LIMIT, plan_of

pytestmark = pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))

EPS = 1e-5


@pytest.fixture(autouse=True)
def _maps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "tensor_map", stand_in_map)


def normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    wide = x.astype(np.float64)
    return wide / np.sqrt((wide * wide).mean(axis=1, keepdims=True) + EPS) * weight


def drawn(m: int, cols: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Rows of very different sizes with an outlier channel, and a norm's weight."""
    x = rng.standard_normal((m, cols)).astype(np.float32)
    x *= (10.0 ** rng.integers(-5, 6, (m, 1))).astype(np.float32)
    x[:, 3] *= 200
    return x, rng.standard_normal(cols).astype(np.float32)


@pytest.mark.parametrize(
    ("kind", "m", "n", "k", "groups", "tokens", "split", "half"),
    [
        ("Q4_0", 37, 200, 576, 1, 32, False, True),  # threads that idle at a row's end; several turns
        ("Q4_K", 20, 200, 1024, 3, 64, True, False),  # tiles cut along K: both kinds of flags
        ("Q8_0", 30, 100, 352, 2, 16, False, False),  # half of the threads idle, and few registers
        ("F16", 9, 130, 2592, 2, 64, False, True),  # a thread stands for two
    ],
)
def test_a_product_behind_its_norm(
    kind: str, m: int, n: int, k: int, groups: int, tokens: int, split: bool, half: bool
) -> None:
    """Issue 6: operands as the norm's own kernel makes them, seen by all blocks; the count is back at zero."""
    rng = np.random.default_rng(k + n)
    matrix = random_matrix(kind, n, k, rng)
    x, weight = drawn(m, k, rng)
    plan = plan_of(kind, m, n, k, groups, tokens, split=split)
    out = run_on_machine(pack([matrix]), x, plan, half=half, norm=(weight, EPS))
    assert relative_error(out, normed(x, weight) @ dequantized([matrix]).T) < LIMIT


def test_two_kinds_behind_a_norm() -> None:
    """Issue 4, QKV in one launch, with issue 6's norm inside: tiles of both kinds wait for the same rows."""
    rng = np.random.default_rng(6)
    matrices = [random_matrix(kind, n, 512, rng) for kind, n in (("Q4_K", 128), ("Q6_K", 70))]
    x, weight = drawn(40, 512, rng)
    first, second = (pack([matrix]) for matrix in matrices)
    plan = next(layouts(40, 198, 512, first.kind, 3, 32, 1, 1, Behind(second.kind, 70)))
    out = run_on_machine((first, second), x, plan, norm=(weight, EPS))
    assert relative_error(out, normed(x, weight) @ dequantized(matrices).T) < LIMIT


def test_gate_and_up_launched_again() -> None:
    """Two launches in a row leave the same; blocks without a tile take rows too."""
    rng = np.random.default_rng(5)
    gate, up = (random_matrix("Q4_K", 24, 512, rng) for _ in range(2))
    x, weight = drawn(21, 512, rng)
    plan = plan_of("Q4_K", 21, 48, 512, 1, 32)
    assert plan.blocks == 1
    packed = pack([gate, up], gated=True)
    out = run_on_machine(packed, x, plan, gate="swiglu", half=True, norm=(weight, EPS), launches=2)
    g, u = (normed(x, weight) @ dequantized([matrix]).T for matrix in (gate, up))
    assert relative_error(out, g / (1 + np.exp(-g)) * u) < LIMIT


def test_zeros_and_what_is_no_number_stay_in_their_rows() -> None:
    """A row of zeros gives zeros; a row with a not-a-number is all of them, and its neighbours know nothing of it."""
    rng = np.random.default_rng(7)
    matrix = random_matrix("Q8_0", 64, 320, rng)
    x, weight = drawn(6, 320, rng)
    x[1], x[2, 5], x[4, 7] = 0, np.nan, np.inf
    out = run_on_machine(pack([matrix]), x, plan_of("Q8_0", 6, 64, 320, 1, 32), norm=(weight, EPS))
    assert not out[1].any()
    assert not np.isfinite(out[[2, 4]]).any()
    good = [0, 3, 5]
    assert relative_error(out[good], normed(x[good], weight) @ dequantized([matrix]).T) < LIMIT


@pytest.mark.parametrize("resident", [1, 3])
def test_any_number_of_blocks_gets_through(resident: int) -> None:
    """Issue 6: the next block begins when one has ended, as beside other work on a device; tiles are cut along K."""
    rng = np.random.default_rng(11)
    matrix = random_matrix("Q4_K", 100, 1024, rng)
    x, weight = drawn(37, 1024, rng)
    plan = plan_of("Q4_K", 37, 100, 1024, 1, 32, split=True)
    assert plan.blocks > 3
    out = run_on_machine(pack([matrix]), x, plan, norm=(weight, EPS), resident=resident)
    assert relative_error(out, normed(x, weight) @ dequantized([matrix]).T) < LIMIT


def test_rows_of_blocks_that_do_not_run_would_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine tells: where a group does its own share and no more, one block at a time waits for ever."""
    monkeypatch.setattr("tests.kernels.gemm_machine._MOST_TURNS", 600)
    rng = np.random.default_rng(12)
    matrix = random_matrix("Q8_0", 200, 96, rng)
    x, weight = drawn(20, 96, rng)
    plan = plan_of("Q8_0", 20, 200, 96, 1, 32)
    assert plan.blocks > 1

    def does_one_turn(text: str) -> str:
        """Tickets have run out for who has had one."""
        first, second = re.finditer(r"atom\.relaxed\.gpu\.global\.inc\.u32 (%r\d+), \[%rd\d+\], %r\d+;", text)
        assert first.start() < second.start()
        return f"{text[: second.start()]}mov.u32 {second.group(1)}, 1000000;{text[second.end() :]}"

    run_on_machine(pack([matrix]), x, plan, norm=(weight, EPS), resident=1)
    with pytest.raises(AssertionError, match="wait for ever"):
        run_on_machine(pack([matrix]), x, plan, norm=(weight, EPS), change=does_one_turn, resident=1)


def test_a_reader_that_does_not_wait_is_found() -> None:
    """With nobody to wait for, operands are read before they are written."""
    rng = np.random.default_rng(8)
    matrix = random_matrix("Q8_0", 200, 352, rng)
    x, weight = drawn(40, 352, rng)
    plan = plan_of("Q8_0", 40, 200, 352, 1, 32)
    assert plan.blocks > 1

    def hasty(text: str) -> str:
        """The producer is told that all rows are there, whatever the count says."""
        reads = list(re.finditer(r"ld\.acquire\.gpu\.global\.u32 (%r\d+), \[%rd\d+\];", text))
        flags = [read for read in reads if "setp.eq" in text[read.end() : read.end() + 60]]
        told = [read for read in reads if read not in flags]
        assert told
        for read in reversed(told):
            text = f"{text[: read.start()]}mov.u32 {read.group(1)}, 1000000;{text[read.end() :]}"
        return text

    out = run_on_machine(pack([matrix]), x, plan, norm=(weight, EPS), change=hasty)
    assert not relative_error(out, normed(x, weight) @ dequantized([matrix]).T) < LIMIT
