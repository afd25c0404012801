"""Hyper-parameters: defaults, contradictions and unknown keys, each by its name."""

import numpy as np
import pytest

from frink_numba.errors import GgufError, UnsupportedModelError
from frink_numba.host.architectures import find_architecture
from frink_numba.host.hyperparameters import read_hyperparameters
from frink_numba.host.rope_scaling import PLAIN as PLAIN_SCALING
from frink_numba.host.rope_scaling import ScalingKind

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


TENSORS = tuple(f"tensor {i}" for i in range(29))
LONG = (*TENSORS[2:], "rope_factors_long.weight", "rope_factors_short.weight")
ORIGINAL = {"rope__scaling__original_context_length": 64}
WINDOW = {"attention__sliding_window": 7}
GRANITE = {"attention__scale": 0.25, "logit_scale": 8.0}
EXPERTS = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32}


def read(architecture="llama", tensors=TENSORS, **changes):
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
    assert (hyper.rope_theta, hyper.scaling, hyper.vocab) == (10000.0, PLAIN_SCALING, None)
    assert (hyper.windows, hyper.rotated) == ((0, 0, 0), (True, True, True))
    assert (hyper.experts, hyper.attention_scale) == (None, None)
    assert (hyper.softcap, hyper.logit_softcap) == (0.0, 0.0)
    assert (hyper.embedding_scale, hyper.residual_scale, hyper.logit_divisor) == (1.0, 1.0, 1.0)


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
    assert (hyper.windows, hyper.vocab) == ((7, 7, 7), 100)
    assert (hyper.scaling.kind, hyper.scaling.factor) == (ScalingKind.LINEAR, 4.0)


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
        ({"rope__scaling__original_context_length": 512, "rope__scaling__finetuned": True}, 1.0),
        ({"rope__scaling__type": "none", "rope__scaling__original_context_length": 64}, 1.0),
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 8.0, **ORIGINAL}, 8.0),
    ],
)
def test_linear_scaling_in_all_its_spellings(changes, factor):
    scaling = read(**changes).scaling
    assert scaling.factor == factor
    assert scaling.kind is (ScalingKind.NONE if factor == 1 else ScalingKind.LINEAR)


