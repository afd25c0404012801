"""The table of architectures: each fact that no file states, flipped, is caught by a golden; the rest is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from frink_numba.errors import UnsupportedModelError
from frink_numba.host import load as load_module
from frink_numba.host.architectures import ARCHITECTURES, Architecture, all_layers, find_architecture
from frink_numba.host.hyperparameters import read_hyperparameters
from frink_numba.layer import Activation, Layer, RopeLayout
from tests.golden.tiny import VARIANTS, golden_logits, tokens
from tests.golden.tiny_gguf import content, write
from tests.host.errors import worst_error

# A golden of each architecture.
FIRST = {variant.architecture: name for name, variant in reversed(VARIANTS.items())}


def test_every_architecture_has_a_golden():
    assert set(FIRST) == set(ARCHITECTURES)


def other_layout(row: Architecture) -> RopeLayout:
    return RopeLayout.NEOX if row.rope_layout is RopeLayout.NORM else RopeLayout.NORM


def other_activation(row: Architecture) -> Activation:
    return Activation.SWIGLU if row.activation is Activation.GEGLU else Activation.GEGLU


@pytest.fixture
def run_flipped(tmp_path, monkeypatch, run):
    """run_flipped(variant, row) gives the logits of a variant under another row of the table."""

    def run_flipped(name: str, row: Architecture) -> np.ndarray:
        monkeypatch.setattr(load_module, "find_architecture", lambda name: row)
        variant = VARIANTS[name]
        return run(write(content(variant), tmp_path / "m.gguf"), tokens(variant), variant.context)

    return run_flipped


@pytest.mark.parametrize("architecture", FIRST)
def test_the_other_rope_layout_drifts_from_position_1_on(architecture, run_flipped):
    """Fault 15: at position 0 nothing turns: only later ones tell."""
    name, row = FIRST[architecture], ARCHITECTURES[architecture]
    logits, golden = run_flipped(name, replace(row, rope_layout=other_layout(row))), golden_logits(VARIANTS[name])
    assert worst_error(logits, golden) > 1e-2
    assert worst_error(logits[:1], golden[:1]) < 1e-5


@pytest.mark.parametrize("architecture", FIRST)
def test_the_other_activation_moves_the_logits(architecture, run_flipped):
    """Fault 17."""
    name, row = FIRST[architecture], ARCHITECTURES[architecture]
    logits = run_flipped(name, replace(row, activation=other_activation(row)))
    assert worst_error(logits, golden_logits(VARIANTS[name])) > 1e-2


def unrotated_first(windows: Any) -> tuple[bool, ...]:
    return tuple(layer > 0 for layer in range(len(windows)))


FLIPS: list[tuple[str, dict[str, Any]]] = [
    ("mistral_window", {"window_period": 0, "keys": frozenset({"attention.sliding_window"})}),
    ("gemma_grouped", {"scaled_embedding": False}),
    ("gemma2_window", {"scaled_embedding": False}),
    ("gemma3_two_bases", {"scaled_embedding": False}),
    ("gemma2_window", {"window_period": 1}),
    ("gemma2_window", {"window_period": 3}),
    ("gemma3_two_bases", {"window_period": 5}),
    ("gemma3_two_bases", {"window_period": 7}),
    ("gemma3_two_bases", {"local_theta": None}),
    ("gemma3_scaled", {"local_scaling": True}),  # fault 14
    ("olmo3_window", {"local_scaling": True}),
    ("olmo3_window", {"window_period": 1}),
    ("smollm3_unrotated", {"rotated": all_layers}),
    ("smollm3_unrotated", {"rotated": unrotated_first}),
    ("exaone4_hybrid", {"rotated": all_layers}),
    ("exaone4_hybrid", {"window_period": 3}),
    ("exaone4_plain", {"rotated": unrotated_first}),
    *(
        (name, {"mixture": replace(row.mixture, normalized=not row.mixture.normalized)})
        for name, row in ((name, ARCHITECTURES[variant.architecture]) for name, variant in VARIANTS.items())
        if row.mixture is not None and VARIANTS[name].experts is not None
    ),
]


@pytest.mark.parametrize(("name", "flip"), FLIPS, ids=[f"{name} {next(iter(flip))}" for name, flip in FLIPS])
def test_a_flipped_fact_moves_the_logits(name, flip, run_flipped):
    row = replace(ARCHITECTURES[VARIANTS[name].architecture], **flip)
    assert worst_error(run_flipped(name, row), golden_logits(VARIANTS[name])) > 1e-2


def test_every_fact_of_the_table_is_flipped():
    """A field that a row may set is held by a golden here, or by a test of hyper-parameters, tensors or defaults."""
    flipped = {next(iter(flip)) for _, flip in FLIPS}
    elsewhere = {
        *("name", "models", "rope_layout", "activation"),  # above and below
        *("layer_tensors", "optional_layer_tensors", "rope_factors"),  # test_load.py: missing and unknown tensors
        *("keys", "required_keys", "neutral", "foreign_parts"),  # test_hyperparameters.py: missing and unknown keys
        "states_magnitude",  # test_scaling_keys.py
        *("default_window", "default_softcap", "default_logit_softcap", "query_scalars"),  # below
        "whole_qk_norm",  # below: the other shape does not load
    }
    assert flipped | elsewhere == {field.name for field in fields(Architecture)}


LayerEdit = Callable[[Layer], Layer]


def attention(**changes: Any) -> LayerEdit:
    return lambda layer: replace(layer, attention=replace(layer.attention, **changes))


def norm_by_head(layer: Layer) -> Layer:
    """Q and K normed head by head, with the rows of the whole vector's weight."""
    spec = layer.attention
    return attention(q_norm=spec.q_norm.reshape(spec.n_heads, -1), k_norm=spec.k_norm.reshape(spec.n_kv_heads, -1))(
        layer
    )


