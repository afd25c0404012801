"""How many rows a step may have so that each gets the bits of a step of its own, with the kernels for few rows.

Sums of a row have an order of their own in every kernel; what may depend on the number of rows is where the order is
cut: the columns of a thin product over warps, the keys of the attention over parts. All else works on single rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from frink_numba.backend import Edges
from frink_numba.kernels import decode_attention
from frink_numba.kernels.decode_attention import DecodeShape
from frink_numba.kernels.gemm_kinds import fragment_kind
from frink_numba.kernels.thin_gemm_plan import ThinDevice, ThinPlan, thin_plan
from frink_numba.layer import Layer
from frink_numba.quant import QuantMatrix

_MOST = decode_attention.MOST_ROWS


class FewRows:
    """The answer for the layers of a model and what lies around them. `kernels`: a TensorKernels."""

    def __init__(self, kernels: Any, layers: Sequence[Layer], edges: Edges) -> None:
        self._decodes = kernels.decodes
        self._shapes: set[DecodeShape] = set()
        matrices = [edges.output]
        for layer in layers:
            spec, expert = layer.attention, layer.ffn.experts[0]
            matrices += [spec.q, spec.k, spec.v, spec.o, expert.gate, expert.up, expert.down]
            if decode_attention.why_not(spec.n_heads, spec.n_kv_heads, spec.head_dim) is None:
                heads = spec.n_heads, spec.n_kv_heads, spec.head_dim
                self._shapes.add(DecodeShape(*heads, window=spec.window))
        self._rows = _MOST if kernels.invariant else _products_alike(matrices, kernels.thins.device)
        if kernels.invariant:
            self._shapes.clear()  # the attention for many rows works on single ones

    def at(self, start: int) -> int:
        """Rows of a step from position `start` on: a power of two, so that few graphs serve all steps."""
        rows = min([self._rows, *(self._decodes.alike(shape, start, self._rows) for shape in self._shapes)])
        return 1 << (rows.bit_length() - 1)


def _products_alike(matrices: Sequence[QuantMatrix], device: ThinDevice) -> int:
    """The most rows with which all products sum in the order of one row."""
    kinds = {(kind.name, matrix.cols) for matrix in matrices if (kind := fragment_kind(matrix.kind.name)) is not None}
    rows = 1
    while rows < _MOST and all(
        _order(thin_plan(name, rows + 1, 64, cols, device)) == _order(thin_plan(name, 1, 64, cols, device))
        for name, cols in kinds
    ):
        rows += 1
    return rows


def _order(plan: ThinPlan) -> int:
    """What of a plan decides the order of a sum."""
    return plan.k_groups
