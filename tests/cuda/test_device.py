"""Devices: every reason why one cannot be used is the true one, and none of them crashes or hangs."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time

import pytest

from frink_numba import driver
from frink_numba.cuda import device as module
from frink_numba.cuda.backend import create
from frink_numba.cuda.device import open_device, visible_devices
from frink_numba.cuda.simt.body import SimtBody
from frink_numba.errors import BackendUnavailable, DeviceError
from tests.cuda.fake_gpu import ILLEGAL_ADDRESS, OUT_OF_MEMORY, FakeCudaError, LinkerError, fake_device

H200 = driver.Device(0, "NVIDIA H200", 141 << 30, (9, 0), 132)
OLD = driver.Device(1, "Tesla P4", 8 << 30, (6, 1), 20)


@pytest.fixture(autouse=True)
def _own_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_opened", {})
    monkeypatch.setattr(module, "_driver_process", None)


def answering(monkeypatch: pytest.MonkeyPatch, devices=(H200, OLD), cuda=(13, 0), problem=None) -> None:
    found = driver.Driver("580.1", cuda, tuple(devices), problem)
    monkeypatch.setattr(module.driver, "query_driver", lambda version: found)


def reason_of(number: int = 0) -> BackendUnavailable:
    with pytest.raises(BackendUnavailable) as caught:
        open_device(number)
    return caught.value


def test_no_driver(monkeypatch: pytest.MonkeyPatch):
    """The machine simply has none: no warning is due unless the user named the backend."""
    answering(monkeypatch, (), None, "no NVIDIA driver is installed (libcuda.so.1 is not found)")
    error = reason_of()
    assert str(error) == "no NVIDIA driver is installed (libcuda.so.1 is not found)"
    assert error.absent


@pytest.mark.parametrize("problem", ["cuInit answered CUDA_ERROR_NO_DEVICE (100)", "the NVIDIA driver finds no device"])
def test_no_device(problem: str, monkeypatch: pytest.MonkeyPatch):
    answering(monkeypatch, (), (13, 0), problem)
    error = reason_of()
    assert str(error) == problem
    assert error.absent


def test_a_driver_that_does_not_answer_is_worth_a_warning(monkeypatch: pytest.MonkeyPatch):
    answering(monkeypatch, (), (13, 0), "cuInit answered CUDA_ERROR_UNKNOWN (999)")
    error = reason_of()
    assert "CUDA_ERROR_UNKNOWN" in str(error)
    assert not error.absent


@pytest.mark.parametrize(("cuda", "extra"), [((13, 0), "cu13"), ((12, 8), "cu12")])
def test_the_extra_is_not_installed(cuda, extra: str, monkeypatch: pytest.MonkeyPatch):
    """A GPU without the packages: the reason is the command that mends it."""
    answering(monkeypatch, cuda=cuda)
    found = module.util.find_spec
    monkeypatch.setattr(module.util, "find_spec", lambda name: None if name == "numba_cuda" else found(name))
    error = reason_of()
    assert str(error).endswith(f"(no numba_cuda): pip install 'frink-numba[{extra}]'")
    assert not error.absent


def test_the_driver_is_too_old(monkeypatch: pytest.MonkeyPatch):
    """Field report: code newer than the driver. Found by comparing versions, before anything is compiled."""
    answering(monkeypatch, cuda=(12, 4))
    monkeypatch.setattr(module.metadata, "version", lambda name: "13.0.3")
    assert str(reason_of()) == (
        "the driver is too old: it runs CUDA 12.4, the installed packages compile for CUDA 13; "
        "update the driver or pip install 'frink-numba[cu12]'"
    )


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch):
    answering(monkeypatch)
    assert str(reason_of(2)) == "there is no device 2: the driver shows 2, counted from 0"


def test_a_device_that_is_too_old(monkeypatch: pytest.MonkeyPatch):
    answering(monkeypatch)
    assert str(reason_of(1)) == "Tesla P4 has compute capability 6.1, the kernels need 7.5 or newer"


def test_a_tier_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch):
    answering(monkeypatch, (driver.Device(0, "NVIDIA T4", 1 << 34, (7, 5), 40),))
    monkeypatch.setenv("FRINK_CUDA_TIER", "wgmma")
    assert "FRINK_CUDA_TIER=wgmma needs compute capability 9.0" in str(reason_of())


def test_packages_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch):
    """Field report: NumPy 2.5 breaks numba-cuda. An import that fails is a reason, not a crash."""
    answering(monkeypatch)

    def broken(*_: object, **__: object) -> None:
        raise ImportError("cannot import name 'row_stack' from 'numpy'")

    monkeypatch.setattr(module, "make_runtime", broken)
    assert "numba-cuda cannot be imported: ImportError: cannot import name 'row_stack'" in str(reason_of())


def test_a_device_is_opened_once_with_its_facts(monkeypatch: pytest.MonkeyPatch):
    answering(monkeypatch)
    monkeypatch.setattr(module, "make_runtime", lambda tier, number: None)
    monkeypatch.setenv("FRINK_CUDA_TIER", "simt")
    monkeypatch.setattr(module, "make_body", lambda tier, info, runtime, invariant: SimtBody(runtime, None))
    device = open_device(0)
    assert open_device(0) is device
    assert device.info == H200
    assert str(device) == "NVIDIA H200, simt tier"


def opening(monkeypatch: pytest.MonkeyPatch, modules: tuple[str, ...] = ()) -> tuple[list[int], list[str]]:
    """A driver that is there, and a device that can be opened: (contexts made, what happened in which order)."""
    answering(monkeypatch)
    found, order, contexts = module.driver.query_driver(version=False), [], []

    def query(version: bool) -> driver.Driver:
        for thread in threading.enumerate():
            if thread.name == "frink-imports":
                order.append("imports beside the driver")
        return found

    monkeypatch.setattr(module.driver, "is_installed", lambda: True)
    monkeypatch.setattr(module.driver, "query_driver", query)
    monkeypatch.setattr(module.driver, "make_context", contexts.append)
    monkeypatch.setattr(module, "_TENSOR_MODULES", modules)
    monkeypatch.setattr(module, "make_runtime", lambda tier, number: order.append("runtime"))
    monkeypatch.setattr(module, "make_body", lambda tier, info, runtime, invariant: SimtBody(runtime, None))
    return contexts, order


def ended(name: str) -> None:
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(10)


def test_modules_are_imported_while_the_driver_starts(monkeypatch: pytest.MonkeyPatch):
    """And are there before anybody needs them; the context is made in a thread too."""
    contexts, order = opening(monkeypatch, ("slow", "broken", "never"))

    def slow(name: str) -> None:
        if name == "broken":
            raise ImportError("what is wrong is said where it is needed")
        time.sleep(0.1)
        order.append(name)

    monkeypatch.setattr(module, "import_module", slow)
    monkeypatch.setenv("FRINK_CUDA_TIER", "mma")
    module._open(0)
    assert order == ["imports beside the driver", "slow", "runtime"]
    ended("frink-context")
    assert contexts == [0]


def test_the_oldest_tier_imports_and_makes_nothing_ahead(monkeypatch: pytest.MonkeyPatch):
    """Its modules and its context are numba's."""
    contexts, order = opening(monkeypatch, ("never",))
    monkeypatch.setattr(module, "import_module", lambda name: order.append(name))
    monkeypatch.setenv("FRINK_CUDA_TIER", "simt")
    module._open(0)
    assert order == ["runtime"]
    assert contexts == []


