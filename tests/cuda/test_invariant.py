"""FRINK_INVARIANT on a device: a step is made of the same kernels whatever its rows, and what cannot be is refused.

That these kernels then give the same bits is for a GPU to show: `tests/differential/test_cuda_invariant.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from frink_numba import driver
from frink_numba.backend import Decline, Serve, Step
from frink_numba.cuda import device as device_module
from frink_numba.cuda.backend import CudaBackend
from frink_numba.cuda.device import CudaDevice, open_device
from frink_numba.cuda.simt import launchers
from frink_numba.cuda.simt.body import SimtBody
from frink_numba.errors import BackendUnavailable
from frink_numba.host.kv_cache import KVCache
from frink_numba.kernels.gemm_mma import MmaGemm
from frink_numba.kernels.gemm_variant import WgmmaGemm
from tests.cuda import fake_tensor
from tests.cuda.fake_gpu import fake_device
from tests.cuda.fake_tensor import tensor_device
from tests.cuda.steps import small_model
from tests.cuda.tensor_stacks import LIMIT, hidden_rows, random_rows, step_over, taken, unlike_layers, worst_error
from tests.cuda.test_tensor_edges import EDGES, new_cache, token_step
from tests.cuda.test_tensor_edges import LAYERS as TWO_LAYERS

LAYERS = unlike_layers()
TIERS = ("wgmma", "mma")


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """(name, compiled variant) of every launch that is made, in order; of products without their tiles."""
    made: list[tuple[str, Any]] = []
    bind = fake_tensor.FakeKernel.bind

    def recorded(kernel: fake_tensor.FakeKernel, blocks: int, *values: float) -> Any:
        variant = kernel.variant
        if isinstance(variant, MmaGemm | WgmmaGemm):  # whole tiles of any size are alike
            variant = (variant.kind, getattr(variant, "second", ""), variant.epilogue)
        made.append((kernel.name, repr(variant)))
        if "split_tiles" in dict(kernel.arguments):
            at = [name for name, _ in kernel.arguments].index("split_tiles")
            assert values[at] == 0, "a tile is cut along K"
        return bind(kernel, blocks, *values)

    monkeypatch.setattr(fake_tensor.FakeKernel, "bind", recorded)
    return made


@pytest.mark.parametrize("tier", TIERS)
def test_a_step_is_made_of_the_same_kernels_whatever_its_rows(tier: str, bound: list[tuple[str, Any]]) -> None:
    """From one row to many: the same variants in the same order, none of those for few rows; and still the truth."""
    backend = CudaBackend(LAYERS, tensor_device(tier, invariant=True))
    assert backend.invariant
    assert "invariant" in str(backend.device)
    seen = []
    for batch, start_pos in ((1, 0), (3, 5), (8, 0), (40, 2), (300, 0)):
        cache = KVCache(LAYERS, 512)
        if start_pos:
            cache.push(random_rows(LAYERS, start_pos))
        bound.clear()
        step = step_over(LAYERS, cache, hidden_rows(batch))
        first = replace(step, layers=LAYERS[:1], caches=[cache[0]])
        assert worst_error(LAYERS[:1], first, taken(backend.run(0, 1, step))) < LIMIT
        bound.clear()
        assert backend.run(0, len(LAYERS), step) is not None
        seen.append([launch for launch in bound if launch[0] != "mirror_rows"])  # rows that the host's cache has
    assert {name for name, _ in seen[0]}.isdisjoint({"thin_gemm", "decode_attention"})
    assert all(other == seen[0] for other in seen)


@pytest.mark.parametrize("tier", TIERS)
def test_logits_are_made_of_the_same_kernels_whatever_their_number(tier: str, bound: list[tuple[str, Any]]) -> None:
    backend = CudaBackend(TWO_LAYERS, tensor_device(tier, invariant=True))
    seen = []
    for batch, logits in ((1, 1), (40, 1), (40, 40)):
        bound.clear()
        assert backend.run(0, len(TWO_LAYERS), token_step(TWO_LAYERS, new_cache(), batch, logits)) is not None
        seen.append(bound[:])
    assert seen[0] == seen[1] == seen[2]


def test_without_the_setting_kernels_do_depend_on_the_rows(bound: list[tuple[str, Any]]) -> None:
    """What the tests above can see."""
    backend = CudaBackend(LAYERS, tensor_device("mma"))
    for batch in (1, 40):
        assert backend.run(0, len(LAYERS), step_over(LAYERS, KVCache(LAYERS, 512), hidden_rows(batch))) is not None
    names = [name for name, _ in bound]
    assert "thin_gemm" in names
    assert "gemm" in names


def test_what_depends_on_the_step_is_marked_as_passing() -> None:
    """Memory and evicted rows: with FRINK_INVARIANT the dispatcher lets nobody else serve such a step."""
    device = tensor_device("mma", memory_bytes=1 << 20, invariant=True)
    backend = CudaBackend(LAYERS, device)
    answer = backend.can_serve(0, step_over(LAYERS, KVCache(LAYERS, 4096), hidden_rows(2000)))
    assert isinstance(answer, Decline)
    assert answer.passing
    assert "no room" in answer.reason


def test_no_room_for_the_logits_is_a_failure(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's logits, for this step alone, would have other bits."""
    monkeypatch.setattr("frink_numba.log._said", set())
    device = tensor_device("mma", invariant=True)
    monkeypatch.setattr(type(device.body), "edges_bytes", lambda body, edges: 1 << 40)
    backend = CudaBackend(TWO_LAYERS, device)
    assert backend.run(0, len(TWO_LAYERS), token_step(TWO_LAYERS, new_cache(), 5, 1, EDGES)) is None
    assert "no room for the embedding and the output matrix" in caplog.text


