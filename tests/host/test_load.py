"""Opening models: which files load, and what every other one is told."""

import re

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

import frink_numba
from frink_numba.errors import FrinkError, GgufError, ModelNotFoundError, SettingError, UnsupportedModelError
from frink_numba.host.gguf import GgufFile
from frink_numba.host.load import load
from frink_numba.layer import Activation, RopeLayout
from tests.golden.tiny import VARIANTS
from tests.golden.tiny_gguf import content


def test_every_variant_loads_with_its_facts(save):
    for name, variant in VARIANTS.items():
        if variant.architecture not in ("llama", "qwen2") or variant.experts:
            continue
        with load(save(name)) as model:
            assert model.architecture.name == variant.architecture
            assert len(model.layers) == variant.layers
            assert model.vocab_size == variant.vocab
            assert (model.output is model.embedding) == variant.tied  # fault 36
            layer = model.layers[-1]
            attention = layer.attention
            assert (attention.n_heads, attention.n_kv_heads) == (variant.heads, variant.kv_heads)
            assert attention.window == variant.window
            assert layer.norm_eps == pytest.approx(variant.eps, rel=1e-6)
            assert attention.rope.theta == pytest.approx(variant.theta)
            assert attention.rope.layout is (RopeLayout.NEOX if name.startswith("qwen2") else RopeLayout.NORM)
            assert layer.ffn.activation is Activation.SWIGLU
            assert (attention.q_bias is not None) == ("q_proj" in variant.biases)
            assert (attention.o_bias is not None) == ("o_proj" in variant.biases)
            assert (layer.ffn.experts[0].down_bias is not None) == ("down_proj" in variant.biases)


def test_frequency_factors_are_of_linear_scaling_times_the_files_own(save):
    """Faults 14 and 16: one factor for all pairs, the file's factors, or both multiplied."""
    half = VARIANTS["llama_grouped"].head_dim // 2

    def factors(name, edit=lambda file: None):
        with load(save(name, edit)) as model:
            return model.layers[1].attention.rope.freq_factors

    assert factors("llama_grouped") is None
    np.testing.assert_array_equal(factors("llama_linear"), np.full(half, 4, np.float32))
    own = factors("llama_llama3")
    np.testing.assert_array_equal(own, content(VARIANTS["llama_llama3"]).tensors["rope_freqs.weight"])
    assert own.min() == 1
    assert own.max() == 8

    def scale(file):
        file.metadata |= {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}

    np.testing.assert_array_equal(factors("llama_llama3", scale), 2 * own)


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_norms_and_biases_in_half_precision_are_converted(save, dtype):
    """Fault 22."""

    def halve(file):
        kind = GGMLQuantizationType[dtype]
        for name, tensor in file.tensors.items():
            if tensor.ndim == 1:
                file.tensors[name] = (quants.quantize(tensor, kind), kind)

    with load(save("qwen2_grouped")) as exact, load(save("qwen2_grouped", halve)) as model:
        for half, full in zip(model.layers, exact.layers, strict=True):
            for mine, other in ((half.attn_norm, full.attn_norm), (half.attention.q_bias, full.attention.q_bias)):
                assert mine.dtype == np.float32
                np.testing.assert_allclose(mine, other, rtol=2**-8)
                assert not np.array_equal(mine, other)


def test_every_tensor_of_a_file_is_read(save, monkeypatch):
    """Fault 19: biases that are there are used."""
    read = set()
    for method in ("matrix", "matrices", "vector"):
        real = getattr(GgufFile, method)
        monkeypatch.setattr(GgufFile, method, lambda self, name, real=real: read.add(name) or real(self, name))
    for name in VARIANTS:
        read.clear()
        with load(save(name)) as model:
            assert read == set(model.gguf.tensors)


def rename(old, new):
    return lambda file: file.tensors.update({new: file.tensors.pop(old)})


def drop(name):
    return lambda file: file.tensors.pop(name)


def reshape(name, *shape):
    return lambda file: file.tensors.update({name: np.zeros(shape, np.float32)})


