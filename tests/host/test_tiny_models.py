"""Tiny models against transformers' logits; and that each fact of a file, flipped, is caught by them.

A model that loads and is wrong is worse than one that refuses: relative error under 1e-5 at every position, and every
sabotage beyond 1e-2. `test_architectures.py` flips the facts that no file states.
"""

from collections.abc import Callable

import numpy as np
import pytest

from frink_numba.host.decoder import Decoder
from frink_numba.host.load import load
from tests.golden.tiny import VARIANTS, golden_logits, tokens
from tests.golden.tiny_gguf import Content, content, write
from tests.host.errors import worst_error

FIRST = {variant.architecture: name for name, variant in reversed(VARIANTS.items())}  # a golden of each architecture


@pytest.mark.parametrize("name", [name for name, variant in VARIANTS.items() if not variant.adapted])
def test_logits_are_transformers(name, tmp_path, run):
    """Faults 15, 16, 19, 36 and more: every rope, bias, window and head arrangement, at positions up to 99."""
    variant = VARIANTS[name]
    logits = run(write(content(variant), tmp_path / "m.gguf"), tokens(variant), variant.context)
    assert logits.dtype == np.float32
    assert worst_error(logits, golden_logits(variant)) < 1e-5


@pytest.mark.parametrize("name", FIRST.values())
def test_chunks_and_single_tokens_give_the_same_logits(name, save, backends):
    """Faults 1, 3, 7: windows, caps, mixtures and unrotated layers over a cache that grows."""
    variant, ids = VARIANTS[name], tokens(VARIANTS[name])
    with load(save(name)) as model, Decoder(model, backends) as decoder:
        cache = decoder.new_cache()
        parts = [decoder.prefill(ids[:90], cache, logits="all", chunk_size=13).logits]
        parts += [decoder.decode(token, cache).logits[None] for token in ids[90:]]
    assert worst_error(np.concatenate(parts), golden_logits(variant)) < 1e-5


Edit = Callable[[Content], object]


def key(name: str, value: object) -> Edit:
    return lambda file: file.metadata.update({name: value})


def keys(architecture: str, **values: object) -> Edit:
    """`rope__scaling__factor=2.0` sets ARCHITECTURE.rope.scaling.factor."""
    named = {f"{architecture}.{name.replace('__', '.')}": value for name, value in values.items()}
    return lambda file: file.metadata.update(named)


def without(name: str) -> Edit:
    return lambda file: file.metadata.pop(name)


def change(suffix: str, function: Callable[[np.ndarray], np.ndarray]) -> Edit:
    """Put function(tensor) in the place of each layer's tensor "blk.N.SUFFIX"."""

    def edit(file: Content) -> None:
        names = [name for name in file.tensors if name.split(".", 2)[-1] == suffix]
        assert names
        for name in names:
            file.tensors[name] = np.ascontiguousarray(function(file.tensors[name]))

    return edit


def zero(suffix: str) -> Edit:
    return change(suffix, np.zeros_like)


def ones(suffix: str) -> Edit:
    return change(suffix, np.ones_like)


def swap(one: str, other: str) -> Edit:
    def edit(file: Content) -> None:
        for i in range(3):
            a, b = f"blk.{i}.{one}", f"blk.{i}.{other}"
            file.tensors[a], file.tensors[b] = file.tensors[b], file.tensors[a]

    return edit


def shift_norms(by: float) -> Edit:
    """Fault 17: Gemma's norms less or more than the one that the file has added."""

    def edit(file: Content) -> None:
        for name, tensor in file.tensors.items():
            if name.endswith("norm.weight"):
                file.tensors[name] = tensor + np.float32(by)

    return edit


def swap_halves(rows: np.ndarray) -> np.ndarray:
    return np.concatenate(np.split(rows, 2)[::-1])


def roll_experts(stack: np.ndarray) -> np.ndarray:
    return np.roll(stack, 1, axis=0)


def tie(file: Content) -> None:
    del file.tensors["output.weight"]


