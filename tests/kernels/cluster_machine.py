"""Blocks of a cluster on `ptx_machine`, all at once: threads side by side, each with its block's shared memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.kernels.ptx_machine import Memory, Program
from tests.kernels.thin_machine import ThinMachine

_PEER = 1 << 24  # what `mapa` gives: block + 1, then the address


class ClusterMachine(ThinMachine):
    """`run(cluster)` for each cluster of a launch."""

    def __init__(
        self,
        program: Program,
        memory: Memory,
        threads: int,
        blocks: int,
        values: Sequence[float],
        kinds: Sequence[str],
        dynamic: int,
        cluster: int,
    ) -> None:
        self.own_threads, self.cluster = threads, cluster
        super().__init__(program, memory, threads * cluster, blocks, values, kinds, dynamic)
        self.own_shared = self.shared.size
        self.shared = np.empty(cluster * self.own_shared, np.uint8)
        every = np.arange(threads * cluster, dtype=np.uint32)
        self.rank = every // threads
        self.special["%tid.x"] = every % threads
        self.special["%ntid.x"] = np.full(every.size, threads, np.uint32)
        self.special["%cluster_ctarank"] = self.rank
        self._restart(0)

    def _restart(self, block: int) -> None:
        super()._restart(block)
        if hasattr(self, "rank"):
            self.block[:] = block * self.cluster + self.rank
        self.arrived = np.zeros(self.threads, np.int64)  # phases of the cluster's barrier, of each thread
        self.waited = np.zeros(self.threads, np.int64)

    def address(self, text: str) -> Callable[[Any], np.ndarray]:
        plain = super().address(text)
        if text.strip("[] ").startswith("%rd"):
            return plain

        def placed(active: Any) -> np.ndarray:
            where = plain(active)
            far = where >= _PEER
            local = np.where(far, where % _PEER, where)
            assert ((local >= 0) & (local < self.own_shared)).all(), "shared address out of range"
            return local + np.where(far, where // _PEER - 1, self.rank[active]) * self.own_shared

        return placed

    def _compile(
        self, pc: int, predicate: str, opcode: str, text: str, parts: list[str]
    ) -> tuple[Callable[[Any], None], bool]:
        action, follows = super()._compile(pc, predicate, opcode, text, parts)
        return action, follows and not opcode.startswith("barrier.")

    def _action(self, pc: int, opcode: str, text: str, parts: list[str]) -> Callable[[Any], None]:
        if opcode.startswith("mapa."):
            target, address, rank = self.register(parts[0]), self.operand(parts[1]), self.operand(parts[2])

            def locate(active: Any) -> None:
                target[active] = (rank(active) + 1) * _PEER + address(active)

            return locate
        if opcode.startswith("barrier.cluster.arrive"):

            def arrive(active: Any) -> None:
                assert (self.arrived[active] == self.waited[active]).all(), "arrived twice without a wait"
                self.arrived[active] += 1
                self._release()

            return arrive
        if opcode.startswith("barrier.cluster.wait"):

            def wait(active: Any) -> None:
                assert (self.arrived[active] == self.waited[active] + 1).all(), "waits for what it did not arrive at"
                self.waited[active] += 1
                self.blocked[active] = True
                self._release()

            return wait
        return super()._action(pc, opcode, text, parts)

    def _release(self) -> None:
        """Threads that wait for a phase at which every thread has arrived."""
        reached = int(self.arrived.min())
        for thread in np.flatnonzero(self.blocked & self.alive & (self.waited <= reached)):
            if self.program.lines[self.pc[thread] - 1][1].startswith("barrier.cluster.wait"):
                self.blocked[thread] = False

    def _named(self, parts: list[str], waits: bool) -> Callable[[Any], None]:
        number = self.operand(parts[0])
        wanted = int(parts[1]) if len(parts) > 1 else self.own_threads

        def meet(active: Any) -> None:
            everyone = np.arange(self.threads)[active]
            numbers = number(active).astype(np.int64) + 16 * self.rank[active]
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
