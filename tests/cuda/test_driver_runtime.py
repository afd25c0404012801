"""The runtime of the tensor-core tiers over a driver made of a list: what it calls, owns, and no longer touches."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from frink_numba.cuda.driver_runtime import DriverRuntime
from frink_numba.errors import DeviceError

bindings = pytest.importorskip("cuda.bindings")

ANSWERS: dict[str, Any] = {
    "cuDeviceGet": 7, "cuDevicePrimaryCtxRetain": "context", "cuStreamCreate": 31, "cuEventCreate": 41,
}  # fmt: skip


class Status(int):
    name = "CUDA_ERROR_OUT_OF_MEMORY"


class Recorder:
    """Every function of the driver: noted with its arguments; memory is the process's own."""

    CU_MEMHOSTALLOC_PORTABLE = 1
    CUevent_flags = SimpleNamespace(CU_EVENT_DISABLE_TIMING=2)
    CUmemorytype = SimpleNamespace(CU_MEMORYTYPE_DEVICE="device", CU_MEMORYTYPE_HOST="host")
    CUDA_MEMCPY2D = SimpleNamespace
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED="relaxed")

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.fail: str | None = None
        self.depth = 0  # contexts pushed
        self.mode = "strict"  # of captures, for the thread
        self.kept: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, *arguments))
            if name == self.fail:
                return Status(2), None
            self.depth += {"cuCtxPushCurrent": 1, "cuCtxPopCurrent": -1}.get(name, 0)
            if name not in ("cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxPopCurrent"):
                assert self.depth == 1, f"{name} outside a context"
            if name in ("cuMemAlloc", "cuMemHostAlloc"):
                self.kept.append(ctypes.create_string_buffer(arguments[0]))
                return Status(0), ctypes.addressof(self.kept[-1])
            if name == "cuThreadExchangeStreamCaptureMode":
                before, self.mode = self.mode, arguments[0]
                return Status(0), before
            if name in ("cuMemFree", "cuMemFreeHost"):
                assert self.mode == "relaxed", "a capture of this thread would fail"
            if name == "cuMemGetInfo":
                return Status(0), 5, 9
            return (Status(0), ANSWERS[name]) if name in ANSWERS else (Status(0),)

        return call

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == name]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    made = Recorder()
    monkeypatch.setattr(bindings, "driver", made, raising=False)
    yield made
    assert made.depth == 0


def test_work_happens_in_the_primary_context(driver: Recorder) -> None:
    """Retained at the first use, not before: a plan that only asks must not make one."""
    runtime = DriverRuntime(3)
    assert driver.calls == [("cuInit", 0), ("cuDeviceGet", 3)]
    for _ in range(2):
        with runtime.active():
            assert runtime.memory() == (5, 9)
    assert driver.named("cuDevicePrimaryCtxRetain") == [(7,)]
    with pytest.raises(ZeroDivisionError), runtime.active():
        raise ZeroDivisionError
    assert driver.depth == 0


def test_memory_is_given_back_with_its_last_reference(driver: Recorder) -> None:
    """From outside `active()` too, and views of page-locked memory keep all of it."""
    runtime = DriverRuntime(0)
    with runtime.active():
        block, host = runtime.device_bytes(1000), runtime.pinned_bytes(64)
        stream, event = runtime.stream(), runtime.event()
    assert (block.nbytes, runtime.address(block)) == (1000, block.address)
    assert (host.dtype, host.nbytes) == (np.uint8, 64)
    host[:] = 7
    view, address = host[8:16], host.ctypes.data
    del host
    gc.collect()
    assert not driver.named("cuMemFreeHost")
    assert view.sum() == 56
    freed = block.address
    del view, block, stream, event
    gc.collect()
    assert driver.named("cuMemFreeHost") == [(address,)]
    assert driver.named("cuMemFree") == [(freed,)]
    assert driver.named("cuStreamDestroy") == [(31,)]
    assert driver.named("cuEventDestroy") == [(41,)]
    assert driver.mode == "strict"


@pytest.mark.parametrize("lost", ["abandoned", "forked"])
def test_a_lost_device_and_a_forked_child_are_left_alone(
    lost: str, driver: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R21: after `abandon`, and in a child that was forked, no call is made for memory."""
    runtime = DriverRuntime(0)
    with runtime.active():
        block, host = runtime.device_bytes(8), runtime.pinned_bytes(8)
    if lost == "abandoned":
        runtime.abandon()
    else:
        monkeypatch.setattr(os, "getpid", lambda: -1)
    before = len(driver.calls)
    del block, host
    gc.collect()
    assert len(driver.calls) == before


def test_copies_name_their_addresses(driver: Recorder) -> None:
    runtime = DriverRuntime(0)
    with runtime.active():
        stream, event, rows = runtime.stream(), runtime.event(), np.zeros((2, 3), np.float32)
        runtime.send(100, rows, stream)
        runtime.fetch(rows, 200, stream)
        runtime.fetch_strided(rows, 64, 5, 300, stream)
        runtime.move(1, 2, 3, stream)
        runtime.zero(9, 16, stream)
        runtime.record(event, stream)
        runtime.wait(event, stream)
        runtime.synchronize(stream)
    host = rows.ctypes.data
    assert driver.named("cuMemcpyHtoDAsync") == [(100, host, 24, 31)]
    assert driver.named("cuMemcpyDtoHAsync") == [(host, 200, 24, 31)]
    ((copy, on),) = driver.named("cuMemcpy2DAsync")
    assert on == 31
    assert vars(copy) == {
        "srcMemoryType": "device", "srcDevice": 300, "srcPitch": 24,
        "dstMemoryType": "host", "dstHost": host, "dstPitch": 64, "WidthInBytes": 24, "Height": 5,
    }  # fmt: skip
    assert driver.named("cuMemcpyDtoDAsync") == [(1, 2, 3, 31)]
    assert driver.named("cuMemsetD8Async") == [(9, 0, 16, 31)]
    assert driver.named("cuEventRecord") == [(41, 31)]
    assert driver.named("cuStreamWaitEvent") == [(31, 41, 0)]
    assert driver.named("cuStreamSynchronize") == [(31,)]


def test_a_failure_says_what_failed(driver: Recorder) -> None:
    runtime = DriverRuntime(0)
    driver.fail = "cuMemAlloc"
    with runtime.active(), pytest.raises(DeviceError, match=r"cuMemAlloc failed: CUDA_ERROR_OUT_OF_MEMORY \(2\)"):
        runtime.device_bytes(1 << 50)
    driver.fail = "cuCtxSynchronize"
    with runtime.active():
        assert "cuCtxSynchronize failed" in (runtime.drain() or "")
        driver.fail = None
        assert runtime.drain() is None


def test_a_tensor_body_imports_no_numba() -> None:
    """What a process with kernels on disk needs: half of the wait for a first token was numba's import."""
    code = (
        "import sys\n"
        "from frink_numba import driver\n"
        "from frink_numba.cuda import device, driver_runtime\n"
        "info = driver.Device(0, 'H200', 1 << 37, (9, 0), 132)\n"
        "device.make_body('wgmma', info, None)\n"
        "assert not {'numba', 'numba_cuda', 'cuda.core'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
