"""What the NVIDIA driver says of itself and its devices, asked through ctypes: no CUDA package is needed or imported.

Sources: the CUDA driver API (cuInit, cuDriverGetVersion, cuDeviceGet*, cuDevicePrimaryCtxRetain) and NVML
(nvmlSystemGetDriverVersion). Questions make no context on any device.
"""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

# CUdevice_attribute
_MULTIPROCESSORS = 16
_COMPUTE_MAJOR = 75
_COMPUTE_MINOR = 76


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU, by the driver's number; `memory` in bytes."""

    number: int
    name: str
    memory: int
    compute_capability: tuple[int, int]
    multiprocessors: int


@dataclass(frozen=True, slots=True)
class Driver:
    """The driver: its version ("580.95.05", None when NVML is missing), the newest CUDA it runs, and its devices.

    `problem` says why it cannot be used; it is None when at least one device is usable.
    """

    version: str | None
    cuda_version: tuple[int, int] | None
    devices: tuple[Device, ...]
    problem: str | None


class _DriverError(Exception):
    pass


def query_driver(*, version: bool = True) -> Driver:
    """Ask the driver. Never raises: what is wrong is told in `problem`.

    version: whether to ask for its own, which takes as long as all else.
    """
    try:
        cuda = _library()
    except OSError:
        return Driver(None, None, (), "no NVIDIA driver is installed (libcuda.so.1 is not found)")
    own = _nvml_version() if version else None
    cuda_version = None
    try:
        number = ctypes.c_int()
        _call(cuda, "cuDriverGetVersion", ctypes.byref(number))
        cuda_version = (number.value // 1000, number.value % 1000 // 10)
        _call(cuda, "cuInit", ctypes.c_uint(0))
        count = ctypes.c_int()
        _call(cuda, "cuDeviceGetCount", ctypes.byref(count))
        devices = tuple(_device(cuda, number) for number in range(count.value))
    except (_DriverError, AttributeError) as error:  # AttributeError: the library lacks the function
        return Driver(own, cuda_version, (), f"the NVIDIA driver is installed but does not answer: {error}")
    problem = None if devices else "the NVIDIA driver finds no device"
    return Driver(own, cuda_version, devices, problem)


def is_installed() -> bool:
    """Whether there is a driver to ask; asks it nothing."""
    try:
        _library()
    except OSError:
        return False
    return True


def make_context(number: int) -> None:
    """Make the primary context of a device that `query_driver` has found, which stays as long as the process does.

    It takes a tenth of a second, in which Python can do other things. What fails here fails again, and is said, where
    the context is asked for.
    """
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    with suppress(OSError, AttributeError):  # AttributeError: the library lacks the function
        cuda = _library()
        if cuda.cuDeviceGet(ctypes.byref(handle), ctypes.c_int(number)) == 0:
            cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)


def _library() -> ctypes.CDLL:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def _device(cuda: ctypes.CDLL, number: int) -> Device:
    handle = ctypes.c_int()
    _call(cuda, "cuDeviceGet", ctypes.byref(handle), ctypes.c_int(number))
    name = ctypes.create_string_buffer(256)
    _call(cuda, "cuDeviceGetName", name, ctypes.c_int(len(name)), handle)
    memory = ctypes.c_size_t()
    _call(cuda, "cuDeviceTotalMem_v2", ctypes.byref(memory), handle)

    def attribute(which: int) -> int:
        value = ctypes.c_int()
        _call(cuda, "cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(which), handle)
        return value.value

    return Device(
        number,
        name.value.decode("utf-8", "replace"),
        memory.value,
        (attribute(_COMPUTE_MAJOR), attribute(_COMPUTE_MINOR)),
        attribute(_MULTIPROCESSORS),
    )


def _call(cuda: ctypes.CDLL, function: str, *arguments: Any) -> None:
    status = getattr(cuda, function)(*arguments)
    if status != 0:
        text = ctypes.c_char_p()
        name = "unknown error"
        if cuda.cuGetErrorName(ctypes.c_int(status), ctypes.byref(text)) == 0 and text.value:
            name = text.value.decode("ascii", "replace")
        raise _DriverError(f"{function} answered {name} ({status})")


def _nvml_version() -> str | None:
    """The driver's own version as people know it; the CUDA driver API does not tell it."""
    try:
        nvml = ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() != 0:
            return None
        try:
            text = ctypes.create_string_buffer(96)
            if nvml.nvmlSystemGetDriverVersion(text, ctypes.c_uint(len(text))) != 0:
                return None
            return text.value.decode("ascii", "replace")
        finally:
            nvml.nvmlShutdown()
    except (OSError, AttributeError):
        return None