@pytest.mark.parametrize(
    ("variant", "name"),
    [
        ("qwen3_grouped", "blk.1.attn_q_norm.weight"),
        ("gemma2_caps", "blk.1.post_ffw_norm.weight"),
        ("olmo2_whole_norm", "blk.1.post_attention_norm.weight"),
        ("phi3_fused", "blk.1.attn_qkv.weight"),
        ("phi3_longrope_long", "rope_factors_short.weight"),
        ("qwen2moe_shared", "blk.1.ffn_gate_inp_shexp.weight"),
        ("mixtral", "blk.1.ffn_up_exps.weight"),
        ("llama_grouped", "token_embd.weight"),
        ("llama_grouped", "output_norm.weight"),
        ("llama_grouped", "blk.0.attn_norm.weight"),
        ("llama_grouped", "blk.2.ffn_down.weight"),
        ("qwen2_grouped", "blk.1.attn_q.bias"),
        ("qwen2_grouped", "blk.1.attn_v.bias"),
    ],
)
def test_a_missing_tensor_is_named(save, variant, name):
    with pytest.raises(GgufError, match=f"tensor '{name}' is missing"):
        load(save(variant, drop(name)))


@pytest.mark.parametrize(
    ("variant", "old", "new"),
    [
        ("llama_grouped", "blk.2.ffn_up.weight", "blk.2.ffn_gate_inp.weight"),
        ("llama_grouped", "blk.2.ffn_up.weight", "blk.3.ffn_up.weight"),  # beyond block_count
        ("llama_grouped", "blk.2.ffn_up.weight", "blk.02.ffn_up.weight"),
        ("llama_grouped", "blk.2.ffn_up.weight", "blk.+2.ffn_up.weight"),
        ("llama_grouped", "blk.2.ffn_up.weight", "blk.9999999999999999999.ffn_up.weight"),
        ("llama_grouped", "output.weight", "output.bias"),
        ("qwen2_grouped", "output.weight", "rope_freqs.weight"),
        ("llama_grouped", "blk.0.attn_q.weight", "blk.0.attn_qkv.weight"),
        ("llama_grouped", "blk.0.attn_norm.weight", "blk.0.attn_q_norm.weight"),
        ("olmo2_whole_norm", "blk.0.post_attention_norm.weight", "blk.0.attn_norm.weight"),
        ("gemma_grouped", "blk.0.ffn_norm.weight", "blk.0.post_ffw_norm.weight"),
        ("phi3_fused", "blk.0.ffn_up.weight", "blk.0.ffn_gate.weight"),
        ("mixtral", "blk.0.ffn_up_exps.weight", "blk.0.ffn_up.weight"),
        ("granitemoe", "blk.0.ffn_up_exps.weight", "blk.0.ffn_up_shexp.weight"),
        ("granitemoe_shared", "blk.0.ffn_up_exps.weight", "blk.0.ffn_gate_inp_shexp.weight"),
        ("qwen3moe_normalized", "blk.0.ffn_up_exps.weight", "blk.0.ffn_up_shexp.weight"),
        ("qwen3_grouped", "output.weight", "rope_factors_long.weight"),
        ("internlm2_grouped", "blk.0.attn_q.weight", "blk.0.attn_q.bias"),
    ],
)
def test_an_unknown_tensor_is_refused_by_name(save, variant, old, new):
    """Fault 19: what nothing consumes may change the result."""
    with pytest.raises(UnsupportedModelError, match=f"tensor '{new.replace('+', '.')}' is not known for architecture"):
        load(save(variant, rename(old, new)))


@pytest.mark.parametrize(
    ("name", "shape", "want"),
    [
        ("token_embd.weight", (79, 64), [80, 64]),
        ("token_embd.weight", (80, 32), [80, 64]),
        ("output.weight", (81, 64), [80, 64]),
        ("output_norm.weight", (63,), [64]),
        ("blk.1.attn_q.weight", (32, 64), [64, 64]),
        ("blk.1.attn_k.weight", (64, 64), [32, 64]),
        ("blk.1.attn_v.weight", (32, 63), [32, 64]),
        ("blk.1.attn_output.weight", (64, 32), [64, 64]),
        ("blk.1.attn_norm.weight", (1, 64), [64]),
        ("blk.1.ffn_gate.weight", (64, 96), [96, 64]),
        ("blk.1.ffn_down.weight", (96, 64), [64, 96]),
        ("blk.1.ffn_down.bias", (96,), [64]),
        ("rope_freqs.weight", (16,), [8]),
    ],
)
def test_a_shape_that_the_hyper_parameters_contradict_is_named(save, name, shape, want):
    """R20, fault 33."""
    with pytest.raises(GgufError) as caught:
        load(save("llama_grouped", reshape(name, *shape)))
    assert f"tensor '{name}' has shape {list(shape)}, but the hyper-parameters ask for {want}" in str(caught.value)


