"""Rotary scalings that a file tells of in part: it is refused, since it would run with another rotation (R17)."""

import numpy as np
import pytest

from frink_numba.errors import GgufError, UnsupportedModelError
from frink_numba.host.load import load
from frink_numba.host.rope_scaling import ScalingKind, yarn_magnitude
from tests.golden.tiny import VARIANTS, golden_logits, tokens
from tests.golden.tiny_gguf import content, write
from tests.host.errors import worst_error
from tests.host.test_hyperparameters import LONG, TENSORS, read

TYPE, FACTOR = {"rope__scaling__type": "yarn"}, {"rope__scaling__factor": 8.0}
ORIGINAL = {"rope__scaling__original_context_length": 64}
YARN = {**TYPE, **FACTOR, **ORIGINAL}
LONGROPE = {"rope__scaling__attn_factor": 1.19, **ORIGINAL}


@pytest.mark.parametrize(
    ("key", "value"),
    [("attn_factor", 1.1), ("beta_fast", 16.0), ("beta_slow", 2.0), ("ext_factor", 1.0), ("log_multiplier", 0.0)],
)
@pytest.mark.parametrize(
    ("others", "tensors", "stated"),
    [
        ({}, TENSORS, r"there is no rope\.scaling\.type"),
        (FACTOR, TENSORS, r"there is no rope\.scaling\.type"),
        ({**FACTOR, "rope__scaling__type": "linear"}, TENSORS, r"rope\.scaling\.type is 'linear'"),
        ({"rope__scaling__type": "none"}, TENSORS, r"rope\.scaling\.type is 'none'"),
        (LONGROPE, LONG, r"there is no rope\.scaling\.type"),
        ({**LONGROPE, "rope__scaling__type": "longrope"}, LONG, r"rope\.scaling\.type is 'longrope'"),
    ],
)
def test_a_key_of_yarn_without_yarn_is_refused(key, value, others, tensors, stated):
    changes = {**others, f"rope__scaling__yarn_{key}": value}
    with pytest.raises(GgufError, match=rf"llama\.rope\.scaling\.yarn_{key} is there.* of YaRN, but {stated}"):
        read("llama", tensors, **changes)
    assert read(**YARN, **{f"rope__scaling__yarn_{key}": value}).scaling.kind is ScalingKind.YARN


@pytest.mark.parametrize("architecture", ["llama", "phi3", "qwen2"])
def test_an_original_context_that_nothing_is_scaled_from_is_refused(architecture):
    """YaRN or LongRoPE whose other keys were lost; equal to the context it says that nothing is scaled (phi3)."""
    with pytest.raises(GgufError, match=r"original_context_length is 64 and context_length is 512, but neither"):
        read(architecture, **ORIGINAL)
    with pytest.raises(GgufError, match=r"original_context_length is 64 beside a factor of 8, but there is no"):
        read(architecture, **ORIGINAL, **FACTOR)
    with pytest.raises(GgufError, match=r"original_context_length is 512 beside a factor of 8"):
        read(architecture, rope__scaling__original_context_length=512, **FACTOR)
    assert read(architecture, rope__scaling__original_context_length=512) == read(architecture)


@pytest.mark.parametrize("name", ["llama_yarn", "llama_yarn_turns", "qwen2_yarn", "smollm3_yarn", "olmo3_window"])
def test_a_file_of_yarn_without_its_type_does_not_load(name, tmp_path):
    """Fault 12: run as linear its logits would be off by more than their size."""
    file = content(VARIANTS[name])
    del file.metadata[f"{file.architecture}.rope.scaling.type"]
    with pytest.raises(GgufError, match=r"but there is no rope\.scaling\.type"):
        load(write(file, tmp_path / "m.gguf"))


def test_a_file_of_phi3_without_its_factors_does_not_load(tmp_path):
    file = content(VARIANTS["phi3_longrope_long"])
    for name in ("rope_factors_long.weight", "rope_factors_short.weight"):
        del file.tensors[name]
    del file.metadata["phi3.rope.scaling.attn_factor"]
    with pytest.raises(GgufError, match=r"neither rope\.scaling\.type nor LongRoPE's factors are there"):
        load(write(file, tmp_path / "m.gguf"))


def test_olmo_3_states_yarns_magnitude_once_more(tmp_path, run):
    """As its converter writes it: the logits are transformers' with the key as without."""
    variant = VARIANTS["olmo3_window"]
    file = content(variant)
    file.metadata["olmo2.rope.scaling.attn_factor"] = yarn_magnitude(variant.rope["factor"])
    logits = run(write(file, tmp_path / "m.gguf"), tokens(variant))
    assert worst_error(logits, golden_logits(variant)) < 1e-5


@pytest.mark.parametrize(
    ("architecture", "stated", "more"),
    [
        ("olmo2", 1.2079, {}),  # another magnitude
        ("olmo2", yarn_magnitude(8.0), {"rope__scaling__yarn_attn_factor": 1.5}),  # which contradicts it
        ("llama", yarn_magnitude(8.0), {}),  # one more factor, by the format's rule
        ("qwen2", 1.5, {}),
    ],
)
def test_another_magnitude_beside_yarn_is_refused(architecture, stated, more):
    with pytest.raises(UnsupportedModelError, match=rf"{architecture}\.rope\.scaling\.attn_factor is .* is 'yarn'"):
        read(architecture, **YARN, **more, rope__scaling__attn_factor=stated)


@pytest.mark.parametrize("stated", [1.0, yarn_magnitude(8.0), float(np.float32(yarn_magnitude(8.0)))])
def test_a_magnitude_that_changes_nothing_is_taken(stated):
    assert read("olmo2", **YARN, rope__scaling__attn_factor=stated) == read("olmo2", **YARN)
    own = {"rope__scaling__yarn_attn_factor": float(np.float32(yarn_magnitude(8.0)))}
    assert read("olmo2", **YARN, **own, rope__scaling__attn_factor=stated) == read("olmo2", **YARN, **own)
