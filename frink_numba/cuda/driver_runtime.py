"""One device's memory, streams, events and copies through cuda.bindings alone, for the tensor-core tiers.

Their kernels are machine code from a folder and their launches are driver calls, so that a process that finds them
there never imports numba. The context is the device's primary one, which numba, torch and others in the process use as
well.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from frink_numba.cuda.runtime import Graph, call_driver, one_line
from frink_numba.errors import DeviceError


class DeviceBlock:
    """A block of device memory, freed with its last reference. Freeing waits for work that was queued before."""

    __slots__ = ("__cuda_array_interface__", "__weakref__", "address", "nbytes")

    def __init__(self, address: int, nbytes: int) -> None:
        self.address, self.nbytes = address, nbytes
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


class Handle:
    """A stream or an event of the driver's, destroyed with its last reference."""

    __slots__ = ("__weakref__", "handle")

    def __init__(self, handle: Any) -> None:
        self.handle = handle


class _HostBlock:
    """Owns page-locked memory while arrays look at it."""

    __slots__ = ("__array_interface__", "__weakref__")

    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}


class _Current:
    """Inside it, a context is the calling thread's."""

    __slots__ = ("_context", "_driver")

    def __init__(self, driver: Any, context: Any) -> None:
        self._driver, self._context = driver, context

    def __enter__(self) -> None:
        (status,) = self._driver.cuCtxPushCurrent(self._context)
        _check(status, "cuCtxPushCurrent")

    def __exit__(self, *_: object) -> None:
        self._driver.cuCtxPopCurrent()


class DriverRuntime:
    """See `frink_numba.cuda.runtime.Runtime`; `number` is the driver's among the visible devices."""

    def __init__(self, number: int) -> None:
        from cuda.bindings import driver

        self._driver = driver
        call_driver("cuInit", 0)
        self._device = call_driver("cuDeviceGet", number)
        self._context: Any = None
        self._copy = driver.CUDA_MEMCPY2D()  # each copy fills in the rest, and the driver keeps none of it
        self._copy.srcMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
        self._copy.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_HOST
        self._process = os.getpid()
        self._abandoned = False

    def active(self) -> _Current:
        if self._context is None:
            self._context = call_driver("cuDevicePrimaryCtxRetain", self._device)
        return _Current(self._driver, self._context)

    def memory(self) -> tuple[int, int]:
        free, total = call_driver("cuMemGetInfo")
        return int(free), int(total)

    def device_bytes(self, nbytes: int) -> DeviceBlock:
        address = int(call_driver("cuMemAlloc", nbytes))
        block = DeviceBlock(address, nbytes)
        self._when_gone(block, "cuMemFree", address)
        return block

    def pinned_bytes(self, nbytes: int) -> np.ndarray:
        # Portable: page-locked for the contexts of other devices too.
        address = int(call_driver("cuMemHostAlloc", nbytes, self._driver.CU_MEMHOSTALLOC_PORTABLE))
        owner = _HostBlock(address, nbytes)
        self._when_gone(owner, "cuMemFreeHost", address)
        return np.asarray(owner)

    def stream(self) -> Handle:
        stream = Handle(call_driver("cuStreamCreate", 0))
        self._when_gone(stream, "cuStreamDestroy", stream.handle)
        return stream

    def event(self) -> Handle:
        event = Handle(call_driver("cuEventCreate", self._driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))
        self._when_gone(event, "cuEventDestroy", event.handle)
        return event

    def upload(self, target: DeviceBlock, source: np.ndarray, stream: Handle) -> None:
        self.send(target.address, source, stream)

    def download(self, target: np.ndarray, source: DeviceBlock, stream: Handle) -> None:
        self.fetch(target, source.address, stream)

    def handle(self, stream: Handle) -> int:
        return int(stream.handle)

    def address(self, block: DeviceBlock) -> int:
        return block.address

    # A step makes some dozens of the following calls while the device waits for the next: they go straight there.

    def send(self, address: int, source: np.ndarray, stream: Handle) -> None:
        (status,) = self._driver.cuMemcpyHtoDAsync(address, source.ctypes.data, source.nbytes, stream.handle)
        _check(status, "cuMemcpyHtoDAsync")

    def fetch(self, target: np.ndarray, address: int, stream: Handle) -> None:
        (status,) = self._driver.cuMemcpyDtoHAsync(target.ctypes.data, address, target.nbytes, stream.handle)
        _check(status, "cuMemcpyDtoHAsync")

    def fetch_strided(
        self, first: np.ndarray, pitch: int, count: int, address: int, stream: Handle, source_pitch: int = 0
    ) -> None:
        copy, nbytes = self._copy, first.nbytes
        copy.srcDevice, copy.srcPitch = address, source_pitch or nbytes
        copy.dstHost, copy.dstPitch = first.ctypes.data, pitch
        copy.WidthInBytes, copy.Height = nbytes, count
        (status,) = self._driver.cuMemcpy2DAsync(copy, stream.handle)
        _check(status, "cuMemcpy2DAsync")

    def graph(self, stream: Handle, launches: Sequence[Callable[[int], None]]) -> Callable[[], None]:
        return Graph(self.handle(stream), launches)

    def move(self, target: int, source: int, nbytes: int, stream: Handle) -> None:
        call_driver("cuMemcpyDtoDAsync", target, source, nbytes, stream.handle)

    def zero(self, address: int, nbytes: int, stream: Handle) -> None:
        call_driver("cuMemsetD8Async", address, 0, nbytes, stream.handle)

    def record(self, event: Handle, stream: Handle) -> None:
        (status,) = self._driver.cuEventRecord(event.handle, stream.handle)
        _check(status, "cuEventRecord")

    def wait(self, event: Handle, stream: Handle) -> None:
        (status,) = self._driver.cuStreamWaitEvent(stream.handle, event.handle, 0)
        _check(status, "cuStreamWaitEvent")

    def synchronize(self, stream: Handle) -> None:
        (status,) = self._driver.cuStreamSynchronize(stream.handle)
        _check(status, "cuStreamSynchronize")

    def drain(self) -> str | None:
        try:
            call_driver("cuCtxSynchronize")
        except Exception as error:  # cuda.bindings has classes of its own
            return one_line(error)
        return None

    def release(self) -> None:
        """Nothing: memory is given back when it is no longer referenced."""

    def abandon(self) -> None:
        self._abandoned = True

    def _when_gone(self, owner: Any, function: str, *arguments: Any) -> None:
        """Call the driver when `owner` is gone; at exit the driver itself cleans up."""
        weakref.finalize(owner, self._give_back, function, *arguments).atexit = False

    def _give_back(self, function: str, *arguments: Any) -> None:
        """A driver call from whichever thread drops the last reference; a lost device or a forked child makes none."""
        if self._abandoned or self._process != os.getpid():
            return
        driver = self._driver
        driver.cuCtxPushCurrent(self._context)
        # The collector may come by while this thread captures launches, where freeing is forbidden unless asked for.
        relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        _, mode = driver.cuThreadExchangeStreamCaptureMode(relaxed)
        try:
            getattr(driver, function)(*arguments)  # what it answers would help nobody
        finally:
            driver.cuThreadExchangeStreamCaptureMode(mode)
            driver.cuCtxPopCurrent()


def _check(status: Any, function: str) -> None:
    if status:
        raise DeviceError(f"{function} failed: {status.name} ({int(status)})")
