"""How many launches a layer of a prompt takes, and which (issue 6: seven or fewer)."""

from __future__ import annotations

import numpy as np
import pytest

from frink_numba.cuda.backend import CudaBackend
from frink_numba.cuda.tensor import launches
from frink_numba.host.kv_cache import KVCache
from frink_numba.layer import Layer
from tests.cuda.fake_tensor import tensor_device
from tests.cuda.quantized_layers import quantized_layer
from tests.cuda.tensor_stacks import HIDDEN, assert_equal, hidden_rows, step_over, taken, unlike_layers
from tests.random_layers import LayerOptions

ALIKE = ["norm", "qkv", "prepare", "attention", "o", "ffn norm", "gate_up", "down"]


def layers_of(kinds: list[str]) -> list[Layer]:
    rng = np.random.default_rng(3)
    return [quantized_layer(rng, LayerOptions(hidden=HIDDEN, head_dim=32, ffn=96), kinds) for _ in range(2)]


def launches_of(tier: str, layers: list[Layer], rows: int) -> list[list[str]]:
    """Names of each layer's launches, in a step of so many rows."""
    device = tensor_device(tier)
    backend = CudaBackend(layers, device)
    taken(backend.run(0, len(layers), step_over(layers, KVCache(layers, 256), hidden_rows(rows))))
    (program,) = device.body._programs.values()  # type: ignore[attr-defined]
    ops = [op for part in (*program.segments, *program.heads) for op in part.launches]
    return [[op.name for op in ops if op.layer == number] for number in range(len(layers))]


@pytest.fixture
def norms_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "NORMS_INSIDE", frozenset({"qkv", "gate_up"}))


@pytest.mark.usefixtures("norms_inside")
def test_six_launches_a_layer() -> None:
    """The norms are in the products behind them."""
    fused = [name for name in ALIKE if "norm" not in name]
    assert launches_of("wgmma", layers_of(["Q8_0"]), 200) == [fused] * 2
    assert len(fused) == 6


@pytest.mark.usefixtures("norms_inside")
def test_products_of_few_rows_have_kernels_without_a_norm() -> None:
    assert launches_of("wgmma", layers_of(["Q8_0"]), 64) == [ALIKE] * 2


@pytest.mark.parametrize(("stage", "gone"), [("gate_up", "ffn norm"), ("qkv", "norm")])
def test_seven_with_one_norm_inside(stage: str, gone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With Q, K and V of two kinds too."""
    monkeypatch.setattr(launches, "NORMS_INSIDE", frozenset({stage}))
    for kinds in (["Q8_0"], MIXED):
        for names in launches_of("wgmma", layers_of(kinds), 200):
            assert names == [name for name in ALIKE if name != gone]
            assert len(names) == 7


MIXED = ["Q8_0", "Q8_0", "F16", "Q8_0", "Q8_0", "Q8_0", "Q8_0"]


@pytest.mark.usefixtures("norms_inside")
def test_six_with_v_of_another_kind() -> None:
    """One product takes both kinds."""
    for names in launches_of("wgmma", layers_of(MIXED), 100):
        assert names == [name for name in ALIKE if "norm" not in name]


@pytest.mark.usefixtures("norms_inside")
@pytest.mark.parametrize("kinds", [["Q8_0", "F16", "Q8_0"], ["Q8_0", "F16", "Q4_0"]])
def test_three_products_of_three_packs(kinds: list[str]) -> None:
    """Those behind the first take the rows that it normed."""
    for names in launches_of("wgmma", layers_of([*kinds, *["Q8_0"] * 4]), 100):
        assert names == ["qkv", "qkv", "qkv", "prepare", "attention", "o", "gate_up", "down"]


@pytest.mark.parametrize(("tier", "rows"), [("mma", 40), ("wgmma", 3)])
def test_v_of_another_kind_by_itself(tier: str, rows: int) -> None:
    """The other kernels are of one kind: those of the `mma` tier, and those for few rows."""
    for names in launches_of(tier, layers_of(MIXED), rows):
        assert names.count("qkv") == 2


def test_two_kinds_in_one_launch_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden batch and K/V rows are the same whether Q, K and V of two kinds are one product or two; biases too."""
    rng = np.random.default_rng(4)
    options = LayerOptions(hidden=HIDDEN, head_dim=32, ffn=96, bias=True)
    layers = [quantized_layer(rng, options, kinds) for kinds in (MIXED, ["Q8_0"], ["Q4_0", "Q4_0", "Q8_0"])]
    answers = []
    for mixes in (True, False):
        device = tensor_device("wgmma")
        monkeypatch.setattr(device.body.kernels.gemms, "mixes", mixes)  # type: ignore[attr-defined]
        backend = CudaBackend(layers, device)
        answers.append(taken(backend.run(0, len(layers), step_over(layers, KVCache(layers, 256), hidden_rows(40)))))
    assert_equal(*answers)


@pytest.mark.parametrize("rows", [1, 3])
def test_five_with_few_rows(rows: int) -> None:
    """Issue 7: norms and what comes before attention are inside others, and two kinds share a launch."""
    for kinds in (["Q8_0"], ["Q8_0", "Q8_0", "Q4_0", "Q8_0", "Q8_0", "Q8_0", "Q8_0"]):
        assert launches_of("wgmma", layers_of(kinds), rows) == [["qkv", "attention", "o", "gate_up", "down"]] * 2
    mixed = layers_of(["Q8_0", "Q8_0", "F16", "Q8_0", "Q8_0", "Q8_0", "Q8_0"])  # sums that are not scaled alike
    assert launches_of("wgmma", mixed, rows) == [["qkv", "qkv", "attention", "o", "gate_up", "down"]] * 2


@pytest.mark.usefixtures("norms_inside")
def test_norms_of_their_own_on_the_other_tier() -> None:
    assert launches_of("mma", layers_of(["Q8_0"]), 40) == [ALIKE] * 2


@pytest.mark.usefixtures("norms_inside")
@pytest.mark.parametrize("rows", [80, 200])
def test_norms_inside_change_no_bit(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever norms the rows, hidden batch and K/V rows are the same: unlike layers, mixed kinds, all norms."""
    layers = unlike_layers()
    answers = []
    for inside in (frozenset({"qkv", "gate_up"}), frozenset[str]()):
        monkeypatch.setattr(launches, "NORMS_INSIDE", inside)
        backend = CudaBackend(layers, tensor_device("wgmma"))
        answers.append(taken(backend.run(0, len(layers), step_over(layers, KVCache(layers, 256), hidden_rows(rows)))))
    assert_equal(*answers)