def untie(file: Content) -> None:
    file.tensors["output.weight"] = file.tensors["token_embd.weight"][::-1].copy()


def regroup(file: Content) -> None:
    """Query head i reads K/V head i mod 2 instead of i div 2: the same, had the middle two heads changed places."""
    order = [0, 2, 1, 3]
    for i in range(3):
        q, o = f"blk.{i}.attn_q.weight", f"blk.{i}.attn_output.weight"
        file.tensors[q] = file.tensors[q].reshape(4, 16, 64)[order].reshape(64, 64)
        file.tensors[o] = file.tensors[o].reshape(64, 4, 16)[:, order].reshape(64, 64)


def invert_factors(file: Content) -> None:
    file.tensors["rope_freqs.weight"] = 1 / file.tensors["rope_freqs.weight"]


SABOTAGE: list[tuple[str, str, Edit]] = [
    ("theta", "llama_theta", key("llama.rope.freq_base", 10000.0)),
    ("theta of qwen2", "qwen2_tied", key("qwen2.rope.freq_base", 10000.0)),
    ("linear scaling dropped", "llama_linear", key("llama.rope.scaling.factor", 1.0)),
    ("linear scaling inverted", "llama_linear", key("llama.rope.scaling.factor", 0.25)),
    ("linear scaling of qwen2 dropped", "qwen2_linear", key("qwen2.rope.scaling.factor", 1.0)),
    ("frequency factors dropped", "llama_llama3", lambda file: file.tensors.pop("rope_freqs.weight")),
    (
        "frequency factors inverted",
        "llama_llama3",
        invert_factors,
    ),
    ("window dropped", "mistral_window", without("llama.attention.sliding_window")),
    ("window one too wide", "mistral_window", key("llama.attention.sliding_window", 8)),  # fault 5
    ("window one too narrow", "mistral_window", key("llama.attention.sliding_window", 6)),
    ("epsilon", "llama_grouped", key("llama.attention.layer_norm_rms_epsilon", 1e-5)),
    ("partly rotated heads", "llama_grouped", key("llama.rope.dimension_count", 8)),
    ("heads grouped the other way", "llama_grouped", regroup),
    ("output tied", "llama_grouped", tie),
    ("output not tied", "llama_tied", untie),
    ("gate and up swapped", "llama_grouped", swap("ffn_gate.weight", "ffn_up.weight")),
    ("norms swapped", "llama_grouped", swap("attn_norm.weight", "ffn_norm.weight")),
    ("norm weights ignored", "llama_grouped", ones("attn_norm.weight")),
    ("output norm ignored", "llama_grouped", lambda file: file.tensors["output_norm.weight"].fill(1)),
    *(
        (f"{name} of {variant} ignored", variant, zero(f"{name}.bias"))
        for variant, names in {
            "qwen2_grouped": ("attn_q", "attn_k", "attn_v"),
            "llama_biases": ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"),
            "qwen2moe_shared": ("attn_q", "attn_k", "attn_v"),
        }.items()
        for name in names
    ),
    *(
        (f"{name} of {variant} ignored", variant, ones(f"{name}.weight"))  # fault 18, and post-norms
        for variant, names in {
            "qwen3_grouped": ("attn_q_norm", "attn_k_norm"),
            "gemma2_caps": ("post_attention_norm", "post_ffw_norm"),
            "gemma3_two_bases": ("attn_q_norm", "attn_k_norm", "post_attention_norm", "post_ffw_norm"),
            "olmo2_whole_norm": ("attn_q_norm", "attn_k_norm", "post_attention_norm", "post_ffw_norm"),
            "exaone4_plain": ("attn_q_norm", "attn_k_norm", "post_attention_norm", "post_ffw_norm"),
            "olmoe_whole_norm": ("attn_q_norm", "attn_k_norm"),
            "qwen3moe_normalized": ("attn_q_norm", "attn_k_norm"),
        }.items()
        for name in names
    ),
    ("YaRN dropped", "llama_yarn", keys("llama", rope__scaling__type="none", rope__scaling__factor=1.0)),
    ("YaRN as linear", "llama_yarn", keys("llama", rope__scaling__type="linear")),
    ("YaRN's factor", "qwen2_yarn", keys("qwen2", rope__scaling__factor=2.0)),
    ("YaRN's original context", "llama_yarn", keys("llama", rope__scaling__original_context_length=256)),
    ("YaRN's magnitude not applied", "llama_yarn", keys("llama", rope__scaling__yarn_attn_factor=1.0)),  # fault 12
    ("YaRN's magnitude twice", "llama_yarn", keys("llama", rope__scaling__yarn_attn_factor=1.1386**2)),
    ("YaRN's own magnitude", "llama_yarn_turns", without("llama.rope.scaling.yarn_attn_factor")),
    ("YaRN's fast turns", "llama_yarn_turns", without("llama.rope.scaling.yarn_beta_fast")),
    ("YaRN's slow turns", "llama_yarn_turns", without("llama.rope.scaling.yarn_beta_slow")),
    ("LongRoPE's magnitude", "llama_longrope_long", keys("llama", rope__scaling__attn_factor=1.0)),
    ("LongRoPE's magnitude of phi3", "phi3_longrope_short", keys("phi3", rope__scaling__attn_factor=1.0)),
    ("theta of qwen3", "qwen3_head_dim", keys("qwen3", rope__freq_base=10000.0)),
    ("gemma's norms without the one", "gemma_grouped", shift_norms(-1)),
    ("gemma's norms with a second one", "gemma_grouped", shift_norms(1)),
    ("gemma2's attention cap", "gemma2_caps", keys("gemma2", attn_logit_softcapping=50.0)),  # fault 11
    ("gemma2's logit cap", "gemma2_caps", keys("gemma2", final_logit_softcapping=30.0)),
    ("gemma2's window dropped", "gemma2_window", keys("gemma2", attention__sliding_window=0)),
    ("gemma2's window one too wide", "gemma2_window", keys("gemma2", attention__sliding_window=8)),
    ("gemma2's other layers", "gemma2_window", keys("gemma2", attention__sliding_window_pattern=[False, True] * 2)),
    ("gemma2's query scale", "gemma2_scale", without("gemma2.attention.scale")),
    ("gemma3's window dropped", "gemma3_two_bases", keys("gemma3", attention__sliding_window=0)),
    ("gemma3's pattern", "gemma3_two_bases", keys("gemma3", attention__sliding_window_pattern=5)),
    ("gemma3's global base", "gemma3_two_bases", keys("gemma3", rope__freq_base=10000.0)),
    ("gemma3's local base", "gemma3_scaled", keys("gemma3", rope__freq_base_swa=500.0)),
    ("gemma3's scaling dropped", "gemma3_scaled", keys("gemma3", rope__scaling__factor=1.0)),  # fault 14
    ("gemma3's logit cap", "gemma3_scaled", without("gemma3.final_logit_softcapping")),
    ("phi3's gate and up swapped", "phi3_fused", change("ffn_up.weight", swap_halves)),
    ("phi3's q and kv swapped", "phi3_fused", change("attn_qkv.weight", swap_halves)),
    ("phi3's whole heads rotated", "phi3_partial", keys("phi3", rope__dimension_count=16)),
    ("phi3's window dropped", "phi3_window", keys("phi3", attention__sliding_window=0)),
    ("phi3's window one too wide", "phi3_window", keys("phi3", attention__sliding_window=8)),
    ("olmo3's window dropped", "olmo3_window", keys("olmo2", attention__sliding_window=0)),
    ("olmo3's scaling dropped", "olmo3_window", keys("olmo2", rope__scaling__factor=1.0)),
    ("granite's embedding scale", "granite_multipliers", keys("granite", embedding_scale=1.0)),
    ("granite's residual scale", "granite_multipliers", keys("granite", residual_scale=1.0)),
    ("granite's attention scale", "granite_multipliers", keys("granite", attention__scale=0.25)),
    ("granite's logit scale", "granite_multipliers", keys("granite", logit_scale=1.0)),
    ("granite's logit scale the other way", "granite_multipliers", keys("granite", logit_scale=0.4)),
    ("smollm3's YaRN dropped", "smollm3_yarn", keys("smollm3", rope__scaling__factor=1.0)),
    ("exaone4's factors dropped", "exaone4_plain", lambda file: file.tensors.pop("rope_freqs.weight")),
    ("exaone4's window one too wide", "exaone4_hybrid", keys("exaone4", attention__sliding_window=8)),
    ("exaone4's pattern", "exaone4_pattern", without("exaone4.attention.sliding_window_pattern")),
    ("theta of internlm2", "internlm2_grouped", keys("internlm2", rope__freq_base=10000.0)),
    ("one expert fewer", "qwen3moe_normalized", keys("qwen3moe", expert_used_count=2)),
    ("one expert more", "mixtral", keys("llama", expert_used_count=3)),
    ("experts out of order", "olmoe_whole_norm", change("ffn_down_exps.weight", roll_experts)),
    ("the router out of order", "qwen2moe_shared", change("ffn_gate_inp.weight", roll_experts)),
    ("the shared expert ignored", "qwen2moe_shared", zero("ffn_down_shexp.weight")),
    ("granite's shared expert ignored", "granitemoe_shared", zero("ffn_down_shexp.weight")),
    ("granite's shared gate and up swapped", "granitemoe_shared", swap("ffn_gate_shexp.weight", "ffn_up_shexp.weight")),
    ("granite's residual scale with experts", "granitemoe", keys("granitemoe", residual_scale=1.0)),
    ("the shared expert's gate ignored", "qwen2moe_shared", zero("ffn_gate_inp_shexp.weight")),
]


