"""A row of the fused attention gives the same bits in every step and beside every neighbour (FRINK_INVARIANT).

What counts is which blocks of keys a tile walks over for the sake of its other rows: they must leave no trace in a row
that sees none of their keys. The arithmetic of a step alone, and the kernels' own PTX without a GPU (`ptx_machine`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from frink_numba.kernels.fused_attention import HeadShape
from frink_numba.kernels.fused_attention_emit import softmax
from tests.kernels.array_emitter import ArrayEmitter
from tests.kernels.attention_device import run_attention
from tests.kernels.attention_machine import MachineAttentions, MachineDevice, stand_in_maps
from tests.kernels.compiling import missing_tools

SINKS = np.asarray([0.5, -3.0], np.float32)


class FloatEmitter(ArrayEmitter):
    """Knows the instructions of a softmax too: one rounding each."""

    def __init__(self) -> None:
        super().__init__()
        builder: Any = self.builder
        builder.fadd, builder.fsub, builder.fmul = np.add, np.subtract, np.multiply
        builder.fcmp_unordered = lambda sign, a, b: {"!=": a != b}[sign]

    def asm(self, template: str, result: str, arguments: Any, **how: Any) -> Any:
        values = [argument.value.astype(np.float64) for argument in arguments]
        known = {
            "max.f32": np.maximum,
            "fma.rn.f32": lambda a, b, c: a * b + c,
            "neg.f32": np.negative,
            "ex2.approx.ftz.f32": np.exp2,
        }
        name = template.split()[0]
        if name not in known:
            return super().asm(template, result, arguments, **how)
        return self.array(result, known[name](*values).astype(np.float32))


@pytest.mark.parametrize("guard", [True, False])
def test_a_block_that_a_row_does_not_see_leaves_no_trace(guard: bool) -> None:
    """Its weights are zeros, and earlier sums are multiplied by exactly one; by zero where there were none."""
    rng = np.random.default_rng(0)
    e = FloatEmitter()
    lanes = 32
    unseen = e.array("f32", np.full(lanes, -np.inf, np.float32))
    seen = e.array("f32", rng.normal(size=lanes).astype(np.float32))
    maxima = e.array("f32", (300 * rng.normal(size=lanes // 4).repeat(4)).astype(np.float32))
    factor = e.array("f32", np.full(lanes, 0.18033688, np.float32))
    # Registers 0, 1, 4, 5 are of the first row, 2, 3, 6, 7 of the second (`fused_attention_emit`).
    scores = [unseen, unseen, seen, seen] * 2
    before = [maxima, e.array("f32", np.full(lanes, -np.inf, np.float32))]
    weights, new, sums, rescale = softmax(e, scores, before, factor, guard)  # type: ignore[arg-type]
    np.testing.assert_array_equal(rescale[0].value, np.float32(1))
    np.testing.assert_array_equal(new[0].value, maxima.value)
    np.testing.assert_array_equal(sums[0].value, 0)
    for i in (0, 1, 4, 5):
        np.testing.assert_array_equal(weights[i].value, 0)
    np.testing.assert_array_equal(rescale[1].value, 0)


@pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))
@pytest.mark.parametrize("tier", [("wgmma", (9, 0)), ("mma", (8, 0))], ids=lambda v: v[0])
@pytest.mark.parametrize(
    "options", [{}, {"window": 70}, {"window": 150, "softcap": 5.0, "sinks": SINKS}], ids=["all", "window", "options"]
)
def test_chunks_and_neighbours(
    tier: tuple[str, tuple[int, int]], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """300 rows at once, against parts of them behind their prefix, alone and after another sequence."""
    stand_in_maps(monkeypatch)
    rng = np.random.default_rng(5)
    n, shape, device = 300, HeadShape(2, 1, 64), MachineDevice()
    attentions = MachineAttentions(*tier, device)
    q, other = (2 * rng.standard_normal((2, n, 2, 64))).astype(np.float16)
    k, v = rng.standard_normal((2, n, 1, 64)).astype(np.float16)
    whole = run_attention(attentions, device, shape, q, [(k, v, n)], runs=1, **options)[0].view(np.uint16)
    for first, last in ((100, 171), (171, 300)):
        rows = last - first
        alone = run_attention(attentions, device, shape, q[first:last], [(k[:last], v[:last], rows)], runs=1, **options)
        np.testing.assert_array_equal(alone[0].view(np.uint16), whole[first:last])
    beside = np.concatenate([other[:23], q[first:last]])
    sequences = [(v[:40], k[:40], 23), (k[:last], v[:last], rows)]
    both = run_attention(attentions, device, shape, beside, sequences, runs=1, **options)[0]
    np.testing.assert_array_equal(both[23:].view(np.uint16), whole[first:last])