def swap_pre_norms(layer: Layer) -> Layer:
    """Norms that stand after attention and FFN put before them."""
    moved = {"attn_norm": layer.post_attn_norm, "ffn_norm": layer.post_ffn_norm}
    return replace(layer, **moved, post_attn_norm=None, post_ffn_norm=None)


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("qwen3_grouped", attention(qk_norm_after_rope=True)),  # fault 18
        ("gemma3_two_bases", attention(qk_norm_after_rope=True)),
        ("exaone4_plain", attention(qk_norm_after_rope=True)),
        ("olmo2_whole_norm", attention(qk_norm_after_rope=True)),
        ("olmo2_whole_norm", norm_by_head),
        ("olmoe_whole_norm", norm_by_head),
        ("olmo2_whole_norm", swap_pre_norms),
        ("exaone4_hybrid", swap_pre_norms),
        ("gemma2_caps", attention(scale=1.0)),
    ],
)
def test_a_layer_built_otherwise_moves_the_logits(name, edit, tmp_path, monkeypatch, run):
    real = load_module.build

    def build(*arguments: Any) -> Any:
        tensors = real(*arguments)
        return replace(tensors, layers=tuple(map(edit, tensors.layers)))

    monkeypatch.setattr(load_module, "build", build)
    variant = VARIANTS[name]
    logits = run(write(content(variant), tmp_path / "m.gguf"), tokens(variant))
    assert worst_error(logits, golden_logits(variant)) > 1e-2


@pytest.mark.parametrize(
    ("architecture", "layers", "hidden", "heads", "head_dim", "scalar"),
    [
        ("gemma2", 26, 2304, 8, 256, 256),
        ("gemma2", 42, 3584, 16, 256, 256),
        ("gemma2", 46, 4608, 32, 128, 144),
        ("gemma3", 18, 640, 4, 256, 256),
        ("gemma3", 26, 1152, 4, 256, 256),
        ("gemma3", 34, 2560, 8, 256, 256),
        ("gemma3", 48, 3840, 16, 256, 256),
        ("gemma3", 62, 5376, 32, 128, 168),
    ],
)
def test_the_published_sizes_have_the_query_scales_of_their_configurations(
    architecture, layers, hidden, heads, head_dim, scalar
):
    """Fault 20: by the model's sizes, not by its number of layers. The scalars are `query_pre_attn_scalar`."""
    facts = {
        "block_count": layers,
        "context_length": 8192,
        "embedding_length": hidden,
        "feed_forward_length": 4 * hidden,
        "attention.head_count": heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
    }
    hyper = read_hyperparameters(
        {f"{architecture}.{key}": value for key, value in facts.items()},
        find_architecture(architecture),
        tensors=[str(i) for i in range(1000)],
        where="m.gguf",
    )
    scale = hyper.attention_scale or hyper.head_dim**-0.5
    assert scale == pytest.approx(scalar**-0.5)
    assert hyper.embedding_scale == pytest.approx(hidden**0.5)
    if architecture == "gemma2":
        assert (hyper.softcap, hyper.logit_softcap) == (50.0, 30.0)
        assert hyper.windows == (4096, 0) * (layers // 2)
    else:
        assert (hyper.softcap, hyper.logit_softcap) == (0.0, 0.0)


@pytest.mark.parametrize(
    "name",
    [
        "mamba",
        "stablelm",
        "starcoder2",
        "command-r",
        "phimoe",
        "gemma3n",
        "llama4",
        "mistral3",
        "deepseek2",
        "LLAMA",
        "",
        "x" * 5000,
    ],
)
def test_an_unknown_architecture_is_refused_with_the_list_of_those_that_run(name):
    with pytest.raises(UnsupportedModelError, match=r"llama \(.*SmolLM2.*qwen2 \(") as caught:
        find_architecture(name)
    assert repr(name[:80]) in str(caught.value)
    assert all(f"{known} (" in str(caught.value) for known in ARCHITECTURES)
    assert len(str(caught.value)) < 1000
