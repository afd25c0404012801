"""The kernels over rows, on `ptx_machine`: those of the tensor-core body, run from their PTX over NumPy arrays."""

from __future__ import annotations

import functools
from typing import Any

from frink_numba.cuda.tensor.kernels import TensorKernels
from frink_numba.kernels import half_rows
from frink_numba.kernels.cubins import Target
from frink_numba.kernels.gemm import Gemms
from tests.kernels.attention_machine import MachineDevice, MachineKernel, linked_ptx

_TARGET = Target("80")


@functools.cache
def _texts() -> dict[str, str]:
    return {}


def _text(source: Any) -> str:
    """The PTX of a kernel, linked once; sources are alike by their names and threads."""
    key = f"{source.name} {source.threads}"
    if key not in _texts():
        _texts()[key] = linked_ptx(source, _TARGET)
    return _texts()[key]


class _MachineGemms(Gemms):
    def __init__(self, device: MachineDevice) -> None:
        super().__init__("mma", (8, 0), multiprocessors=2)
        self._device = device

    def _kernel(self, variant: Any) -> Any:
        assert variant is None, "the machine has no products"
        source = half_rows.source(overlap=False)
        return MachineKernel(_text(source), half_rows.ARGUMENTS, source.threads, 0, self._device.memory)


class MachineRows(TensorKernels):
    """TensorKernels whose kernels over rows run on `device`."""

    def __init__(self, device: MachineDevice) -> None:
        super().__init__("mma", (8, 0), multiprocessors=2)
        self.gemms = _MachineGemms(device)
        self._device = device

    def _kernel(self, source: Any, arguments: Any) -> Any:
        return MachineKernel(_text(source), arguments, source.threads, 0, self._device.memory)
