"""Functions that numba compiles for this CPU, kept on disk as machine code: only the first process compiles them.

<FRINK_CACHE_DIR>/cpu/NAME-DIGEST.o    one function: a digest, a newline, and a native object file

The digest in the name covers everything that the code depends on, so that a file is never out of date. numba's own
cache is not used: its folder is one setting for the whole process, it misses changes in imported modules, and it takes
half a second to start. A process that finds its files here imports llvmlite alone, and is ready in some 50 ms.
Files are placed whole, and any process may write the same one. A folder that cannot be written means compiling anew.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from frink_numba import settings
from frink_numba.errors import SettingError

_HERE = Path(__file__).parent


class CannotCompile(Exception):
    """numba is missing, or it cannot compile for this processor: the message says why."""


class CompiledFunction:
    """A function of 64-bit integers without a result. Calling it lets go of the GIL."""

    def __init__(self, code: bytes, parameters: int) -> None:
        import llvmlite.binding as llvm

        symbol, _, machine_code = code.partition(b"\n")
        self._engine = _loader()  # it owns the code
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(machine_code))
        self._engine.finalize_object()
        self.address: int = self._engine.get_function_address(symbol.decode())
        # numba's convention: where to put the result and an error come first, and a status comes back.
        kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *(ctypes.c_int64,) * parameters)
        self._function = kind(self.address)
        self._slot = ctypes.c_void_p()
        self._unused = ctypes.addressof(self._slot)

    def __call__(self, *arguments: int) -> None:
        self._function(self._unused, self._unused, *arguments)


def compiled(
    name: str, make: Callable[[], Callable[..., None]], parameters: int, sources: Sequence[str]
) -> CompiledFunction:
    """The function that `make` gives, which takes `parameters` 64-bit integers, as machine code.

    `name` tells it from the other functions made from `sources`, files of this folder; `make` is called only when the
    code is not on disk. CannotCompile says why there is none.
    """
    digest = _digest(name, sources)
    try:
        path = Path(settings.get("FRINK_CACHE_DIR")) / "cpu" / f"{name}-{digest}.o"
    except SettingError:  # no home folder, as in some containers
        return CompiledFunction(_compile(make, parameters), parameters)
    code = _read(path)
    if code is None:
        code = _compile(make, parameters)
        _write(path, code)
    return CompiledFunction(code, parameters)


@cache
def _target() -> tuple[str, str]:
    """The processor's name and its features, as LLVM has them; CannotCompile when its code could not be run."""
    from importlib import metadata  # who computes nothing on the host does without it

    try:
        import llvmlite.binding as llvm

        metadata.version("numba")
    except (ImportError, metadata.PackageNotFoundError):
        raise CannotCompile('numba is not installed: pip install "frink-numba[fast]"') from None
    if sys.byteorder != "little":
        raise CannotCompile("this processor is big-endian")
    features = llvm.get_host_cpu_features()
    if platform.machine().lower() in ("x86_64", "amd64", "i386", "i686") and not features.get("f16c"):
        # LLVM's way without the instruction calls a function that is not there.
        raise CannotCompile("this processor has no instruction that converts float16 (F16C)")
    return llvm.get_host_cpu_name(), features.flatten()


def _loader() -> Any:
    """What loads an object file: one for each, so that no two can clash."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(jit=True, codemodel="jitdefault")
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)


def _compile(make: Callable[[], Callable[..., None]], parameters: int) -> bytes:
    """The function's symbol, a newline, and an object file with nothing but its code."""
    from numba import config, njit, types

    if config.DISABLE_JIT or config.CPU_NAME or config.CPU_FEATURES or not config.ENABLE_AVX:
        raise CannotCompile("numba is set up for another processor than this, or not to compile (NUMBA_*)")
    options = {"nogil": True, "error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    dispatcher = njit(**options)(make())
    dispatcher.compile((types.int64,) * parameters)
    (result,) = dispatcher.overloads.values()
    _, form, (machine_code, _) = result.library.serialize_using_object_code()
    if form != "object":
        raise CannotCompile(f"this numba gives {form!r} instead of an object file")
    return result.fndesc.llvm_func_name.encode() + b"\n" + machine_code


def _digest(name: str, sources: Sequence[str]) -> str:
    digest = hashlib.sha256(f"{name}\0{_toolchain()}".encode())
    for source in (*sources, "compiled.py"):
        digest.update(b"\0" + _HERE.joinpath(source).read_bytes())
    return digest.hexdigest()[:32]


@cache
def _toolchain() -> str:
    from importlib import metadata

    versions = (sys.implementation.cache_tag, metadata.version("numba"), metadata.version("llvmlite"))
    return repr((*versions, platform.system(), *_target()))


def _read(path: Path) -> bytes | None:
    """What `_write` wrote; None when there is none, or when the file is damaged."""
    try:
        digest, _, code = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    return code if digest == hashlib.sha256(code).hexdigest().encode() else None


def _write(path: Path, code: bytes) -> None:
    """Keep the code, whole or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(code).hexdigest().encode() + b"\n" + code)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError:  # a full disk, a read-only folder: the next process compiles anew
        return
