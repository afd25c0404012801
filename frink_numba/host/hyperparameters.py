"""Hyper-parameters of a model, read from its metadata and checked against each other.

A key `ARCH.*` is consumed, or known to change nothing, or known with the one value that changes nothing; any other is
refused by name, since a model that runs without it would be wrong. So are keys that contradict each other: those of a
rotary scaling that the file does not name (`host/scaling_keys.py`), or of windows that it gives no width.

Some keys may be missing, and then mean what the format says they do: Granite's embedding and residual scale are 1,
`rope.freq_base` is 10000, all channels of a head turn without `rope.dimension_count` (phi3's too, some of whose models
turn fewer). A file that left such a key out by mistake cannot be told from one that means it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from frink_numba.host.architectures import Architecture
from frink_numba.host.key_reader import KeyReader
from frink_numba.host.rope_scaling import PLAIN, RopeScaling
from frink_numba.host.scaling_keys import SCALING_KEYS, read_scaling

_CONSUMED = SCALING_KEYS | frozenset(
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
    }
)
# Keys that describe how the model was made, or serve other uses than the next token's logits.
_WITHOUT_EFFECT = frozenset({"rope.scaling.finetuned", "tensor_data_layout", "pooling_type"})
# Keys that would change the result, with the value under which they do not.
_NEUTRAL: dict[str, Any] = {
    "expert_count": 0,
    "expert_used_count": 0,
    "expert_group_count": 0,
    "expert_group_used_count": 0,
    "expert_gating_func": 1,  # softmax
    "nextn_predict_layers": 0,
    "attention.causal": True,
    "use_parallel_residual": False,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
}
_EXPERT_KEYS = frozenset({"expert_count", "expert_used_count"})
_DEFAULT_THETA = 10000.0  # llama.cpp's, for files without rope.freq_base
_WINDOW = "attention.sliding_window"
_OF_WINDOWS = ("attention.sliding_window_pattern", "rope.freq_base_swa")  # mean nothing without one


@dataclass(frozen=True, slots=True)
class ExpertCounts:
    """The mixture of each layer."""

    count: int
    used: int  # by a token
    ffn: int  # width of an expert
    shared_ffn: int  # width of the shared expert; 0: none


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
    local_theta: float  # of layers with a window
    rope_dim: int  # leading channels of a head that turn
    scaling: RopeScaling
    local_scaling: RopeScaling  # of layers with a window
    rotated: tuple[bool, ...]
    windows: tuple[int, ...]  # 0: none
    experts: ExpertCounts | None = None
    attention_scale: float | None = None  # None: 1/sqrt(head_dim)
    softcap: float = 0.0  # of the attention's scores; 0: none
    logit_softcap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_divisor: float = 1.0


def read_hyperparameters(
    metadata: Mapping[str, Any], architecture: Architecture, *, tensors: Collection[str], where: str
) -> Hyperparameters:
    """Read and check the keys `ARCH.*` of `metadata`; `tensors`: the names of the file's tensors, `where` names it.

    GgufError for what is missing, malformed or contradictory; UnsupportedModelError for what is not served.
    """
    reader = KeyReader(metadata, architecture.name, where)
    consumed = _CONSUMED | architecture.keys | (_EXPERT_KEYS if architecture.mixture else frozenset())
    neutral = {**_NEUTRAL, **architecture.neutral}
    consumed |= _of_parts_that_no_layer_has(reader, architecture, tensors)
    reader.refuse_unknown(consumed | (_WITHOUT_EFFECT - neutral.keys()), neutral)
    reader.require(architecture.required_keys)
    layers = reader.integer("block_count")
    if layers > len(tensors):
        reader.fail("block_count", f"is {layers}, but the file holds only {len(tensors)} tensors")
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
    ffn = reader.per_layer("feed_forward_length", layers)
    windows = _windows(reader, architecture, layers)
    theta = reader.number("rope.freq_base", default=_DEFAULT_THETA)
    scaling = read_scaling(reader, architecture, tensors, theta)
    return Hyperparameters(
        layers=layers,
        context_length=reader.integer("context_length"),
        hidden=hidden,
        ffn=ffn,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        norm_eps=reader.number("attention.layer_norm_rms_epsilon"),
        vocab=reader.integer("vocab_size") if reader.has("vocab_size") else None,
        rope_theta=theta,
        local_theta=reader.number("rope.freq_base_swa", default=architecture.local_theta or theta),
        rope_dim=rope_dim,
        scaling=scaling,
        local_scaling=scaling if architecture.local_scaling else PLAIN,
        rotated=architecture.rotated(windows),
        windows=windows,
        experts=_experts(reader, architecture, ffn),
        attention_scale=_attention_scale(reader, architecture, (hidden, n_heads[0], head_dim)),
        softcap=reader.number("attn_logit_softcapping", default=architecture.default_softcap),
        logit_softcap=reader.number("final_logit_softcapping", default=architecture.default_logit_softcap),
        embedding_scale=reader.number("embedding_scale", default=hidden**0.5 if architecture.scaled_embedding else 1.0),
        residual_scale=reader.number("residual_scale", default=1.0),
        logit_divisor=reader.number("logit_scale", default=1.0),
    )


def _of_parts_that_no_layer_has(
    reader: KeyReader, architecture: Architecture, tensors: Collection[str]
) -> frozenset[str]:
    """The keys about parts that other models of this family have, where the file holds no tensor of such a part."""
    found: set[str] = set()
    for start, parts in architecture.foreign_parts.items():
        if not any(part in name for name in tensors for part in parts):
            found.update(
                key for key in reader.names() if key == start or (start.endswith(".") and key.startswith(start))
            )
    return frozenset(found)


def _head_dim(reader: KeyReader, hidden: int, n_heads: int) -> int:
    if not reader.has("attention.key_length") and hidden % n_heads:
        reader.fail("embedding_length", f"is {hidden}, not a multiple of {n_heads} heads, and there is no key_length")
    head_dim = reader.integer("attention.key_length", default=hidden // n_heads)
    value_dim = reader.integer("attention.value_length", default=hidden // n_heads)
    if value_dim != head_dim:
        reader.refuse("attention.value_length", f"is {value_dim}, but keys have {head_dim} channels")
    return head_dim


def _attention_scale(reader: KeyReader, architecture: Architecture, sizes: tuple[int, int, int]) -> float | None:
    if reader.has("attention.scale"):
        return reader.number("attention.scale")
    scalar = architecture.query_scalars.get(sizes)
    return None if scalar is None else scalar**-0.5


def _windows(reader: KeyReader, architecture: Architecture, layers: int) -> tuple[int, ...]:
    if not architecture.window_period:
        return (0,) * layers
    if not reader.has(_WINDOW) and not architecture.default_window:
        for key in filter(reader.has, _OF_WINDOWS):
            reader.fail(key, f"is there, but {_WINDOW}, the width of the windows, is missing")
    window = reader.integer(_WINDOW, default=architecture.default_window, low=0)
    if architecture.window_period == 1:
        return (window,) * layers
    pattern = reader.pattern("attention.sliding_window_pattern", layers, period=architecture.window_period)
    return tuple(window if windowed else 0 for windowed in pattern)


def _experts(reader: KeyReader, architecture: Architecture, ffn: tuple[int, ...]) -> ExpertCounts | None:
    mixture = architecture.mixture
    if mixture is None:
        return None
    count = reader.integer("expert_count", default=None if mixture.required else 0, low=1 if mixture.required else 0)
    if not count:
        if reader.integer("expert_used_count", default=0, low=0):
            reader.fail("expert_used_count", "is not 0, but there are no experts")
        return None
    used = reader.integer("expert_used_count")
    if used > count:
        reader.fail("expert_used_count", f"is {used}, more than the {count} experts there are")
    shared = reader.integer("expert_shared_feed_forward_length", default=0, low=0) if mixture.shared else 0
    return ExpertCounts(count, used, reader.integer("expert_feed_forward_length", default=ffn[0]), shared)
