"""The shelf of loaded kernels: what a device can have, each loaded once, all given back."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import pytest

from frink_numba.errors import BackendUnavailable
from frink_numba.kernels import launch
from frink_numba.kernels.cubins import Source, Target
from frink_numba.kernels.launch import KernelShelf

ARGUMENTS = (("x", "u64"), ("n", "u32"))


class Loaded:
    """Stands in for a LoadedKernel."""

    made: ClassVar[list[Loaded]] = []

    def __init__(self, cubin: Any, arguments: list[str], threads: int, shared: int, **how: Any) -> None:
        self.facts = (cubin, arguments, threads, shared, how)
        self.closed = 0
        self.made.append(self)

    def close(self) -> None:
        self.closed += 1


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loaded, "made", [])
    monkeypatch.setattr(launch, "LoadedKernel", Loaded)
    monkeypatch.setattr(launch, "load_cubin", lambda source, target: (source.name, target))


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


def test_closing_unloads_all_and_may_come_twice() -> None:
    shelf = KernelShelf((8, 0))
    first = shelf.kernel(source(), ARGUMENTS)
    shelf.close()
    shelf.close()
    assert first.closed == 1  # type: ignore[attr-defined]
    assert shelf.kernel(source(), ARGUMENTS) is not first
