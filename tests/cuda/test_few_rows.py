"""Steps of a few rows on the tensor-core body: how many there may be, and drafts of a greedy answer over them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from frink_numba import registry
from frink_numba.backend import Edges, Step
from frink_numba.cuda.backend import CudaBackend
from frink_numba.cuda.tensor.few_rows import FewRows
from frink_numba.host.decoder import Decoder
from frink_numba.host.load import load
from frink_numba.host.speculation import Speculative
from frink_numba.layer import Layer
from tests.cuda.fake_tensor import tensor_device
from tests.cuda.tensor_stacks import OPTIONS, unlike_layers
from tests.golden.tiny_gguf import write
from tests.golden.tiny_text import text_content
from tests.random_blocks import random_matrix


def edges_of(kind: str, rows: int, cols: int) -> Edges:
    output = random_matrix(kind, rows, cols, np.random.default_rng(0))
    return Edges(output, 1.0, np.ones(cols, np.float32), 1e-5, output)


def test_rows_that_sum_in_the_order_of_one():
    """Eight, however wide they are: the kernels for few rows sum the columns of a row in one order always."""
    kernels = tensor_device().body.kernels
    (layer,) = unlike_layers(0, OPTIONS[:1])
    assert FewRows(kernels, [layer], edges_of("Q8_0", 64, 64)).at(0) == 8
    assert FewRows(kernels, [layer], edges_of("Q4_K", 64, 14336)).at(0) == 8
    assert FewRows(kernels, [layer], edges_of("Q8_0", 64, 1 << 16)).at(0) == 8


def test_rows_whose_keys_are_cut_as_those_of_one():
    """Fewer where the number of parts changes in the middle of the step."""
    kernels = tensor_device().body.kernels
    (layer,) = unlike_layers(0, OPTIONS[:1])
    few = FewRows(kernels, [layer], edges_of("Q8_0", 64, 64))
    found = [few.at(start) for start in range(600)]
    assert set(found) == {1, 2, 4, 8}
    assert found[255] == 1  # its keys are one part, those of the next row two
    assert found[252:256] == [4, 2, 2, 1]
    assert np.mean(np.equal(found, 8)) > 0.9


def test_a_backend_without_logits_promises_nothing():
    """The host's products for the logits would sum in another order than for one row."""
    layers = unlike_layers(0, OPTIONS[:2])
    backend = CudaBackend(layers, tensor_device())
    assert backend.few_rows(Step(layers, [], 0, 8)) == (1, 0.0)
    assert backend.few_rows(Step(layers, [], 0, 8, edges=edges_of("Q8_0", 64, 64))) == (1, 0.0)


@pytest.mark.parametrize("most", [2, 7])
@pytest.mark.parametrize("tier", ["wgmma", "mma"])
def test_drafts_change_no_answer(tier: str, most: int, tmp_path, monkeypatch: pytest.MonkeyPatch):
    """Issue 7: the very tokens, drafts that hold and drafts that do not."""
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))

    def make(layers: Sequence[Layer]) -> CudaBackend:
        return CudaBackend(layers, tensor_device(tier))

    registry.register_backend("cuda", make, replace=True)
    path = write(text_content(), tmp_path / "m.gguf")
    with load(path) as model, Decoder(model, "cuda,host") as decoder:
        assert decoder.plan(batch=1).backend_of(0) == "cuda"
        caches = [decoder.new_cache(dtype=dtype) for dtype in (np.float32, np.float16)]
        for cache in caches:
            decoder.prefill([1, 2, 3], cache)
        assert [decoder.few_rows(cache, 8) for cache in caches] == [(8, 0.0), (1, 0.0)]
        for prompt in ("abcabcabcabc", "The same again. The same again."):
            plain = [piece.token for piece in decoder.generate(prompt, max_new_tokens=100)]
            made = decoder.generate(prompt, max_new_tokens=100, speculate=most)
            assert [piece.token for piece in made] == plain
            assert isinstance(made.source, Speculative)
            assert made.source.steps > 0
            assert made.source.repeated == 0
