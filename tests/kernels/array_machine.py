"""The fragment code's machine, in NumPy: registers are uint32 arrays, one element a thread (see gemm_kinds.py)."""

from __future__ import annotations

import numpy as np


class ArrayMachine:
    """Runs one slab's 128 threads at once over `memory`, the bytes of shared memory."""

    def __init__(self, memory: np.ndarray) -> None:
        self.memory = memory

    def u32(self, value: int) -> np.ndarray:
        return np.full(128, value, np.uint32)

    def _load(self, address: np.ndarray, size: int) -> np.ndarray:
        assert (address % size == 0).all(), "misaligned load"
        return self.memory[address[:, None] + np.arange(size)]

    def load16(self, address: np.ndarray) -> np.ndarray:
        return self._load(address, 2).view(np.uint16)[:, 0].astype(np.uint32)

    def load32(self, address: np.ndarray) -> np.ndarray:
        return self._load(address, 4).view(np.uint32)[:, 0].copy()

    def load64(self, address: np.ndarray) -> list[np.ndarray]:
        return list(self._load(address, 8).view(np.uint32).T.copy())

    def load128(self, address: np.ndarray) -> list[np.ndarray]:
        return list(self._load(address, 16).view(np.uint32).T.copy())

    def load_matrix(self, tile: np.ndarray, thread: np.ndarray, block: int) -> list[np.ndarray]:
        """As PtxMachine: the addresses that the lanes of `ldmatrix.x4` give, and what the instruction makes of them."""
        lane, warp = np.arange(128) & 31, np.arange(128) & ~31
        inner = lane & 7
        row = tile + (np.arange(128) >> 5) * 2048 + ((lane >> 3) & 1) * 1024 + inner * 128
        address = row + (((lane >> 4) | 2 * block) ^ inner) * 16
        # Lanes 8i .. 8i+7 give the rows of matrix i; lane 4g + t gets word t of row g.
        return [self.load32(address[warp + 8 * i + (lane >> 2)] + 4 * (lane & 3)) for i in range(4)]

    def permute(self, a: np.ndarray, b: np.ndarray, selector: int) -> np.ndarray:
        return self.permute_by(a, b, self.u32(selector))

    def permute_by(self, a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
        both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
        out = np.zeros(128, np.uint64)
        for i in range(4):
            nibble = (selector >> np.uint32(4 * i)).astype(np.uint64) & np.uint64(15)
            assert (nibble < 8).all(), "sign replication is not meant anywhere"
            out |= ((both >> (nibble * np.uint64(8))) & np.uint64(255)) << np.uint64(8 * i)
        return out.astype(np.uint32)

    def low(self, word: np.ndarray) -> np.ndarray:
        return self.permute(word, word, 0x1010)

    def high(self, word: np.ndarray) -> np.ndarray:
        return self.permute(word, word, 0x3232)

    def funnel(self, low: np.ndarray, high: np.ndarray, shift: int) -> np.ndarray:
        both = low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(32))
        return ((both >> np.uint64(shift)) & np.uint64(0xFFFFFFFF)).astype(np.uint32)

    def _halves(self, register: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(register).view(np.float16).astype(np.float64)

    def _register(self, halves: np.ndarray) -> np.ndarray:
        return halves.astype(np.float16).view(np.uint32)

    def fma2(self, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        return self._register(self._halves(a) * self._halves(b) + self._halves(c))

    def mul2(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return self._register(self._halves(a) * self._halves(b))

    def sub2(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return self._register(self._halves(a) - self._halves(b))


class CountingMachine:
    """Counts the arithmetic that a kind's fragment code does on what it has loaded."""

    def __init__(self) -> None:
        self.operations = 0

    def u32(self, value: int) -> Address:
        return Address(self)

    def _loaded(self, count: int) -> list[Word]:
        return [Word(self) for _ in range(count)]

    def load16(self, address: Address) -> Word:
        return Word(self)

    load32 = load16

    def load64(self, address: Address) -> list[Word]:
        return self._loaded(2)

    def load128(self, address: Address) -> list[Word]:
        return self._loaded(4)

    def load_matrix(self, tile: Address, thread: Address, block: int) -> list[Word]:
        return self._loaded(4)

    def _operation(self, *operands: object) -> Word:
        self.operations += 1
        return Word(self)

    def low(self, word: Word) -> Word:
        return word  # part of the instruction that uses it

    high = low
    permute = permute_by = funnel = fma2 = mul2 = sub2 = _operation


class Address:
    """What is computed from addresses and constants is not counted: the compiler does it once."""

    def __init__(self, machine: CountingMachine) -> None:
        self.machine = machine

    def _same(self, other: object) -> Address:
        return self

    __add__ = __mul__ = __and__ = __or__ = __xor__ = __lshift__ = __rshift__ = _same


class Word:
    """A register that came from memory, or from one that did."""

    def __init__(self, machine: CountingMachine) -> None:
        self.machine = machine

    def _counted(self, other: object) -> Word:
        return self.machine._operation()

    __and__ = __or__ = __xor__ = __lshift__ = __rshift__ = _counted
