"""R20: what does not fit together is a named error before any device work."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from frink_numba.cuda.shapes import LayerShape, check_hidden, check_layer, check_prefix
from frink_numba.errors import ShapeError
from frink_numba.layer import Layer
from frink_numba.quant import QuantMatrix
from tests.random_layers import LayerOptions, random_layer

EVERYTHING = LayerOptions(bias=True, qk_norm="head", post_norms=True, factors=True)


def make() -> Layer:
    return random_layer(np.random.default_rng(0), EVERYTHING)


def changed(part: str, **changes: Any) -> Layer:
    layer = make()
    if part == "attention":
        return replace(layer, attention=replace(layer.attention, **changes))
    if part == "rope":
        assert layer.attention.rope is not None
        return replace(layer, attention=replace(layer.attention, rope=replace(layer.attention.rope, **changes)))
    if part == "expert":
        return replace(layer, ffn=replace(layer.ffn, experts=(replace(layer.ffn.experts[0], **changes),)))
    return replace(layer, **changes)


def matrix(rows: int, cols: int) -> QuantMatrix:
    return QuantMatrix.from_float32(np.ones((rows, cols), np.float32))


def vector(n: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(n, dtype)


WRONG = [
    ("attention", {"n_heads": 0}, "n_heads is 0"),
    ("attention", {"n_kv_heads": -1}, "n_kv_heads is -1"),
    ("attention", {"head_dim": 0}, "head_dim is 0"),
    ("attention", {"n_kv_heads": 3}, "4 query heads cannot share 3"),
    ("attention", {"window": -1}, "a window of -1"),
    ("attention", {"softcap": -0.5}, "a soft cap of -0.5"),
    ("attention", {"q": matrix(63, 40)}, "q is 63 x 40, not 64 x 40"),
    ("attention", {"k": matrix(32, 41)}, "k is 32 x 41, not 32 x 40"),
    ("attention", {"v": matrix(64, 40)}, "v is 64 x 40, not 32 x 40"),
    ("attention", {"o": matrix(64, 40)}, "o is 64 x 40, not 40 x 64"),
    ("expert", {"gate": matrix(56, 44)}, "gate is 56 x 44, not 56 x 40"),
    ("expert", {"up": matrix(55, 40)}, "up is 55 x 40, not 56 x 40"),
    ("expert", {"down": matrix(40, 40)}, "down is 40 x 40, not 40 x 56"),
    ("layer", {"attn_norm": vector(40, np.float64)}, "attn_norm is float64 [40], not float32 [40]"),
    ("layer", {"ffn_norm": vector(39)}, "ffn_norm is float32 [39], not float32 [40]"),
    ("layer", {"post_attn_norm": vector(41)}, "post_attn_norm is float32 [41]"),
    ("layer", {"post_ffn_norm": np.ones((1, 40), np.float32)}, "post_ffn_norm is float32 [1, 40]"),
    ("attention", {"q_bias": vector(32)}, "q_bias is float32 [32], not float32 [64]"),
    ("attention", {"k_bias": vector(64)}, "k_bias is float32 [64], not float32 [32]"),
    ("attention", {"v_bias": vector(1)}, "v_bias is float32 [1], not float32 [32]"),
    ("attention", {"q_norm": vector(32)}, "q_norm is float32 [32], not float32 [16 or 64]"),
    ("attention", {"k_norm": vector(64)}, "k_norm is float32 [64], not float32 [16 or 32]"),
    ("rope", {"freq_factors": vector(16)}, "freq_factors is float32 [16], not float32 [8]"),
]


@pytest.mark.parametrize(("part", "changes", "message"), WRONG, ids=[message for _, _, message in WRONG])
def test_parts_that_contradict_each_other(part: str, changes: dict[str, Any], message: str):
    with pytest.raises(ShapeError, match=re.escape(message)):
        check_layer(changed(part, **changes))


def test_a_sound_layer_passes():
    check_layer(make())
    check_layer(random_layer(np.random.default_rng(0), LayerOptions(qk_norm="whole", layout=None)))


@pytest.mark.parametrize(
    ("hidden", "batch", "message"),
    [
        (np.zeros((4, 40)), 4, "C-contiguous float32, not float64"),
        (np.zeros((4, 80), np.float32)[:, ::2], 4, "C-contiguous"),
        (np.zeros((4, 41), np.float32), 4, "shape [4, 41], not [4, 40]"),
        (np.zeros((5, 40), np.float32), 4, "shape [5, 40], not [4, 40]"),
        (np.zeros((0, 40), np.float32), 0, "shape [0, 40]"),
        (np.zeros((40,), np.float32), 1, "shape [40], not [1, 40]"),
    ],
)
def test_a_hidden_batch_that_does_not_fit(hidden: np.ndarray, batch: int, message: str):
    with pytest.raises(ShapeError, match=re.escape(message)):
        check_hidden(hidden, batch, [make()])


def test_layers_of_different_widths_make_no_run():
    layers = [make(), random_layer(np.random.default_rng(0), LayerOptions(hidden=44))]
    with pytest.raises(ShapeError, match=re.escape("[40, 44]")):
        check_hidden(np.zeros((4, 40), np.float32), 4, layers)


@pytest.mark.parametrize(
    ("keys", "values", "message"),
    [
        (np.zeros((3, 2, 16), np.float32), np.zeros((4, 2, 16), np.float32), "K rows have shape [3, 2, 16]"),
        (np.zeros((4, 2, 16), np.float32), np.zeros((4, 1, 16), np.float32), "V rows have shape [4, 1, 16]"),
        (np.zeros((4, 2, 16)), np.zeros((4, 2, 16), np.float32), "K rows are float64"),
    ],
)
def test_prefix_rows_that_do_not_fit(keys: np.ndarray, values: np.ndarray, message: str):
    with pytest.raises(ShapeError, match=re.escape(message)):
        check_prefix(make(), keys, values, 4)


def test_the_sizes_of_a_layer():
    shape = LayerShape.of(make())
    assert (shape.hidden, shape.n_heads, shape.n_kv_heads, shape.head_dim, shape.ffn) == (40, 4, 2, 16, 56)
    assert (shape.query_width, shape.kv_width, shape.rope_pairs) == (64, 32, 8)
    assert LayerShape.of(random_layer(np.random.default_rng(0), LayerOptions(layout=None))).rope_pairs == 0
