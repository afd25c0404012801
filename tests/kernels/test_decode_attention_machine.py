"""The decode attention's own PTX against float64 without a GPU (issue 7; rules R4, R9, R11, R14, R17)."""

from __future__ import annotations

import numpy as np
import pytest

from frink_numba.kernels.decode_attention import DecodeShape
from frink_numba.layer import RopeLayout
from tests.kernels.attention_machine import MachineDevice
from tests.kernels.compiling import missing_tools
from tests.kernels.decode_attention_case import Case
from tests.kernels.decode_machine import MachineDecodes
from tests.kernels.gemm_device import relative_error

pytestmark = pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))

LIMIT = 1.5e-3
NEOX = RopeLayout.NEOX


def check(case: Case, capability: tuple[int, int], multiprocessors: int, parts: int | None = None) -> None:
    device = MachineDevice()
    decodes = MachineDecodes(capability, device, multiprocessors)
    out, k, v = case.expected()
    ran = case.run(decodes, device=device, parts=parts)
    for row in range(case.m):
        assert relative_error(ran["out"][0][row], out[row]) < LIMIT, f"row {row}"
    assert np.array_equal(ran["out"][0], ran["out"][1]), "blocks in another order give other bits"
    assert np.abs(ran["k_rows"] - k).max() < 1e-5
    assert np.array_equal(ran["v_rows"], v.astype(np.float32))
    for name, true, scale in (("k", ran["k_rows"], case.k_scale), ("v", ran["v_rows"], case.v_scale)):
        assert np.array_equal(ran[f"{name}_mirror"], (true / scale).astype(np.float16).astype(np.float32) * scale)


@pytest.mark.parametrize("capability", [(9, 0), (8, 0)], ids=lambda c: f"sm_{c[0]}{c[1]}")
@pytest.mark.parametrize("sequences", [[(1, 0)], [(1, 127)], [(2, 15)], [(1, 700)], [(3, 254), (1, 9)]], ids=str)
def test_rows_and_lengths(sequences: list[tuple[int, int]], capability: tuple[int, int]) -> None:
    """One part and several, rows that see each other, blocks in a drawn order."""
    check(Case(DecodeShape(4, 2, 64, rot_dim=64, layout=NEOX), sequences), capability, 12)


@pytest.mark.parametrize(
    "case",
    [
        Case(DecodeShape(2, 1, 96, rot_dim=48, layout=NEOX, q_norm=True, k_norm=True), [(4, 270)], sinks=True),
        Case(DecodeShape(12, 1, 128, rot_dim=128, softcap=5.0), [(1, 300)], k_scale=4.0, v_scale=16.0),
        Case(DecodeShape(4, 2, 64, window=100), [(7, 330), (3, 0)]),
    ],
    ids=["norms and sinks", "wide group and scales", "window"],
)
def test_shapes(case: Case) -> None:
    """Channels beyond whole 64, more queries than a tile, windows."""
    check(case, (9, 0), 8)


def test_blocks_without_work_write_nothing() -> None:
    """One block a multiprocessor, of which few have a part of the keys."""
    case = Case(DecodeShape(2, 1, 32), [(1, 40)])
    device = MachineDevice()
    attention = MachineDecodes((9, 0), device, 7).attention(case.shape, sequences=1, most_rows=1, parts=3)
    assert (attention.blocks, attention.spread) == (7, True)
    check(case, (9, 0), 7, parts=3)
