"""Scales before the first layer, and what bends the logits after the last."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from frink_numba.host.architectures import find_architecture
from frink_numba.host.edges import bend_logits, embed
from frink_numba.host.hyperparameters import Hyperparameters, read_hyperparameters
from frink_numba.quant import QuantMatrix
from tests.golden.tiny import VARIANTS
from tests.golden.tiny_gguf import content


@cache
def plain() -> Hyperparameters:
    file = content(VARIANTS["llama_grouped"])
    return read_hyperparameters(file.metadata, find_architecture("llama"), tensors=file.tensors, where="m.gguf")


def logits() -> np.ndarray:
    return np.linspace(-90, 90, 12, dtype=np.float32).reshape(2, 6)


def test_rows_of_the_embedding_in_order_and_scaled() -> None:
    table = np.random.default_rng(0).normal(size=(7, 64)).astype(np.float32)
    ids, matrix = np.array([3, 0, 3]), QuantMatrix.from_float32(table)
    np.testing.assert_array_equal(embed(matrix, ids, plain()), table[ids])
    scaled = embed(matrix, ids, replace(plain(), embedding_scale=12.0))
    np.testing.assert_array_equal(scaled, table[ids] * np.float32(12))
    assert scaled.dtype == np.float32
    np.testing.assert_array_equal(matrix.data.view(np.float32), table)  # the file's rows are left alone


def test_plain_logits_are_left_alone() -> None:
    bent = logits()
    bend_logits(bent, plain())
    np.testing.assert_array_equal(bent, logits())


def test_infinities_and_nan_show_without_a_warning() -> None:
    bent = np.array([[np.inf, -np.inf, np.nan, 3e38]], np.float32)
    bend_logits(bent, replace(plain(), logit_divisor=0.1, logit_softcap=30.0))
    np.testing.assert_array_equal(bent, np.array([[30, -30, np.nan, 30]], np.float32))
    bent = np.array([[3e38]], np.float32)
    bend_logits(bent, replace(plain(), logit_divisor=0.1))
    assert np.isinf(bent).all()


@pytest.mark.parametrize(("divisor", "cap"), [(8.0, 0.0), (1.0, 30.0), (2.0, 5.0)])
def test_logits_are_divided_and_then_capped(divisor: float, cap: float) -> None:
    """Fault 11: the cap bounds them, in this order, for one row as for all."""
    hyper = replace(plain(), logit_divisor=divisor, logit_softcap=cap)
    bent, want = logits(), logits().astype(np.float64) / divisor
    bend_logits(bent, hyper)
    np.testing.assert_allclose(bent, cap * np.tanh(want / cap) if cap else want, rtol=1e-6)
    assert not cap or np.abs(bent).max() <= cap
    row = logits()[1:]
    bend_logits(row, hyper)
    np.testing.assert_array_equal(row[0], bent[1])
