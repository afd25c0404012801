"""The kernels that the tensor-core body is built from, behind one object that compiles or loads each once.

Making a `TensorKernels` imports no compiler; all addresses are integers in the current context.
"""

from __future__ import annotations

from typing import Any

from frink_numba.kernels import (
    gated_half,
    gather_rows,
    log_likelihood,
    mirror_rows,
    norm_add,
    norm_half,
    rope_rows,
    scatter_bytes,
)
from frink_numba.kernels.cubins import Source
from frink_numba.kernels.decode_attention import DecodeAttentions
from frink_numba.kernels.fused_attention import Attentions
from frink_numba.kernels.gemm import Gemms, HalfRows
from frink_numba.kernels.launch import KernelShelf, Launch, LoadedKernel
from frink_numba.kernels.row_threads import row_threads
from frink_numba.kernels.sample import Samplers
from frink_numba.kernels.thin_gemm import ThinGemms


class TensorKernels:
    """Products, attentions and the kernels over rows, for one device; `thins` and `decodes` are those for few rows.

    invariant: nothing that is launched may make a row's result depend on the rows beside it, or on their number. So
    `thins` and `decodes`, which sum in another order than the kernels for many rows, are not to be used.
    """

    def __init__(
        self, tier: str, capability: tuple[int, int], multiprocessors: int, *, invariant: bool = False
    ) -> None:
        self.tier, self.invariant = tier, invariant
        self.gemms = Gemms(tier, capability, multiprocessors, invariant=invariant)
        self.thins = ThinGemms(capability, multiprocessors)
        self.attentions = Attentions(tier, capability, multiprocessors)
        self.decodes = DecodeAttentions(capability, multiprocessors)
        self.samplers = Samplers(capability)
        self._shelf = KernelShelf(capability, tier)
        self._overlap = self._shelf.overlap

    def settle(self) -> None:
        """Load all kernels that were asked for so far; what the compiler or the driver raises."""
        for family in (self.gemms, self.thins, self.attentions, self.decodes, self.samplers, self._shelf):
            family.settle()

    def norm_half(self, m: int, cols: int, x: int, weight: int, eps: float, out: HalfRows) -> Launch:
        """RMS norm of float32 [m, cols] into operands."""
        threads = row_threads(cols)
        kernel = self._kernel(norm_half.source(threads, self._overlap), norm_half.ARGUMENTS)
        return kernel.bind(m, x, weight, out.half, out.scale, out.norm, cols, eps)

    def norm_add(self, m: int, cols: int, hidden: int, y: int, weight: int, eps: float) -> Launch:
        """hidden += RMS norm of y, both float32 [m, cols]."""
        threads = row_threads(cols)
        kernel = self._kernel(norm_add.source(threads, self._overlap), norm_add.ARGUMENTS)
        return kernel.bind(m, hidden, y, weight, cols, eps)

    def gated_half(self, gate_name: str, m: int, cols: int, gate: int, up: int, out: HalfRows) -> Launch:
        """act(gate) * up, both float32 [m, cols], into operands."""
        kernel = self._kernel(gated_half.source(gate_name, row_threads(cols), self._overlap), gated_half.ARGUMENTS)
        return kernel.bind(m, gate, up, out.half, out.scale, out.norm, cols)

    def rope_rows(
        self, m: int, pairs: int, positions: int, frequencies: int, scale: float, cos: int, sin: int
    ) -> Launch:
        """Cosines and sines float32 [m, pairs] for int32 positions [m]."""
        kernel = self._kernel(rope_rows.source(self._overlap), rope_rows.ARGUMENTS)
        return kernel.bind(m, positions, frequencies, cos, sin, pairs, scale)

    def mirror_rows(
        self,
        n: int,
        heads: int,
        head_dim: int,
        pitch: int,
        sources: tuple[int, int],
        targets: tuple[int, int],
        scales: tuple[float, float],
    ) -> Launch:
        """K and V rows float32 [n, heads, head_dim] into mirrors f16 [n, heads, pitch], divided by their scales."""
        kernel = self._kernel(mirror_rows.source(self._overlap), mirror_rows.ARGUMENTS)
        inverse = (1.0 / scales[0], 1.0 / scales[1])
        return kernel.bind(n, *sources, *targets, *inverse, heads * head_dim, head_dim, pitch)

    def gather_rows(self, count: int, cols: int, x: int, rows: int, out: int) -> Launch:
        """Rows of float32 [any, cols], named by int32 [count], to float32 [count, cols]."""
        return self._kernel(gather_rows.source(self._overlap), gather_rows.ARGUMENTS).bind(count, x, rows, out, cols)

    def log_likelihood(self, m: int, count: int, logits: int, tokens: int, out: int) -> Launch:
        """Logarithms float32 [m] of the softmax of float32 [m, count] at int32 tokens [m]."""
        kernel = self._kernel(log_likelihood.source(self._overlap), log_likelihood.ARGUMENTS)
        return kernel.bind(m, logits, tokens, out, count)

    def scatter_bytes(self, blocks: int, table: int, count: int) -> Launch:
        """The copies that a table of `count` records of `scatter_bytes.COPY` names."""
        return self._kernel(scatter_bytes.source(self._overlap), scatter_bytes.ARGUMENTS).bind(blocks, table, count)

    def _kernel(self, source: Source, arguments: Any) -> LoadedKernel:
        return self._shelf.kernel(source, arguments, overlap=self._overlap)
