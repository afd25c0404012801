"""A product of few rows, ready to be bound (few_gemm.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from frink_numba.kernels.few_gemm_plan import FewPlan
from frink_numba.kernels.few_gemm_variant import FewGemm
from frink_numba.kernels.gemm_product import Product
from frink_numba.kernels.launch import Launch
from frink_numba.kernels.tma import MAP_BYTES, tensor_map

if TYPE_CHECKING:
    from frink_numba.kernels.gemm import DeviceWeights, HalfRows


@dataclass(frozen=True, slots=True)
class FewProduct(Product):
    """A product of few rows with quantized weights (few_gemm.py)."""

    variant: FewGemm
    plan: FewPlan

    @property
    def workspace(self) -> int:
        """Bytes of the workspace: counts, and the sums of each part where records are shared out."""
        return self.plan.workspace

    def maps(self, x: HalfRows, out: int, pitch: int | None = None) -> bytes:
        """As WgmmaProduct.maps."""
        variant = self.variant
        pitch = self._pitch(pitch, variant.epilogue.item)
        tokens = tensor_map(x.half, self.m, self.cols, self.cols * 2, variant.tokens, 64, 2, 128)
        box = (variant.store.chunk_tokens(variant.store_tokens), variant.epilogue.box_columns)
        return tokens + tensor_map(out, self.m, self.outputs, pitch, *box, variant.store.item, variant.store.swizzle)

    def bind(
        self,
        weights: DeviceWeights,
        x: HalfRows,
        out: int,
        pitch: int | None = None,
        *,
        maps: int,
        workspace: int,
        add: bool = False,
        out_scale: int = 0,
    ) -> Launch:
        """As WgmmaProduct.bind, without a norm."""
        plan = self.plan
        self._check((self.variant.kind,), self.variant.epilogue, weights, add, out_scale)
        addresses = (weights.data, weights.row_scale, x.scale, weights.bias, x.norm, out_scale, workspace)
        shape = (self.m, plan.slabs, plan.records, plan.sets, plan.parts)
        return self.kernel.bind(plan.blocks, maps, maps + MAP_BYTES, *addresses, *weights.bounds(), *shape, int(add))
