"""LoRA adapters: against transformers with merged weights, and what is refused; never ignored (R15)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from frink_numba.backend import Decline, Step
from frink_numba.cuda.classify import decline_reason
from frink_numba.errors import FrinkError, GgufError, ModelNotFoundError, SettingError, UnsupportedModelError
from frink_numba.host.backend import HostBackend
from frink_numba.host.decoder import Decoder
from frink_numba.host.kv_cache import KVCache
from frink_numba.host.load import load
from tests.golden.tiny import VARIANTS, golden_logits, tokens
from tests.golden.tiny_gguf import adapter_content, content
from tests.host.errors import worst_error

ADAPTED = [name for name, variant in VARIANTS.items() if variant.adapted]


@pytest.fixture
def logits(save, backends):
    """logits(variant, adapters): of the variant's prompt."""

    def logits(name: str, adapters: Any) -> np.ndarray:
        with load(save(name), adapters=adapters) as model, Decoder(model, backends) as decoder:
            return decoder.prefill(tokens(VARIANTS[name]), decoder.new_cache(), logits="all").logits

    return logits


def adapter(name: str = "llama_lora", **metadata: Any) -> Any:
    file = adapter_content(VARIANTS[name])
    file.metadata |= {key.replace("__", "."): value for key, value in metadata.items()}
    return file


@pytest.mark.parametrize("name", ADAPTED)
def test_logits_are_those_of_merged_weights(name, save, logits):
    """Every projection has an update; phi3's fused ones are split."""
    got = logits(name, [save(adapter(name))])
    assert worst_error(got, golden_logits(VARIANTS[name])) < 1e-5
    assert worst_error(logits(name, []), golden_logits(VARIANTS[name])) > 1e-2


def test_a_scale_multiplies_and_adapters_add_up(save, logits):
    path = save(adapter())
    golden = golden_logits(VARIANTS["llama_lora"])
    assert worst_error(logits("llama_lora", [(path, 0.25), (path, 0.75)]), golden) < 1e-5
    assert worst_error(logits("llama_lora", [(path, 3), (path, -2)]), golden) < 1e-4
    assert worst_error(logits("llama_lora", [(path, 0.5)]), golden) > 1e-2


def test_an_alpha_of_0_leaves_the_scale_alone(save, logits):
    """As in llama.cpp: then nothing is divided by the rank."""
    path = save(adapter(adapter__lora__alpha=0.0))
    assert worst_error(logits("llama_lora", [(path, 2.0)]), golden_logits(VARIANTS["llama_lora"])) < 1e-5


@pytest.mark.parametrize("name", [name for name in adapter().tensors if name.startswith("blk.1.") and "lora_b" in name])
def test_each_update_moves_the_logits(name, save, logits):
    file = adapter()
    file.tensors[name] = np.zeros_like(file.tensors[name])
    assert worst_error(logits("llama_lora", [save(file)]), golden_logits(VARIANTS["llama_lora"])) > 1e-3


def test_an_adapter_in_half_precision_or_quantized_is_converted(save):
    for kind in ("F16", "BF16"):
        file = adapter()
        for name, tensor in file.tensors.items():
            file.tensors[name] = (quants.quantize(tensor, GGMLQuantizationType[kind]), GGMLQuantizationType[kind])
        with load(save("llama_lora"), adapters=[save(file)]) as model:
            exact = adapter().tensors["blk.2.ffn_down.weight.lora_a"]
            lora = next(lora for lora in model.layers[2].lora if lora.target == "down")
            assert lora.down.dtype == np.float32
            np.testing.assert_allclose(lora.down, exact, rtol=2**-8)


def test_the_cuda_backend_declines_adapted_layers_and_the_host_serves_them(save):
    """R15: the reason is named; an adapter of some layers leaves the others as they are."""
    file = adapter()
    file.tensors = {name: tensor for name, tensor in file.tensors.items() if name.startswith("blk.1.")}
    with load(save("llama_lora"), adapters=[save(file)]) as model:
        assert [decline_reason(layer) for layer in model.layers] == [None, "an attached LoRA", None]
        cache = KVCache(model.layers, 8)
        backend = HostBackend(model.layers)
        answers = [backend.can_serve(n, Step(model.layers, cache, 0, 4)) for n in range(3)]
        assert not any(isinstance(answer, Decline) for answer in answers)


def renamed(old: str, new: str) -> Any:
    file = adapter()
    for suffix in ("lora_a", "lora_b"):
        file.tensors[f"{new}.{suffix}"] = file.tensors.pop(f"{old}.{suffix}")
    return file


