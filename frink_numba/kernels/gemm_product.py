"""What all bound products of the tensor-core tiers have in common (gemm.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from frink_numba.errors import ShapeError
from frink_numba.kernels.gemm_epilogue import Epilogue
from frink_numba.kernels.launch import LoadedKernel

if TYPE_CHECKING:
    from frink_numba.kernels.gemm import DeviceWeights, MixedWeights


@dataclass(frozen=True, slots=True)
class Product:
    """One product's kernel: y[m, outputs] from x[m, cols]."""

    m: int
    outputs: int
    cols: int
    kernel: LoadedKernel

    def _pitch(self, pitch: int | None, item: int) -> int:
        """Bytes from row to row of the result; None is dense."""
        if pitch is None:
            return self.outputs * item
        if pitch < self.outputs * item or pitch % item:
            raise ShapeError(f"rows of {self.outputs} results of {item} bytes do not fit a pitch of {pitch} bytes")
        return pitch

    def _check(
        self,
        kinds: tuple[str, ...],
        epilogue: Epilogue,
        weights: DeviceWeights | MixedWeights,
        add: bool,
        out_scale: int,
    ) -> None:
        if (weights.kinds, weights.outputs, weights.cols) != (kinds, self.outputs, self.cols):
            raise ShapeError(
                f"the product is for {' and '.join(kinds)} {self.outputs} x {self.cols}, "
                f"the weights are {' and '.join(weights.kinds)} {weights.outputs} x {weights.cols}"
            )
        if add and (epilogue.half or epilogue.gate):
            raise ShapeError("only a plain float32 result can be added to")
        if epilogue.half and not out_scale:
            raise ShapeError("an f16 result needs out_scale")
