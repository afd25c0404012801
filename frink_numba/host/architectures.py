"""The architectures that run, by GGUF name: one row of facts each. Whatever a row does not know is refused by name.

A row names the tensors that a layer must and may have; `host/layers.py` knows where each goes. Of the hyper-parameters
`ARCH.*` the common ones are read by `host/hyperparameters.py`; a row names those that only its architecture has. Facts
that no file states are those of llama.cpp, which defines these files, and of the models' published configurations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from frink_numba.errors import UnsupportedModelError
from frink_numba.layer import Activation, RopeLayout

_ATTENTION = frozenset({"attn_q.weight", "attn_k.weight", "attn_v.weight", "attn_output.weight"})
_PRE_NORMS = frozenset({"attn_norm.weight", "ffn_norm.weight"})
_POST_NORMS = frozenset({"post_attention_norm.weight", "post_ffw_norm.weight"})
_QK_NORMS = frozenset({"attn_q_norm.weight", "attn_k_norm.weight"})
_QKV_BIASES = frozenset({"attn_q.bias", "attn_k.bias", "attn_v.bias"})
_OTHER_BIASES = frozenset({"attn_output.bias", "ffn_gate.bias", "ffn_up.bias", "ffn_down.bias"})
_FFN = frozenset({"ffn_gate.weight", "ffn_up.weight", "ffn_down.weight"})
_DENSE = _ATTENTION | _PRE_NORMS | _FFN
_EXPERTS = frozenset({"ffn_gate_inp.weight", "ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_down_exps.weight"})
_SHARED_EXPERT = frozenset({"ffn_gate_shexp.weight", "ffn_up_shexp.weight", "ffn_down_shexp.weight"})
_SHARED_GATE = frozenset({"ffn_gate_inp_shexp.weight"})

Rotated = Callable[[Sequence[int]], "tuple[bool, ...]"]
"""Of the layers' windows (0: none): which layers are rotated."""


def all_layers(windows: Sequence[int]) -> tuple[bool, ...]:
    return (True,) * len(windows)


def three_of_four(windows: Sequence[int]) -> tuple[bool, ...]:
    """SmolLM3: each fourth layer is not rotated."""
    return tuple(layer % 4 != 3 for layer in range(len(windows)))


def windowed_layers(windows: Sequence[int]) -> tuple[bool, ...]:
    """EXAONE 4: where some layers have a window, only those are rotated."""
    return tuple(bool(window) for window in windows) if any(windows) else all_layers(windows)


@dataclass(frozen=True, slots=True)
class Mixture:
    """How an architecture's layers use experts."""

    normalized: bool  # the weights of a token's experts are divided by their sum
    shared: frozenset[str] = frozenset()  # tensors of one more expert, for every token
    required: bool = True  # False: a file without `expert_count` is dense

    def tensors(self, shared: bool) -> frozenset[str]:
        """What every layer has in place of a dense one's."""
        return _EXPERTS | (self.shared if shared else frozenset())


@dataclass(frozen=True, slots=True)
class Architecture:
    """Facts that a file does not state, because they follow from its architecture."""

    name: str  # `general.architecture`, and the prefix of its keys
    models: str  # what people know it by
    rope_layout: RopeLayout  # which channels turn together; llama's files hold Q and K reordered for NORM
    activation: Activation
    layer_tensors: frozenset[str]  # every layer has these: names after "blk.N."
    optional_layer_tensors: frozenset[str] = frozenset()
    keys: frozenset[str] = frozenset()  # hyper-parameters that only some architectures have
    required_keys: frozenset[str] = frozenset()  # those of them without which a file says too little
    neutral: Mapping[str, Any] = field(default_factory=dict)  # keys that must have this value, if they are there
    foreign_parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Keys, or with a dot at the end how keys start, about parts that relatives of these models have, and what occurs
    in the names of such parts' tensors: the keys mean nothing in a file without them."""
    rope_factors: bool = False  # "rope_freqs.weight", "rope_factors_long.weight" and "..._short.weight" may be there
    window_period: int = 0  # 0: no windows; 1: all layers have one; n: all but each n-th
    default_window: int = 0  # where the file states none
    local_theta: float | None = None  # rotary base of layers with a window; None: that of the others
    local_scaling: bool = True  # layers with a window are scaled like the others
    states_magnitude: bool = False
    """`rope.scaling.attn_factor` may repeat YaRN's magnitude; elsewhere it would be one more factor."""
    rotated: Rotated = all_layers
    whole_qk_norm: bool = False  # Q and K are normed over all heads, not head by head
    default_softcap: float = 0.0  # of the attention's scores
    default_logit_softcap: float = 0.0
    scaled_embedding: bool = False  # embeddings are multiplied by the square root of their width
    query_scalars: Mapping[tuple[int, int, int], int] = field(default_factory=dict)
    """(hidden, heads, head_dim) of models that divide scores by the square root of another number than head_dim."""
    mixture: Mixture | None = None

    def tensors(self, experts: bool, shared: bool = False) -> frozenset[str]:
        """What every layer has in a file with experts, with a shared one beside them, or without."""
        if not experts or self.mixture is None:
            return self.layer_tensors
        return self.layer_tensors - _FFN | self.mixture.tensors(shared)


