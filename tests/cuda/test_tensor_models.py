"""Every architecture's tiny model through the tensor-core body on a fake device, from tokens to transformers' logits.

The same as `tests/differential/test_cuda_tiny_models.py` does on a GPU, without one: launches, weights and rows are the
package's own, the kernels' arithmetic is NumPy's with the kernels' roundings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from frink_numba import registry
from frink_numba.cuda.backend import CudaBackend
from frink_numba.cuda.tensor.weights import LayerPacks
from frink_numba.host import load as load_module
from frink_numba.host.decoder import Decoder
from frink_numba.host.load import load
from frink_numba.layer import FeedForward, Layer
from tests.cuda.fake_tensor import tensor_device
from tests.golden.closeness import assert_close
from tests.golden.tiny import VARIANTS, golden_logits, tokens
from tests.golden.tiny_gguf import adapter_content, content, write

PLAIN = [name for name, variant in VARIANTS.items() if not variant.adapted]
# The tensor-core kernels' own limits, which tiny models meet and real ones do not; and what the host alone computes.
HOST = {name for name in PLAIN if VARIANTS[name].experts} | {"llama_head_dim"}


@pytest.fixture
def fake_device(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """fake_device(tier): from now on `cuda` is a fake device of that tier."""
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))

    def use(tier: str) -> None:
        def make(layers: Sequence[Layer]) -> CudaBackend:
            return CudaBackend(layers, tensor_device(tier))

        registry.register_backend("cuda", make, replace=True)

    return use


@pytest.mark.parametrize("name", PLAIN)
def test_logits_are_transformers(name: str, fake_device, tmp_path):
    """R4, R14, R15, R17, R18, R24: in chunks of many rows, then a few, then single ones; both tiers in turn."""
    fake_device(("wgmma", "mma")[PLAIN.index(name) % 2])
    variant, ids = VARIANTS[name], tokens(VARIANTS[name])
    path = write(content(variant), tmp_path / "m.gguf")
    with load(path, context_length=variant.context) as model, Decoder(model, "cuda,host") as decoder:
        cache = decoder.new_cache()
        served = [row.backend for row in decoder.plan(batch=16, cache=cache).rows]
        assert served == (["host"] if name in HOST else ["cuda"])
        parts = [decoder.prefill(ids[:80], cache, logits="all", chunk_size=40).logits]
        parts += [decoder.prefill(ids[80:96], cache, logits="all", chunk_size=8).logits]
        parts += [decoder.decode(int(token), cache).logits[None] for token in ids[96:]]
    assert_close(np.concatenate(parts), golden_logits(variant), 1e-2)


def test_fused_tensors_share_a_product_and_stay_views(tmp_path):
    """Phi-3: Q, K and V are one pack, gate and up another, made from views of the file's tensors."""
    path = write(content(VARIANTS["phi3_fused"]), tmp_path / "m.gguf")
    with load(path) as model:
        for layer in model.layers:
            packs = LayerPacks.of(layer)
            assert [len(pack.matrices) for pack in packs.all()] == [3, 1, 2, 1]
            assert packs.gate_up[0].gated
            assert not any(matrix.data.flags.owndata for pack in packs.all() for matrix in pack.matrices)


def dense(layer: Layer) -> Layer:
    return replace(layer, ffn=FeedForward(layer.ffn.activation, layer.ffn.experts[:1]))


def test_mixtures_on_the_host_between_dense_layers_on_the_device(fake_device, monkeypatch, tmp_path):
    """R6, R15, R22: the plan shows the runs and the reason; counts are the host's own; logits are near."""
    real = load_module.build

    def build(*arguments):
        tensors = real(*arguments)
        first, mixed, last = tensors.layers
        return replace(tensors, layers=(dense(first), mixed, dense(last)))

    monkeypatch.setattr(load_module, "build", build)
    fake_device("wgmma")
    ids = tokens(VARIANTS["mixtral"])
    path = write(content(VARIANTS["mixtral"]), tmp_path / "m.gguf")
    with load(path) as model, Decoder(model, "cuda,host") as decoder, Decoder(model, "host") as alone:
        rows = decoder.plan(batch=8).rows
        assert [(row.layers, row.backend) for row in rows] == [("0", "cuda"), ("1", "host"), ("2", "cuda")]
        assert rows[1].why == "cuda: 4 experts"
        got = decoder.prefill(ids, decoder.new_cache(), logits="all", chunk_size=30).logits
        want = alone.prefill(ids, alone.new_cache(), logits="all", chunk_size=30).logits
        assert_close(got, want, 1e-2)
        assert decoder.activations[0] == decoder.activations[2] == {0: 4}
        assert set(decoder.activations[1]) == {0, 1, 2, 3}
        assert decoder.activations == alone.activations


@pytest.mark.parametrize("name", ["llama_lora", "phi3_lora"])
def test_an_adapter_of_one_layer_leaves_the_others_on_the_device(name: str, fake_device, tmp_path):
    """R15: the device declines the layer by name, the host serves it, and nobody ignores it."""
    fake_device("wgmma")
    variant, ids = VARIANTS[name], tokens(VARIANTS[name])
    file = adapter_content(variant)
    file.tensors = {key: tensor for key, tensor in file.tensors.items() if key.startswith("blk.1.")}
    path, adapters = write(content(variant), tmp_path / "m.gguf"), [write(file, tmp_path / "a.gguf")]
    with (
        load(path, adapters=adapters) as model,
        Decoder(model, "cuda,host") as decoder,
        Decoder(model, "host") as alone,
    ):
        rows = decoder.plan(batch=8).rows
        assert [(row.layers, row.backend) for row in rows] == [("0", "cuda"), ("1", "host"), ("2", "cuda")]
        assert rows[1].why == "cuda: an attached LoRA"
        got = decoder.prefill(ids, decoder.new_cache(), logits="all").logits
        want = alone.prefill(ids, alone.new_cache(), logits="all").logits
    assert_close(got, want, 1e-2)
    with load(path) as model, Decoder(model, "cuda,host") as decoder:
        without = decoder.prefill(ids, decoder.new_cache(), logits="all").logits
    assert (np.linalg.norm(without - want, axis=1) / np.linalg.norm(want, axis=1)).max() > 1e-2
