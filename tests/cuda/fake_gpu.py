"""A device made of NumPy: memory that starts as NaN, streams that run late and out of order, and faults on demand.

Work queued in a stream is done when somebody waits, in an order that the `schedule` chooses among what streams and
events allow. A result that depends on the schedule is a missing event; a NaN is memory that was read before it was
written. Nothing needs numba or a GPU.
"""

from __future__ import annotations

import ctypes
import math
import random
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from frink_numba import driver
from frink_numba.cuda.device import CudaDevice
from frink_numba.cuda.simt.body import SimtBody
from frink_numba.cuda.simt.launchers import Launchers
from frink_numba.kernels.device_matrix import DeviceMatrix, pack
from frink_numba.layer import RopeLayout

OUT_OF_MEMORY = "Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY"
ILLEGAL_ADDRESS = "Call to cuStreamSynchronize results in CUDA_ERROR_ILLEGAL_ADDRESS"


class FakeCudaError(Exception):
    """What numba or cuda.core would raise."""


class LinkerError(RuntimeError):
    """Named as the class that numba raises when a kernel cannot be linked."""


@dataclass(eq=False)
class FakeStream:
    queue: deque[Callable[[], bool]] = field(default_factory=deque)  # each answers False while it must wait


@dataclass(eq=False)
class FakeEvent:
    recorded: int = 0
    reached: int = 0


class _Owner:
    """Owns a block of device memory while arrays look at it."""

    def __init__(self, memory: np.ndarray) -> None:
        self.__array_interface__: dict[str, Any] = memory.__array_interface__


@dataclass(eq=False)
class _Block:
    """A block of device memory. Freeing waits for the device, so that work queued before may still use it."""

    memory: np.ndarray
    start: int
    freed_at: int | None = None  # the number of the first piece of work that must not use it any more


