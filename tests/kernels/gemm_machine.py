"""The `wgmma` tier's products on `ptx_machine`: the interface as it is, with kernels that run their PTX over arrays."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from frink_numba.kernels import few_gemm_variant, gemm_variant
from frink_numba.kernels.few_gemm_plan import FewPlan
from frink_numba.kernels.few_gemm_variant import FewGemm
from frink_numba.kernels.gemm import Gemms, HalfRows, source_of
from frink_numba.kernels.gemm_pack import PackedMatrix
from frink_numba.kernels.gemm_plan import Plan
from frink_numba.kernels.thin_gemm import NormRows
from tests.kernels.attention_machine import MachineDevice, linked_ptx
from tests.kernels.packed_weights import place_weights
from tests.kernels.ptx_machine import Program
from tests.kernels.row_machine import MachineRows
from tests.kernels.thin_machine import ThinMachine

_MOST_TURNS = 1_000_000  # of all blocks of a launch: many times what any takes that does not hang

# What stands in for a tensor map: address, rows, columns, pitch, rows and columns of a box, item, swizzle.
_MAP = struct.Struct("<8Q")


def stand_in_map(*numbers: int) -> bytes:
    return _MAP.pack(*numbers).ljust(128, b"\0")


class GemmMachine(ThinMachine):
    """Adds the copy engine's boxes and rows, both ways, and `stmatrix`."""

    def _restart(self, block: int) -> None:
        super()._restart(block)
        self.stores: dict[int, list[list[Callable[[], None]]]] = {}  # of a thread: committed groups, the open one last
        self.ahead: set[tuple[int, int, int]] = set()  # boxes in the L2 cache that were not loaded yet

    def turns(self, block: int) -> Iterator[None]:
        yield from super().turns(block)
        assert not self.ahead, f"block {block} loads none of these boxes, which it called for ahead: {self.ahead}"
        for groups in self.stores.values():
            for store in (store for group in groups for store in group):
                store()

    def _action(self, pc: int, opcode: str, text: str, parts: list[str]) -> Callable[[Any], None]:
        if opcode == "mov.b64" and parts[1].startswith("{"):
            low, high = (self.operand(p.strip()) for p in parts[1].strip("{}").split(","))
            target = self.registers[parts[0]] = np.zeros(self.threads, np.uint64)
            return lambda active: target.__setitem__(
                active, low(active).astype(np.uint64) | (high(active).astype(np.uint64) << np.uint64(32))
            )
        return super()._action(pc, opcode, text, parts)

    def _each(self, active: Any, *values: Callable[[Any], np.ndarray]) -> Any:
        return zip(np.arange(self.threads)[active], *(value(active) for value in values), strict=True)

    def _do_cp_async_bulk_shared(self, opcode: str, parts: list[str]) -> Callable[[Any], None]:
        target, source, barrier = (self.address(parts[i]) for i in (0, 1, 3))
        size = self.operand(parts[2])

        def start(active: Any) -> None:
            for _, to, origin, count, where in self._each(active, target, source, size, barrier):
                assert to % 16 == origin % 16 == count % 16 == 0
                self.loads.append(lambda t=to, o=origin, n=int(count), b=int(where): self._arrive(t, o, n, b))

        return start

    def _arrive(self, target: int, origin: int, count: int, barrier: int) -> None:
        data, places = self.view("shared", target + np.arange(count), np.uint8)
        given, origins = self.view("global", origin + np.arange(count), np.uint8)
        data[places] = given[origins]
        self.barriers[barrier].transactions -= count
        self.barriers[barrier].settle()

    def _box(self, text: str) -> tuple[Callable[[Any], np.ndarray], list[Callable[[Any], np.ndarray]]]:
        inner = [p.strip() for p in re.sub(r"[\[\]{}]", "", text).split(",")]
        return self.operand(inner[0], "u64"), [self.operand(p) for p in inner[1:]]

    def _swizzled(self, at: int, rows: int, width: int) -> np.ndarray:
        """Addresses [rows, width] of a box of rows of `width` bytes, of which the swizzle knows 64 and 128."""
        assert at % 1024 == 0 or width == 64
        place = at + width * np.arange(rows)[:, None] + np.arange(width)
        return place ^ (((place >> 7) & (7 if width == 128 else 3)) << 4)

    def _do_cp_async_bulk_tensor_2d_shared(self, opcode: str, parts: list[str]) -> Callable[[Any], None]:
        target, barrier = self.address(parts[0]), self.address(parts[2])
        tensor_map, (column, row) = self._box(parts[1])

        def start(active: Any) -> None:
            for _, to, which, c, r, where in self._each(active, target, tensor_map, column, row, barrier):
                self.ahead.discard((int(which), int(c), int(r)))
                numbers = [int(n) for n in self.memory.read(int(which), np.empty(8, np.uint64))]
                self.loads.append(lambda n=numbers, t=int(to), c=int(c), r=int(r), b=int(where): load(n, t, c, r, b))

        def load(numbers: list[int], to: int, column: int, row: int, barrier: int) -> None:
            address, rows, cols, pitch, box_rows, box_cols, item, swizzle = numbers
            assert box_cols * item == swizzle
            box = np.zeros((box_rows, swizzle), np.uint8)
            n, width = max(0, min(box_rows, rows - row)), max(0, min(box_cols, cols - column)) * item
            at = address + (row + np.arange(n)[:, None]) * pitch + column * item + np.arange(width)
            given, places = self.view("global", at, np.uint8)
            box[:n, :width] = given[places]
            data, places = self.view("shared", self._swizzled(to, box_rows, swizzle), np.uint8)
            data[places] = box
            self.barriers[barrier].transactions -= box.size
            self.barriers[barrier].settle()

        return start

    def _do_cp_async_bulk_prefetch_tensor_2d(self, opcode: str, parts: list[str]) -> Callable[[Any], None]:
        tensor_map, (column, row) = self._box(parts[0])

        def start(active: Any) -> None:
            for _, which, c, r in self._each(active, tensor_map, column, row):
                self.ahead.add((int(which), int(c), int(r)))

        return start

    def _do_cp_async_bulk_tensor_2d_global(self, opcode: str, parts: list[str]) -> Callable[[Any], None]:
        return self._store(parts, False)

    def _do_cp_reduce_async_bulk_tensor_2d(self, opcode: str, parts: list[str]) -> Callable[[Any], None]:
        return self._store(parts, True)

    def _store(self, parts: list[str], adds: bool) -> Callable[[Any], None]:
        tensor_map, (column, row) = self._box(parts[0])
        source = self.address(parts[1])

        def start(active: Any) -> None:
            for thread, which, c, r, origin in self._each(active, tensor_map, column, row, source):
                numbers = [int(n) for n in self.memory.read(int(which), np.empty(8, np.uint64))]
                open_group = self.stores.setdefault(int(thread), [[]])[-1]
                open_group.append(lambda n=numbers, o=int(origin), c=int(c), r=int(r): store(n, o, c, r))

        def store(numbers: list[int], origin: int, column: int, row: int) -> None:
            address, rows, cols, pitch, box_rows, box_cols, item, swizzle = numbers
            data, places = self.view("shared", self._swizzled(origin, box_rows, swizzle), np.uint8)
            kind = np.float32 if item == 4 else np.float16
            box = data[places].view(kind)
            n, width = max(0, min(box_rows, rows - row)), max(0, min(box_cols, cols - column))
            at = address + (row + np.arange(n)[:, None]) * pitch + (column + np.arange(width)) * item
            held, places = self.view("global", at, kind)
            held[places] = box[:n, :width] + (held[places] if adds else 0)

        return start

    def _do_cp_async_bulk_commit_group(self, opcode: str, parts: list[str]) -> Callable[[Any], None]:
        def commit(active: Any) -> None:
            for thread in np.arange(self.threads)[active]:
                self.stores.setdefault(int(thread), [[]]).append([])

        return commit

    def _do_cp_async_bulk_wait_group_read(self, opcode: str, parts: list[str]) -> Callable[[Any], None]:
        pending = int(parts[0])

        def wait(active: Any) -> None:
            for thread in np.arange(self.threads)[active]:
                groups = self.stores.setdefault(int(thread), [[]])
                done = max(0, len(groups) - 1 - pending)
                for store in (store for group in groups[:done] for store in group):
                    store()
                del groups[:done]

        return wait

    def _do_bar_sync(self, opcode: str, parts: list[str]) -> Callable[[Any], None]:
        if len(parts) < 2 or not parts[1].startswith("%"):
            return super()._do_bar_sync(opcode, parts)
        count = self.operand(parts[1])
        return lambda active: self._named([parts[0], str(int(count(active)[0]))], True)(active)

    def _do_atom(self, opcode: str, parts: list[str]) -> Callable[[Any], None]:
        assert opcode.endswith(".gpu.global.inc.u32")
        target, address, most = self.register(parts[0]), self.address(parts[1]), self.operand(parts[2])

        def take(active: Any) -> None:
            for thread, where, last in self._each(active, address, most):
                data, place = self.view("global", np.asarray([where]), np.uint32)
                target[thread] = data[place[0]]
                data[place[0]] = 0 if data[place[0]] >= last else data[place[0]] + 1

        return take

    def _do_red_release_gpu_global_inc(self, opcode: str, parts: list[str]) -> Callable[[Any], None]:
        address, most = self.address(parts[0]), self.operand(parts[1])

        def add(active: Any) -> None:
            for where, last in zip(address(active), most(active), strict=True):
                data, place = self.view("global", np.asarray([where]), np.uint32)
                data[place[0]] = 0 if data[place[0]] >= last else data[place[0]] + 1

        return add

    _do_red_relaxed_gpu_global_inc = _do_red_release_gpu_global_inc

    def _do_red_release_gpu_global_add(self, opcode: str, parts: list[str]) -> Callable[[Any], None]:
        address, amount = self.address(parts[0]), self.operand(parts[1])

        def add(active: Any) -> None:
            for _, where, more in self._each(active, address, amount):
                data, place = self.view("global", np.asarray([where]), np.uint32)
                data[place[0]] += more

        return add

    def _do_stmatrix(self, opcode: str, parts: list[str]) -> Callable[[Any], None]:
        sources = [self.operand(p.strip()) for p in parts[1].strip("{}").split(",")]
        address, lane = self.address(parts[0]), np.arange(32)
        assert ".trans" in opcode

        def store(active: Any) -> None:
            self._warps(active)
            rows = address(active).reshape(-1, 4, 8)
            for i, source in enumerate(sources):
                word = source(active).reshape(-1, 32)
                matrix = np.empty((len(word), 8, 8), np.uint16)
                for v in range(2):
                    # Transposed: lane 4g + t holds rows 2t, 2t + 1 of column g.
                    matrix[:, 2 * (lane & 3) + v, lane >> 2] = (word >> (16 * v)) & 0xFFFF
                data, places = self.view("shared", rows[:, i, :, None] + 2 * np.arange(8), np.uint16)
                data[places] = matrix

        return store


