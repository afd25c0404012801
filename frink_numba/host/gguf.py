"""A GGUF model, in one file or split over several: metadata, and weights as views of the mapped bytes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType

import numpy as np

from frink_numba.errors import GgufError
from frink_numba.host.gguf_format import shown
from frink_numba.host.gguf_metadata import Metadata
from frink_numba.host.gguf_reader import GgufPart, TensorInfo
from frink_numba.host.gguf_split import merged_values, open_parts
from frink_numba.quant import QuantMatrix

__all__ = ["GgufFile", "Metadata", "TensorInfo"]


class GgufFile:
    """An open model: `GgufFile.open(path)`, then `metadata`, `tensors`, `matrix` and `vector`; a context manager.

    Nothing but the header is read at opening; the tensors' bytes come in page by page as they are used. Closing
    releases the mapping. Matrices handed out before stay valid: they hold it until the last of them is gone.
    """

    def __init__(self, parts: list[GgufPart]) -> None:
        self._parts = parts
        self._metadata = Metadata(merged_values(parts))
        self._tensors = MappingProxyType({name: info for part in parts for name, info in part.tensors.items()})

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> GgufFile:
        """Open the model at `path`; any part of a split model opens all of it.

        GgufError names the file, the key or tensor, and what is wrong; ModelNotFoundError a file that is not there.
        """
        return cls(open_parts(Path(path)))

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files of the model, in order."""
        return tuple(part.path for part in self._parts)

    @property
    def version(self) -> int:
        """The format's version, 2 or 3, of the first file."""
        return self._parts[0].version

    @property
    def metadata(self) -> Metadata:
        """Keys and values; strings and arrays are decoded at the first access."""
        return self._metadata

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Kind, shape and place of every tensor, in the order of the files."""
        return self._tensors

    def matrix(self, name: str) -> QuantMatrix:
        """The two-dimensional tensor `name` as a view of its mapped bytes; GgufError when there is no such tensor."""
        info = self._info(name)
        if len(info.shape) != 2:
            raise GgufError(f"{self._where(info)} has shape {list(info.shape)}; a matrix has two dimensions")
        rows, cols = info.shape
        return QuantMatrix(info.kind, self._bytes(info).reshape(rows, -1), rows, cols)

    def matrices(self, name: str) -> tuple[QuantMatrix, ...]:
        """The three-dimensional tensor `name` as views of its matrices; GgufError when there is no such tensor."""
        info = self._info(name)
        if len(info.shape) != 3:
            raise GgufError(
                f"{self._where(info)} has shape {list(info.shape)}; a stack of matrices has three dimensions"
            )
        count, rows, cols = info.shape
        data = self._bytes(info).reshape(count, rows, -1)
        return tuple(QuantMatrix(info.kind, part, rows, cols) for part in data)

    def vector(self, name: str) -> np.ndarray:
        """The one-dimensional F32, F16 or BF16 tensor `name` as a float32 copy; GgufError for any other."""
        info = self._info(name)
        if len(info.shape) != 1:
            raise GgufError(f"{self._where(info)} has shape {list(info.shape)}; a vector has one dimension")
        data = self._bytes(info)
        if info.kind.name == "F32":
            return data.view("<f4").astype(np.float32)
        if info.kind.name == "F16":
            return data.view("<f2").astype(np.float32)
        if info.kind.name == "BF16":
            return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)
        raise GgufError(f"{self._where(info)} is of kind {info.kind}; a vector is read from F32, F16 or BF16")

    def close(self) -> None:
        """Release the mapping (once the last matrix is gone, if any is out); may be called twice."""
        for part in self._parts:
            part.close()

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"GgufFile({str(self.paths[0])!r}: {len(self._tensors)} tensors, {len(self._metadata)} keys)"

    def _info(self, name: str) -> TensorInfo:
        info = self._tensors.get(name)
        if info is None:
            raise GgufError(f"{self.paths[0]}: has no tensor {shown(name)}; it has {len(self._tensors)} others")
        return info

    def _bytes(self, info: TensorInfo) -> np.ndarray:
        return self._parts[info.part].read(info.offset, info.offset + info.nbytes)

    def _where(self, info: TensorInfo) -> str:
        return f"{self.paths[info.part]}: tensor {shown(info.name)}"
