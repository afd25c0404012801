"""Compiles kernels for GPUs that are not there: numba once, to LTO-IR, then nvJitLink for each architecture."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
_OLDEST = (7, 5)  # LTO-IR made for it links for every later architecture, as numba's own does on the device


@dataclass(frozen=True, slots=True)
class Usage:
    """What ptxas says of a kernel on one architecture; bytes of a thread's local memory, of a block's shared memory."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int


def missing_tools() -> str | None:
    """Why nothing can be compiled here, or None."""
    try:
        from cuda.core import Linker  # noqa: F401
        from cuda.pathfinder import load_nvidia_dynamic_lib

        for name in ("nvvm", "nvrtc", "nvJitLink"):
            load_nvidia_dynamic_lib(name)
    except Exception as error:
        return f'kernels cannot be compiled here, pip install "frink-numba[cu13]": {str(error).splitlines()[0]}'
    return None


@contextmanager
def _no_device_needed() -> Iterator[None]:
    """Device functions ask the current device for its target; without a device, answer for it."""
    from numba.cuda import dispatcher

    class Device:
        compute_capability = _OLDEST

    real = dispatcher.get_current_device
    dispatcher.get_current_device = lambda: Device
    try:
        yield
    finally:
        dispatcher.get_current_device = real


def compile_to_ltoir(kernel: Any, signature: Any) -> bytes:
    """LTO-IR of a kernel, with the launch bounds that it is declared with."""
    from numba import cuda

    bounds = kernel.targetoptions["launch_bounds"]
    with _no_device_needed():
        code, _ = cuda.compile(
            kernel.py_func,
            signature,
            cc=_OLDEST,
            device=False,
            abi="numba",
            output="ltoir",
            launch_bounds=bounds,
        )
    return code


def _link(ltoir: bytes, architecture: str) -> Usage:
    from cuda.core import Linker, LinkerOptions, ObjectCode

    options = LinkerOptions(arch=architecture, link_time_optimization=True, ptxas_options=["-v"])
    linker = Linker(ObjectCode.from_ltoir(ltoir), options=options)
    linker.link("cubin")
    log = linker.get_info_log()
    memory = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    registers = re.search(r"Used (\d+) registers", log)
    assert memory is not None, log
    assert registers is not None, log
    shared = re.search(r"(\d+) bytes smem", log)
    return Usage(int(registers[1]), *(int(part) for part in memory.groups()), int(shared[1]) if shared else 0)


def link(ltoir: bytes, architectures: Sequence[str] = ARCHITECTURES) -> dict[str, Usage]:
    """Link for each architecture, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(architectures, pool.map(lambda a: _link(ltoir, a), architectures), strict=True))


def ptx(ltoir: bytes) -> str:
    """The PTX that link-time optimization makes of it."""
    from cuda.core import Linker, LinkerOptions, ObjectCode

    options = LinkerOptions(arch="sm_90", link_time_optimization=True, ptx=True)
    return bytes(Linker(ObjectCode.from_ltoir(ltoir), options=options).link("ptx").code).decode()
