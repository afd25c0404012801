"""The NVIDIA driver asked through ctypes: a stand-in library plays each state, the real one is asked where it is."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

from frink_numba import driver
from frink_numba.driver import Device, query_driver


class _Cuda:
    """A libcuda of `devices` GPUs; `failing` maps a function to the status that it answers."""

    def __init__(self, devices: int, failing: dict[str, int] | None = None) -> None:
        self.devices = devices
        self.failing = failing or {}
        self.contexts: list[int] = []  # of which devices, by handle

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            if name in self.failing:
                return self.failing[name]
            getattr(self, f"on_{name}")(*arguments)
            return 0

        return call

    def on_cuDriverGetVersion(self, out: Any) -> None:
        out._obj.value = 13020

    def on_cuInit(self, flags: Any) -> None:
        assert flags.value == 0

    def on_cuDeviceGetCount(self, out: Any) -> None:
        out._obj.value = self.devices

    def on_cuDeviceGet(self, out: Any, number: Any) -> None:
        out._obj.value = number.value + 40

    def on_cuDeviceGetName(self, out: Any, size: Any, handle: Any) -> None:
        out.value = f"GPU {handle.value}".encode()
        assert size.value == len(out)

    def on_cuDeviceTotalMem_v2(self, out: Any, handle: Any) -> None:
        out._obj.value = 150_000_000_000 + handle.value

    def on_cuDeviceGetAttribute(self, out: Any, which: Any, handle: Any) -> None:
        out._obj.value = {16: 132, 75: 9, 76: 0}[which.value]

    def on_cuDevicePrimaryCtxRetain(self, out: Any, handle: Any) -> None:
        self.contexts.append(handle.value)

    def on_cuGetErrorName(self, status: Any, out: Any) -> None:
        out._obj.value = b"CUDA_ERROR_SOMETHING"


class _Nvml:
    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlSystemGetDriverVersion(self, text: Any, size: Any) -> int:
        text.value = b"580.95.05"
        return 0

    def nvmlShutdown(self) -> int:
        return 0


def _libraries(monkeypatch: pytest.MonkeyPatch, cuda: Any, nvml: Any) -> None:
    def load(name: str) -> Any:
        found = cuda if "cuda" in name else nvml
        if found is None:
            raise OSError(f"{name}: cannot open shared object file")
        return found

    monkeypatch.setattr(ctypes, "CDLL", load)


def test_devices_are_described(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory beyond 2**32 bytes survives, handles are the driver's and numbers ours."""
    _libraries(monkeypatch, _Cuda(2), _Nvml())
    found = query_driver()
    assert (found.version, found.cuda_version, found.problem) == ("580.95.05", (13, 2), None)
    assert found.devices == (
        Device(0, "GPU 40", 150_000_000_040, (9, 0), 132),
        Device(1, "GPU 41", 150_000_000_041, (9, 0), 132),
    )


def test_no_driver_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    _libraries(monkeypatch, None, None)
    found = query_driver()
    assert found.devices == ()
    assert found.problem is not None
    assert "no NVIDIA driver is installed" in found.problem


def test_a_driver_that_fails_is_a_reason_with_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver and a kernel module of different versions answer at cuInit; the version is still told."""
    _libraries(monkeypatch, _Cuda(1, {"cuInit": 803}), None)
    found = query_driver()
    assert (found.version, found.cuda_version, found.devices) == (None, (13, 2), ())
    assert found.problem == (
        "the NVIDIA driver is installed but does not answer: cuInit answered CUDA_ERROR_SOMETHING (803)"
    )


def test_no_device_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    _libraries(monkeypatch, _Cuda(0), _Nvml())
    assert query_driver().problem == "the NVIDIA driver finds no device"


def test_this_machine_is_described_without_an_error() -> None:
    """Whatever is here: usable devices, or the reason why there is none."""
    found = query_driver()
    assert (found.problem is None) == bool(found.devices)
    assert driver.query_driver() == found


def test_without_its_version_the_other_library_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes as long to start as all else."""
    monkeypatch.setattr(driver, "_nvml_version", lambda: pytest.fail("asked"))
    _libraries(monkeypatch, _Cuda(1), None)
    found = query_driver(version=False)
    assert (found.version, found.cuda_version, len(found.devices)) == (None, (13, 2), 1)


def test_whether_there_is_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    _libraries(monkeypatch, _Cuda(1, {"cuInit": 803}), None)
    assert driver.is_installed(), "whatever it would answer"
    _libraries(monkeypatch, None, None)
    assert not driver.is_installed()


def test_a_context_is_made_by_number_and_what_fails_is_said_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = _Cuda(2)
    _libraries(monkeypatch, cuda, None)
    driver.make_context(1)
    assert cuda.contexts == [41]
    cuda.failing = {"cuDeviceGet": 101}
    driver.make_context(1)
    assert cuda.contexts == [41]
    _libraries(monkeypatch, None, None)
    driver.make_context(0)


@pytest.mark.gpu
def test_the_real_driver_tells_its_devices() -> None:
    found = query_driver()
    assert found.version is not None
    assert found.cuda_version is not None
    assert all(device.memory > 2**30 and device.multiprocessors > 0 for device in found.devices)
