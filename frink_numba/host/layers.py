"""Build the layer descriptions of a model from its tensors: every tensor is consumed, with the shape that it must have.

A GGUF file lists a tensor's dimensions fastest first; shapes here are in NumPy's order, rows first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from frink_numba.errors import GgufError, UnsupportedModelError
from frink_numba.host.architectures import Architecture
from frink_numba.host.dequantize import dequantize
from frink_numba.host.gguf import GgufFile
from frink_numba.host.hyperparameters import Hyperparameters
from frink_numba.host.rope_scaling import frequency_factors
from frink_numba.layer import AttentionSpec, Expert, FeedForward, Layer, Rope
from frink_numba.quant import QuantMatrix


@dataclass(frozen=True, slots=True)
class ModelTensors:
    """All weights of a model."""

    embedding: QuantMatrix  # [vocab, hidden]
    layers: tuple[Layer, ...]
    output_norm: np.ndarray  # float32 [hidden]
    output: QuantMatrix  # [vocab, hidden]; the embedding itself when the file has no other


def build(gguf: GgufFile, architecture: Architecture, hyper: Hyperparameters) -> ModelTensors:
    """Read every tensor of `gguf`.

    GgufError names a tensor that is missing or has another shape than the hyper-parameters ask for;
    UnsupportedModelError one that this architecture does not know, since leaving it out could change the result.
    """
    reader = _TensorReader(gguf)
    reader.refuse_unknown(architecture, hyper.layers)
    embedding = reader.embedding(hyper)
    stored = None
    if architecture.rope_factors and reader.has("rope_freqs.weight"):
        stored = reader.vector("rope_freqs.weight", hyper.rope_dim // 2)
        if not (np.isfinite(stored).all() and (stored > 0).all()):
            reader.fail("rope_freqs.weight", "holds factors that are not positive numbers")
    factors = frequency_factors(hyper.rope_dim, hyper.rope_linear, stored)
    rope = Rope(hyper.rope_theta, hyper.rope_dim, architecture.rope_layout, factors)
    layers = tuple(_layer(reader, architecture, hyper, rope, number) for number in range(hyper.layers))
    output = embedding
    if reader.has("output.weight"):
        output = reader.matrix("output.weight", embedding.rows, hyper.hidden)
    return ModelTensors(embedding, layers, reader.vector("output_norm.weight", hyper.hidden), output)


def _layer(reader: _TensorReader, architecture: Architecture, hyper: Hyperparameters, rope: Rope, number: int) -> Layer:
    hidden, ffn, head_dim = hyper.hidden, hyper.ffn[number], hyper.head_dim
    n_heads, n_kv_heads = hyper.n_heads[number], hyper.n_kv_heads[number]
    queries, keys = n_heads * head_dim, n_kv_heads * head_dim

    def matrix(name: str, rows: int, cols: int) -> QuantMatrix:
        return reader.matrix(f"blk.{number}.{name}.weight", rows, cols)

    def vector(name: str, size: int) -> np.ndarray:
        return reader.vector(f"blk.{number}.{name}", size)

    def bias(name: str, size: int) -> np.ndarray | None:
        full = f"blk.{number}.{name}.bias"
        if not reader.has(full) and f"{name}.bias" not in architecture.layer_tensors:
            return None
        return reader.vector(full, size)

    attention = AttentionSpec(
        n_heads,
        n_kv_heads,
        head_dim,
        q=matrix("attn_q", queries, hidden),
        k=matrix("attn_k", keys, hidden),
        v=matrix("attn_v", keys, hidden),
        o=matrix("attn_output", hidden, queries),
        rope=rope,
        q_bias=bias("attn_q", queries),
        k_bias=bias("attn_k", keys),
        v_bias=bias("attn_v", keys),
        o_bias=bias("attn_output", hidden),
        window=hyper.window,
    )
    expert = Expert(
        gate=matrix("ffn_gate", ffn, hidden),
        up=matrix("ffn_up", ffn, hidden),
        down=matrix("ffn_down", hidden, ffn),
        gate_bias=bias("ffn_gate", ffn),
        up_bias=bias("ffn_up", ffn),
        down_bias=bias("ffn_down", hidden),
    )
    return Layer(
        attn_norm=vector("attn_norm.weight", hidden),
        attention=attention,
        ffn_norm=vector("ffn_norm.weight", hidden),
        ffn=FeedForward(architecture.activation, (expert,)),
        norm_eps=hyper.norm_eps,
    )


class _TensorReader:
    """Tensors by name, of the shape that they must have."""

    def __init__(self, gguf: GgufFile) -> None:
        self.gguf = gguf
        self.where = gguf.paths[0]
        self._kinds: set[str] = set()  # those known to hold weights

    def fail(self, name: str, problem: str) -> NoReturn:
        raise GgufError(f"{self.where}: tensor {name!r} {problem}")

    def has(self, name: str) -> bool:
        return name in self.gguf.tensors

    def refuse_unknown(self, architecture: Architecture, layers: int) -> None:
        """Refuse every tensor that `build` would leave unread."""
        known = {"token_embd.weight", "output_norm.weight", "output.weight"}
        if architecture.rope_factors:
            known.add("rope_freqs.weight")
        in_layer = architecture.layer_tensors | architecture.optional_layer_tensors
        for name in self.gguf.tensors:
            if name in known:
                continue
            block, _, rest = name.partition(".")
            number, _, suffix = rest.partition(".")
            if block == "blk" and suffix in in_layer and number == _canonical(number, layers):
                continue
            raise UnsupportedModelError(
                f"{self.where}: tensor {name[:80]!r} is not known for architecture {architecture.name!r} with "
                f"{layers} layers, and leaving it out may change the result"
            )

    def matrix(self, name: str, rows: int, cols: int) -> QuantMatrix:
        self._check(name, (rows, cols))
        matrix = self.gguf.matrix(name)
        if matrix.kind.name not in self._kinds:
            try:
                dequantize(matrix, 0, 0)
            except UnsupportedModelError as error:
                raise UnsupportedModelError(f"{self.where}: tensor {name!r}: {error}") from None
            self._kinds.add(matrix.kind.name)
        return matrix

    def vector(self, name: str, size: int) -> np.ndarray:
        self._check(name, (size,))
        return self.gguf.vector(name)

    def embedding(self, hyper: Hyperparameters) -> QuantMatrix:
        """The one matrix whose rows the file may leave unsaid."""
        info = self.gguf.tensors.get("token_embd.weight")
        rows = hyper.vocab or (info.shape[0] if info is not None and len(info.shape) == 2 else 1)
        return self.matrix("token_embd.weight", rows, hyper.hidden)

    def _check(self, name: str, want: tuple[int, ...]) -> None:
        info = self.gguf.tensors.get(name)
        if info is None:
            self.fail(name, "is missing")
        if tuple(info.shape) != want:
            self.fail(name, f"has shape {list(info.shape)}, but the hyper-parameters ask for {list(want)}")


def _canonical(number: str, layers: int) -> str | None:
    """`number` as it is written for a layer under `layers`; None for anything else ("01", "+1", "٣", a huge one)."""
    if not number.isascii() or not number.isdecimal() or len(number) > 9 or int(number) >= layers:
        return None
    return str(int(number))