def test_yarn_has_the_defaults_of_its_paper():
    """Fault 12: 1.1386 at factor 4, unless the file states another magnitude."""
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}
    original = {"rope__scaling__original_context_length": 4096}
    scaling = read(**yarn, **original).scaling
    assert (scaling.kind, scaling.factor, scaling.original_context) == (ScalingKind.YARN, 4.0, 4096)
    assert (scaling.fast_turns, scaling.slow_turns) == (32.0, 1.0)
    assert scaling.magnitude == pytest.approx(1.138629, abs=1e-6)
    stated = {"yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0, "yarn_attn_factor": 1.5}
    scaling = read(**yarn, **original, **{f"rope__scaling__{key}": value for key, value in stated.items()}).scaling
    assert (scaling.fast_turns, scaling.slow_turns, scaling.magnitude) == (16.0, 2.0, 1.5)
    shrunk = {"rope__scaling__type": "yarn", "rope__scaling__factor": 0.5}
    assert read(**shrunk, **original).scaling.magnitude == 1.0


@pytest.mark.parametrize("kind", [{}, {"rope__scaling__type": "longrope"}])
def test_the_tensors_of_longrope_need_no_type(kind):
    """phi3's files name none."""
    facts = {"rope__scaling__attn_factor": 1.19, "rope__scaling__original_context_length": 4096}
    scaling = read("phi3", LONG, **facts, **kind).scaling
    assert (scaling.kind, scaling.magnitude, scaling.original_context) == (ScalingKind.LONGROPE, 1.19, 4096)


def test_windows_by_period_or_by_layer():
    """Gemma's first layers have one, and each n-th has not."""
    window = {"attention__sliding_window": 7}
    assert read("gemma2", **window).windows == (7, 0, 7)
    assert read("gemma2").windows == (4096, 0, 4096)
    assert read("gemma3", **window).windows == (7, 7, 7)
    assert read("gemma3", **window, attention__sliding_window_pattern=2).windows == (7, 0, 7)
    assert read("gemma3", **window, attention__sliding_window_pattern=1).windows == (0, 0, 0)
    flags = np.array([False, True, True])
    assert read("exaone4", **window, attention__sliding_window_pattern=flags).windows == (0, 7, 7)
    assert read("olmo2", attention__sliding_window=0, attention__sliding_window_pattern=flags).windows == (0, 0, 0)
    assert read("gemma2", attention__sliding_window_pattern=flags).windows == (0, 4096, 4096)


@pytest.mark.parametrize(
    ("architecture", "key"),
    [
        ("gemma3", "attention__sliding_window_pattern"),
        ("gemma3", "rope__freq_base_swa"),
        ("olmo2", "attention__sliding_window_pattern"),
        ("olmo2", "rope__freq_base_swa"),
        ("exaone4", "attention__sliding_window_pattern"),
    ],
)
def test_facts_of_windows_without_their_width_are_refused(architecture, key):
    """The file contradicts itself: every layer would see everything, where some were made not to."""
    name = key.replace("__", ".").replace(".", r"\.")
    with pytest.raises(GgufError, match=rf"{architecture}\.{name} is there, but attention\.sliding_window, .*missing"):
        read(architecture, **{key: 3})
    assert read(architecture, **{key: 3}, attention__sliding_window=7).windows[0] == 7


def test_layers_that_are_not_rotated():
    layers = {"block_count": 6}
    assert read("smollm3", **layers).rotated == (True, True, True, False, True, True)
    assert read("exaone4", **layers).rotated == (True,) * 6
    assert read("exaone4", **layers, attention__sliding_window=7).rotated == (True, True, True, False, True, True)


def test_the_base_and_scaling_of_layers_with_a_window():
    """Fault 14: Gemma 3's scaling is for global layers only, and its local layers have a base of their own."""
    linear = {"rope__scaling__type": "linear", "rope__scaling__factor": 8.0, "rope__freq_base": 1e6}
    hyper = read("gemma3", **linear)
    assert (hyper.rope_theta, hyper.local_theta) == (1e6, 1e4)
    assert (hyper.scaling.factor, hyper.local_scaling) == (8.0, PLAIN_SCALING)
    assert read("gemma3", attention__sliding_window=7, rope__freq_base_swa=5e3).local_theta == 5e3
    hyper = read("llama", **linear)
    assert hyper.local_theta == hyper.rope_theta
    assert hyper.local_scaling == hyper.scaling


def test_scales_and_caps():
    hyper = read("granite", **GRANITE, embedding_scale=12.0, residual_scale=0.22)
    assert (hyper.embedding_scale, hyper.residual_scale) == (12.0, 0.22)
    assert (hyper.attention_scale, hyper.logit_divisor) == (0.25, 8.0)
    assert read("gemma").embedding_scale == 8.0
    hyper = read("gemma2", attn_logit_softcapping=20.0, final_logit_softcapping=10.0, attention__scale=0.1)
    assert (hyper.softcap, hyper.logit_softcap, hyper.attention_scale) == (20.0, 10.0, 0.1)


def test_mixtures():
    experts = read("qwen3moe", **EXPERTS).experts
    assert (experts.count, experts.used, experts.ffn, experts.shared_ffn) == (8, 2, 32, 0)
    assert read("qwen2moe", **EXPERTS, expert_shared_feed_forward_length=48).experts.shared_ffn == 48
    assert read("granitemoe", **GRANITE, expert_count=8, expert_used_count=2).experts.shared_ffn == 0
    shared = {"expert_shared_feed_forward_length": 40}
    assert read("granitemoe", **GRANITE, **shared, expert_count=8, expert_used_count=2).experts.shared_ffn == 40
    assert read("olmoe", expert_count=8, expert_used_count=8).experts.ffn == 96
    assert read("llama", expert_count=8, expert_used_count=2).experts.count == 8
    assert read("llama", expert_count=0, expert_used_count=0).experts is None


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
        ({"rope__scaling__type": "yarn"}, r"rope\.scaling\.type is 'yarn', but there is no rope\.scaling\.factor"),
        (
            {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0},
            r"rope\.scaling\.original_context_length is missing",
        ),
        (
            {
                "rope__scaling__type": "yarn",
                "rope__scaling__factor": 4.0,
                "rope__scaling__original_context_length": 64,
                "rope__freq_base": 1.0,
            },
            r"freq_base is 1, with which YaRN",
        ),
        ({"rope__scaling__type": "longrope"}, r"rope\.scaling\.type is 'longrope', but there are no tensors"),
        ({"expert_count": -1}, r"expert_count is -1"),
        ({"expert_count": 8}, r"expert_used_count is missing"),
        ({"expert_used_count": 2}, r"expert_used_count is not 0, but there are no experts"),
        ({"expert_count": 8, "expert_used_count": 9}, r"expert_used_count is 9, more than the 8 experts"),
        ({"expert_count": "8"}, r"expert_count holds a str"),
        ({"attention__sliding_window": -4}, r"sliding_window is -4"),
    ],
)
def test_a_malformed_or_contradictory_fact_is_named(changes, words):
    with pytest.raises(GgufError, match=rf"^m\.gguf: llama\..*{words}"):
        read(**changes)


