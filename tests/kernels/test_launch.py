"""The shelf of loaded kernels: what a device can have, each loaded once, all given back."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import pytest

from frink_numba.errors import BackendUnavailable, DeviceError
from frink_numba.kernels import launch
from frink_numba.kernels.compile_apart import Pending
from frink_numba.kernels.cubins import Cubin, Source, Target
from frink_numba.kernels.launch import KernelShelf, LoadedKernel

ARGUMENTS = (("x", "u64"), ("n", "u32"))


class Loaded:
    """Stands in for a LoadedKernel."""

    made: ClassVar[list[Loaded]] = []

    def __init__(self, cubin: Any, arguments: list[str], threads: int, shared: int, **how: Any) -> None:
        self.facts = (cubin, arguments, threads, shared, how)
        self.closed, self.settled = 0, False
        self.made.append(self)

    def load(self) -> None:
        if self.facts[0][1] == "broken":
            raise DeviceError("no room for a module")
        self.settled = True

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loaded, "made", [])
    monkeypatch.setattr(launch, "LoadedKernel", Loaded)
    monkeypatch.setattr(launch, "find_cubin", lambda source, target: (source.name, target))


stand_ins = pytest.mark.usefixtures("_stand_ins")


def source(name: str = "kernel", threads: int = 64) -> Source:
    return Source(name, lambda: (None, None), threads)


@pytest.mark.parametrize(
    ("capability", "tier", "arch", "overlap"),
    [
        ((9, 0), "wgmma", "90a", True),
        ((9, 0), "mma", "90", True),
        ((9, 0), None, "90a", True),
        ((8, 6), None, "86", False),
        ((12, 0), "mma", "120", True),
    ],
)
def test_the_target_of_a_device(capability: tuple[int, int], tier: str | None, arch: str, overlap: bool) -> None:
    shelf = KernelShelf(capability, tier)
    assert shelf.target == Target(arch)
    assert shelf.overlap is overlap


@pytest.mark.parametrize(
    ("capability", "tier"), [((8, 9), "wgmma"), ((10, 0), "wgmma"), ((7, 5), "mma"), ((7, 5), None)]
)
def test_what_a_device_lacks(capability: tuple[int, int], tier: str | None) -> None:
    with pytest.raises(BackendUnavailable, match=r"no tensor-core kernels of the tier .* capability \d+\.\d"):
        KernelShelf(capability, tier)


@stand_ins
def test_a_kernel_is_loaded_once_whoever_asks() -> None:
    shelf = KernelShelf((9, 0))
    got: list[Any] = []
    threads = [
        threading.Thread(target=lambda: got.append(shelf.kernel(source(), ARGUMENTS, 48, cluster=2, overlap=True)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(Loaded.made) == 1
    assert all(kernel is Loaded.made[0] for kernel in got)
    cubin = ("kernel", Target("90a"))
    assert Loaded.made[0].facts == (cubin, ["u64", "u32"], 64, 48, {"cluster": 2, "overlap": True})


@stand_ins
def test_kernels_are_told_apart_by_all_that_they_are_loaded_with() -> None:
    shelf = KernelShelf((9, 0))
    made = {
        shelf.kernel(source(), ARGUMENTS),
        shelf.kernel(source("other"), ARGUMENTS),
        shelf.kernel(source(threads=128), ARGUMENTS),
        shelf.kernel(source(), ARGUMENTS, 16),
        shelf.kernel(source(), ARGUMENTS, cluster=2),
        shelf.kernel(source(), ARGUMENTS, overlap=True),
    }
    assert len(made) == len(Loaded.made) == 6


@stand_ins
def test_closing_unloads_all_and_may_come_twice() -> None:
    shelf = KernelShelf((8, 0))
    first = shelf.kernel(source(), ARGUMENTS)
    shelf.close()
    shelf.close()
    assert first.closed == 1  # type: ignore[attr-defined]
    assert shelf.kernel(source(), ARGUMENTS) is not first


@stand_ins
def test_what_is_not_on_disk_is_compiled_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel comes before its code; settling loads all."""
    monkeypatch.setattr(launch, "find_cubin", lambda source, target: None)
    monkeypatch.setattr(launch.QUEUE, "begin", lambda source, target: ("pending", source.name, target))
    shelf = KernelShelf((9, 0))
    made: Any = [shelf.kernel(source(), ARGUMENTS), shelf.kernel(source("other"), ARGUMENTS)]
    assert [kernel.facts[0][:2] for kernel in made] == [("pending", "kernel"), ("pending", "other")]
    assert not any(kernel.settled for kernel in made)
    shelf.settle()
    assert all(kernel.settled for kernel in made)


@stand_ins
def test_a_kernel_that_cannot_be_loaded_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that do not need it are not to fail with it; who asks again gets another try."""
    monkeypatch.setattr(launch, "find_cubin", lambda source, target: None)
    monkeypatch.setattr(launch.QUEUE, "begin", lambda source, target: ("pending", source.name, target))
    shelf = KernelShelf((9, 0))
    broken, other = (shelf.kernel(source(name), ARGUMENTS) for name in ("broken", "other"))
    with pytest.raises(DeviceError, match="no room"):
        shelf.settle()
    shelf.settle()
    assert shelf.kernel(source("other"), ARGUMENTS) is other
    assert shelf.kernel(source("broken"), ARGUMENTS) is not broken


class Driver:
    """The driver calls that loading takes, each told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from cuda.bindings import driver

        self.calls: list[str] = []
        answers = {"cuModuleLoadData": ["module"], "cuModuleGetFunction": ["function"], "cuFuncSetAttribute": [],
                   "cuModuleUnload": []}  # fmt: skip
        for name, given in answers.items():
            monkeypatch.setattr(driver, name, self._call(name, given))

    def _call(self, name: str, given: list[Any]) -> Any:
        def call(*_: Any) -> tuple[Any, ...]:
            self.calls.append(name)
            return 0, *given

        return call


class Waiting(Pending):
    """A kernel that is compiled when it is waited for."""

    def __init__(self) -> None:
        self.waited = self.withdrawn = 0

    def withdraw(self) -> None:
        self.withdrawn += 1

    def cubin(self) -> Cubin:
        self.waited += 1
        return Cubin(b"code", "entry", 32, 0)


def test_code_is_loaded_when_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Driver(monkeypatch).calls
    assert LoadedKernel(Cubin(b"code", "entry", 32, 0), ["u64"], 64, 0).function == "function"
    assert calls == ["cuModuleLoadData", "cuModuleGetFunction"]
    calls.clear()
    pending = Waiting()
    kernel = LoadedKernel(pending, ["u64"], 64, 100 << 10, overlap=True)
    assert not calls
    assert not pending.waited
    assert kernel.load() == kernel.load() == kernel.function == "function"
    assert pending.waited == 1
    assert calls == ["cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute", "cuFuncSetAttribute"]
    kernel.close()
    kernel.close()
    assert calls[4:] == ["cuModuleUnload"]
    with pytest.raises(DeviceError, match="unloaded"):
        kernel.load()


def test_closing_what_was_never_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, pending = Driver(monkeypatch).calls, Waiting()
    kernel = LoadedKernel(pending, ["u64"], 64, 0)
    kernel.close()
    kernel.close()
    with pytest.raises(DeviceError, match="unloaded"):
        kernel.load()
    assert not calls
    assert (pending.waited, pending.withdrawn) == (0, 1)
