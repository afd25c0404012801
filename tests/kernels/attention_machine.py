"""The attention kernels on `ptx_machine`: the interface as it is, with kernels that run their PTX over NumPy arrays."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from frink_numba.kernels import fused_attention, fused_attention_mma, fused_attention_wgmma, qkv_prepare
from frink_numba.kernels.cubins import Source, Target
from frink_numba.kernels.fused_attention import Attentions, source_of
from frink_numba.kernels.fused_attention_plan import Layout, MmaLayout
from tests.kernels.ptx_machine import Machine, Memory, Program

_MAP = struct.Struct("<5Q")  # what stands in for a tensor map: address, positions, heads, channels, positions of a box


class MachineDevice:
    def __init__(self, size: int = 16 << 20) -> None:
        self.memory = Memory(size)
        self._likes: dict[int, np.ndarray] = {}

    def place(self, array: np.ndarray) -> int:
        address = self.memory.place(array)
        self._likes[address] = array
        return address

    def read(self, address: int) -> np.ndarray:
        return self.memory.read(address, self._likes[address])

    def launch(self, bound: Callable[[int], None]) -> None:
        bound(0)


class MachineKernel:
    """Stands in for a LoadedKernel."""

    def __init__(self, text: str, arguments: Sequence[Any], threads: int, shared: int, memory: Memory) -> None:
        self._program, self._memory = Program.parse(text), memory
        self._kinds = [kind for _, kind in arguments]
        self._threads, self._shared = threads, shared

    def bind(self, blocks: int, *values: float) -> Callable[[int], None]:
        def launch(_: int) -> None:
            shape = (self._threads, blocks, values, self._kinds, self._shared)
            machine = Machine(self._program, self._memory, *shape)
            for block in range(blocks):
                machine.run(block)

        return launch

    def close(self) -> None:
        pass


@functools.cache
def ptx_of(variant: Any, target: Target) -> str:
    """The PTX of an attention kernel."""
    return linked_ptx(source_of(variant), target)


def linked_ptx(source: Source, target: Target) -> str:
    """The PTX of a kernel after link-time optimization."""
    from cuda.core import Linker, LinkerOptions, ObjectCode
    from numba import cuda

    function, signature = source.build()
    bounds = (source.threads, source.blocks)
    code = cuda.compile(
        function, signature, cc=target.capability, device=False, abi="numba", output="ltoir", launch_bounds=bounds
    )[0]
    options = LinkerOptions(arch=f"sm_{target.arch}", link_time_optimization=True, ptx=True)
    return bytes(Linker(ObjectCode.from_ltoir(code), options=options).link("ptx").code).decode(errors="replace")


class MachineAttentions(Attentions):
    """Attentions whose kernels run on the machine; `change` is done to their PTX first."""

    def __init__(
        self,
        tier: str,
        capability: tuple[int, int],
        device: MachineDevice,
        change: Callable[[str], str] = lambda text: text,
    ) -> None:
        super().__init__(tier, capability, multiprocessors=3)
        self._device, self._change = device, change
        self._made: dict[Any, MachineKernel] = {}

    def _kernel(self, variant: Any) -> Any:
        if variant not in self._made:
            self._made[variant] = self._machine_kernel(variant)
        return self._made[variant]

    def _machine_kernel(self, variant: Any) -> MachineKernel:
        source = source_of(variant)
        modules = {Layout: fused_attention_wgmma, MmaLayout: fused_attention_mma, qkv_prepare.QkvPrepare: qkv_prepare}
        arguments = modules[type(variant)].ARGUMENTS  # type: ignore[attr-defined]
        shared = variant.shared if isinstance(variant, Layout | MmaLayout) else 0
        text = self._change(ptx_of(variant, self._shelf.target))
        return MachineKernel(text, arguments, source.threads, shared, self._device.memory)


def stand_in_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensor maps are the driver's to make: what the machine reads instead."""

    def heads_map(*numbers: int) -> bytes:
        return _MAP.pack(*numbers).ljust(128, b"\0")

    monkeypatch.setattr(fused_attention, "heads_map", heads_map)
