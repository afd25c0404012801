"""Instructions of whole warps for `ptx_machine`: exchanges, `ldmatrix`, `mma.sync` and `wgmma`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.kernels.ptx_operations import float_of


class TensorInstructions:
    """Part of `ptx_machine.Machine`."""

    threads: int
    registers: dict[str, np.ndarray]
    register: Callable[[str], np.ndarray]
    operand: Callable[..., Callable[[Any], np.ndarray]]
    address: Callable[[str], Callable[[Any], np.ndarray]]
    view: Callable[[str, np.ndarray, Any], tuple[np.ndarray, np.ndarray]]
    products: dict[int, list[list[Callable[[], None]]]]

    # ---- within warps --------------------------------------------------------------------------------------------

    def _warps(self, active: Any) -> np.ndarray:
        everyone = np.arange(self.threads)[active].reshape(-1, 32)
        assert (everyone[:, 0] % 32 == 0).all(), "part of a warp at an instruction for whole warps"
        assert (np.diff(everyone, axis=1) == 1).all(), "part of a warp at an instruction for whole warps"
        return everyone

    def _do_shfl_sync_bfly(self, opcode: str, parts: list[str]) -> Callable[[Any], None]:
        target, source = self.register(parts[0].split("|")[0]), self.operand(parts[1])
        distance = self.operand(parts[2])

        def exchange(active: Any) -> None:
            self._warps(active)
            values = source(active).reshape(-1, 32)
            lanes = np.arange(32) ^ int(distance(active)[0])
            target[active] = values[:, lanes].reshape(-1)

        return exchange

    def _do_shfl_sync_idx(self, opcode: str, parts: list[str]) -> Callable[[Any], None]:
        target, source, lane = self.register(parts[0].split("|")[0]), self.operand(parts[1]), int(parts[2])

        def take(active: Any) -> None:
            self._warps(active)
            target[active] = np.repeat(source(active).reshape(-1, 32)[:, lane], 32)

        return take

    def _do_vote_sync_ballot(self, opcode: str, parts: list[str]) -> Callable[[Any], None]:
        target, flag = self.register(parts[0]), self.register(parts[1])

        def ballot(active: Any) -> None:
            self._warps(active)
            bits = (flag[active].reshape(-1, 32).astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(axis=1)
            target[active] = np.repeat(bits, 32).astype(np.uint32)

        return ballot

    def _do_ldmatrix(self, opcode: str, parts: list[str]) -> Callable[[Any], None]:
        targets = [self.register(p.strip()) for p in parts[0].strip("{}").split(",")]
        address, transposed = self.address(parts[1]), ".trans" in opcode
        lane = np.arange(32)

        def load(active: Any) -> None:
            self._warps(active)
            rows = address(active).reshape(-1, 4, 8)
            assert (rows % 16 == 0).all()
            for i, target in enumerate(targets):
                at = rows[:, i, :, None] + 2 * np.arange(8)
                data, places = self.view("shared", at, np.uint16)
                matrix = data[places].astype(np.uint32)
                if transposed:
                    matrix = matrix.transpose(0, 2, 1)
                low, high = (matrix[:, lane >> 2, 2 * (lane & 3) + v] for v in range(2))
                target[active] = (low | (high << 16)).reshape(-1)

        return load

    def _do_mma_sync(self, opcode: str, parts: list[str]) -> Callable[[Any], None]:
        assert "m16n8k16.row.col.f32.f16.f16.f32" in opcode
        names = [[p.strip() for p in part.strip("{}").split(",")] for part in parts]
        d, a, b, c = ([self.register(n) for n in group] for group in names)
        g, t = np.arange(32) >> 2, np.arange(32) & 3

        def multiply(active: Any) -> None:
            count = self._warps(active).shape[0]
            left = np.empty((count, 16, 16), np.float32)
            right = np.empty((count, 16, 8), np.float32)
            for i, register in enumerate(a):
                pair = register[active].view(np.float16).reshape(count, 32, 2)
                for v in range(2):
                    left[:, g + 8 * (i & 1), 2 * t + v + 8 * (i >> 1)] = pair[:, :, v]
            for i, register in enumerate(b):
                pair = register[active].view(np.float16).reshape(count, 32, 2)
                for v in range(2):
                    right[:, 2 * t + v + 8 * i, g] = pair[:, :, v]
            product = left @ right
            for i in range(4):
                more = product[:, g + 8 * (i >> 1), 2 * t + (i & 1)].reshape(-1)
                float_of(d[i])[active] = float_of(c[i])[active] + more

        return multiply

    # ---- wgmma ---------------------------------------------------------------------------------------------------

    def _do_wgmma_commit_group(self, opcode: str, parts: list[str]) -> Callable[[Any], None]:
        def commit(active: Any) -> None:
            for group in np.unique(np.arange(self.threads)[active] // 32):
                self.products.setdefault(int(group), [[]]).append([])

        return commit

    def _do_wgmma_wait_group(self, opcode: str, parts: list[str]) -> Callable[[Any], None]:
        pending = int(parts[0])

        def wait(active: Any) -> None:
            for group in np.unique(np.arange(self.threads)[active] // 32):
                queue = self.products.setdefault(int(group), [[]])
                done = max(0, len(queue) - 1 - pending)
                for products in queue[:done]:
                    for product in products:
                        product()
                del queue[:done]

        return wait

    def _operand_tile(self, descriptor: int, rows: np.ndarray, transposed: bool) -> np.ndarray:
        """float32 [rows, 16] of an operand in shared memory: 128-byte swizzle, transposed: its k in rows of memory."""
        assert descriptor >> 62 == 1, "128-byte swizzle"
        start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
        row, k = rows[:, None], np.arange(16)
        if transposed:
            at = start + row // 64 * leading + row % 64 * 2 + k // 8 * stride + k % 8 * 128
        else:
            at = start + row // 8 * stride + row % 8 * 128 + k * 2
        data, places = self.view("shared", at ^ (((at >> 7) & 7) << 4), np.float16)
        return data[places].astype(np.float32)

    def _do_wgmma_mma_async(self, opcode: str, parts: list[str]) -> Callable[[Any], None]:
        columns = int(re.findall(r"m64n(\d+)k16", opcode)[0])
        d = [float_of(self.register(p.strip())) for p in parts[0].strip("{}").split(",")]
        a_registers = [self.register(p.strip()) for p in parts[1].strip("{}").split(",")]
        b, transposed = self.operand(parts[2], "u64"), parts[-1] == "1"
        adds = self.operand(parts[3], "pred") if parts[3].startswith("%") else None
        g, t = np.arange(32) >> 2, np.arange(32) & 3

        def multiply(active: Any) -> None:
            # A warp multiplies its 16 rows of the group's 64, whenever the others do theirs.
            for warp in self._warps(active):
                descriptor = int(b(warp)[0])
                keep = bool(adds(warp)[0]) if adds is not None else True
                queue = self.products.setdefault(int(warp[0] // 32), [[]])
                # Descriptors are read when the instruction is issued, operand registers while it runs.
                a = int(a_registers[0][warp[0]]) if len(a_registers) == 1 else 0
                queue[-1].append(lambda w=warp, a=a, s=descriptor, k=keep: compute(w, a, s, k))

        def compute(warp: np.ndarray, a: int, descriptor: int, keep: bool) -> None:
            if len(a_registers) == 4:
                left = np.empty((16, 16), np.float32)
                for i, register in enumerate(a_registers):
                    pair = register[warp].view(np.float16).reshape(32, 2)
                    for v in range(2):
                        left[g + 8 * (i & 1), 2 * t + v + 8 * (i >> 1)] = pair[:, v]
            else:
                rows = 16 * int(warp[0] // 32 % 4) + np.arange(16)
                left = self._operand_tile(a, rows, False)
            product = left @ self._operand_tile(descriptor, np.arange(columns), transposed).T
            for i, register in enumerate(d):
                more = product[g + 8 * ((i >> 1) & 1), 8 * (i >> 2) + 2 * t + (i & 1)]
                register[warp] = register[warp] + more if keep else more

        return multiply