class MachineGemms(Gemms):
    """Products whose kernels run on the machine; `change` is done to their PTX first.

    resident: how many blocks run at a time, the next one when one has ended; None for all.
    """

    def __init__(
        self,
        device: MachineDevice,
        multiprocessors: int,
        change: Callable[[str], str] = lambda t: t,
        resident: int | None = None,
    ) -> None:
        super().__init__("wgmma", (9, 0), multiprocessors)
        self._held, self._change, self._resident = device, change, resident

    def _kernel(self, variant: Any) -> Any:
        text = self._change(linked_ptx(source_of(variant, overlap=True), self._shelf.target))
        text = re.sub(
            r"\.reg (\.\w+) (\w+(?:, \w+)+);",
            lambda m: "\n".join(f".reg {m.group(1)} {name};" for name in m.group(2).split(", ")),
            text,
        )
        return _MachineKernel(text, variant, self._held, self._resident)


class _MachineKernel:
    """Stands in for a LoadedKernel."""

    def __init__(self, text: str, variant: Any, device: MachineDevice, resident: int | None) -> None:
        self._program, self._variant, self._device, self._resident = Program.parse(text), variant, device, resident

    def bind(self, blocks: int, *values: float) -> Callable[[int], None]:
        few = isinstance(self._variant, FewGemm)
        kinds = [kind for _, kind in (few_gemm_variant if few else gemm_variant).ARGUMENTS]
        resident = self._resident or (blocks if few or self._variant.norm else 1)

        def launch(_: int) -> None:
            shape = (
                self._program, self._device.memory, self._variant.threads, blocks, values, kinds, self._variant.shared
            )  # fmt: skip
            # By turns, in an order that chance decides; they begin in their own order, when there is room.
            random, coming = np.random.default_rng(blocks), iter(range(blocks))
            running: list[Iterator[None]] = []
            for _ in range(_MOST_TURNS):
                while len(running) < resident and (block := next(coming, None)) is not None:
                    running.append(GemmMachine(*shape).turns(block))
                if not running:
                    return
                turn = running[int(random.integers(len(running)))]
                if next(turn, turn) is turn:
                    running.remove(turn)
            raise AssertionError(f"{len(running)} of {blocks} blocks wait for ever")

        return launch