@pytest.mark.parametrize(
    ("variant", "name", "shape", "want"),
    [
        ("phi3_fused", "blk.1.attn_qkv.weight", (64, 64), [128, 64]),
        ("phi3_fused", "blk.1.ffn_up.weight", (96, 64), [192, 64]),
        ("phi3_longrope_partial", "rope_factors_short.weight", (8,), [4]),
        ("qwen3_grouped", "blk.1.attn_q_norm.weight", (64,), [16]),
        ("olmo2_whole_norm", "blk.1.attn_k_norm.weight", (16,), [32]),
        ("mixtral", "blk.1.ffn_gate_exps.weight", (3, 96, 64), [4, 96, 64]),
        ("mixtral", "blk.1.ffn_down_exps.weight", (4, 96, 64), [4, 64, 96]),
        ("mixtral", "blk.1.ffn_gate_inp.weight", (2, 64), [4, 64]),
        ("qwen2moe_shared", "blk.1.ffn_gate_inp_shexp.weight", (1, 64), [64]),
        ("qwen2moe_shared", "blk.1.ffn_gate_shexp.weight", (24, 64), [40, 64]),
    ],
)
def test_a_shape_of_another_architecture_is_named(save, variant, name, shape, want):
    """R20, fault 33."""
    with pytest.raises(GgufError) as caught:
        load(save(variant, reshape(name, *shape)))
    assert f"tensor '{name}' has shape {list(shape)}, but the hyper-parameters ask for {want}" in str(caught.value)


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf])
@pytest.mark.parametrize(
    ("variant", "name"),
    [
        ("llama_llama3", "rope_freqs.weight"),
        ("phi3_longrope_long", "rope_factors_long.weight"),
        ("phi3_longrope_long", "rope_factors_short.weight"),
    ],
)
def test_frequency_factors_that_are_no_factors_are_refused(save, variant, name, bad):
    def spoil(file):
        file.tensors[name][3] = bad

    with pytest.raises(GgufError, match=rf"{name}' holds factors that are not positive"):
        load(save(variant, spoil))


@pytest.mark.parametrize("kind", ["linear", "yarn"])
@pytest.mark.parametrize(("factor", "stored"), [(3e38, 8.0), (1.2e-38, 1e-38)])
def test_a_scaling_beyond_numbers_is_refused(save, kind, factor, stored):
    """Each alone is a number, their product is none."""

    def spoil(file):
        facts = {"type": kind, "factor": factor, "original_context_length": 64}
        file.metadata |= {f"llama.rope.scaling.{name}": value for name, value in facts.items()}
        file.tensors["rope_freqs.weight"].fill(stored)

    with pytest.raises(GgufError, match=r"gives factors that are not positive numbers"):
        load(save("llama_llama3", spoil))


@pytest.mark.parametrize("bad", [1e308, 1e-45, 1e-320])
@pytest.mark.parametrize("key", ["embedding_scale", "logit_scale", "attention.scale", "rope.scaling.factor"])
def test_a_number_beyond_float32_is_refused(save, key, bad):
    def spoil(file):
        file.metadata[f"granite.{key}"] = np.float64(bad)

    with pytest.raises(GgufError, match=rf"granite\.{key} is .*; it must be a number that float32 can hold"):
        load(save("granite_tied", spoil))


def test_factors_of_two_kinds_contradict(save):
    def add(file):
        file.tensors["rope_freqs.weight"] = np.ones(8, np.float32)

    with pytest.raises(GgufError, match=r"rope_freqs\.weight' stands beside the factors of LongRoPE"):
        load(save("llama_longrope_long", add))


def test_fused_tensors_and_stacks_of_experts_are_views_of_the_file(save):
    """No copy: every part lies in the bytes of its tensor."""
    with load(save("phi3_fused")) as model:
        for number, layer in enumerate(model.layers):
            spec, expert = layer.attention, layer.ffn.experts[0]
            for name, parts in {"attn_qkv": (spec.q, spec.k, spec.v), "ffn_up": (expert.gate, expert.up)}.items():
                whole = model.gguf.matrix(f"blk.{number}.{name}.weight")
                at = whole.data.ctypes.data
                for part in parts:
                    assert part.data.ctypes.data == at
                    at += part.nbytes
                assert at == whole.data.ctypes.data + whole.nbytes
    with load(save("mixtral")) as model:
        stack = model.gguf.matrices("blk.2.ffn_up_exps.weight")
        for expert, matrix in zip(model.layers[2].ffn.experts, stack, strict=True):
            assert expert.up.data.ctypes.data == matrix.data.ctypes.data
            assert not expert.up.data.flags.owndata


