"""Hyper-parameters of a model, read from its metadata and checked against each other.

A key `ARCH.*` is consumed, or known to change nothing, or known with the one value that changes nothing; any other is
refused by name, since a model that runs without it would be wrong.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from frink_numba.errors import GgufError, UnsupportedModelError
from frink_numba.host.architectures import Architecture

_CONSUMED = frozenset(
    {
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "vocab_size",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scale_linear",
    }
)
# Keys that describe how the model was made, or serve other uses than the next token's logits.
_WITHOUT_EFFECT = frozenset(
    {
        "rope.scaling.original_context_length",  # linear scaling and factor tensors need no reference length
        "rope.scaling.finetuned",
        "tensor_data_layout",
        "pooling_type",
    }
)
# Keys that would change the result, with the value under which they do not.
_NEUTRAL: dict[str, Any] = {
    "expert_count": 0,
    "expert_used_count": 0,
    "attention.causal": True,
    "use_parallel_residual": False,
    "rope.scaling.attn_factor": 1.0,
}
_DEFAULT_THETA = 10000.0  # llama.cpp's, for files without rope.freq_base
_MAX = 1 << 31  # no dimension or length of a sound file reaches it


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """The facts of one model. The tuples hold one entry a layer."""

    layers: int
    context_length: int
    hidden: int
    ffn: tuple[int, ...]
    n_heads: tuple[int, ...]
    n_kv_heads: tuple[int, ...]
    head_dim: int
    norm_eps: float
    vocab: int | None  # None: the file does not say
    rope_theta: float
    rope_dim: int  # leading channels of a head that turn
    rope_linear: float  # positions are divided by it; 1: not scaled
    window: int  # 0: none


def read_hyperparameters(
    metadata: Mapping[str, Any], architecture: Architecture, *, tensors: int, where: str
) -> Hyperparameters:
    """Read and check the keys `ARCH.*` of `metadata`; `tensors` bounds the layers a file can hold, `where` names it.

    GgufError for what is missing, malformed or contradictory; UnsupportedModelError for what is not served.
    """
    reader = _Reader(metadata, architecture.name, where)
    reader.refuse_unknown(_CONSUMED | ({"attention.sliding_window"} if architecture.window else frozenset()))
    layers = reader.integer("block_count")
    if layers > tensors:
        reader.fail("block_count", f"is {layers}, but the file holds only {tensors} tensors")
    hidden = reader.integer("embedding_length")
    n_heads = reader.per_layer("attention.head_count", layers)
    n_kv_heads = reader.per_layer("attention.head_count_kv", layers, default=n_heads)
    for layer, (queries, keys) in enumerate(zip(n_heads, n_kv_heads, strict=True)):
        if queries % keys:
            reader.fail(
                "attention.head_count", f"is {queries} in layer {layer}, not a multiple of its {keys} K/V heads"
            )
    head_dim = _head_dim(reader, hidden, n_heads[0])
    rope_dim = reader.integer("rope.dimension_count", default=head_dim)
    if rope_dim > head_dim or rope_dim % 2:
        reader.fail(
            "rope.dimension_count", f"is {rope_dim}; it must be even and at most the head's {head_dim} channels"
        )
    window = reader.integer("attention.sliding_window", default=0, low=0) if architecture.window else 0
    return Hyperparameters(
        layers=layers,
        context_length=reader.integer("context_length"),
        hidden=hidden,
        ffn=reader.per_layer("feed_forward_length", layers),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        norm_eps=reader.number("attention.layer_norm_rms_epsilon"),
        vocab=reader.integer("vocab_size") if reader.has("vocab_size") else None,
        rope_theta=reader.number("rope.freq_base", default=_DEFAULT_THETA),
        rope_dim=rope_dim,
        rope_linear=_linear_scaling(reader),
        window=window,
    )


def _head_dim(reader: _Reader, hidden: int, n_heads: int) -> int:
    if not reader.has("attention.key_length") and hidden % n_heads:
        reader.fail("embedding_length", f"is {hidden}, not a multiple of {n_heads} heads, and there is no key_length")
    head_dim = reader.integer("attention.key_length", default=hidden // n_heads)
    value_dim = reader.integer("attention.value_length", default=hidden // n_heads)
    if value_dim != head_dim:
        reader.refuse("attention.value_length", f"is {value_dim}, but keys have {head_dim} channels")
    return head_dim


def _linear_scaling(reader: _Reader) -> float:
    """The factor of linear scaling, 1 when there is none. As in llama.cpp, a factor without a type is linear."""
    factors = [reader.number(key) for key in ("rope.scaling.factor", "rope.scale_linear") if reader.has(key)]
    if len(set(factors)) > 1:
        reader.fail("rope.scaling.factor", f"is {factors[0]:g}, but rope.scale_linear is {factors[1]:g}")
    factor = factors[0] if factors else None
    kind = reader.text("rope.scaling.type", default="none" if factor is None else "linear")
    if kind == "linear":
        if factor is None:
            reader.fail("rope.scaling.type", "is 'linear', but there is no rope.scaling.factor")
        return factor
    if kind != "none":
        reader.refuse("rope.scaling.type", f"is {kind[:80]!r}; 'linear', 'none' and rope_freqs.weight are served")
    if factor not in (None, 1.0):
        reader.fail("rope.scaling.factor", f"is {factor:g}, but rope.scaling.type is 'none'")
    return 1.0


class _Reader:
    """Typed access to the keys `ARCH.*`, without the prefix; an error names the file and the whole key."""

    def __init__(self, metadata: Mapping[str, Any], prefix: str, where: str) -> None:
        self.metadata, self.prefix, self.where = metadata, prefix, where

    def fail(self, key: str, problem: str) -> NoReturn:
        raise GgufError(f"{self.where}: {self.prefix}.{key} {problem}")

    def refuse(self, key: str, problem: str) -> NoReturn:
        raise UnsupportedModelError(f"{self.where}: {self.prefix}.{key} {problem}; this is not served")

    def refuse_unknown(self, consumed: frozenset[str]) -> None:
        for full in self.metadata:
            prefix, dot, key = full.partition(".")
            if prefix != self.prefix or not dot or key in consumed or key in _WITHOUT_EFFECT:
                continue
            if key not in _NEUTRAL:
                self.refuse(key[:80], "is not known to this version, and may change the result")
            value, neutral = self.metadata[full], _NEUTRAL[key]
            if not isinstance(value, bool | int | float) or value != neutral:
                shown = value if isinstance(value, bool | int | float) else f"a {type(value).__name__}"
                self.refuse(key, f"is {shown}, not {neutral}")

    def has(self, key: str) -> bool:
        return f"{self.prefix}.{key}" in self.metadata

    def _get(self, key: str) -> Any:
        if not self.has(key):
            self.fail(key, "is missing, and the model cannot be built without it")
        return self.metadata[f"{self.prefix}.{key}"]

    def integer(self, key: str, *, default: int | None = None, low: int = 1) -> int:
        if default is not None and not self.has(key):
            return default
        return self._checked_integer(key, self._get(key), low)

    def _checked_integer(self, key: str, value: Any, low: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            self.fail(key, f"holds a {type(value).__name__}; it must be an integer")
        if not low <= value < _MAX:
            self.fail(key, f"is {value}; it must be from {low} up to {_MAX - 1}")
        return value

    def per_layer(self, key: str, layers: int, *, default: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """One integer a layer, from an array of that length or a single number for all."""
        if default is not None and not self.has(key):
            return default
        value = self._get(key)
        if not isinstance(value, np.ndarray):
            return (self._checked_integer(key, value, 1),) * layers
        if value.shape != (layers,):
            self.fail(key, f"has {len(value)} entries for {layers} layers")
        if 0 in value:
            self.refuse(key, f"is 0 in layer {int(np.argmin(value))}: a layer without this part")
        return tuple(self._checked_integer(key, entry, 1) for entry in value.tolist())

    def number(self, key: str, *, default: float | None = None) -> float:
        """A positive finite number."""
        if default is not None and not self.has(key):
            return default
        value = self._get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.fail(key, f"holds a {type(value).__name__}; it must be a number")
        if not 0 < value < math.inf:
            self.fail(key, f"is {value}; it must be a positive number")
        return float(value)

    def text(self, key: str, *, default: str) -> str:
        value = self.metadata.get(f"{self.prefix}.{key}", default)
        if not isinstance(value, str):
            self.fail(key, f"holds a {type(value).__name__}; it must be a string")
        return value
