"""Copies into shared memory and barriers for `ptx_machine`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass
class Barrier:
    count: int
    pending: int
    transactions: int = 0
    phase: int = 0

    def settle(self) -> None:
        if self.pending == 0 and self.transactions == 0:
            self.phase ^= 1
            self.pending = self.count


class SharedInstructions:
    """Part of `ptx_machine.Machine`."""

    threads: int
    registers: dict[str, np.ndarray]
    register: Callable[[str], np.ndarray]
    operand: Callable[..., Callable[[Any], np.ndarray]]
    address: Callable[[str], Callable[[Any], np.ndarray]]
    view: Callable[[str, np.ndarray, Any], tuple[np.ndarray, np.ndarray]]
    memory: Any
    program: Any
    pc: np.ndarray
    blocked: np.ndarray
    barriers: dict[int, Barrier]
    named: dict[int, tuple[int, list[np.ndarray]]]
    copies: dict[int, list[list[Any]]]
    loads: list[Callable[[], None]]
    _waiting: Callable[[], np.ndarray]

    # ---- copies --------------------------------------------------------------------------------------------------

    def _do_cp_async_cg(self, opcode: str, parts: list[str]) -> Callable[[Any], None]:
        target, source = self.address(parts[0]), self.address(parts[1])
        size = self.operand(parts[3]) if len(parts) > 3 else self.operand("16")

        def copy(active: Any) -> None:
            everyone = np.arange(self.threads)[active]
            to, origin, count = target(active).copy(), source(active).copy(), size(active).copy()
            for warp in np.unique(everyone // 32):
                mine = everyone // 32 == warp
                self.copies.setdefault(int(warp), [[]])[-1].append((to[mine], origin[mine], count[mine]))

        return copy

    def _do_cp_async_commit_group(self, opcode: str, parts: list[str]) -> Callable[[Any], None]:
        def commit(active: Any) -> None:
            for warp in np.unique(np.arange(self.threads)[active] // 32):
                self.copies.setdefault(int(warp), [[]]).append([])

        return commit

    def _do_cp_async_wait_group(self, opcode: str, parts: list[str]) -> Callable[[Any], None]:
        return self._copied(int(parts[0]))

    def _do_cp_async_wait_all(self, opcode: str, parts: list[str]) -> Callable[[Any], None]:
        return self._copied(-1)

    def _copied(self, pending: int) -> Callable[[Any], None]:
        def wait(active: Any) -> None:
            for warp in np.unique(np.arange(self.threads)[active] // 32):
                groups = self.copies.setdefault(int(warp), [[]])
                done = groups if pending < 0 else groups[: max(0, len(groups) - 1 - pending)]
                for group in done:
                    for to, origin, count in group:
                        for i in range(16):
                            data, places = self.view("shared", to + i, np.uint8)
                            given, origins = self.view("global", origin + i, np.uint8)
                            data[places] = np.where(i < count, given[origins], 0)
                self.copies[int(warp)] = [[]] if pending < 0 else groups[len(done) :]

        return wait

    def _do_cp_async_bulk_tensor_3d(self, opcode: str, parts: list[str]) -> Callable[[Any], None]:
        target = self.address(parts[0])
        inner = [p.strip() for p in re.sub(r"[\[\]{}]", "", parts[1]).split(",")]
        tensor_map = self.operand(inner[0], "u64")
        coordinates = [self.operand(p) for p in inner[1:]]
        barrier = self.address(parts[2])

        def start(active: Any) -> None:
            for i in range(len(np.arange(self.threads)[active])):
                described = self.memory.read(int(tensor_map(active)[i]), np.empty(5, np.uint64))
                place = [int(c(active)[i].astype(np.int32)) for c in coordinates]
                at, where = int(barrier(active)[i]), int(target(active)[i])
                self.loads.append(lambda d=described, p=place, b=at, w=where: self._arrive_box(d, p, b, w))

        return start

    def _arrive_box(self, described: np.ndarray, place: list[int], barrier: int, target: int) -> None:
        """A box of 64 channels of a head, as `tma.heads_map` describes it: zeros outside, 128-byte swizzle."""
        address, positions, heads, channels, rows = (int(x) for x in described)
        held = self.memory.read(address, np.empty((positions, heads, channels), np.uint16))
        channel, head, position = place
        assert 0 <= head < heads
        box = np.zeros((rows, 64), np.uint16)
        part = held[position : position + rows, head, channel : channel + 64]
        box[: part.shape[0], : part.shape[1]] = part
        at = target + 128 * np.arange(rows)[:, None] + 2 * np.arange(64)
        data, places = self.view("shared", at ^ (((at >> 7) & 7) << 4), np.uint16)
        data[places] = box
        self.barriers[barrier].transactions -= box.size * 2
        self.barriers[barrier].settle()

    # ---- barriers ------------------------------------------------------------------------------------------------

    def _do_mbarrier_init(self, opcode: str, parts: list[str]) -> Callable[[Any], None]:
        address, count = self.address(parts[0]), self.operand(parts[1])

        def init(active: Any) -> None:
            for where, wanted in zip(address(active), count(active), strict=True):
                self.barriers[int(where)] = Barrier(int(wanted), int(wanted))

        return init

    def _do_mbarrier_arrive(self, opcode: str, parts: list[str]) -> Callable[[Any], None]:
        address = self.address(parts[1])
        more = self.operand(parts[2]) if "expect_tx" in opcode else None

        def arrive(active: Any) -> None:
            expected = more(active) if more is not None else np.zeros(1, np.uint32)
            for i, where in enumerate(address(active)):
                barrier = self.barriers[int(where)]
                barrier.transactions += int(expected[i]) if more is not None else 0
                assert barrier.pending > 0, "more arrivals than the barrier counts"
                barrier.pending -= 1
                barrier.settle()
            self.blocked[self._waiting()] = False

        return arrive

    def _do_mbarrier_try_wait(self, opcode: str, parts: list[str]) -> Callable[[Any], None]:
        done, address, parity = self.register(parts[0]), self.address(parts[1]), self.operand(parts[2])

        def wait(active: Any) -> None:
            everyone = np.arange(self.threads)[active]
            for thread, where, phase in zip(everyone, address(active), parity(active), strict=True):
                done[thread] = self.barriers[int(where)].phase != int(phase)
            held = everyone[~done[active]]
            # They look again when something has happened.
            self.blocked[held] = True
            self.pc[held] -= 1

        return wait

    def _do_bar_sync(self, opcode: str, parts: list[str]) -> Callable[[Any], None]:
        return self._named(parts, True)

    def _do_bar_arrive(self, opcode: str, parts: list[str]) -> Callable[[Any], None]:
        return self._named(parts, False)

    def _do_bar_warp_sync(self, opcode: str, parts: list[str]) -> Callable[[Any], None]:
        return lambda active: None

    def _named(self, parts: list[str], waits: bool) -> Callable[[Any], None]:
        number = self.operand(parts[0])
        wanted = int(parts[1]) if len(parts) > 1 else self.threads

        def meet(active: Any) -> None:
            everyone, numbers = np.arange(self.threads)[active], number(active)
            for one in np.unique(numbers):
                mine = everyone[numbers == one]
                arrived, waiting = self.named.get(int(one), (0, []))
                arrived += len(mine)
                if waits:
                    waiting = [*waiting, mine]
                    self.blocked[mine] = True
                assert arrived <= wanted, "more threads at a barrier than it counts"
                if arrived == wanted:
                    for group in waiting:
                        self.blocked[group] = False
                    arrived, waiting = 0, []
                self.named[int(one)] = (arrived, waiting)

        return meet
