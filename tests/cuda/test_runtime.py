"""Sorting what CUDA's layers raise, and a runtime that is only made when it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

from frink_numba.cuda.runtime import compile_failed, one_line, out_of_memory, simulated
from frink_numba.errors import DeviceError, SettingError
from tests.cuda.fake_gpu import LinkerError


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (MemoryError(), True),
        (RuntimeError("[2] Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY"), True),
        (DeviceError("loading a kernel failed: CUDA_ERROR_OUT_OF_MEMORY (2)"), True),
        (RuntimeError("CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_memory_that_ran_out_is_known_by_cudas_name_for_it(error: Exception, answer: bool):
    assert out_of_memory(error) is answer


def test_compile_errors_are_known_by_their_classes():
    """Those of numba and of its linker, also by a base class."""

    class NvvmError(Exception):
        pass

    class Derived(NvvmError):
        pass

    assert compile_failed(LinkerError("x"))
    assert compile_failed(Derived("x"))
    assert not compile_failed(RuntimeError("NvvmError"))


def test_the_real_classes_are_among_them():
    """The names in the table are those that the installed numba-cuda raises."""
    errors = pytest.importorskip("numba.cuda.cudadrv.error")
    core = pytest.importorskip("numba.core.errors")
    linker = pytest.importorskip("numba.cuda.cudadrv.driver")
    assert compile_failed(errors.NvvmError("x"))
    assert compile_failed(errors.NvrtcCompilationError("x"))
    assert compile_failed(core.TypingError("x"))
    assert compile_failed(linker.LinkerError("x"))
    assert not compile_failed(errors.CudaDriverError("x"))


def test_an_error_in_one_line():
    assert one_line(ValueError("a\n  b\tc")) == "ValueError: a b c"
    assert one_line(KeyError()) == "KeyError"


def test_the_simulator_is_known_by_numbas_own_variable(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "1")
    assert simulated()
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "0")
    assert not simulated()
    monkeypatch.delenv("NUMBA_ENABLE_CUDASIM")
    assert not simulated()
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "perhaps")
    with pytest.raises(SettingError):
        simulated()


def test_the_module_imports_no_numba():
    """Only a runtime that is made does."""
    code = "import sys, frink_numba.cuda.runtime, frink_numba.cuda.backend; assert 'numba' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
