"""One device's memory, streams, events and copies through numba.cuda: all that differs between a GPU and the simulator.

Importing this module imports no numba; making a `NumbaRuntime` does. Everything a runtime hands out is plain numba.cuda
(device arrays, streams, events), so that the kernels' launchers take it as it is.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from frink_numba import settings
from frink_numba.errors import DeviceError

_COMPILE_ERRORS = frozenset({"NumbaError", "NvvmError", "NvvmSupportError", "NvrtcError", "LinkerError", "NVVMError"})


class Runtime(Protocol):
    """What the resident stack needs of a device. Every method may raise; `failure_kind` sorts what they raise."""

    def active(self) -> Any:
        """A context manager: inside it, the calling thread works on this device."""

    def memory(self) -> tuple[int, int]:
        """Free and total device memory in bytes."""

    def device_bytes(self, nbytes: int) -> Any:
        """A new device array of uint8, uninitialized, aligned to 256 bytes."""

    def pinned_bytes(self, nbytes: int) -> np.ndarray:
        """A new page-locked host array of uint8, uninitialized."""

    def stream(self) -> Any:
        """A new stream."""

    def event(self) -> Any:
        """A new event."""

    def upload(self, target: Any, source: np.ndarray, stream: Any) -> None:
        """Copy host to device in the order of `stream`; pageable sources may be overwritten once it returns."""

    def download(self, target: np.ndarray, source: Any, stream: Any) -> None:
        """Copy device to page-locked host memory in the order of `stream`; ended once the stream is waited for."""

    def handle(self, stream: Any) -> int:
        """The driver's handle of a stream."""

    def address(self, block: Any) -> int:
        """Where a device array begins."""

    def send(self, address: int, source: np.ndarray, stream: Any) -> None:
        """`upload` to an address; `source` is C-contiguous."""

    def fetch(self, target: np.ndarray, address: int, stream: Any) -> None:
        """`download` from an address; `target` is C-contiguous."""

    def fetch_strided(
        self, first: np.ndarray, pitch: int, count: int, address: int, stream: Any, source_pitch: int = 0
    ) -> None:
        """`fetch` into `count` arrays as large as `first`, `pitch` bytes from one to the next.

        On the device there are `source_pitch` bytes from one to the next; 0: they lie dense.
        """

    def graph(self, stream: Any, launches: Sequence[Callable[[int], None]]) -> Callable[[], None]:
        """The launches, captured: what is answered runs them in the order of `stream` at the cost of one."""

    def move(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        """Copy between device addresses in the order of `stream`."""

    def zero(self, address: int, nbytes: int, stream: Any) -> None:
        """Fill device memory with zero bytes in the order of `stream`."""

    def record(self, event: Any, stream: Any) -> None:
        """Set `event` behind the work queued in `stream` so far."""

    def wait(self, event: Any, stream: Any) -> None:
        """Make later work of `stream` wait until the last record of `event` is reached."""

    def synchronize(self, stream: Any) -> None:
        """Make the calling thread wait for all work of `stream`."""

    def drain(self) -> str | None:
        """Wait for all work of the device; the error's text when it cannot work any more, else None."""

    def release(self) -> None:
        """Give memory that is no longer referenced back to the driver now."""

    def abandon(self) -> None:
        """The device is lost: call the driver for its memory never again, not even when the process ends."""


class NumbaRuntime:
    """The runtime over numba.cuda, for a GPU by its number among the visible ones, or for the simulator."""

    def __init__(self, number: int) -> None:
        from numba import cuda

        self._cuda = cuda
        self._number = number
        self._simulated = simulated()
        self._abandoned: Any = None

    @contextmanager
    def active(self) -> Iterator[None]:
        with self._cuda.gpus[self._number]:
            yield

    def memory(self) -> tuple[int, int]:
        free, total = self._cuda.current_context().get_memory_info()
        if self._simulated:  # the simulator answers infinity
            return sys.maxsize, sys.maxsize
        return int(free), int(total)

    def device_bytes(self, nbytes: int) -> Any:
        return self._cuda.device_array(nbytes, np.uint8)

    def pinned_bytes(self, nbytes: int) -> np.ndarray:
        return self._cuda.pinned_array(nbytes, np.uint8)

    def stream(self) -> Any:
        return self._cuda.stream()

    def event(self) -> Any:
        return self._cuda.event() if self._simulated else self._cuda.event(timing=False)

    def upload(self, target: Any, source: np.ndarray, stream: Any) -> None:
        target.copy_to_device(source, stream=stream)

    def download(self, target: np.ndarray, source: Any, stream: Any) -> None:
        source.copy_to_host(target, stream=stream)

    def handle(self, stream: Any) -> int:
        return int(getattr(stream, "handle", stream))

    def address(self, block: Any) -> int:
        return int(block.__cuda_array_interface__["data"][0])

    def send(self, address: int, source: np.ndarray, stream: Any) -> None:
        call_driver("cuMemcpyHtoDAsync", address, source.ctypes.data, source.nbytes, self.handle(stream))

    def fetch(self, target: np.ndarray, address: int, stream: Any) -> None:
        call_driver("cuMemcpyDtoHAsync", target.ctypes.data, address, target.nbytes, self.handle(stream))

    def fetch_strided(
        self, first: np.ndarray, pitch: int, count: int, address: int, stream: Any, source_pitch: int = 0
    ) -> None:
        from cuda.bindings import driver

        copy = driver.CUDA_MEMCPY2D()
        copy.srcMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
        copy.srcDevice, copy.srcPitch = address, source_pitch or first.nbytes
        copy.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_HOST
        copy.dstHost, copy.dstPitch = first.ctypes.data, pitch
        copy.WidthInBytes, copy.Height = first.nbytes, count
        call_driver("cuMemcpy2DAsync", copy, self.handle(stream))

    def graph(self, stream: Any, launches: Sequence[Callable[[int], None]]) -> Callable[[], None]:
        return Graph(self.handle(stream), launches)

    def move(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        call_driver("cuMemcpyDtoDAsync", target, source, nbytes, self.handle(stream))

    def zero(self, address: int, nbytes: int, stream: Any) -> None:
        call_driver("cuMemsetD8Async", address, 0, nbytes, self.handle(stream))

    def record(self, event: Any, stream: Any) -> None:
        event.record(stream)

    def wait(self, event: Any, stream: Any) -> None:
        event.wait(stream)

    def synchronize(self, stream: Any) -> None:
        stream.synchronize()

    def drain(self) -> str | None:
        try:
            self._cuda.synchronize()
        except Exception as error:  # numba, cuda.core and cuda.bindings each have classes of their own
            return one_line(error)
        return None

    def release(self) -> None:
        # numba frees late, in batches; the simulator and foreign memory managers have no such queue.
        manager = getattr(self._cuda.current_context(), "memory_manager", None)
        pending = getattr(manager, "deallocations", None)
        if pending is not None:
            pending.clear()

    def abandon(self) -> None:
        if self._simulated or self._abandoned is not None:
            return
        # Entered and never left: numba's queues of memory, streams and modules to free are kept and not worked off.
        self._abandoned = self._cuda.gpus[self._number].get_primary_context().defer_cleanup()
        self._abandoned.__enter__()


class Graph:
    """Launches that were captured in a stream, and are replayed in it as one."""

    def __init__(self, stream: int, launches: Sequence[Callable[[int], None]]) -> None:
        from cuda.bindings import driver

        self._stream = stream
        self._launch = driver.cuGraphLaunch
        call_driver("cuStreamBeginCapture", stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        try:
            for launch in launches:
                launch(stream)
        finally:
            graph = call_driver("cuStreamEndCapture", stream)
        try:
            self._executable = call_driver("cuGraphInstantiate", graph, 0)
        finally:
            call_driver("cuGraphDestroy", graph)
        weakref.finalize(self, driver.cuGraphExecDestroy, self._executable).atexit = False

    def __call__(self) -> None:
        (status,) = self._launch(self._executable, self._stream)
        if status:
            raise DeviceError(f"cuGraphLaunch failed: {status.name} ({int(status)})")


def call_driver(name: str, *arguments: Any) -> Any:
    """Call the driver and answer what it gives, a tuple if several things; DeviceError with its name for a failure."""
    from cuda.bindings import driver

    status, *given = getattr(driver, name)(*arguments)
    if int(status):
        raise DeviceError(f"{name} failed: {status.name} ({int(status)})")
    return given[0] if len(given) == 1 else tuple(given) or None


def simulated() -> bool:
    """Whether numba.cuda is its own simulator in this process (NUMBA_ENABLE_CUDASIM)."""
    return bool(settings.get("NUMBA_ENABLE_CUDASIM"))


def out_of_memory(error: BaseException) -> bool:
    """Whether device or page-locked memory ran out; the classes differ, CUDA's name for it is in every text."""
    return isinstance(error, MemoryError) or "OUT_OF_MEMORY" in str(error)


def compile_failed(error: BaseException) -> bool:
    """Whether a kernel could not be compiled or linked, which no later try will change."""
    return any(kind.__name__ in _COMPILE_ERRORS for kind in type(error).__mro__)


def one_line(error: BaseException) -> str:
    """An error as one line that names its kind."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
