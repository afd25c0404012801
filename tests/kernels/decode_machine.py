"""The decode attention on `ptx_machine`: the interface as it is, with kernels that run their PTX over NumPy arrays."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from frink_numba.kernels.cubins import Target
from frink_numba.kernels.decode_attention import DecodeAttentions, source_of
from frink_numba.kernels.decode_attention_variant import ARGUMENTS, DecodeKernel
from tests.kernels.attention_machine import MachineDevice, linked_ptx
from tests.kernels.ptx_machine import Program
from tests.kernels.thin_machine import ThinMachine


class DecodeMachine(ThinMachine):
    """Adds the instructions that only the decode attention uses."""

    def _action(self, pc: int, opcode: str, text: str, parts: list[str]) -> Callable[[Any], None]:
        own: dict[str, Any] = {
            "vote.sync.all.pred": self._all_agree,
            "movmatrix.sync.aligned.m8n8.trans.b16": self._transpose,
            "atom.acq_rel.gpu.global.add.u32": self._do_atom_global_add,
        }  # fmt: skip
        if opcode in own:
            return own[opcode](opcode, parts)  # type: ignore[no-any-return]
        return super()._action(pc, opcode, text, parts)

    def _all_agree(self, opcode: str, parts: list[str]) -> Callable[[Any], None]:
        target, flag = self.register(parts[0]), self.register(parts[1])

        def agree(active: Any) -> None:
            self._warps(active)
            target[active] = np.repeat(flag[active].reshape(-1, 32).all(axis=1), 32)

        return agree

    def _transpose(self, opcode: str, parts: list[str]) -> Callable[[Any], None]:
        target, source = self.register(parts[0]), self.operand(parts[1])

        def transpose(active: Any) -> None:
            self._warps(active)
            matrices = np.ascontiguousarray(source(active)).view(np.uint16).reshape(-1, 8, 8)
            target[active] = np.ascontiguousarray(matrices.transpose(0, 2, 1)).view(np.uint32).reshape(-1)

        return transpose


@functools.cache
def program_of(variant: DecodeKernel, target: Target) -> Program:
    def apart(found: re.Match[str]) -> str:
        return "\n".join(f".reg {found.group(1)} {name};" for name in found.group(2).split(", "))

    # Registers that are declared together, one a line.
    return Program.parse(re.sub(r"\.reg (\.\w+) (\w+(?:, \w+)+);", apart, linked_ptx(source_of(variant), target)))


class MachineDecodes(DecodeAttentions):
    """Decode attentions whose kernels run on `device`, their blocks in a drawn order."""

    def __init__(self, capability: tuple[int, int], device: MachineDevice, multiprocessors: int, seed: int = 0) -> None:
        super().__init__(capability, multiprocessors)
        self._device, self._random = device, np.random.default_rng(seed)

    def _kernel(self, variant: DecodeKernel) -> Any:
        return _MachineKernel(self, variant)

    def run(self, variant: DecodeKernel, blocks: int, values: tuple[float, ...]) -> None:
        kinds = [kind for _, kind in ARGUMENTS]
        threads = source_of(variant).threads
        program = program_of(variant, self._shelf.target)
        machine = DecodeMachine(program, self._device.memory, threads, blocks, values, kinds, variant.shared)
        for block in self._random.permutation(blocks):
            machine.run(int(block))


class _MachineKernel:
    """Stands in for a LoadedKernel."""

    def __init__(self, owner: MachineDecodes, variant: DecodeKernel) -> None:
        self._owner, self._variant = owner, variant

    def bind(self, blocks: int, *values: float) -> Callable[[int], None]:
        return lambda _: self._owner.run(self._variant, blocks, values)