def test_scaled_rows_are_refused_in_a_cache_of_float16(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are f16 after the division in their own step, before it in later ones."""
    monkeypatch.setattr("frink_numba.log._said", set())
    outcomes = {}
    for dtype in (np.float32, np.float16):
        backend = CudaBackend(LAYERS, tensor_device("mma", invariant=True))
        step = step_over(LAYERS, KVCache(LAYERS, 512, dtype=dtype), hidden_rows(5))
        ran = [backend.run(number, 1, step) is not None for number in range(len(LAYERS))]
        scaled = [max(backend.device.bank.get(layer).scales[1:]) > 1 for layer in LAYERS]
        outcomes[dtype] = ran
    assert any(scaled)
    assert not all(scaled)
    assert all(outcomes[np.float32])
    assert outcomes[np.float16] == [not one for one in scaled]
    assert "FRINK_INVARIANT=1 needs a cache of float32" in caplog.text


def _simt(invariant: bool) -> CudaDevice:
    device = fake_device()
    device.body = SimtBody(device.runtime, device.body.launchers, invariant=invariant)
    return device


def test_the_simt_tier_serves_single_rows_and_refuses_caches_of_float16() -> None:
    """Steps of one row must not go to the host (R2), and rows are float32 within a step."""
    layers = small_model(0, 2)
    for invariant in (False, True):
        backend = CudaBackend(layers, _simt(invariant))
        width = layers[0].hidden_dim
        x = np.zeros((1, width), np.float32)
        answer = backend.can_serve(0, Step(layers, KVCache(layers, 16), 0, 1, x))
        assert isinstance(answer, Serve if invariant else Decline)
    answer = backend.can_serve(0, Step(layers, KVCache(layers, 16, dtype=np.float16), 0, 1, x))
    assert isinstance(answer, Decline)
    assert not answer.passing
    assert "need a cache of float32" in answer.reason


def test_simt_products_of_few_rows_are_those_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """`thin_matmul` sums in another order."""
    pytest.importorskip("numba.cuda")
    loaded = launchers.load_launchers(invariant=True).quantized_matmul
    assert loaded.keywords == {"thin": False}  # type: ignore[attr-defined]


def test_a_device_is_opened_in_one_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with the tier: its programs and kernels are those of the mode it was opened in."""
    info = driver.Device(0, "NVIDIA H200", 1 << 37, (9, 0), 132)
    monkeypatch.setattr(device_module, "visible_devices", lambda: (info,))
    monkeypatch.setattr(device_module, "_opened", {})
    monkeypatch.setattr(device_module, "make_runtime", lambda tier, number: None)
    monkeypatch.setenv("FRINK_INVARIANT", "1")
    assert open_device(0).body.invariant
    monkeypatch.setenv("FRINK_INVARIANT", "0")
    with pytest.raises(BackendUnavailable, match="FRINK_INVARIANT=0 came after the device was opened with 1"):
        open_device(0)