@pytest.mark.parametrize(
    ("architecture", "changes", "words"),
    [
        ("granite", {"attention__scale": 0.1}, r"granite\.logit_scale is missing"),
        ("granite", {"logit_scale": 0.1}, r"granite\.attention\.scale is missing"),
        ("qwen3moe", {}, r"qwen3moe\.expert_feed_forward_length is missing"),
        ("qwen3moe", {"expert_feed_forward_length": 32}, r"qwen3moe\.expert_count is missing"),
        ("qwen3moe", {**EXPERTS, "expert_count": 0}, r"qwen3moe\.expert_count is 0"),
        ("qwen2moe", EXPERTS, r"qwen2moe\.expert_shared_feed_forward_length is missing"),
        (
            "gemma3",
            {**WINDOW, "attention__sliding_window_pattern": np.array([1, 0])},
            r"pattern has 2 entries for 3 layers",
        ),
        ("gemma3", {**WINDOW, "attention__sliding_window_pattern": np.array([1, 0, 2])}, r"pattern holds other values"),
        ("gemma3", {**WINDOW, "attention__sliding_window_pattern": 0}, r"pattern is 0"),
        ("gemma3", {**WINDOW, "attention__sliding_window_pattern": "LG"}, r"pattern holds a str"),
    ],
)
def test_what_an_architecture_needs_is_named(architecture, changes, words):
    with pytest.raises(GgufError, match=rf"^m\.gguf: .*{words}"):
        read(architecture, **changes)


def test_longrope_needs_its_magnitude_and_its_original_context():
    with pytest.raises(GgufError, match=r"attn_factor is missing, which LongRoPE"):
        read("phi3", LONG, rope__scaling__original_context_length=4096)
    with pytest.raises(GgufError, match=r"original_context_length is missing"):
        read("phi3", LONG, rope__scaling__attn_factor=1.2)
    with pytest.raises(GgufError, match=r"type is 'yarn', but there are tensors 'rope_factors_long"):
        read("phi3", LONG, rope__scaling__type="yarn", rope__scaling__factor=2.0)