@pytest.mark.parametrize(
    ("file", "error", "words"),
    [
        (adapter(general__type="model"), UnsupportedModelError, "are 'model' and 'lora'"),
        (adapter(adapter__type="control_vector"), UnsupportedModelError, "'adapter' and 'control_vector'"),
        (adapter(adapter__alora__invocation_tokens=[1, 2]), UnsupportedModelError, "has adapter.alora.invocation"),
        (adapter(adapter__lora__alpha="6"), GgufError, "alpha is '6'"),
        (adapter(adapter__lora__alpha=float("nan")), GgufError, "alpha is nan"),
        (adapter("phi3_lora"), UnsupportedModelError, "is an adapter of 'phi3', the model is 'llama'"),
        (renamed("blk.1.attn_q.weight", "token_embd.weight"), UnsupportedModelError, "'token_embd.weight', and an"),
        (renamed("blk.1.attn_q.weight", "output.weight"), UnsupportedModelError, "'output.weight', and an update"),
        (renamed("blk.1.attn_q.weight", "blk.1.attn_norm.weight"), UnsupportedModelError, "'blk.1.attn_norm.weight'"),
        (renamed("blk.1.attn_q.weight", "blk.1.attn_qkv.weight"), UnsupportedModelError, "'blk.1.attn_qkv.weight'"),
        (renamed("blk.1.attn_q.weight", "blk.x.attn_q.weight"), UnsupportedModelError, "'blk.x.attn_q.weight'"),
        (renamed("blk.1.attn_q.weight", "blk.3.attn_q.weight"), GgufError, "but the model has 3 layers"),
        (renamed("blk.1.attn_q.weight", "blk.01.attn_q.weight"), GgufError, "'blk.01.attn_q.weight'"),
        (renamed("blk.1.attn_q.weight", "blk.1.attn_k.weight"), GgufError, r"\[64, 3\], but the model's is 32 x 64"),
        (renamed("blk.1.attn_k.weight", "blk.1.attn_q.weight"), GgufError, r"\[32, 3\], but the model's is 64 x 64"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_by_name(file, error, words, save):
    path = save("llama_lora")
    with pytest.raises(error, match=words):
        load(path, adapters=[save(file)])
    path.unlink()


@pytest.mark.parametrize("name", ["blk.0.attn_q.weight.lora_a", "blk.0.attn_q.weight.lora_b"])
def test_half_an_update_is_refused(name, save):
    file = adapter()
    del file.tensors[name]
    with pytest.raises(GgufError, match=f"tensor '{name}' is missing"):
        load(save("llama_lora"), adapters=[save(file)])


def test_an_adapter_without_tensors_is_refused(save):
    """It would be attached and change nothing: never ignored (R15)."""
    file = adapter()
    file.tensors.clear()
    path = save(file)
    with pytest.raises(GgufError, match=rf"{path.name}: holds no tensors"):
        load(save("llama_lora"), adapters=[path])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    ("name", "kind"), [("lora_b", "F32"), ("lora_a", "F32"), ("lora_a", "F16"), ("lora_a", "Q8_0")]
)
def test_numbers_that_are_not_finite_are_refused(name, kind, value, save):
    """One of them would make every logit NaN."""
    file = adapter()
    name = f"blk.1.ffn_down.weight.{name}"
    tensor = file.tensors[name] = file.tensors[name].copy()
    tensor[-1, -1] = value
    if kind != "F32":
        quant = GGMLQuantizationType[kind]
        with np.errstate(invalid="ignore"):
            file.tensors[name] = (quants.quantize(tensor, quant), quant)
    path = save(file)
    with pytest.raises(GgufError, match=rf"{path.name}: tensor '{name}' holds NaN or infinity"):
        load(save("llama_lora"), adapters=[path])


def test_a_tensor_that_is_no_update_is_refused(save):
    file = adapter()
    file.tensors["blk.0.attn_q.weight"] = np.ones((64, 64), np.float32)
    with pytest.raises(UnsupportedModelError, match=r"'blk\.0\.attn_q\.weight' is no part of a low-rank update"):
        load(save("llama_lora"), adapters=[save(file)])


def test_an_update_of_experts_is_refused(save):
    file = adapter()
    with pytest.raises(UnsupportedModelError, match="this layer has experts"):
        load(save("mixtral"), adapters=[save(file)])


def test_arguments_that_are_no_adapters_are_refused(save, tmp_path):
    path, model = save(adapter()), save(content(VARIANTS["llama_lora"]))
    with pytest.raises(SettingError, match="is one path; write a list"):
        load(model, adapters=path)
    for scale in (float("nan"), float("inf"), "1", True):
        with pytest.raises(SettingError, match="must be a finite number"):
            load(model, adapters=[(path, scale)])
    with pytest.raises(ModelNotFoundError):
        load(model, adapters=[tmp_path / "none.gguf"])
    with pytest.raises(FrinkError, match=r"general\.type is 'adapter'"):
        load(path)