_WINDOW = frozenset({"attention.sliding_window"})
_GRANITE_SCALES = frozenset({"attention.scale", "embedding_scale", "residual_scale", "logit_scale"})
_STATE_SPACE = {"ssm.": ("ssm_",)}  # Granite 4's files state it, those of models without one too
_PATTERN = _WINDOW | {"attention.sliding_window_pattern"}

ARCHITECTURES = {
    row.name: row
    for row in (
        Architecture(
            name="llama",
            models="Llama 2 and 3, SmolLM2, Mistral, Mixtral",
            rope_layout=RopeLayout.NORM,
            activation=Activation.SWIGLU,
            layer_tensors=_DENSE,
            optional_layer_tensors=_QKV_BIASES | _OTHER_BIASES,
            keys=_WINDOW,
            rope_factors=True,
            window_period=1,
            mixture=Mixture(normalized=True, required=False),
        ),
        Architecture(
            name="qwen2",
            models="Qwen2, Qwen2.5",
            rope_layout=RopeLayout.NEOX,
            activation=Activation.SWIGLU,
            layer_tensors=_DENSE | _QKV_BIASES,
        ),
        Architecture(
            name="qwen3",
            models="Qwen3",
            rope_layout=RopeLayout.NEOX,
            activation=Activation.SWIGLU,
            layer_tensors=_DENSE | _QK_NORMS,
        ),
        Architecture(
            name="gemma",
            models="Gemma",
            rope_layout=RopeLayout.NEOX,
            activation=Activation.GEGLU,
            layer_tensors=_DENSE,
            scaled_embedding=True,
        ),
        Architecture(
            name="gemma2",
            models="Gemma 2",
            rope_layout=RopeLayout.NEOX,
            activation=Activation.GEGLU,
            layer_tensors=_DENSE | _POST_NORMS,
            keys=_PATTERN | {"attention.scale", "attn_logit_softcapping", "final_logit_softcapping"},
            window_period=2,
            default_window=4096,
            default_softcap=50.0,
            default_logit_softcap=30.0,
            scaled_embedding=True,
            query_scalars={(4608, 32, 128): 144},  # 27B
        ),
        Architecture(
            name="gemma3",
            models="Gemma 3",
            rope_layout=RopeLayout.NEOX,
            activation=Activation.GEGLU,
            layer_tensors=_DENSE | _POST_NORMS | _QK_NORMS,
            keys=_PATTERN | {"attention.scale", "final_logit_softcapping", "rope.freq_base_swa"},
            window_period=6,
            local_theta=10000.0,
            local_scaling=False,
            scaled_embedding=True,
            query_scalars={(5376, 32, 128): 168},  # 27B
        ),
        Architecture(
            name="phi3",
            models="Phi-3, Phi-3.5, Phi-4",
            rope_layout=RopeLayout.NEOX,
            activation=Activation.SWIGLU,
            layer_tensors=_PRE_NORMS | {"attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight"},
            keys=_WINDOW,
            rope_factors=True,
            window_period=1,
        ),
        Architecture(
            name="olmo2",
            models="OLMo 2 and 3",
            rope_layout=RopeLayout.NEOX,
            activation=Activation.SWIGLU,
            layer_tensors=_ATTENTION | _FFN | _POST_NORMS | _QK_NORMS,
            keys=_PATTERN | {"rope.freq_base_swa"},
            window_period=4,
            local_scaling=False,
            states_magnitude=True,  # OLMo 3
            whole_qk_norm=True,
        ),
        Architecture(
            name="granite",
            models="Granite 3, Granite 4 of attention only",
            rope_layout=RopeLayout.NORM,
            activation=Activation.SWIGLU,
            layer_tensors=_DENSE,
            optional_layer_tensors=_QKV_BIASES | _OTHER_BIASES,
            keys=_GRANITE_SCALES,
            required_keys=frozenset({"attention.scale", "logit_scale"}),
            neutral={"rope.scaling.finetuned": True},  # false: not rotated at all
            foreign_parts=_STATE_SPACE | {"expert_shared_feed_forward_length": ("_exps", "_shexp")},
            rope_factors=True,
        ),
        Architecture(
            name="granitemoe",
            models="Granite 3 with experts",
            rope_layout=RopeLayout.NORM,
            activation=Activation.SWIGLU,
            layer_tensors=_DENSE,
            keys=_GRANITE_SCALES | {"expert_shared_feed_forward_length"},
            required_keys=frozenset({"attention.scale", "logit_scale"}),
            neutral={"rope.scaling.finetuned": True},
            foreign_parts=_STATE_SPACE,
            mixture=Mixture(normalized=True, shared=_SHARED_EXPERT),
        ),
        Architecture(
            name="smollm3",
            models="SmolLM3",
            rope_layout=RopeLayout.NORM,
            activation=Activation.SWIGLU,
            layer_tensors=_DENSE,
            optional_layer_tensors=_QKV_BIASES | _OTHER_BIASES,
            rope_factors=True,
            rotated=three_of_four,
        ),
        Architecture(
            name="exaone4",
            models="EXAONE 4",
            rope_layout=RopeLayout.NEOX,
            activation=Activation.SWIGLU,
            layer_tensors=_ATTENTION | _FFN | _POST_NORMS | _QK_NORMS,
            keys=_PATTERN,
            rope_factors=True,
            window_period=4,
            rotated=windowed_layers,
        ),
        Architecture(
            name="internlm2",
            models="InternLM 2 and 2.5",
            rope_layout=RopeLayout.NORM,
            activation=Activation.SWIGLU,
            layer_tensors=_DENSE,
        ),
        Architecture(
            name="qwen2moe",
            models="Qwen1.5-MoE, Qwen2-57B-A14B",
            rope_layout=RopeLayout.NEOX,
            activation=Activation.SWIGLU,
            layer_tensors=_DENSE | _QKV_BIASES,
            keys=frozenset({"expert_feed_forward_length", "expert_shared_feed_forward_length"}),
            required_keys=frozenset({"expert_feed_forward_length", "expert_shared_feed_forward_length"}),
            mixture=Mixture(normalized=False, shared=_SHARED_EXPERT | _SHARED_GATE),
        ),
        Architecture(
            name="qwen3moe",
            models="Qwen3-30B-A3B, Qwen3-235B-A22B",
            rope_layout=RopeLayout.NEOX,
            activation=Activation.SWIGLU,
            layer_tensors=_DENSE | _QK_NORMS,
            keys=frozenset({"expert_feed_forward_length"}),
            required_keys=frozenset({"expert_feed_forward_length"}),
            mixture=Mixture(normalized=True),
        ),
        Architecture(
            name="olmoe",
            models="OLMoE",
            rope_layout=RopeLayout.NEOX,
            activation=Activation.SWIGLU,
            layer_tensors=_DENSE | _QK_NORMS,
            whole_qk_norm=True,
            mixture=Mixture(normalized=False),
        ),
    )
}


def find_architecture(name: str) -> Architecture:
    """The row of `name`; UnsupportedModelError lists the architectures that run."""
    row = ARCHITECTURES.get(name)
    if row is None:
        known = "; ".join(f"{row.name} ({row.models})" for row in ARCHITECTURES.values())
        raise UnsupportedModelError(f"architecture {name[:80]!r} is not served; these are: {known}")
    return row