class FakeRuntime:
    """See frink_numba.cuda.runtime.Runtime. `memory_bytes` bounds what can be allocated on the device."""

    def __init__(self, memory_bytes: int = 1 << 34, schedule: str = "lazy", seed: int = 0) -> None:
        self.memory_bytes = memory_bytes
        self.schedule = schedule
        self.random = random.Random(seed)
        self.streams: list[FakeStream] = []
        self.held = 0  # bytes of device memory that somebody refers to
        self.blocks: list[_Block] = []
        self.issued = 0  # pieces of work queued so far
        self.running: int | None = None  # the number of the piece that is being done
        self.captured: list[Callable[[], None]] | None = None  # while launches are captured
        self.pinned: list[np.ndarray] = []
        self.calls: list[str] = []
        self.up = self.down = self.waits = 0
        self.queries = 0
        self.fail_at: int | None = None  # the number of the call that raises
        self.error: Exception = FakeCudaError("CUDA_ERROR_LAUNCH_FAILED")
        self.sticky = False  # once it failed, everything fails
        self.broken: str | None = None
        self.abandoned = False

    # --- the injection seam ---

    def call(self, name: str) -> None:
        self.calls.append(name)
        if self.broken is not None:
            raise FakeCudaError(self.broken)
        if self.fail_at is not None and len(self.calls) - 1 == self.fail_at:
            if self.sticky:
                self.broken = ILLEGAL_ADDRESS
            raise self.error

    # --- memory ---

    @contextmanager
    def active(self):
        yield

    def memory(self) -> tuple[int, int]:
        self.queries += 1
        return self.memory_bytes - self.allocated(), self.memory_bytes

    def allocated(self) -> int:
        return self.held

    def device_bytes(self, nbytes: int) -> np.ndarray:
        self.call("device_bytes")
        if self.allocated() + nbytes > self.memory_bytes:
            raise FakeCudaError(OUT_OF_MEMORY)
        room = np.full(nbytes + 256, 0xFF, np.uint8)  # NaN as float32
        offset = -room.ctypes.data % 256
        block = _Block(room[offset : offset + nbytes], room.ctypes.data + offset)
        owner = _Owner(block.memory)
        self.blocks.append(block)
        self.held += nbytes
        weakref.finalize(owner, self._freed, block).atexit = False
        return np.asarray(owner)

    def _freed(self, block: _Block) -> None:
        self.held -= block.memory.nbytes
        block.freed_at = self.issued
        self._collect()

    def _collect(self) -> None:
        """Forget freed blocks that no queued work can use."""
        if self.running is None and not any(stream.queue for stream in self.streams):
            self.blocks = [block for block in self.blocks if block.freed_at is None]

    def array(self, address: int, shape: tuple[int, ...], dtype: Any = np.uint8) -> np.ndarray:
        """Device memory from its address, which must be allocated when the piece of work that asks was queued."""
        dtype = np.dtype(dtype)
        nbytes = math.prod(shape) * dtype.itemsize
        for block in self.blocks:
            offset = address - block.start
            if offset >= 0 and offset + nbytes <= block.memory.nbytes:
                number = self.issued if self.running is None else self.running
                assert block.freed_at is None or number < block.freed_at, "device memory was used after it was freed"
                return block.memory[offset : offset + nbytes].view(dtype).reshape(shape)
        raise AssertionError(f"{nbytes} bytes at {address:#x} are not device memory")

    def pinned_bytes(self, nbytes: int) -> np.ndarray:
        self.call("pinned_bytes")
        block = np.full(nbytes, 0xFF, np.uint8)
        self.pinned.append(block)
        return block

    def release(self) -> None:
        self.call("release")

    def abandon(self) -> None:
        self.abandoned = True

    # --- streams ---

    def stream(self) -> FakeStream:
        self.call("stream")
        self.streams.append(FakeStream())
        return self.streams[-1]

    def event(self) -> FakeEvent:
        self.call("event")
        return FakeEvent()

    def queue(self, stream: FakeStream, work: Callable[[], None]) -> None:
        if self.captured is not None:
            self.captured.append(lambda: self.queue(stream, work))
            return
        number, self.issued = self.issued, self.issued + 1

        def item() -> bool:
            self.running = number
            try:
                work()
            finally:
                self.running = None
            return True

        stream.queue.append(item)

    def upload(self, target: np.ndarray, source: np.ndarray, stream: FakeStream) -> None:
        self.call("upload")
        assert (target.nbytes, target.dtype) == (source.nbytes, source.dtype)
        assert source.flags.c_contiguous
        self.up += source.nbytes
        if not any(np.shares_memory(source, block) for block in self.pinned):
            source = source.copy()  # pageable: staged before the call returns
        self.queue(stream, lambda: np.copyto(target, source.reshape(target.shape)))

    def download(self, target: np.ndarray, source: np.ndarray, stream: FakeStream) -> None:
        self.call("download")
        assert any(np.shares_memory(target, block) for block in self.pinned), "a copy into pageable memory waits"
        self.down += target.nbytes
        self.queue(stream, lambda: np.copyto(target, source.reshape(target.shape)))

    # --- by address ---

    def handle(self, stream: FakeStream) -> int:
        return self.streams.index(stream) + 1

    def address(self, block: np.ndarray) -> int:
        return int(block.__array_interface__["data"][0])

    def _pinned(self, array: np.ndarray) -> bool:
        return any(np.shares_memory(array, block) for block in self.pinned)

    def send(self, address: int, source: np.ndarray, stream: FakeStream) -> None:
        self.call("send")
        assert source.flags.c_contiguous
        self.up += source.nbytes
        # Page-locked memory is read when the copy is done, whoever has it then; other memory before the call returns.
        data = _host(source.ctypes.data, source.nbytes)
        if not self._pinned(source):
            data = data.copy()
        self.queue(stream, lambda: np.copyto(self.array(address, (data.size,)), data))

    def fetch(self, target: np.ndarray, address: int, stream: FakeStream) -> None:
        self.call("fetch")
        assert target.flags.c_contiguous
        assert self._pinned(target), "a copy into pageable memory waits"
        self.down += target.nbytes
        data = _host(target.ctypes.data, target.nbytes)
        self.queue(stream, lambda: np.copyto(data, self.array(address, (data.size,))))

    def fetch_strided(
        self, first: np.ndarray, pitch: int, count: int, address: int, stream: FakeStream, source_pitch: int = 0
    ) -> None:
        self.call("fetch_strided")
        nbytes, start = first.nbytes, first.ctypes.data
        assert pitch >= nbytes
        extent = pitch * (count - 1) + nbytes
        blocks = [block for block in self.pinned if np.shares_memory(first, block)]
        assert any(start + extent <= block.ctypes.data + block.nbytes for block in blocks), "not one page-locked block"
        self.down += nbytes * count
        places = [_host(start + pitch * i, nbytes) for i in range(count)]

        def copy() -> None:
            for number, place in enumerate(places):
                np.copyto(place, self.array(address + number * (source_pitch or nbytes), (nbytes,)))

        self.queue(stream, copy)

    def host(self, address: int, nbytes: int) -> np.ndarray:
        """Page-locked host memory from its address, as kernels reach it."""
        inside = [b for b in self.pinned if b.ctypes.data <= address and address + nbytes <= b.ctypes.data + b.nbytes]
        assert inside, f"{nbytes} bytes at {address:#x} are not page-locked"
        return _host(address, nbytes)

    def move(self, target: int, source: int, nbytes: int, stream: FakeStream) -> None:
        self.call("move")
        self.queue(stream, lambda: np.copyto(self.array(target, (nbytes,)), self.array(source, (nbytes,))))

    def zero(self, address: int, nbytes: int, stream: FakeStream) -> None:
        self.call("zero")
        self.queue(stream, lambda: self.array(address, (nbytes,)).fill(0))

    def launch(self, handle: int, name: str, work: Callable[[], None]) -> None:
        """What a kernel's launch calls."""
        self.call(name)
        self.queue(self.streams[handle - 1], work)

    def graph(self, stream: FakeStream, launches: Sequence[Callable[[int], None]]) -> Callable[[], None]:
        self.call("graph")
        self.captured = captured = []
        up, down = self.up, self.down
        try:
            for launch in launches:
                launch(self.handle(stream))
        finally:
            self.captured = None
            up, self.up, down, self.down = self.up - up, up, self.down - down, down

        def replay() -> None:
            self.call("replay")
            self.up, self.down = self.up + up, self.down + down
            for queue in captured:
                queue()

        return replay

    def record(self, event: FakeEvent, stream: FakeStream) -> None:
        self.call("record")
        self._record(event, stream)

    def _record(self, event: FakeEvent, stream: FakeStream) -> None:
        if self.captured is not None:
            self.captured.append(lambda: self._record(event, stream))
            return
        event.recorded += 1
        number = event.recorded

        def reach() -> None:
            event.reached = max(event.reached, number)

        self.queue(stream, reach)

    def wait(self, event: FakeEvent, stream: FakeStream) -> None:
        self.call("wait")
        self._wait(event, stream)

    def _wait(self, event: FakeEvent, stream: FakeStream) -> None:
        if self.captured is not None:
            self.captured.append(lambda: self._wait(event, stream))
            return
        number = event.recorded
        stream.queue.append(lambda: event.reached >= number)

    def synchronize(self, stream: FakeStream) -> None:
        self.call("synchronize")
        self.waits += 1
        self._run_until(lambda: not stream.queue, stream)

    def drain(self) -> str | None:
        if self.broken is not None:
            return f"FakeCudaError: {self.broken}"
        self._run_until(lambda: not any(stream.queue for stream in self.streams), None)
        return None

    def _run_until(self, done: Callable[[], bool], wanted: FakeStream | None) -> None:
        while not done():
            order = list(self.streams)
            if self.schedule == "random":
                self.random.shuffle(order)
            elif self.schedule == "reversed":
                order.reverse()
            if wanted is not None and self.schedule == "lazy":  # the others only as far as the wanted one needs
                order.remove(wanted)
                order.insert(0, wanted)
            for stream in order:
                if stream.queue and stream.queue[0]():
                    stream.queue.popleft()
                    break
            else:
                raise AssertionError("the streams wait for each other")
        self._collect()