def run_on_machine(
    packed: PackedMatrix | tuple[PackedMatrix, PackedMatrix],
    x: np.ndarray,
    plan: Plan | FewPlan,
    *,
    gate: str = "",
    half: bool = False,
    bias: np.ndarray | None = None,
    add_to: np.ndarray | None = None,
    multiprocessors: int = 3,
    change: Callable[[str], str] = lambda text: text,
    norm: tuple[np.ndarray, float] | None = None,
    launches: int = 1,
    resident: int | None = None,
) -> np.ndarray:
    """float32 [m, outputs] of a product with this cut; f16 operands are x rounded, with a scale of 1.

    packed: of one kind, or two of two kinds. norm: weight and eps of an RMS norm of x that the launch does itself,
    whose operands are checked to the bit.
    resident: blocks that run at a time; None for all behind a norm, else for one.
    """
    device = MachineDevice(32 << 20)
    m = x.shape[0]
    filled = -(-m // 256) * 256
    operand, norms, scale = (np.full(n, np.nan, d) for n, d in ((x.shape, "f2"), (filled, "f4"), (filled, "f4")))
    source = None
    if norm is not None:
        source = NormRows(device.place(x), device.place(norm[0]), norm[1])
    else:
        operand[:], scale[:] = x, 1
        norms[:m] = np.linalg.norm(operand.astype(np.float32), axis=1)
    rows = HalfRows(device.place(operand), device.place(scale), device.place(norms))
    weights = place_weights(packed if isinstance(packed, tuple) else (packed,), device.place, bias)
    gemms = MachineGemms(device, multiprocessors, change, resident)
    product: Any = gemms.product(weights, m, gate=gate, half=half, norm=norm is not None, plan=plan)
    width = -(-weights.outputs // 8) * 8 + 8
    start = np.full((m, width), np.nan, np.float16 if half else np.float32)
    if add_to is not None:
        start[:, : weights.outputs] = add_to
    out, out_scale = device.place(start), device.place(np.full(filled, np.nan, np.float32))
    workspace = np.zeros(product.workspace, np.uint8)
    workspace_at = device.place(workspace)
    made = product.maps(rows, out, start.strides[0])
    launch = product.bind(
        weights, rows, out, start.strides[0], maps=device.place(np.frombuffer(made, np.uint8)), workspace=workspace_at,
        add=add_to is not None, out_scale=out_scale if half else 0, **({} if source is None else {"norm": source}),
    )  # fmt: skip
    for _ in range(launches):
        launch(0)
    if source is not None:
        _check_operands(device, rows, source, *x.shape)
    assert not device.read(workspace_at)[: gemm_variant.FLAG_BYTES].any(), "flags are not back at zero"
    result = device.read(out)[:, : weights.outputs].astype(np.float32)
    return result * device.read(out_scale)[:m, None] if half else result


def _check_operands(device: MachineDevice, rows: HalfRows, source: NormRows, m: int, cols: int) -> None:
    """What a launch made of its rows is what the norm's own kernel makes of them, to the bit."""
    own = HalfRows(*(device.place(np.full(n, np.nan, kind)) for n, kind in ((m * cols, "f2"), (m, "f4"), (m, "f4"))))
    MachineRows(device).norm_half(m, cols, source.hidden, source.weight, source.eps, own)(0)
    for got, wanted, count in ((rows.half, own.half, m * cols), (rows.scale, own.scale, m), (rows.norm, own.norm, m)):
        given, right = device.read(got).reshape(-1)[:count], device.read(wanted)
        assert np.array_equal(given.view(f"u{given.itemsize}"), right.view(f"u{given.itemsize}"))
