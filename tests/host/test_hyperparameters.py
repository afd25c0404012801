"""Hyper-parameters: defaults, contradictions and unknown keys, each by its name."""

import numpy as np
import pytest

from frink_numba.errors import GgufError, UnsupportedModelError
from frink_numba.host.architectures import find_architecture
from frink_numba.host.hyperparameters import read_hyperparameters

PLAIN = {
    "general.architecture": "llama",
    "general.name": "x",
    "tokenizer.ggml.model": "no_vocab",
    "llama.block_count": 3,
    "llama.context_length": 512,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


def read(architecture="llama", tensors=29, **changes):
    metadata = dict(PLAIN)
    for key, value in changes.items():
        full = "llama." + key.replace("__", ".")
        if value is None:
            del metadata[full]
        else:
            metadata[full] = value
    metadata = {key.replace("llama.", f"{architecture}."): value for key, value in metadata.items()}
    return read_hyperparameters(metadata, find_architecture(architecture), tensors=tensors, where="m.gguf")


def test_what_a_file_may_leave_out_has_llama_cpps_defaults():
    hyper = read()
    assert hyper.n_heads == hyper.n_kv_heads == (4, 4, 4)
    assert hyper.ffn == (96, 96, 96)
    assert (hyper.head_dim, hyper.rope_dim) == (16, 16)
    assert (hyper.rope_theta, hyper.rope_linear, hyper.window, hyper.vocab) == (10000.0, 1.0, 0, None)


def test_what_a_file_states_is_taken():
    hyper = read(
        attention__head_count_kv=2,
        attention__key_length=24,
        attention__value_length=24,
        rope__dimension_count=12,
        rope__freq_base=5e5,
        attention__sliding_window=7,
        vocab_size=100,
        rope__scaling__type="linear",
        rope__scaling__factor=4.0,
    )
    assert hyper.n_kv_heads == (2, 2, 2)
    assert (hyper.head_dim, hyper.rope_dim, hyper.rope_theta) == (24, 12, 5e5)
    assert (hyper.window, hyper.vocab, hyper.rope_linear) == (7, 100, 4.0)


def test_arrays_give_one_number_a_layer():
    hyper = read(
        attention__head_count=np.array([4, 8, 2], np.uint32),
        attention__head_count_kv=np.array([2, 2, 1], np.int32),
        feed_forward_length=np.array([96, 64, 32], np.uint32),
        attention__key_length=16,
        attention__value_length=16,
    )
    assert hyper.n_heads == (4, 8, 2)
    assert hyper.n_kv_heads == (2, 2, 1)
    assert hyper.ffn == (96, 64, 32)


@pytest.mark.parametrize(
    ("changes", "factor"),
    [
        ({"rope__scaling__type": "none"}, 1.0),
        ({"rope__scaling__type": "none", "rope__scaling__factor": 1.0}, 1.0),
        ({"rope__scaling__factor": 8.0}, 8.0),  # as in llama.cpp, a factor alone is linear
        ({"rope__scale_linear": 2.0}, 2.0),
        ({"rope__scale_linear": 2.0, "rope__scaling__factor": 2.0, "rope__scaling__type": "linear"}, 2.0),
        ({"rope__scaling__original_context_length": 4096, "rope__scaling__finetuned": True}, 1.0),
    ],
)
def test_linear_scaling_in_all_its_spellings(changes, factor):
    assert read(**changes).rope_linear == factor


@pytest.mark.parametrize("key", [key.removeprefix("llama.") for key in PLAIN if key.startswith("llama.")])
def test_a_missing_fact_is_named(key):
    with pytest.raises(GgufError, match=rf"m\.gguf: llama\.{key} is missing"):
        read(**{key.replace(".", "__"): None})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_count": 0}, r"block_count is 0"),
        ({"block_count": 2**32 - 1}, r"block_count is 4294967295"),
        ({"block_count": 30}, r"block_count is 30, but the file holds only 29 tensors"),
        ({"block_count": -1}, r"block_count is -1"),
        ({"block_count": "3"}, r"block_count holds a str"),
        ({"block_count": 3.0}, r"block_count holds a float"),
        ({"block_count": True}, r"block_count holds a bool"),
        ({"block_count": np.array([3])}, r"block_count holds a ndarray"),
        ({"context_length": 0}, r"context_length is 0"),
        ({"embedding_length": 66}, r"embedding_length is 66, not a multiple of 4 heads"),
        ({"embedding_length": 2**31}, r"embedding_length is 2147483648"),
        ({"feed_forward_length": np.array([96, 96])}, r"feed_forward_length has 2 entries for 3 layers"),
        ({"feed_forward_length": ["a", "b", "c"]}, r"feed_forward_length holds a list"),
        ({"attention__head_count": np.array([4.0, 4.0, 4.0])}, r"head_count holds a float"),
        ({"attention__head_count_kv": 3}, r"attention\.head_count is 4 in layer 0, not a multiple of its 3 K/V heads"),
        ({"attention__layer_norm_rms_epsilon": 0.0}, r"epsilon is 0\.0; it must be a positive number"),
        ({"attention__layer_norm_rms_epsilon": float("nan")}, r"epsilon is nan"),
        ({"attention__layer_norm_rms_epsilon": "tiny"}, r"epsilon holds a str"),
        ({"rope__freq_base": float("inf")}, r"freq_base is inf"),
        ({"rope__freq_base": -1.0}, r"freq_base is -1\.0"),
        ({"rope__dimension_count": 18}, r"rope\.dimension_count is 18; it must be even and at most the head's 16"),
        ({"rope__dimension_count": 7}, r"rope\.dimension_count is 7; it must be even"),
        ({"rope__dimension_count": 0}, r"rope\.dimension_count is 0"),
        ({"vocab_size": 0}, r"vocab_size is 0"),
        ({"rope__scaling__type": "linear"}, r"rope\.scaling\.type is 'linear', but there is no"),
        (
            {"rope__scaling__type": "none", "rope__scaling__factor": 2.0},
            r"factor is 2, but rope\.scaling\.type is 'none'",
        ),
        ({"rope__scale_linear": 2.0, "rope__scaling__factor": 4.0}, r"factor is 4, but rope\.scale_linear is 2"),
        ({"rope__scaling__type": 1}, r"rope\.scaling\.type holds a int"),
        ({"attention__sliding_window": -4}, r"sliding_window is -4"),
    ],
)
def test_a_malformed_or_contradictory_fact_is_named(changes, words):
    with pytest.raises(GgufError, match=rf"^m\.gguf: llama\..*{words}"):
        read(**changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"expert_count": 8}, r"expert_count is 8, not 0"),
        ({"expert_count": "8"}, r"expert_count is a str, not 0"),
        ({"attention__causal": False}, r"attention\.causal is False, not True"),
        ({"use_parallel_residual": True}, r"use_parallel_residual is True"),
        ({"rope__scaling__attn_factor": 1.2}, r"rope\.scaling\.attn_factor is 1\.2, not 1\.0"),
        ({"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}, r"rope\.scaling\.type is 'yarn'"),
        ({"rope__scaling__type": "longrope"}, r"rope\.scaling\.type is 'longrope'"),
        ({"attention__scale": 0.1}, r"attention\.scale is not known"),
        ({"attention__temperature_scale": 0.1}, r"attention\.temperature_scale is not known"),
        ({"logit_scale": 0.1}, r"logit_scale is not known"),
        ({"embedding_scale": 12.0}, r"embedding_scale is not known"),
        ({"residual_scale": 0.2}, r"residual_scale is not known"),
        ({"final_logit_softcapping": 30.0}, r"final_logit_softcapping is not known"),
        ({"expert_feed_forward_length": 32}, r"expert_feed_forward_length is not known"),
        ({"attention__value_length": 8}, r"attention\.value_length is 8, but keys have 16"),
        ({"attention__head_count": np.array([4, 0, 4])}, r"attention\.head_count is 0 in layer 1"),
    ],
)
def test_what_would_change_the_result_is_refused_by_name(changes, words):
    with pytest.raises(UnsupportedModelError, match=rf"^m\.gguf: llama\.{words}.*not served"):
        read(**changes)


def test_a_window_is_refused_where_the_file_does_not_say_which_layers_have_it():
    """qwen2's window holds from a certain layer on, which no key tells."""
    with pytest.raises(UnsupportedModelError, match=r"qwen2\.attention\.sliding_window is not known"):
        read("qwen2", attention__sliding_window=7)


@pytest.mark.parametrize(
    "changes",
    [
        {"expert_count": 0, "expert_used_count": 0},
        {"attention__causal": True},
        {"rope__scaling__attn_factor": 1.0},
        {"tensor_data_layout": "Meta AI original pth", "pooling_type": 0},
    ],
)
def test_keys_that_change_nothing_are_taken(changes):
    assert read(**changes) == read()


def test_keys_of_another_prefix_do_not_matter():
    metadata = {**PLAIN, "llama4.expert_count": 8, "llamas": 1, "quantize.imatrix.file": "x"}
    assert read_hyperparameters(metadata, find_architecture("llama"), tensors=29, where="m.gguf") == read()