def test_without_a_driver_nothing_is_imported(monkeypatch: pytest.MonkeyPatch):
    opening(monkeypatch, ("never",))
    monkeypatch.setattr(module.driver, "is_installed", lambda: False)
    monkeypatch.setattr(module, "import_module", lambda name: pytest.fail(name))
    assert module._import_ahead() is None


def test_device_names(monkeypatch: pytest.MonkeyPatch):
    """cuda is the first visible device, cuda:N names one; anything else is refused."""
    monkeypatch.setattr("frink_numba.cuda.backend.open_device", fake_device)
    assert create([]).name == "cuda"
    second = create([], device="1")
    assert (second.name, second.device.info.number) == ("cuda:1", 1)
    for wrong in ("", "one", "-1", "0x1"):
        with pytest.raises(BackendUnavailable, match="is not a device number"):
            create([], device=wrong)


@pytest.mark.parametrize("fails", [False, True])
def test_the_context_is_made_beside_what_follows(fails: bool, monkeypatch: pytest.MonkeyPatch):
    """In a thread that ends by itself; a failure is the first step's to say."""
    device = fake_device()
    if fails:
        device.runtime.broken = ILLEGAL_ADDRESS
    monkeypatch.setattr("frink_numba.cuda.backend.open_device", lambda number: device)
    made = create([])  # else it is closed at once
    for thread in threading.enumerate():
        if thread.name == "frink-context":
            assert not thread.daemon
            thread.join()
    assert (device._workspace is None) is fails
    made.close()
    assert device.problem is None


