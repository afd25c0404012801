"""Products of weights with one to four columns straight from the quantized bytes, where numba is installed.

A product with a single column is bound by the bytes of its weights: 4 to 8 bits an element here, 32 in NumPy. The
weights take no memory beyond the mapped file. The kernels are in thin_kernels.py, imported where they are compiled.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from enum import IntEnum
from functools import cache
from typing import Any, TypeAlias

import numpy as np

from frink_numba.errors import FrinkError, ShapeError
from frink_numba.host.compiled import CannotCompile, CompiledFunction, compiled
from frink_numba.host.team import team
from frink_numba.log import say_once, warn_once
from frink_numba.quant import QuantMatrix
from frink_numba.registry import describe

FEW = 4  # columns at most
THIN_KINDS = frozenset({"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "F16", "BF16"})

_RUN = 32  # elements that are expanded at a time: a row is a whole number of runs
_LEAST_ELEMENTS = 1 << 16  # of a set: smaller ones are as fast in NumPy, and need no compiled code
_CHUNK = 1 << 15  # elements that a thread takes at a time: a few microseconds
_ELEMENTS_PER_THREAD = 1 << 17  # below twice this a second thread is not worth its coordination
_SOURCES = ("lanes.py", "thin_blocks.py", "thin_kernels.py", "thin_products.py")

_FLOAT32 = np.dtype(np.float32)  # compared with at every product, where a type would have to be looked up

Matrices: TypeAlias = tuple[QuantMatrix, ...]


class Job(IntEnum):
    """The 64-bit integers that a kernel is given."""

    NEXT = 0  # the first row that no thread has taken
    CHUNK = 1  # rows taken at a time
    X = 2  # address of float32 x [cols], or [FEW, cols]
    OUT = 3  # address of float32 out [rows], or [rows, FEW]
    BLOCKS = 4  # of a row; 32 elements are a block of the kinds without blocks
    SEGMENTS = 5  # matrices that are stacked
    FIRST_SEGMENT = 6  # of each its address, its first row, and the row after its last


def thin_set(matrices: Matrices) -> ThinSet | None:
    """`matrices` made ready, or None when they are NumPy's to multiply, or to refuse.

    That is: kinds, widths or sizes that are not served here, no numba, or none that works on this processor.
    """
    if any(m.kind.name not in THIN_KINDS or m.cols % _RUN or m.cols != matrices[0].cols for m in matrices):
        return None
    if sum(matrix.rows * matrix.cols for matrix in matrices) < _LEAST_ELEMENTS or not available():
        return None
    return ThinSet(matrices)


@cache
def available() -> bool:
    """Whether products can be compiled, or were; says once why not."""
    try:
        team()
    except CannotCompile as error:
        say_once(logging.INFO, f"decoding runs in NumPy: {error}")
        return False
    except FrinkError:
        raise
    except Exception as error:  # numba's and LLVM's have no common base
        warn_once(f"decoding runs in NumPy: numba failed to compile ({describe(error)})")
        return False
    return True


class ThinSet:
    """Matrices stacked row under row. It keeps a reference to them."""

    def __init__(self, matrices: Matrices) -> None:
        self._cols = matrices[0].cols
        self._parts: list[_Part] = []
        for matrix in matrices:
            if self._parts and self._parts[-1].kind == matrix.kind.name:
                self._parts[-1] = _Part((*self._parts[-1].matrices, matrix), self._parts[-1].start)
            else:
                self._parts.append(_Part((matrix,), self._parts[-1].stop if self._parts else 0))
        self._rows = self._parts[-1].stop

    def product(self, x: np.ndarray, out: np.ndarray) -> np.ndarray:
        """out = W x for float32 columns `x` [cols, n], `out` float32 [rows, n], n <= 4.

        ShapeError for other shapes and types: compiled code works with addresses, and checks nothing itself.
        """
        n = x.shape[1] if x.ndim == 2 else 0
        if not 1 <= n <= FEW or x.shape[0] != self._cols or out.shape != (self._rows, n):
            raise ShapeError(
                f"{self._rows} x {self._cols} weights do not take {list(x.shape)} to {list(out.shape)}, "
                f"or not in 1 to {FEW} columns"
            )
        if x.dtype != _FLOAT32 or out.dtype != _FLOAT32:
            raise ShapeError(f"products of float32 columns, not of {x.dtype} to {out.dtype}")
        if n == 1 and x.flags.c_contiguous and out.flags.c_contiguous:
            for part in self._parts:
                part.run(part.one, x, out[part.start : part.stop])
            return out
        columns = np.zeros((FEW, self._cols), np.float32)
        columns[:n] = x.T
        rows = np.empty((self._rows, FEW), np.float32)
        for part in self._parts:
            part.run(_kernel(part.kind, "few"), columns, rows[part.start : part.stop])
        out[...] = rows[:, :n]
        return out


class _Part:
    """Neighbours of one kind: rows `start` to `stop` of a set."""

    def __init__(self, matrices: Matrices, start: int) -> None:
        kind, cols = matrices[0].kind, matrices[0].cols
        rows = sum(matrix.rows for matrix in matrices)
        self.kind, self.matrices, self.start, self.stop = kind.name, matrices, start, start + rows
        self.one = _kernel(kind.name, "one")
        job = [0] * Job.FIRST_SEGMENT
        job[Job.CHUNK] = max(1, _CHUNK // cols)
        job[Job.BLOCKS] = cols // max(kind.block, _RUN)
        job[Job.SEGMENTS] = len(matrices)
        end = 0
        for matrix in matrices:
            job += [_address(matrix.data), end, end + matrix.rows]
            end += matrix.rows
        self._job = (ctypes.c_int64 * len(job))(*job)
        self._threads = rows * cols // _ELEMENTS_PER_THREAD

    def run(self, kernel: CompiledFunction, x: np.ndarray, out: np.ndarray) -> None:
        job = type(self._job).from_buffer_copy(self._job)  # several threads may be here
        job[2], job[3] = _address(x), _address(out)  # Job.X, Job.OUT: enumerations are slow
        team().run(kernel, ctypes.addressof(job), self._threads)


def _address(array: Any) -> int:
    """Of a C-contiguous array."""
    try:
        return ctypes.addressof(ctypes.c_byte.from_buffer(array))  # three times faster than what follows
    except TypeError:  # a read-only array
        address: int = array.__array_interface__["data"][0]
        return address


@cache
def _kernel(kind: str, columns: str) -> CompiledFunction:
    def make() -> Callable[[int], None]:
        from frink_numba.host import thin_blocks, thin_kernels

        kernel = thin_kernels.one_column if columns == "one" else thin_kernels.few_columns
        return kernel(thin_blocks.THIN_BLOCKS[kind])

    return compiled(f"{kind}-{columns}", make, 1, _SOURCES)
