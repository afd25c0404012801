"""Runs a kernel's PTX on the CPU, over NumPy: one block at a time, its threads in an order that chance decides.

What is asynchronous on a GPU happens as late as it may: copies when they are waited for, or some time after; products
of `wgmma` when their group is waited for, from what shared memory holds *then*. A stage that is given back too early, a
result that is read too early, or a barrier that counts wrong therefore shows, as wrong numbers or as a deadlock.

It knows the instructions of the attention kernels and no others. Numbers agree with a GPU's up to the last bits of
`ex2`, `rcp` and of the order of sums inside a product.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.kernels.ptx_operations import PLAIN, TYPES, literal
from tests.kernels.ptx_shared import Barrier, SharedInstructions
from tests.kernels.ptx_tensor import TensorInstructions

SHARED_BASE = 1024
_LOCAL = re.compile(r"\.reg \.(\w+) (\w+);")


class Memory:
    """Global memory: arrays at addresses that do not touch one another."""

    def __init__(self, size: int) -> None:
        self.base, self.used = 1 << 20, 0
        self.data = np.full(size, 0xFF, np.uint8)  # not-a-numbers wherever nothing was written

    def place(self, array: np.ndarray) -> int:
        raw = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        at = -(-(self.used + 64) // 256) * 256
        self.used = at + raw.size
        assert self.used <= self.data.size, "the test's memory is too small"
        self.data[at : at + raw.size] = raw
        return self.base + at

    def read(self, address: int, like: np.ndarray) -> np.ndarray:
        at = address - self.base
        return self.data[at : at + like.nbytes].view(like.dtype).reshape(like.shape).copy()


@dataclass
class Program:
    """A kernel's instructions, its parameters' names in order, and where labels point."""

    lines: list[tuple[str, str, str, list[str]]]  # predicate, opcode, text of operands, operands
    parameters: list[str]
    labels: dict[str, int]
    static: list[tuple[str, int]] = field(default_factory=list)  # shared arrays and their bytes

    @classmethod
    def parse(cls, text: str) -> Program:
        head, _, body = text.partition(".entry")
        parameters = re.findall(r"\.param \.\w+ (\w+)", body)
        body = body[body.index("\n{") + 2 :]
        program = cls([], parameters, {})
        for source in (head, body):
            for name, size in re.findall(r"\.shared [^;]*?(\w+)\[(\d*)\];", source):
                program.static.append((name, int(size or 0)))
        scope, local = 0, dict[str, str]()
        for raw in body.splitlines():
            line = raw.split("//")[0].strip("\0 \t")
            if line == "{":
                scope, local = scope + 1, {}
            elif line == "}":
                local = {}
            for kind, name in _LOCAL.findall(line):
                local[name] = f"%{'p' if kind == 'pred' else 'f' if kind == 'f32' else 'r'}L{scope}_{name}"
            if not line or line[0] in "{}." or line.startswith(".reg"):
                continue
            if line.endswith(":"):
                program.labels[line[:-1]] = len(program.lines)
                continue
            for name, whole in local.items():
                line = re.sub(rf"(?<![\w%.$]){name}(?![\w.:])", whole, line)
            found = re.match(r"(?:@(!?[%\w]+)\s+)?(\S+?)\s*(?:\s(.*))?;$", line)
            assert found, f"not understood: {line}"
            operands = found.group(3) or ""
            parts = [p.strip() for p in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", operands)]
            program.lines.append((found.group(1) or "", found.group(2), operands, parts))
        return program


class Machine(TensorInstructions, SharedInstructions):
    """A launch's blocks, one after the other: `run(block)` for each."""

    def __init__(
        self,
        program: Program,
        memory: Memory,
        threads: int,
        blocks: int,
        values: Sequence[float],
        kinds: Sequence[str],
        dynamic: int,
    ) -> None:
        self.program, self.memory, self.threads = program, memory, threads
        self.parameters = {
            name: np.asarray(value, TYPES[kind])
            for name, kind, value in zip(program.parameters, kinds, values, strict=True)
        }
        self.symbols, at = {}, SHARED_BASE
        for name, size in sorted(program.static, key=lambda item: item[1] == 0):
            self.symbols[name] = at
            at += -(-size // 1024) * 1024
        self.shared = np.empty(at + dynamic, np.uint8)
        tid = np.arange(threads, dtype=np.uint32)
        self.block = np.zeros(threads, np.uint32)
        self.special = {
            "%tid.x": tid,
            "%laneid": tid & 31,
            "%ctaid.x": self.block,
            "%nctaid.x": np.full(threads, blocks, np.uint32),
            "%ntid.x": np.full(threads, threads, np.uint32),
            "%dynamic_smem_size": np.full(threads, dynamic, np.uint32),
        }
        self.registers: dict[str, np.ndarray] = {}
        self.code: dict[int, tuple[Callable[[Any], None], bool]] = {}  # and whether the next one simply follows
        self._restart(0)

    def _restart(self, block: int) -> None:
        self.random = np.random.default_rng(block)
        self.block[:] = block
        # Not-a-numbers where nothing was written; whatever lies beyond is an error.
        self.shared[:] = 0xFF
        self.pc = np.zeros(self.threads, np.int64)
        self.alive = np.ones(self.threads, bool)
        self.blocked = np.zeros(self.threads, bool)
        self.barriers: dict[int, Barrier] = {}
        self.named: dict[int, tuple[int, list[np.ndarray]]] = {}  # arrivals, threads that wait
        self.copies: dict[int, list[list[Any]]] = {}  # cp.async of a warp: committed groups, and the open one last
        self.loads: list[Callable[[], None]] = []  # bulk copies on their way
        self.products: dict[int, list[list[Callable[[], None]]]] = {}  # wgmma of a warp, the same way

    # ---- operands ------------------------------------------------------------------------------------------------

    def register(self, name: str) -> np.ndarray:
        found = self.registers.get(name)
        if found is None:
            kind = np.uint64 if name.startswith("%rd") else bool if name.startswith("%p") else np.uint32
            found = self.registers[name] = np.zeros(self.threads, kind)
        return found

    def operand(self, text: str, kind: str = "u32") -> Callable[[Any], np.ndarray]:
        """A function of the active threads: the operand's values, of the type."""
        wanted = TYPES[kind]
        if text in self.special:
            special = self.special[text]
            return lambda active: special[active]
        if text.startswith("%"):
            register = self.register(text)
            if register.dtype == wanted or kind == "pred":
                return lambda active: register[active]
            return lambda active: register[active].view(wanted)
        constant = np.asarray(self.symbols[text], wanted) if text in self.symbols else np.asarray(literal(text, kind))
        return lambda active: np.broadcast_to(constant, np.arange(self.threads)[active].shape)

    def address(self, text: str) -> Callable[[Any], np.ndarray]:
        """The address in "[%r5+64]" or "[%rd2]", as int64."""
        base, _, offset = text.strip("[]").partition("+")
        value = self.operand(base.strip(), "u64" if base.startswith("%rd") else "u32")
        return lambda active: value(active).astype(np.int64) + int(offset or 0)

    # ---- memory --------------------------------------------------------------------------------------------------

    def view(self, space: str, addresses: np.ndarray, item: Any) -> tuple[np.ndarray, np.ndarray]:
        """(memory as an array of `item`, the places in it)."""
        data, base = (self.shared, 0) if space == "shared" else (self.memory.data, self.memory.base)
        size = np.dtype(item).itemsize
        places = addresses - base
        assert (places % size == 0).all(), f"unaligned {space} address"
        assert ((places >= 0) & (places + size <= data.size)).all(), f"{space} address out of range"
        return data[: data.size // size * size].view(item), places // size

    # ---- running -------------------------------------------------------------------------------------------------

    def run(self, block: int) -> None:
        for _ in self.turns(block):
            pass

    def turns(self, block: int) -> Iterator[None]:
        """Runs a block a few instructions at a time: for blocks that wait for each other, each on a machine."""
        self._restart(block)
        while self.alive.any():
            ready = self.alive & ~self.blocked
            if self.loads and (not ready.any() or self.random.random() < 0.3):
                self.loads.pop(int(self.random.integers(len(self.loads))))()
                self.blocked[self._waiting()] = False
                continue
            if not ready.any():
                places = sorted(
                    {self.program.lines[p][1] + " " + self.program.lines[p][2] for p in self.pc[self.alive]}
                )
                raise AssertionError(f"deadlock at {places}")
            # Of each warp those threads that are furthest behind; warps at the same place go together.
            pcs = np.where(ready, self.pc, np.iinfo(np.int64).max).reshape(-1, 32)
            behind = pcs.min(axis=1)
            chosen = int(self.random.choice(behind[behind < np.iinfo(np.int64).max]))
            warps = behind == chosen
            self._slice(warps, chosen)
            yield

    def _waiting(self) -> np.ndarray:
        """Threads that are held by an mbarrier: they look again."""
        held = np.zeros(self.threads, bool)
        for thread in np.flatnonzero(self.blocked & self.alive):
            held[thread] = self.program.lines[self.pc[thread]][1].startswith("mbarrier.try_wait")
        return held

    def _slice(self, warps: np.ndarray, pc: int) -> None:
        """Some instructions of the threads of these warps, as long as they are ready; those furthest behind first."""
        members = np.repeat(warps, 32)
        left = int(self.random.integers(1, 400))
        while left > 0:
            ready = members & self.alive & ~self.blocked
            if not ready.any():
                return
            pc = int(self.pc[ready].min())
            at = ready & (self.pc == pc)
            active: Any = slice(None) if at.all() else np.flatnonzero(at)
            together = bool((at == ready).all())
            while True:
                act, follows = self._instruction(pc)
                pc, left = pc + 1, left - 1
                self.pc[active] = pc
                act(active)
                if not (together and follows and left > 0):
                    break

    def _instruction(self, pc: int) -> tuple[Callable[[Any], None], bool]:
        found = self.code.get(pc)
        if found is None:
            found = self.code[pc] = self._compile(pc, *self.program.lines[pc])
        return found

    # ---- instructions --------------------------------------------------------------------------------------------

    def _compile(
        self, pc: int, predicate: str, opcode: str, text: str, parts: list[str]
    ) -> tuple[Callable[[Any], None], bool]:
        action = self._action(pc, opcode, text, parts)
        follows = not opcode.startswith(("bra", "ret", "bar.", "mbarrier"))
        if not predicate:
            return action, follows
        flag, wanted = self.register(predicate.lstrip("!")), not predicate.startswith("!")

        def guarded(active: Any) -> None:
            taken = np.arange(self.threads)[active][flag[active] == wanted]
            if taken.size:
                action(taken)

        return guarded, follows

    def _action(self, pc: int, opcode: str, text: str, parts: list[str]) -> Callable[[Any], None]:
        name = opcode.split(".")[0]
        simple = PLAIN.get(opcode) or PLAIN.get(name)
        if opcode.startswith("bra"):
            target = self.program.labels[parts[0]]
            return lambda active: self.pc.__setitem__(active, target)
        if opcode == "ret":
            return lambda active: self.alive.__setitem__(active, False)
        if name in ("griddepcontrol", "setmaxnreg", "fence", "membar", "prefetch") or opcode.startswith("wgmma.fence"):
            return lambda active: None
        words = opcode.replace("::", ".").split(".")
        for width in range(len(words), 0, -1):
            handler = getattr(self, "_do_" + "_".join(words[:width]), None)
            if handler is not None:
                made: Callable[[Any], None] = handler(opcode, parts)
                return made
        if simple is not None:
            return simple(self, opcode, parts)  # type: ignore[no-any-return]
        raise NotImplementedError(f"{opcode} {text}")

    def _do_ld_param(self, opcode: str, parts: list[str]) -> Callable[[Any], None]:
        register = self.register(parts[0])
        value = self.parameters[parts[1].strip("[]")]
        # A wider register is filled up with zeros.
        value = value.view(f"u{value.itemsize}").astype(f"u{register.itemsize}").view(register.dtype)
        return lambda active: register.__setitem__(active, value)

    def _do_ld(self, opcode: str, parts: list[str]) -> Callable[[Any], None]:
        space = "shared" if ".shared" in opcode else "global"
        targets = [self.register(p.strip()) for p in parts[0].strip("{}").split(",")]
        address = self.address(parts[1])
        item = np.uint64 if opcode.endswith("u64") else np.uint32
        vector = len(targets) * np.dtype(item).itemsize

        def load(active: Any) -> None:
            where = address(active)
            assert (where % vector == 0).all(), f"unaligned {opcode}"
            for i, target in enumerate(targets):
                data, places = self.view(space, where + i * np.dtype(item).itemsize, item)
                target[active] = data[places]

        return load

    def _do_st(self, opcode: str, parts: list[str]) -> Callable[[Any], None]:
        space = "shared" if ".shared" in opcode else "global"
        item: Any = np.uint64 if opcode.endswith("u64") else np.uint16 if opcode.endswith(("u16", "b16")) else np.uint32
        kind = {np.uint64: "u64", np.uint16: "u32", np.uint32: "u32"}[item]
        sources = [self.operand(p.strip(), kind) for p in parts[1].strip("{}").split(",")]
        address = self.address(parts[0])
        size = np.dtype(item).itemsize

        def store(active: Any) -> None:
            where = address(active)
            assert (where % (size * len(sources)) == 0).all(), f"unaligned {opcode}"
            for i, source in enumerate(sources):
                data, places = self.view(space, where + i * size, item)
                data[places] = source(active).astype(item)

        return store

    def _do_atom_global_add(self, opcode: str, parts: list[str]) -> Callable[[Any], None]:
        target, address, value = self.register(parts[0]), self.address(parts[1]), self.operand(parts[2])

        def add(active: Any) -> None:
            everyone = np.arange(self.threads)[active]
            for thread, where, more in zip(everyone, address(active), value(active), strict=True):
                data, place = self.view("global", np.asarray([where]), np.uint32)
                target[thread] = data[place[0]]
                data[place[0]] += more

        return add
