"""Devices: which there are, why one cannot be used, and what this process holds of each.

A device's state is the hardware's, so it is kept once per process: a lost device stays lost for every backend over it
(R21), and a child that was forked after CUDA was used is told so before any call could hang (field report: fork).
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from importlib import import_module, metadata, util
from types import TracebackType

from frink_numba import driver, settings
from frink_numba.cuda.arena import Arena
from frink_numba.cuda.body import Body
from frink_numba.cuda.memory import MemoryLimit
from frink_numba.cuda.pinned import PinnedPool
from frink_numba.cuda.runtime import NumbaRuntime, Runtime, compile_failed, one_line, out_of_memory, simulated
from frink_numba.cuda.tier import choose_tier
from frink_numba.cuda.weights import WeightBank
from frink_numba.errors import BackendUnavailable, DeviceError

_TENSOR_MODULES = (
    "cuda.bindings.driver",
    *(f"frink_numba.cuda.{name}" for name in ("driver_runtime", "tensor.body", "tensor.kernels")),
)
_LEAST_CAPABILITY = (7, 5)  # the oldest that the toolkit of CUDA 13 compiles for, and that the kernels are built for


class Workspace:
    """Streams, events, scratch and page-locked memory for the runs of one device, one run at a time."""

    def __init__(self, runtime: Runtime) -> None:
        self.compute = runtime.stream()
        self.downloads = runtime.stream()
        self.uploads = runtime.stream()
        # Per slot of K/V rows: its own rows are computed, are down, its prefix is up, its attention is done.
        self.rows_ready, self.rows_down, self.prefix_up, self.attended = (
            [runtime.event() for _ in range(2)] for _ in range(4)
        )
        self.arena = Arena(runtime)
        self.pinned = PinnedPool(runtime)


class CudaDevice:
    """One device of this process. Everything but `reason` and the facts is used under `working()`."""

    def __init__(self, info: driver.Device, runtime: Runtime, body: Body) -> None:
        self.info = info
        self.runtime = runtime
        self.body = body
        self.memory = MemoryLimit(self._query_free)
        self.bank = WeightBank()
        self.reason: str | None = None  # why it cannot be used any more
        self._workspace: Workspace | None = None
        self._lock = threading.RLock()
        self._process = os.getpid()

    def __str__(self) -> str:
        return f"{self.info.name}, {'invariant, ' if self.body.invariant else ''}{self.tier} tier"

    @property
    def tier(self) -> str:
        return self.body.tier

    @property
    def problem(self) -> str | None:
        """Why the device cannot be used in this process, or None; makes no CUDA call."""
        return _forked(self._process) or self.reason

    def working(self) -> _Working:
        """Have the device for the calling thread alone. DeviceError when it cannot be used."""
        return _Working(self)

    def idle(self) -> bool:
        """Whether no other thread is at work on the device just now."""
        free = self._lock.acquire(blocking=False)
        if free:
            self._lock.release()
        return free

    @property
    def workspace(self) -> Workspace:
        """Made at first use; under `working()`."""
        if self._workspace is None:
            self._workspace = Workspace(self.runtime)
        return self._workspace

    @property
    def arena_bytes(self) -> int:
        return self._workspace.arena.nbytes if self._workspace is not None else 0

    @property
    def held_bytes(self) -> int:
        """Device memory in use for weights, scratch and K/V rows."""
        return self.bank.nbytes + self.arena_bytes + self.body.mirrored_bytes

    @property
    def state(self) -> tuple[int, int, int, int]:
        """Equal as long as weights, scratch, K/V memory and the budget, as last asked for, are what they were."""
        arena = self._workspace.arena.changes if self._workspace is not None else 0
        return self.bank.changes, self.body.changes, arena, self.memory.last

    def failed(self, error: BaseException) -> str:
        """Settle what a failure under `working()` means for later runs; its text, one line.

        Waits for what the device still works on, so that memory handed to it can be used again. A device that answers
        an error to that is lost for the rest of the process.
        """
        text = str(error) if isinstance(error, DeviceError) else one_line(error)
        sticky = self._drain()
        if sticky is not None:
            self._abandon()
            self.reason = f"device lost: {text}" if sticky in text else f"device lost: {text} ({sticky})"
            return self.reason
        if compile_failed(error):
            self.reason = f"kernels do not compile here: {text}"
            return self.reason
        if out_of_memory(error):
            self.memory.lower(self.held_bytes)
            return f"out of memory: {text}"
        return text

    def trim(self) -> None:
        """Give back scratch, streams and K/V rows when nobody's weights are held any more."""
        if self._workspace is not None and not self.bank.nbytes:
            self.body.forget(self.body.mirrored_bytes)
            self._workspace = None
            self.runtime.release()

    def _drain(self) -> str | None:
        try:
            with self.runtime.active():
                return self.runtime.drain()
        except Exception as error:  # the context cannot even be entered
            return one_line(error)

    def _abandon(self) -> None:
        with contextlib.suppress(Exception):  # nothing can be done about it, and the first cause is what counts
            self.runtime.abandon()

    def _check(self) -> None:
        problem = self.problem
        if problem is not None:
            raise DeviceError(problem)

    def _query_free(self) -> int:
        with self.working():
            return self.runtime.memory()[0] + self.held_bytes


class _Working:
    """Inside it, a device is the calling thread's. Every step enters it: a generator takes three times as long."""

    __slots__ = ("_active", "_device")

    def __init__(self, device: CudaDevice) -> None:
        self._device = device

    def __enter__(self) -> None:
        device = self._device
        device._check()
        device._lock.acquire()
        try:
            device._check()
            self._active = device.runtime.active()
            self._active.__enter__()
        except BaseException:
            device._lock.release()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._active.__exit__(kind, error, traceback)
        finally:
            self._device._lock.release()


