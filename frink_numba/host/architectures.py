"""The architectures that run, by GGUF name: one row of facts each. Whatever a row does not know is refused by name.

A row names the tensors that a layer must and may have; `host/layers.py` knows where each goes. Of the hyper-parameters
`ARCH.*` the common ones are read by `host/hyperparameters.py`; a row adds those that only its architecture has.
"""

from __future__ import annotations

from dataclasses import dataclass

from frink_numba.errors import UnsupportedModelError
from frink_numba.layer import Activation, RopeLayout

_DENSE = frozenset(
    {
        "attn_norm.weight",
        "attn_q.weight",
        "attn_k.weight",
        "attn_v.weight",
        "attn_output.weight",
        "ffn_norm.weight",
        "ffn_gate.weight",
        "ffn_up.weight",
        "ffn_down.weight",
    }
)
_QKV_BIASES = frozenset({"attn_q.bias", "attn_k.bias", "attn_v.bias"})
_OTHER_BIASES = frozenset({"attn_output.bias", "ffn_gate.bias", "ffn_up.bias", "ffn_down.bias"})


@dataclass(frozen=True, slots=True)
class Architecture:
    """Facts that a file does not state, because they follow from its architecture."""

    name: str  # `general.architecture`, and the prefix of its keys
    models: str  # what people know it by
    rope_layout: RopeLayout  # which channels turn together; llama's files hold Q and K reordered for NORM
    activation: Activation
    layer_tensors: frozenset[str]  # every layer has these: names after "blk.N."
    optional_layer_tensors: frozenset[str] = frozenset()
    rope_factors: bool = False  # "rope_freqs.weight" holds frequency factors for all layers
    window: bool = False  # "attention.sliding_window" holds for all layers


ARCHITECTURES = {
    row.name: row
    for row in (
        Architecture(
            name="llama",
            models="Llama 2 and 3, SmolLM2, Mistral",
            rope_layout=RopeLayout.NORM,
            activation=Activation.SWIGLU,
            layer_tensors=_DENSE,
            optional_layer_tensors=_QKV_BIASES | _OTHER_BIASES,
            rope_factors=True,
            window=True,
        ),
        Architecture(
            name="qwen2",
            models="Qwen2, Qwen2.5",
            rope_layout=RopeLayout.NEOX,
            activation=Activation.SWIGLU,
            layer_tensors=_DENSE | _QKV_BIASES,
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
