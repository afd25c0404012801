"""Compile kernels to machine code ahead of their launch, without a GPU, and keep it on disk.

numba-cuda makes LTO-IR of a Python function; nvJitLink links it with whole-program optimization (the only way in which
ptxas heeds `setmaxnreg`) to a cubin, which loads in milliseconds and needs no newer driver. The folder
`FRINK_CACHE_DIR`/cubins holds one file per kernel, keyed by everything that can change it: the kernel's name and
parameters, the source of the modules that make it (source_digest.py), the versions of the compilers, the target and the
options. Files are written whole and renamed into place, so that processes share the folder safely; a damaged file is
compiled again.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from frink_numba import settings
from frink_numba.kernels.source_digest import source_digest
from frink_numba.log import warn_once

_PACKAGES = ("numba", "numba-cuda", "llvmlite", "cuda-core", "nvidia-nvjitlink", "nvidia-nvvm", "nvidia-cuda-cccl")


@dataclass(frozen=True, slots=True)
class Target:
    """What code is for: "90a" is sm_90a, whose instructions no other architecture has."""

    arch: str

    @property
    def capability(self) -> tuple[Any, ...]:
        """The compute capability as numba-cuda takes it: (9, 0, "a")."""
        digits = self.arch.rstrip("af")
        suffix = self.arch[len(digits) :]
        return (int(digits[:-1]), int(digits[-1]), suffix) if suffix else (int(digits[:-1]), int(digits[-1]))


@dataclass(frozen=True, slots=True)
class Source:
    """A kernel to compile. `name` holds every parameter that shapes it; `build` gives (function, numba signature).

    The kernel is compiled for blocks of `threads`, of which `blocks` fit a multiprocessor's registers.
    """

    name: str
    build: Callable[[], tuple[Any, Any]]
    threads: int
    blocks: int = 1


@dataclass(frozen=True, slots=True)
class Cubin:
    """Machine code and what ptxas says of it:

    registers a thread, bytes spilled, lines that tell of lost speed (C75xx).
    """

    code: bytes
    entry: str
    registers: int
    spilled: int
    remarks: tuple[str, ...] = ()


def compile_kernel(source: Source, target: Target) -> Cubin:
    """Compile now, without the cache. Seconds."""
    from cuda.core import Linker, LinkerOptions, ObjectCode
    from numba import cuda

    function, signature = source.build()
    bounds = (source.threads, source.blocks)
    intermediate = cuda.compile(
        function, signature, cc=target.capability, device=False, abi="numba", output="ltoir", launch_bounds=bounds
    )[0]
    options = LinkerOptions(arch=f"sm_{target.arch}", link_time_optimization=True, ptxas_options=["-v"])
    linker = Linker(ObjectCode.from_ltoir(intermediate), options=options)
    code = bytes(linker.link("cubin").code)
    log = f"{linker.get_info_log()}\n{linker.get_error_log()}"
    entries = set(re.findall(rb"\.text\.(_Z[^\x00]+)\x00", code))
    if len(entries) != 1:
        raise RuntimeError(f"{source.name}: expected one kernel in the cubin, found {len(entries)}")
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", log)]
    spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill", log))
    remarks = tuple(line.strip() for line in log.splitlines() if "C75" in line)
    return Cubin(code, entries.pop().decode(), max(registers, default=0), spilled, remarks)


def load(source: Source, target: Target) -> Cubin:
    """The kernel's code, from the folder when it is there, else compiled and kept. A warm call imports no compiler."""
    cubin = find(source, target)
    if cubin is None:
        cubin = compile_kernel(source, target)
        _write(cache_path(source, target), cubin)
    return cubin


def find(source: Source, target: Target) -> Cubin | None:
    """The kernel's code from the folder; None when it is not there, or damaged."""
    return _read(cache_path(source, target))


def cache_path(source: Source, target: Target) -> Path:
    shape = [source.name, str(source.threads), str(source.blocks), target.arch]
    parts = [*shape, _toolchain(), source_digest(source.build)]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return Path(settings.get("FRINK_CACHE_DIR")) / "cubins" / f"{digest}.cubin"


@functools.cache
def _toolchain() -> str:
    versions = []
    for package in _PACKAGES:
        try:
            versions.append(f"{package}={metadata.version(package)}")
        except metadata.PackageNotFoundError:
            versions.append(f"{package}=none")
    return " ".join(versions)


def _read(path: Path) -> Cubin | None:
    """The cubin in a file, or None when there is none or it is damaged."""
    try:
        head, _, code = path.read_bytes().partition(b"\n")
        facts = json.loads(head)
        if facts.pop("sha256") != hashlib.sha256(code).hexdigest():
            return None
        return Cubin(code=code, **{**facts, "remarks": tuple(facts["remarks"])})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: Path, cubin: Cubin) -> None:
    facts = asdict(cubin)
    code = facts.pop("code")
    facts["sha256"] = hashlib.sha256(code).hexdigest()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(json.dumps(facts).encode() + b"\n" + code)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        warn_once(f"compiled kernels cannot be kept in {path.parent}: {error.strerror or error}")