def _host(address: int, nbytes: int) -> np.ndarray:
    """Host memory as bytes; it is not kept alive."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def fake_launchers(runtime: FakeRuntime) -> Launchers:
    """The kernels in NumPy, float64 inside; matrices of kind F32 with rows of a multiple of 4."""

    def kernel(work: Callable[..., None]) -> Callable[..., None]:
        def launch(*arguments: Any) -> None:
            runtime.call(work.__name__)
            *rest, stream = arguments
            runtime.queue(stream, lambda: work(*rest))

        return launch

    @kernel
    def rms_norm(x, weight, eps, out):
        wide = x.astype(np.float64)
        out[...] = wide / np.sqrt(np.mean(wide * wide, axis=1, keepdims=True) + eps) * weight

    @kernel
    def add_bias(x, bias):
        x += bias

    @kernel
    def rope_table(inv_freq, magnitude_scale, start_pos, cos, sin):
        angles = (start_pos + np.arange(cos.shape[0]))[:, None] * inv_freq
        cos[...], sin[...] = np.cos(angles) * magnitude_scale, np.sin(angles) * magnitude_scale

    @kernel
    def rope(x, cos, sin, layout):
        pairs = cos.shape[1]
        first, second = (np.s_[..., 0 : 2 * pairs : 2], np.s_[..., 1 : 2 * pairs : 2])
        if layout is RopeLayout.NEOX:
            first, second = np.s_[..., :pairs], np.s_[..., pairs : 2 * pairs]
        a, b, c, s = x[first].copy(), x[second].copy(), cos[:, None], sin[:, None]
        x[first], x[second] = a * c - b * s, a * s + b * c

    @kernel
    def causal_attention(q, k, v, out, start_pos, scale, window, softcap):
        n, heads, _ = q.shape
        i, j = start_pos + np.arange(n)[:, None], np.arange(k.shape[0])
        visible = (j <= i) & ((i - j < window) | (window == 0))
        for head in range(heads):
            shared = head // (heads // k.shape[1])
            scores = scale * (q[:, head].astype(np.float64) @ k[:, shared].T)
            scores = softcap * np.tanh(scores / softcap) if softcap else scores
            likely = np.where(visible, np.exp(scores - scores.max(axis=1, keepdims=True)), 0.0)
            out[:, head] = likely / likely.sum(axis=1, keepdims=True) @ v[:, shared]

    @kernel
    def swiglu(gate, up, out):
        wide = gate.astype(np.float64)
        out[...] = wide / (1 + np.exp(-wide)) * up

    @kernel
    def residual_add(x, y):
        x += y

    @kernel
    def quantized_matmul(x, weight, out):
        stored = weight.stored_cols
        rows = weight.data.view(np.float32).reshape(stored // 4, weight.rows, 4).swapaxes(0, 1)
        out[...] = x.astype(np.float64) @ rows.reshape(weight.rows, stored)[:, : weight.cols].T

    return Launchers(
        rms_norm=rms_norm,
        add_bias=add_bias,
        rope_table=rope_table,
        rope=rope,
        causal_attention=causal_attention,
        swiglu=swiglu,
        residual_add=residual_add,
        quantized_matmul=quantized_matmul,
        pack=pack,
        matrix=DeviceMatrix,
    )


def fake_device(number: int = 0, memory_bytes: int = 1 << 34, schedule: str = "lazy", seed: int = 0) -> CudaDevice:
    """Device `number`, as `open_device` would answer it."""
    runtime = FakeRuntime(memory_bytes, schedule, seed)
    info = driver.Device(number, f"Fake GPU {number}", memory_bytes, (9, 0), 132)
    return CudaDevice(info, runtime, SimtBody(runtime, fake_launchers(runtime)))


def is_nan_free(*arrays: np.ndarray) -> bool:
    return not any(math.isnan(float(array.sum())) for array in arrays)