@pytest.mark.parametrize(("name", "edit"), [row[1:] for row in SABOTAGE], ids=[row[0] for row in SABOTAGE])
def test_a_flipped_fact_moves_the_logits(name, edit, tmp_path, run):
    variant, file = VARIANTS[name], content(VARIANTS[name])
    edit(file)
    logits = run(write(file, tmp_path / "m.gguf"), tokens(variant), variant.context)
    assert worst_error(logits, golden_logits(variant)) > 1e-2


@pytest.mark.parametrize(
    ("name", "context"), [("llama_longrope_long", 64), ("llama_longrope_short", None), ("phi3_longrope_partial", 64)]
)
def test_longropes_factors_follow_the_context_that_the_model_is_opened_for(name, context, tmp_path, run):
    """Fault 13: the other set of factors gives other logits."""
    variant = VARIANTS[name]
    ids = tokens(variant)[:context]
    logits = run(write(content(variant), tmp_path / "m.gguf"), ids, context)
    assert worst_error(logits, golden_logits(variant)[:context]) > 1e-2


@pytest.mark.parametrize("keys", [("attn_logit_softcapping",), ("final_logit_softcapping",)])
def test_a_file_of_gemma2_without_caps_has_those_of_all_its_models(keys, tmp_path, run):
    variant = VARIANTS["gemma2_window"]
    file = content(variant)
    for name in keys:
        del file.metadata[f"gemma2.{name}"]
    logits = run(write(file, tmp_path / "m.gguf"), tokens(variant))
    assert worst_error(logits, golden_logits(variant)) < 1e-5


def test_granite_4_of_attention_only_runs_with_the_keys_of_its_family(save, run):
    """Its converter states a state space and a shared expert; no tensor is of either."""
    variant = VARIANTS["granite_multipliers"]
    stated = {"ssm__conv_kernel": 4, "ssm__inner_size": 128, "ssm__state_size": 16, "ssm__group_count": 1}
    more = {"ssm__time_step_rank": 4, "expert_shared_feed_forward_length": variant.ffn, "expert_count": 0}
    path = save("granite_multipliers", keys("granite", **stated, **more))
    assert worst_error(run(path, tokens(variant)), golden_logits(variant)) < 1e-5