@pytest.mark.parametrize(
    ("architecture", "changes", "words"),
    [
        ("granite", {**GRANITE, "rope__scaling__finetuned": False}, r"rope\.scaling\.finetuned is False, not True"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping is not known"),
        ("gemma2", {"rope__freq_base_swa": 1e4}, r"rope\.freq_base_swa is not known"),
        ("olmoe", {"attention__clamp_kqv": 8.0}, r"attention\.clamp_kqv is not known"),
        ("qwen3moe", {**EXPERTS, "expert_weights_scale": 2.0}, r"expert_weights_scale is not known"),
        ("qwen3moe", {**EXPERTS, "expert_gating_func": 2}, r"expert_gating_func is 2, not 1"),
        ("qwen3moe", {**EXPERTS, "expert_group_count": 4}, r"expert_group_count is 4, not 0"),
        ("qwen3", {"expert_count": 8}, r"expert_count is 8, not 0"),
        ("qwen3", {"expert_count": "8"}, r"expert_count is a str, not 0"),
        ("exaone4", {"nextn_predict_layers": 1}, r"nextn_predict_layers is 1, not 0"),
    ],
)
def test_what_another_architecture_knows_is_refused_by_name(architecture, changes, words):
    with pytest.raises(UnsupportedModelError, match=rf"^m\.gguf: {architecture}\.{words}.*not served"):
        read(architecture, **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention__causal": False}, r"attention\.causal is False, not True"),
        ({"use_parallel_residual": True}, r"use_parallel_residual is True"),
        ({"rope__scaling__attn_factor": 1.2}, r"rope\.scaling\.attn_factor is 1\.2, but rope\.scaling\.type is 'none'"),
        ({"rope__scaling__type": "dynamic", "rope__scaling__factor": 4.0}, r"rope\.scaling\.type is 'dynamic'"),
        ({"rope__scaling__yarn_ext_factor": 0.5}, r"rope\.scaling\.yarn_ext_factor is 0\.5, not 1\.0"),
        ({"rope__scaling__yarn_log_multiplier": 0.1}, r"rope\.scaling\.yarn_log_multiplier is 0\.1, not 0\.0"),
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
        {"expert_gating_func": 1, "expert_group_count": 0, "expert_group_used_count": 0, "nextn_predict_layers": 0},
        {"attention__causal": True},
        {"rope__scaling__attn_factor": 1.0},
        {"tensor_data_layout": "Meta AI original pth", "pooling_type": 0},
    ],
)
def test_keys_that_change_nothing_are_taken(changes):
    assert read(**changes) == read()


def test_keys_of_another_prefix_do_not_matter():
    metadata = {**PLAIN, "llama4.expert_count": 8, "llamas": 1, "quantize.imatrix.file": "x"}
    assert read_hyperparameters(metadata, find_architecture("llama"), tensors=TENSORS, where="m.gguf") == read()


STATE_SPACE = {"ssm__conv_kernel": 4, "ssm__inner_size": 128, "ssm__state_size": 16, "ssm__group_count": 1}


@pytest.mark.parametrize("more", [{}, {"expert_shared_feed_forward_length": 96, "expert_count": 0}])
def test_granite_4_of_attention_only_states_parts_that_it_has_not(more):
    """The converter writes the keys of the whole family; without tensors of such parts they mean nothing."""
    assert read("granite", **GRANITE, **STATE_SPACE, **more) == read("granite", **GRANITE)
    mixture = {**GRANITE, "expert_count": 8, "expert_used_count": 2}
    assert read("granitemoe", **mixture, **STATE_SPACE) == read("granitemoe", **mixture)


@pytest.mark.parametrize(
    ("tensor", "keys", "named"),
    [
        ("blk.1.ssm_in.weight", STATE_SPACE, r"ssm\.conv_kernel"),
        ("blk.1.ffn_gate_exps.weight", {"expert_shared_feed_forward_length": 96}, "expert_shared_feed_forward_length"),
        ("blk.1.ffn_up_shexp.weight", {"expert_shared_feed_forward_length": 96}, "expert_shared_feed_forward_length"),
        ("blk.1.ffn_up.weight", {"expert_shared_feed_forward_lengths": 96}, "expert_shared_feed_forward_lengths"),
    ],
)
def test_those_keys_are_refused_beside_tensors_of_such_parts(tensor, keys, named):
    with pytest.raises(UnsupportedModelError, match=rf"granite\.{named} is not known"):
        read("granite", (*TENSORS, tensor), **GRANITE, **keys)


def test_other_architectures_have_no_state_space():
    with pytest.raises(UnsupportedModelError, match=r"llama\.ssm\.conv_kernel is not known"):
        read(**STATE_SPACE)
