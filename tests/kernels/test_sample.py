"""The choice of a token without a GPU: the kernel's PTX over NumPy arrays, against NumPy (issue 7)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from frink_numba.errors import ShapeError
from frink_numba.kernels.cubins import Target
from frink_numba.kernels.fused_attention import SEQUENCE
from frink_numba.kernels.sample import NextStep, Samplers
from frink_numba.kernels.sample_kernels import ARGMAX_ARGUMENTS, ARGMAX_THREADS, argmax_source
from tests.kernels.attention_machine import MachineDevice, linked_ptx
from tests.kernels.compiling import missing_tools
from tests.kernels.ptx_machine import Machine, Program

pytestmark = pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))


class ChoiceMachine(Machine):
    """Adds the instructions that only the choice of a token uses."""

    def _action(self, pc: int, opcode: str, text: str, parts: list[str]) -> Callable[[Any], None]:
        if opcode == "mov.b64" and (parts[0].startswith("{") or parts[1].startswith("{")):
            return self._halves(parts)
        if opcode == "setp.nan.f32":
            target, a, b = self.register(parts[0]), self.operand(parts[1], "f32"), self.operand(parts[2], "f32")
            return lambda active: target.__setitem__(active, np.isnan(a(active)) | np.isnan(b(active)))
        if opcode == "red.relaxed.gpu.global.max.u64":
            return self._raise(parts)
        if opcode == "atom.acq_rel.gpu.global.add.u32":
            return self._do_atom_global_add(opcode, parts)
        return super()._action(pc, opcode, text, parts)

    def _halves(self, parts: list[str]) -> Callable[[Any], None]:
        if parts[0].startswith("{"):
            low, high = (self.register(p.strip()) for p in parts[0].strip("{}").split(","))
            source = self.operand(parts[1], "u64")

            def split(active: Any) -> None:
                value = source(active).copy()
                low[active], high[active] = value & np.uint64(0xFFFFFFFF), value >> np.uint64(32)

            return split
        below, above = (self.operand(p.strip()) for p in parts[1].strip("{}").split(","))
        target = self.register(parts[0])

        def join(active: Any) -> None:
            target[active] = below(active).astype(np.uint64) | (above(active).astype(np.uint64) << np.uint64(32))

        return join

    def _raise(self, parts: list[str]) -> Callable[[Any], None]:
        address, value = self.address(parts[0]), self.operand(parts[1], "u64")

        def act(active: Any) -> None:
            for where, new in zip(address(active), value(active), strict=True):
                data, place = self.view("global", np.asarray([where]), np.uint64)
                data[place[0]] = max(data[place[0]], new)

        return act


@functools.cache
def program() -> Program:
    text = linked_ptx(argmax_source(False), Target("80"))
    return Program.parse(text.replace(".reg .b32 l, h;", ".reg .b32 l;\n.reg .b32 h;"))  # one name a line


class MachineSamplers(Samplers):
    """Samplers whose choice runs on `device`, its blocks in a drawn order."""

    def __init__(self, device: MachineDevice, seed: int) -> None:
        super().__init__((8, 0))
        self._device, self._random = device, np.random.default_rng(seed)

    def _kernel(self, source: Any, arguments: Any) -> Any:
        assert source.name.startswith("argmax")
        return self

    def bind(self, blocks: int, *values: float) -> Callable[[int], None]:
        def launch(_: int) -> None:
            kinds = [kind for _, kind in ARGMAX_ARGUMENTS]
            machine = ChoiceMachine(program(), self._device.memory, ARGMAX_THREADS, blocks, values, kinds, 0)
            for block in self._random.permutation(blocks):
                machine.run(int(block))

        return launch


def special_logits(count: int, pitch: int) -> np.ndarray:
    """Equals, negative numbers, zeros of both signs, infinities and not-a-numbers; padding that is larger than all."""
    logits = (np.random.default_rng(count).standard_normal((7, pitch)) - 3).astype(np.float32)
    logits[1] = -np.abs(logits[1])
    logits[2] = -1.5
    logits[3, count // 2] = np.inf
    logits[4] = -np.inf
    logits[5, :: max(1, count // 3)] = np.nan
    logits[6] = np.where(np.arange(pitch) % 2, 0.0, -0.0)
    logits[:, count:] = 100
    return logits


@pytest.mark.parametrize(("count", "pitch"), [(1, 1), (5, 8), (255, 255), (17000, 17004)])
def test_the_largest_of_the_first(count: int, pitch: int):
    """The first of equals, as NumPy has it, and nothing of the padding."""
    device = MachineDevice()
    samplers = MachineSamplers(device, count)
    logits = special_logits(count, pitch)
    held, ids = device.place(logits), device.place(np.full(8, -9, np.int32))
    workspace = device.place(np.zeros(samplers.argmax_workspace(7), np.uint8))
    device.launch(samplers.argmax(held, 7, count, ids, workspace=workspace, pitch=pitch))
    np.testing.assert_array_equal(device.read(ids), [*logits[:, :count].argmax(axis=1), -9])
    assert not device.read(workspace).any()


@pytest.mark.parametrize("rows", [1, 3])
def test_the_next_step_of_each_sequence(rows: int):
    """Ids and answers, one position further in every record of every layer; -1 where logits are not numbers."""
    device, rng = MachineDevice(), np.random.default_rng(rows)
    samplers = MachineSamplers(device, rows)
    layers, most, count, pitch, start = 300, 5, 50, 64, 17
    records = np.zeros((layers, rows), SEQUENCE)
    records["start_pos"], records["rows"], records["first_row"] = start, 1, np.arange(rows)
    records["kv_row"], records["k_base"], records["v_base"] = 2, 1 << 40, 3 << 40
    table = device.place(records.view(np.uint8).ravel())
    answers, ids = device.place(np.full((rows, most), -9, np.int32)), device.place(np.full(rows + 1, -9, np.int32))
    done, positions = device.place(np.zeros(rows, np.int32)), device.place(np.full(rows, start, np.int32))
    workspace = device.place(np.zeros(samplers.argmax_workspace(rows), np.uint8))
    step, want = NextStep(answers, done, positions, table, layers, most), []
    for number in range(3):
        logits = rng.standard_normal((rows, pitch)).astype(np.float32)
        logits[:, count:] = 100
        if number == 1:
            logits[rows - 1, 33] = np.nan
        held = device.place(logits)
        device.launch(samplers.argmax(held, rows, count, ids, workspace=workspace, pitch=pitch, next_step=step))
        want.append(logits[:, :count].argmax(axis=1))
        np.testing.assert_array_equal(device.read(ids), [*want[-1], -9])
        if number == 1:
            assert want[-1][rows - 1] == 33
            want[-1][rows - 1] = -1
    back = device.read(answers)
    np.testing.assert_array_equal(back[:, :3], np.array(want).T)
    assert (back[:, 3:] == -9).all()
    assert (device.read(done) == 3).all()
    assert (device.read(positions) == start + 3).all()
    records["start_pos"] += 3
    records["kv_row"] += 3
    assert device.read(table).tobytes() == records.tobytes()
    assert not device.read(workspace).any()


def test_no_choice_without_logits():
    samplers = MachineSamplers(MachineDevice(), 0)
    for m, count, pitch in ((0, 5, 5), (1, 0, 5), (1, 6, 5)):
        with pytest.raises(ShapeError, match="a choice needs"):
            samplers.argmax(0, m, count, 0, workspace=0, pitch=pitch)
