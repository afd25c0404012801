"""LoRA adapters in GGUF form: low-rank updates of a model's projections, attached to its layers when it is opened.

An adapter holds two matrices for each tensor of the model that it changes, NAME.lora_a [rank, cols] and NAME.lora_b
[rows, rank]: NAME x becomes NAME x + scale * alpha / rank * lora_b (lora_a x). Every tensor of the file is used, or the
adapter is refused.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NoReturn, TypeAlias

import numpy as np

from frink_numba.errors import GgufError, SettingError, UnsupportedModelError
from frink_numba.host.architectures import Architecture
from frink_numba.host.dequantize import dequantize
from frink_numba.host.fetch import resolve
from frink_numba.host.gguf import GgufFile
from frink_numba.layer import Layer, Lora
from frink_numba.quant import QuantMatrix

Source: TypeAlias = "str | os.PathLike[str]"
Adapter: TypeAlias = "Source | tuple[Source, float]"
"""A file, or a file and what to multiply its updates by."""

_TARGETS: Mapping[str, tuple[str, ...]] = {  # of fused tensors several, one under the other
    "attn_q.weight": ("q",),
    "attn_k.weight": ("k",),
    "attn_v.weight": ("v",),
    "attn_qkv.weight": ("q", "k", "v"),
    "attn_output.weight": ("o",),
    "ffn_gate.weight": ("gate",),
    "ffn_up.weight": ("up",),
    "ffn_down.weight": ("down",),
}
_GATE_IN_UP = ("gate", "up")
_SUFFIXES = ("lora_a", "lora_b")
_HARMLESS = frozenset({"adapter.type", "adapter.lora.alpha", "adapter.lora.task_name", "adapter.lora.prompt_prefix"})


def attach(layers: Sequence[Layer], architecture: Architecture, adapters: Iterable[Adapter]) -> tuple[Layer, ...]:
    """`layers` with the updates of all `adapters`, which add up.

    GgufError for a damaged file, one without tensors or with numbers that are not finite, or shapes that do not fit the
    model; UnsupportedModelError for an adapter of another
    architecture or kind, or of a tensor whose update is not served; SettingError for a scale that is not finite.
    """
    attached = list(layers)
    for adapter in adapters:
        source, scale = adapter if isinstance(adapter, tuple) else (adapter, 1.0)
        if isinstance(scale, bool) or not isinstance(scale, int | float) or not math.isfinite(scale):
            raise SettingError(f"the adapter {os.fspath(source)} has the scale {scale!r}; it must be a finite number")
        with GgufFile.open(resolve(source)) as gguf:
            for number, loras in _AdapterReader(gguf, architecture).read(attached, float(scale)).items():
                attached[number] = replace(attached[number], lora=(*attached[number].lora, *loras))
    return tuple(attached)


class _AdapterReader:
    def __init__(self, gguf: GgufFile, architecture: Architecture) -> None:
        self._gguf, self._architecture = gguf, architecture
        self._where = gguf.paths[0]

    def read(self, layers: Sequence[Layer], scale: float) -> dict[int, list[Lora]]:
        """The updates of each layer that has any."""
        alpha = self._alpha()
        if not self._gguf.tensors:
            self._fail("holds no tensors: an adapter that changes nothing")
        found: dict[int, list[Lora]] = {}
        for name in sorted({self._stem(name) for name in self._gguf.tensors}):
            number, targets = self._site(name, layers)
            down, up = (self._matrix(f"{name}.{suffix}") for suffix in _SUFFIXES)
            rank = down.shape[0]
            matrices = [_projection(layers[number], target) for target in targets]
            rows, cols = sum(matrix.rows for matrix in matrices), matrices[0].cols
            if down.shape != (rank, cols) or up.shape != (rows, rank) or not rank:
                self._fail(
                    f"tensors of {name[:80]!r} have shapes {list(down.shape)} and {list(up.shape)}, but the model's is "
                    f"{rows} x {cols}"
                )
            factor = scale * (alpha / rank if alpha else 1.0)
            first = 0
            for target, matrix in zip(targets, matrices, strict=True):
                found.setdefault(number, []).append(Lora(target, down, up[first : first + matrix.rows], factor))
                first += matrix.rows
        return found

    def _alpha(self) -> float:
        metadata = self._gguf.metadata
        kind = metadata.get("general.type"), metadata.get("adapter.type")
        if kind != ("adapter", "lora"):
            self._refuse(f"general.type and adapter.type are {kind[0]!r} and {kind[1]!r}, not 'adapter' and 'lora'")
        architecture = metadata.get("general.architecture")
        if architecture != self._architecture.name:
            self._refuse(f"is an adapter of {str(architecture)[:80]!r}, the model is {self._architecture.name!r}")
        for key in metadata:
            if key.startswith("adapter.") and key not in _HARMLESS:
                self._refuse(f"has {key[:80]}, which is not known to this version, and may change the result")
        alpha = metadata.get("adapter.lora.alpha")
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
            self._fail(f"adapter.lora.alpha is {alpha!r}; it must be a number")
        return float(alpha)

    def _stem(self, name: str) -> str:
        stem, _, suffix = name.rpartition(".")
        if suffix not in _SUFFIXES:
            self._refuse(f"tensor {name[:80]!r} is no part of a low-rank update")
        return stem

    def _site(self, name: str, layers: Sequence[Layer]) -> tuple[int, tuple[str, ...]]:
        """The layer's number and the projections that the tensor `name` of the model holds."""
        block, _, rest = name.partition(".")
        number, _, suffix = rest.partition(".")
        in_layer = self._architecture.layer_tensors
        targets = _TARGETS.get(suffix, ()) if suffix in in_layer and block == "blk" else ()
        if suffix == "ffn_up.weight" and "ffn_gate.weight" not in in_layer:
            targets = _GATE_IN_UP
        if not targets or not (number.isascii() and number.isdecimal() and len(number) < 9):
            self._refuse(f"changes the tensor {name[:80]!r}, and an update of it is not served")
        if int(number) >= len(layers) or number != str(int(number)):
            self._fail(f"changes the tensor {name[:80]!r}, but the model has {len(layers)} layers")
        if layers[int(number)].ffn.router is not None and suffix.startswith("ffn_"):
            self._refuse(f"changes the tensor {name[:80]!r}, but this layer has experts")
        return int(number), targets

    def _matrix(self, name: str) -> np.ndarray:
        """float32, a copy: the file is closed again."""
        if name not in self._gguf.tensors:
            self._fail(f"tensor {name[:80]!r} is missing")
        matrix = dequantize(self._gguf.matrix(name))
        if not np.isfinite(matrix).all():
            self._fail(f"tensor {name[:80]!r} holds NaN or infinity")
        return matrix

    def _fail(self, problem: str) -> NoReturn:
        raise GgufError(f"{self._where}: {problem}")

    def _refuse(self, problem: str) -> NoReturn:
        raise UnsupportedModelError(f"{self._where}: {problem}")


def _projection(layer: Layer, target: str) -> QuantMatrix:
    matrix: QuantMatrix = getattr(layer.attention if target in "qkvo" else layer.ffn.experts[0], target)
    return matrix