def test_probing_here_neither_crashes_nor_imports_numba():
    """On this machine, whatever it has: an answer or one line, and without a driver no numba."""
    code = (
        "import sys, time\n"
        "from frink_numba.cuda.backend import create\n"
        "from frink_numba.errors import BackendUnavailable\n"
        "start = time.perf_counter()\n"
        "try:\n"
        "    create([])\n"
        "except BackendUnavailable as error:\n"
        "    assert '\\n' not in str(error) and str(error), error\n"
        "    assert not error.absent or 'numba' not in sys.modules\n"
        "    assert not error.absent or time.perf_counter() - start < 1, 'slow'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_sticky_errors_end_the_device(monkeypatch: pytest.MonkeyPatch):
    """R21, field report: a poisoned context. The first cause stays the reason."""
    device = fake_device()
    device.runtime.broken = ILLEGAL_ADDRESS
    text = device.failed(FakeCudaError("launch failed"))
    assert text == f"device lost: FakeCudaError: launch failed (FakeCudaError: {ILLEGAL_ADDRESS})"
    assert device.problem == text
    assert device.runtime.abandoned
    with pytest.raises(DeviceError, match="device lost"), device.working():
        pass
    monkeypatch.setattr(module, "_opened", {0: device})
    assert str(reason_of()) == text


def test_a_context_that_cannot_be_entered_is_lost():
    device = fake_device()

    def active():
        raise FakeCudaError("CUDA_ERROR_DEVICE_UNAVAILABLE")

    device.runtime.active = active
    assert device.failed(FakeCudaError("first")).startswith("device lost: FakeCudaError: first (")


def test_running_out_of_memory_lowers_the_budget_to_what_is_held():
    device = fake_device(memory_bytes=1000)
    with device.working():
        device.workspace.arena.reserve(300, 0)
    assert device.memory.bytes() == 900
    assert device.failed(FakeCudaError(OUT_OF_MEMORY)) == f"out of memory: FakeCudaError: {OUT_OF_MEMORY}"
    assert device.memory.bytes() == 300
    assert device.problem is None


def test_a_kernel_that_does_not_compile_is_not_tried_again():
    device = fake_device()
    assert device.failed(LinkerError("ptxas\nfailed")) == "kernels do not compile here: LinkerError: ptxas failed"
    assert device.problem == "kernels do not compile here: LinkerError: ptxas failed"


def test_any_other_failure_leaves_the_device_in_use():
    device = fake_device()
    assert device.failed(FakeCudaError("CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES")).startswith("FakeCudaError: CUDA_ERROR")
    assert device.problem is None
    assert not device.runtime.abandoned
    assert device.memory.bytes() == int(0.9 * (1 << 34))


def test_one_thread_at_a_time():
    """Two threads under `working` take turns; one thread may enter it twice."""
    device, inside, worst = fake_device(), [], []

    def work() -> None:
        for _ in range(20):
            with device.working(), device.working():
                inside.append(1)
                worst.append(len(inside))
                time.sleep(0.0005)
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(worst) == 1
    assert len(worst) == 80


def _in_child(device, queue) -> None:
    try:
        with device.working():
            queue.put("entered")
    except DeviceError as error:
        queue.put(str(error))
    queue.put(len(device.runtime.calls))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_is_told_so_before_any_call():
    """Field report: CUDA does not survive a fork. A named error, at once, and not one call to the device."""
    device = fake_device()
    with device.working():
        device.runtime.stream()
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=_in_child, args=(device, queue))
    child.start()
    child.join(20)
    assert child.exitcode == 0
    assert queue.get().startswith(f"this process was forked from process {os.getpid()} after CUDA was used there")
    assert queue.get() == 1
    assert device.problem is None  # the parent goes on


def test_a_process_forked_after_the_driver_was_asked_is_told_so(monkeypatch: pytest.MonkeyPatch):
    """cuInit alone is enough to break children; the driver is not even asked again."""
    answering(monkeypatch)
    visible_devices()
    monkeypatch.setattr(module.driver, "query_driver", lambda version: pytest.fail("asked"))
    parent = os.getpid()
    monkeypatch.setattr(module.os, "getpid", lambda: parent + 1)
    assert str(reason_of()).startswith(f"this process was forked from process {parent} after CUDA was used")