_opened: dict[int, CudaDevice] = {}
_opening = threading.Lock()
_driver_process: int | None = None  # the process in which the driver was first asked


def open_device(number: int = 0) -> CudaDevice:
    """The device by its number among the visible ones. BackendUnavailable says why it cannot be used."""
    with _opening:
        device = _opened.get(number)
        if device is None:
            device = _opened[number] = _open(number)
    problem = device.problem
    if problem is not None:
        raise BackendUnavailable(problem)
    tier = choose_tier(settings.get("FRINK_CUDA_TIER"), device.info.compute_capability)
    if tier != device.tier:
        raise BackendUnavailable(f"FRINK_CUDA_TIER={tier} came after the device was opened with {device.tier}")
    invariant = settings.get("FRINK_INVARIANT")
    if invariant != device.body.invariant:
        raise BackendUnavailable(
            f"FRINK_INVARIANT={int(invariant)} came after the device was opened with {int(not invariant)}"
        )
    return device


def visible_devices() -> tuple[driver.Device, ...]:
    """The devices that the driver shows, at least one. BackendUnavailable says why there is none."""
    global _driver_process
    if simulated():
        return (driver.Device(0, "CUDA simulator", sys.maxsize, (0, 0), 1),)
    forked = _forked(_driver_process)
    if forked is not None:
        raise BackendUnavailable(forked)
    found = driver.query_driver(version=False)
    if found.cuda_version is not None:
        _driver_process = _driver_process or os.getpid()
    if found.problem is not None:
        nothing_there = found.cuda_version is None or "NO_DEVICE" in found.problem or "no device" in found.problem
        raise BackendUnavailable(found.problem, absent=nothing_there)
    _check_packages(found)
    return found.devices


def _open(number: int) -> CudaDevice:
    imports = _import_ahead()
    devices = visible_devices()
    if not 0 <= number < len(devices):
        raise BackendUnavailable(f"there is no device {number}: the driver shows {len(devices)}, counted from 0")
    info = devices[number]
    if not simulated() and info.compute_capability < _LEAST_CAPABILITY:
        major, minor = info.compute_capability
        raise BackendUnavailable(f"{info.name} has compute capability {major}.{minor}, the kernels need 7.5 or newer")
    tier = choose_tier(settings.get("FRINK_CUDA_TIER"), info.compute_capability)
    if tier != "simt":  # whose context is numba's
        # Not a daemon: a process that ends at once lets the driver finish.
        threading.Thread(target=driver.make_context, args=(number,), name="frink-context").start()
    if imports is not None:
        imports.join()
    try:
        runtime = make_runtime(tier, number)
        return CudaDevice(info, runtime, make_body(tier, info, runtime, invariant=settings.get("FRINK_INVARIANT")))
    except ImportError as error:
        raise BackendUnavailable(f"numba-cuda cannot be imported: {one_line(error)}") from error


def _import_ahead() -> threading.Thread | None:
    """Import what the tensor-core tiers need while the driver starts, which takes as long and needs no Python.

    What fails here fails again, and is said, where it is needed.
    """
    if simulated() or not driver.is_installed() or settings.get("FRINK_CUDA_TIER") == "simt":
        return None

    def imports() -> None:
        with contextlib.suppress(Exception):
            for name in _TENSOR_MODULES:
                import_module(name)

    thread = threading.Thread(target=imports, name="frink-imports")
    thread.start()
    return thread


def make_runtime(tier: str, number: int) -> Runtime:
    """What a tier works with on a device by its number. ImportError when a package cannot be imported."""
    if tier == "simt":  # its launches are numba's
        return NumbaRuntime(number)
    from frink_numba.cuda.driver_runtime import DriverRuntime

    return DriverRuntime(number)


def make_body(tier: str, info: driver.Device, runtime: Runtime, *, invariant: bool = False) -> Body:
    """The body of a tier; `invariant` as in FRINK_INVARIANT. ImportError when numba-cuda cannot be imported."""
    if tier == "simt":
        from frink_numba.cuda.simt.body import SimtBody
        from frink_numba.cuda.simt.launchers import load_launchers

        return SimtBody(runtime, load_launchers(invariant=invariant), invariant=invariant)
    from frink_numba.cuda.tensor.body import TensorBody
    from frink_numba.cuda.tensor.kernels import TensorKernels

    kernels = TensorKernels(tier, info.compute_capability, info.multiprocessors, invariant=invariant)
    return TensorBody(runtime, kernels)


def _check_packages(found: driver.Driver) -> None:
    """The extra is installed and the driver runs what its toolkit compiles; nothing is imported."""
    extra = "cu12" if found.cuda_version is not None and found.cuda_version < (13, 0) else "cu13"
    missing = [name for name in ("numba", "numba_cuda", "cuda") if util.find_spec(name) is None]
    if missing:
        raise BackendUnavailable(
            f"a GPU is here, but the CUDA packages are not (no {missing[0]}): pip install 'frink-numba[{extra}]'"
        )
    try:
        toolkit = int(metadata.version("cuda-bindings").partition(".")[0])
    except (metadata.PackageNotFoundError, ValueError):
        return
    if found.cuda_version is not None and found.cuda_version < (toolkit, 0):
        major, minor = found.cuda_version
        raise BackendUnavailable(
            f"the driver is too old: it runs CUDA {major}.{minor}, the installed packages compile for CUDA {toolkit}; "
            f"update the driver or pip install 'frink-numba[cu{major}]'"
        )


def _forked(process: int | None) -> str | None:
    if process is None or process == os.getpid():
        return None
    return (
        f"this process was forked from process {process} after CUDA was used there, which CUDA does not survive; "
        "start processes with the 'spawn' or 'forkserver' method"
    )
