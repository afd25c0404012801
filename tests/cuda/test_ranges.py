"""FRINK_NVTX=1: every launch inside a range of its name inside one of its layer; the same results; nothing when off."""

from __future__ import annotations

import sys
from types import ModuleType

import numpy as np
import pytest

from frink_numba.backend import Edges, Step
from frink_numba.cuda import ranges
from frink_numba.cuda.backend import CudaBackend
from frink_numba.cuda.tensor.launches import NORMS_INSIDE
from frink_numba.host.kv_cache import KVCache
from tests.cuda.fake_tensor import tensor_device
from tests.cuda.tensor_stacks import assert_equal, hidden_rows, step_over, taken, unlike_layers
from tests.kernels.packed_weights import random_matrix

LAYERS = unlike_layers()[1:4]


class Recorder(ModuleType):
    """Stands in for the package nvtx: what was pushed, by depth, and how often the device was called inside."""

    def __init__(self) -> None:
        super().__init__("nvtx")
        self.open: list[str] = []
        self.seen: list[tuple[str, ...]] = []

    def push_range(self, message: str, *, domain: str) -> None:
        assert domain == ranges.DOMAIN
        self.open.append(message)
        self.seen.append(tuple(self.open))

    def pop_range(self, *, domain: str) -> None:
        assert domain == ranges.DOMAIN
        self.open.pop()


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder()
    monkeypatch.setitem(sys.modules, "nvtx", made)
    monkeypatch.setenv("FRINK_NVTX", "1")
    return made


def edges() -> Edges:
    rng = np.random.default_rng(5)
    width = LAYERS[0].hidden_dim
    matrix = random_matrix("Q8_0", 64, width, rng)
    return Edges(matrix, 1.0, np.ones(width, np.float32), 1e-5, matrix)


def run_with_tokens(backend: CudaBackend, around: Edges) -> list[np.ndarray]:
    cache = KVCache(LAYERS, 64, allocate=backend.host_bytes)
    tokens = np.arange(20) % 64
    step = Step(LAYERS, cache, 0, 20, tokens=tokens, edges=around, lookup=lambda: hidden_rows(20), logits=1)
    run = backend.run(0, len(LAYERS), step)
    assert run is not None
    return [run.logits, *(part.copy() for pair in run.kv_rows for part in pair)]


def test_layers_and_operations_have_ranges(recorder: Recorder) -> None:
    """A whole step: from the embedding to the head, each launch of a layer inside the layer's range."""
    backend = CudaBackend(LAYERS, tensor_device())
    run_with_tokens(backend, edges())
    assert recorder.open == []
    inner = [names for names in recorder.seen if len(names) == 2]
    assert {names[0] for names in inner} == {"layer 0", "layer 1", "layer 2"}
    first = [name for layer, name in inner if layer == "layer 0"]
    assert first[0] == ("qkv" if "qkv" in NORMS_INSIDE else "norm")
    assert first[-1].startswith("down")
    for name in ("qkv", "prepare", "attention", "o", "down"):
        assert name in first
    assert {"gate_up", "gate"} & set(first)
    outside = [names[0] for names in recorder.seen if len(names) == 1 and not names[0].startswith("layer")]
    assert outside[0] == "embed"
    assert outside[-1] == "head"  # which norms its one row itself


def test_a_launch_has_exactly_one_range(recorder: Recorder) -> None:
    """As many ranges of operations as the device was launched at: none is forgotten, none is empty."""
    device = tensor_device()
    backend = CudaBackend(LAYERS, device)
    run_with_tokens(backend, edges())
    runtime = device.runtime
    assert "replay" not in runtime.calls
    assert "graph" not in runtime.calls
    kernels = {"embed", "rope_rows", "norm_half", "norm_add", "gemm", "thin_gemm", "qkv_prepare", "attention",
               "gated_half", "decode_attention", "half_rows"}  # fmt: skip
    launched = [name for name in runtime.calls if name in kernels]
    named = [names for names in recorder.seen if not names[-1].startswith("layer")]
    assert len(launched) == len(named)


def test_ranges_change_no_bit(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    around = edges()
    watched = run_with_tokens(CudaBackend(LAYERS, tensor_device()), around)
    monkeypatch.setenv("FRINK_NVTX", "0")
    count = len(recorder.seen)
    assert_equal(run_with_tokens(CudaBackend(LAYERS, tensor_device()), around), watched)
    assert len(recorder.seen) == count, "off means off"


def test_layers_are_numbered_as_in_the_model(recorder: Recorder) -> None:
    """A run that begins at layer 1 says layer 1."""
    backend = CudaBackend(LAYERS, tensor_device())
    step = step_over(LAYERS, KVCache(LAYERS, 64), hidden_rows(6))
    taken(backend.run(1, 2, step))
    assert {names[0] for names in recorder.seen if len(names) == 2} == {"layer 1", "layer 2"}


def test_a_failure_leaves_no_range_open(recorder: Recorder) -> None:
    device = tensor_device()
    backend = CudaBackend(LAYERS, device)
    step = step_over(LAYERS, KVCache(LAYERS, 64), hidden_rows(6))
    taken(backend.run(0, 3, step))
    device.runtime.fail_at = len(device.runtime.calls) + 12
    assert backend.run(0, 3, step) is None
    assert recorder.open == []


def test_a_missing_package_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "nvtx", None)
    monkeypatch.setenv("FRINK_NVTX", "1")
    monkeypatch.setattr("frink_numba.log._said", set())
    assert ranges.open_ranges() is None
    assert ranges.open_ranges() is None
    assert [record.message for record in caplog.records] == [
        "FRINK_NVTX=1, but the package nvtx is not installed: pip install 'frink-numba[profile]'"
    ]
