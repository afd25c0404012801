"""Write small GGUF models for tests, through the `gguf` package's own writer.

    write_gguf(
        tmp_path / "tiny.gguf",
        {"general.architecture": "llama", "llama.block_count": 2, "llama.rope.freq_base": 10000.0},
        {"token_embd.weight": quantize(embedding, "Q8_0"), "output_norm.weight": np.ones(64, np.float32)},
    )

How a metadata value is stored follows from its Python type:

    bool BOOL     int UINT32, INT32 if negative, UINT64 or INT64 if it does not fit     float FLOAT32     str STRING
    a NumPy scalar (np.uint16(3), np.float64(0.5))       its own type
    a NumPy array                                        ARRAY of its own type
    a list or tuple of str or bytes                      ARRAY of STRING (bytes: also what is not valid UTF-8)
    a list or tuple of int, float or bool                ARRAY of INT32, FLOAT32 or BOOL

A tensor is a NumPy array in NumPy's order (rows first; float32, float16, float64, int8 to int64), stored as it is, or a
QuantMatrix, whose bytes are stored under its kind: from `quantize`, or from random_blocks.random_matrix for the kinds
that the `gguf` package can only read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFValueType, GGUFWriter, quants
from gguf.constants import GGMLQuantizationType

from frink_numba.quant import KINDS, QuantMatrix

_NUMPY_TYPES = {
    "uint8": GGUFValueType.UINT8,
    "int8": GGUFValueType.INT8,
    "uint16": GGUFValueType.UINT16,
    "int16": GGUFValueType.INT16,
    "uint32": GGUFValueType.UINT32,
    "int32": GGUFValueType.INT32,
    "uint64": GGUFValueType.UINT64,
    "int64": GGUFValueType.INT64,
    "float32": GGUFValueType.FLOAT32,
    "float64": GGUFValueType.FLOAT64,
    "bool": GGUFValueType.BOOL,
}


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray | QuantMatrix],
    *,
    alignment: int | None = None,
    tensors_per_file: int = 0,
) -> list[Path]:
    """Write a version 3 model and return its files: `path`, or its parts when `tensors_per_file` splits it.

    `metadata` must hold "general.architecture". `alignment` adds "general.alignment". A model split by
    `tensors_per_file` is written to STEM-00001-of-0000N.gguf and so on beside `path`, all metadata in the first.
    """
    metadata = dict(metadata)
    writer = GGUFWriter(path, metadata.pop("general.architecture"), split_max_tensors=tensors_per_file)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    for key, value in metadata.items():
        writer.add_key_value(key, *_stored(value))
    for name, tensor in tensors.items():
        if isinstance(tensor, QuantMatrix):
            writer.add_tensor(name, tensor.data, raw_dtype=GGMLQuantizationType(tensor.kind.ggml_id))
        else:
            writer.add_tensor(name, np.asarray(tensor, order="C"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    files = writer.format_shard_names(path)
    writer.write_tensors_to_file()
    writer.close()
    return files


def quantize(weights: np.ndarray, kind: str) -> QuantMatrix:
    """float32 `weights` [rows, cols] as F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, TQ1_0, TQ2_0 or MXFP4.

    The kinds that the `gguf` package can write; `cols` must be a multiple of the kind's block.
    """
    rows, cols = weights.shape
    data = quants.quantize(np.ascontiguousarray(weights, dtype=np.float32), GGMLQuantizationType[kind])
    return QuantMatrix(KINDS[kind], data.view(np.uint8), rows, cols)


def _stored(value: Any) -> tuple[Any, GGUFValueType, GGUFValueType | None]:
    if isinstance(value, np.ndarray):
        return value.tolist(), GGUFValueType.ARRAY, _NUMPY_TYPES[value.dtype.name]
    if isinstance(value, np.generic):
        return value.item(), _NUMPY_TYPES[value.dtype.name], None
    if isinstance(value, list | tuple):
        return value, GGUFValueType.ARRAY, _item_type(value[0])
    if isinstance(value, bool):
        return value, GGUFValueType.BOOL, None
    if isinstance(value, int):
        narrow = GGUFValueType.UINT32 if value >= 0 else GGUFValueType.INT32
        wide = GGUFValueType.UINT64 if value >= 0 else GGUFValueType.INT64
        return value, narrow if -(2**31) <= value < 2**32 else wide, None
    if isinstance(value, float):
        return value, GGUFValueType.FLOAT32, None
    return value, GGUFValueType.STRING, None


def _item_type(item: Any) -> GGUFValueType:
    if isinstance(item, bool):
        return GGUFValueType.BOOL
    if isinstance(item, int):
        return GGUFValueType.INT32
    return GGUFValueType.FLOAT32 if isinstance(item, float) else GGUFValueType.STRING