def test_longropes_factors_follow_the_context(save):
    """Fault 13: the long ones beyond the original context of 64, the short ones up to it."""
    path = save("phi3_longrope_long")
    tensors = content(VARIANTS["phi3_longrope_long"]).tensors
    for context, name in ((None, "long"), (65, "long"), (64, "short"), (1, "short")):
        with load(path, context_length=context) as model:
            rope = model.layers[0].attention.rope
            np.testing.assert_array_equal(rope.freq_factors, tensors[f"rope_factors_{name}.weight"])
            assert rope.magnitude_scale == pytest.approx(2**0.5)


def test_a_vocabulary_size_that_is_not_stated_is_the_embeddings(save):
    with load(save("llama_grouped", lambda file: file.metadata.pop("llama.vocab_size"))) as model:
        assert model.vocab_size == 80


@pytest.mark.parametrize(
    ("edit", "error", "words"),
    [
        (
            lambda file: file.metadata.update({"general.type": "adapter"}),
            UnsupportedModelError,
            "general.type is 'adapter'",
        ),
        (
            lambda file: setattr(file, "architecture", "mamba"),
            UnsupportedModelError,
            "architecture 'mamba' is not served",
        ),
        (lambda file: file.metadata.pop("llama.block_count"), GgufError, "llama.block_count is missing"),
        (
            lambda file: file.metadata.update({"llama.attention.temperature_scale": 0.1}),
            UnsupportedModelError,
            "temperature_scale is not known",
        ),
    ],
)
def test_a_file_that_is_not_served_is_told_why_and_let_go(save, edit, error, words):
    path = save("llama_grouped", edit)
    with pytest.raises(error, match=words):
        load(path)
    path.unlink()


def test_a_matrix_of_a_kind_that_holds_no_weights_is_refused_at_once(save):
    def retype(file):
        file.tensors["blk.1.attn_k.weight"] = np.ones((32, 64), np.int32)

    with pytest.raises(UnsupportedModelError, match=r"tensor 'blk\.1\.attn_k\.weight': tensors of kind I32 cannot"):
        load(save("llama_grouped", retype))


def test_a_quantized_norm_is_refused_by_name(save):
    """Fault 22: convert, or refuse by name."""

    def quantize(file):
        kind = GGMLQuantizationType.Q8_0
        file.tensors["output_norm.weight"] = (quants.quantize(file.tensors["output_norm.weight"], kind), kind)

    with pytest.raises(GgufError, match=r"'output_norm\.weight' is of kind Q8_0"):
        load(save("llama_grouped", quantize))


@pytest.mark.parametrize("length", [0, -1, 4097, 1.5, "8", True])
def test_a_context_length_beyond_the_models_is_refused(save, length):
    path = save("llama_grouped")
    with pytest.raises(SettingError, match=r"context_length=.*from 1 to 4096"):
        load(path, context_length=length)


def test_a_shorter_context_is_taken(save):
    with load(save("llama_grouped"), context_length=np.int64(64)) as model:
        assert model.context_length == 64
        assert model.hyper.context_length == 4096


def test_a_name_that_leads_nowhere_says_how_to_fetch():
    with pytest.raises(ModelNotFoundError):
        load("no-such-model")


def test_unknown_keywords_are_refused(save):
    with pytest.raises(TypeError, match="context_lenght"):
        frink_numba.load(save("llama_grouped"), context_lenght=5)


def test_a_closed_model_says_so_and_gives_the_mapping_back(save):
    model = load(save("llama_grouped"))
    with model:
        assert not model.closed
    model.close()
    assert model.closed
    with pytest.raises(FrinkError, match="is closed"):
        model.check_open()
    with pytest.raises(FrinkError, match="is closed"):
        _ = model.tokenizer
    with pytest.raises(FrinkError, match="closed"):
        model.gguf.matrix("token_embd.weight")


def test_a_tokenizer_that_is_not_served_does_not_stand_in_the_way_of_ids(save):
    path = save("llama_grouped")
    with load(path) as model, pytest.raises(FrinkError, match=f"^{re.escape(str(path))}: .*token"):
        _ = model.tokenizer
