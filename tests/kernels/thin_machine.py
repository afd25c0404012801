"""The thin products on `ptx_machine`: the interface as it is, with kernels that run their PTX over NumPy arrays."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from frink_numba.kernels import thin_gemm_kernel
from frink_numba.kernels.thin_gemm import ThinGemms, source_of
from tests.kernels.attention_machine import MachineDevice, linked_ptx
from tests.kernels.ptx_machine import Machine, Program
from tests.kernels.ptx_operations import PLAIN, float_of

_ALIASES = {"mul.rn.f32": "mul.f32", "sub.rn.f32": "sub", "add.rn.f32": "add", "sqrt.approx.ftz.f32": "sqrt.rn.f32"}


class ThinMachine(Machine):
    """Adds the instructions that only the thin products use."""

    def _action(self, pc: int, opcode: str, text: str, parts: list[str]) -> Callable[[Any], None]:
        if opcode == "mov.b32" and (parts[0].startswith("{") or parts[1].startswith("{")):
            return self._halves(parts)
        own: dict[str, Any] = {
            "cvt.f32.f16": self._widen, "prmt.b32": self._permute, "mul.hi.u32": self._high,
            "shf.r.wrap.b32": self._funnel, "fma.rn.f16x2": self._paired, "mul.rn.f16x2": self._paired,
            "sub.rn.f16x2": self._paired,
            "lop3.b32": self._logic, "red.global.add.f32": self._add_float, "rsqrt.approx.f32": self._root,
        }  # fmt: skip
        if opcode in _ALIASES:
            return PLAIN[_ALIASES[opcode]](self, opcode, parts)  # type: ignore[no-any-return]
        if opcode in own:
            return own[opcode](opcode, parts)  # type: ignore[no-any-return]
        return super()._action(pc, opcode, text, parts)

    def operand(self, text: str, kind: str = "u32") -> Callable[[Any], np.ndarray]:
        if kind in ("u16", "b16"):
            whole = super().operand(text)
            return lambda active: whole(active).astype(np.uint16)
        return super().operand(text, kind)

    def _halves(self, parts: list[str]) -> Callable[[Any], None]:
        if parts[0].startswith("{"):
            low, high = (self.register(p.strip()) for p in parts[0].strip("{}").split(","))
            source = self.operand(parts[1])

            def split(active: Any) -> None:
                value = source(active).copy()
                low[active], high[active] = value & 0xFFFF, value >> 16

            return split
        pair = [self.operand(p.strip()) for p in parts[1].strip("{}").split(",")]
        target = self.register(parts[0])
        return lambda active: target.__setitem__(active, (pair[0](active) & 0xFFFF) | (pair[1](active) << 16))

    def _widen(self, opcode: str, parts: list[str]) -> Callable[[Any], None]:
        target, source = float_of(self.register(parts[0])), self.operand(parts[1])
        return lambda active: target.__setitem__(active, source(active).astype(np.uint16).view(np.float16))

    def _permute(self, opcode: str, parts: list[str]) -> Callable[[Any], None]:
        target, (a, b, selector) = self.register(parts[0]), (self.operand(p) for p in parts[1:])

        def permute(active: Any) -> None:
            both = a(active).astype(np.uint64) | (b(active).astype(np.uint64) << np.uint64(32))
            chosen, out = selector(active).astype(np.uint64), np.zeros(both.shape, np.uint64)
            for i in range(4):
                nibble = (chosen >> np.uint64(4 * i)) & np.uint64(15)
                assert (nibble < 8).all()
                out |= ((both >> (nibble * np.uint64(8))) & np.uint64(255)) << np.uint64(8 * i)
            target[active] = out.astype(np.uint32)

        return permute

    def _high(self, opcode: str, parts: list[str]) -> Callable[[Any], None]:
        target, a, b = self.register(parts[0]), self.operand(parts[1]), self.operand(parts[2])
        return lambda active: target.__setitem__(active, (a(active).astype(np.uint64) * b(active)) >> np.uint64(32))

    def _funnel(self, opcode: str, parts: list[str]) -> Callable[[Any], None]:
        target, (low, high, count) = self.register(parts[0]), (self.operand(p) for p in parts[1:])

        def shift(active: Any) -> None:
            both = low(active).astype(np.uint64) | (high(active).astype(np.uint64) << np.uint64(32))
            target[active] = (
                (both >> (count(active).astype(np.uint64) & np.uint64(31))) & np.uint64(0xFFFFFFFF)
            ).astype(np.uint32)

        return shift

    def _paired(self, opcode: str, parts: list[str]) -> Callable[[Any], None]:
        target, sources = self.register(parts[0]), [self.operand(p) for p in parts[1:]]

        def work(active: Any) -> None:
            a, b, *c = (np.ascontiguousarray(s(active)).view(np.float16).astype(np.float64) for s in sources)
            with np.errstate(all="ignore"):
                out = a - b if opcode.startswith("sub") else a * b + (c[0] if c else 0)
                target[active] = out.astype(np.float16).view(np.uint32)

        return work

    def _logic(self, opcode: str, parts: list[str]) -> Callable[[Any], None]:
        target, (a, b, c), table = self.register(parts[0]), (self.operand(p) for p in parts[1:4]), int(parts[4], 0)

        def work(active: Any) -> None:
            x, y, z = a(active), b(active), c(active)
            out = np.zeros(x.shape, np.uint32)
            for i in range(8):
                if table >> i & 1:
                    out |= (x if i & 4 else ~x) & (y if i & 2 else ~y) & (z if i & 1 else ~z)
            target[active] = out

        return work

    def _root(self, opcode: str, parts: list[str]) -> Callable[[Any], None]:
        target, source = float_of(self.register(parts[0])), self.operand(parts[1], "f32")
        return lambda active: target.__setitem__(active, 1 / np.sqrt(source(active)))

    def _add_float(self, opcode: str, parts: list[str]) -> Callable[[Any], None]:
        address, value = self.address(parts[0]), self.operand(parts[1], "f32")

        def add(active: Any) -> None:
            data, places = self.view("global", address(active), np.float32)
            assert np.unique(places).size == places.size, "an element is added to twice at once"
            data[places] += value(active)

        return add

    def _do_ld(self, opcode: str, parts: list[str]) -> Callable[[Any], None]:
        if not opcode.endswith(("u16", "b16")):
            return super()._do_ld(opcode, parts)
        target, address = self.register(parts[0]), self.address(parts[1])
        space = "shared" if ".shared" in opcode else "global"

        def load(active: Any) -> None:
            data, places = self.view(space, address(active), np.uint16)
            target[active] = data[places]

        return load

    def _do_mma_sync(self, opcode: str, parts: list[str]) -> Callable[[Any], None]:
        if "m16n8k8" not in opcode:
            return super()._do_mma_sync(opcode, parts)
        zero = "%r_zero_of_a_shorter_product"  # k 8..15 of the longer product
        a, b = ([p.strip() for p in part.strip("{}").split(",")] for part in parts[1:3])
        longer = [parts[0], f"{{{a[0]},{a[1]},{zero},{zero}}}", f"{{{b[0]},{zero}}}", parts[3]]
        return super()._do_mma_sync(opcode.replace("k8", "k16"), longer)


class MachineThins(ThinGemms):
    """Thin products whose kernels run on the machine; `change` is done to their PTX first."""

    def __init__(
        self,
        capability: tuple[int, int],
        device: MachineDevice,
        multiprocessors: int = 3,
        change: Callable[[str], str] = lambda text: text,
    ) -> None:
        super().__init__(capability, multiprocessors)
        self._held, self._change = device, change

    def _kernel(self, variant: Any, shared: int, early: bool) -> Any:
        source = source_of(variant)
        text = self._change(linked_ptx(source, self._shelf.target))
        # Registers that are declared together, one a line.
        text = re.sub(
            r"\.reg (\.\w+) (\w+(?:, \w+)+);",
            lambda m: "\n".join(f".reg {m.group(1)} {name};" for name in m.group(2).split(", ")),
            text,
        )
        return _MachineKernel(text, source.threads, shared, self._held)


class _MachineKernel:
    """Stands in for a LoadedKernel."""

    def __init__(self, text: str, threads: int, shared: int, device: MachineDevice) -> None:
        self._program, self._device = Program.parse(text), device
        self._shape = threads, shared

    def bind(self, blocks: int, *values: float) -> Callable[[int], None]:
        threads, shared = self._shape
        kinds = [kind for _, kind in thin_gemm_kernel.ARGUMENTS]

        def launch(_: int) -> None:
            machine = ThinMachine(self._program, self._device.memory, threads, blocks, values, kinds, shared)
            for block in range(blocks):
                machine.run(block)

        return launch

    def close(self) -> None:
        pass
