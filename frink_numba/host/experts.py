"""A mixture of experts over columns: each token goes through the experts that its router weighs heaviest.

The tokens of an expert are gathered and go through it together, so that each used expert's weights are read once a
block, in the order of the experts' numbers: the sum of a token does not depend on the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from frink_numba.host.activation import ActivationFunction, activate, sigmoid
from frink_numba.host.linear import linear
from frink_numba.host.lora import PreparedLora
from frink_numba.host.scratch import Scratch
from frink_numba.host.weights import Matrices, WeightStore


@dataclass(frozen=True, slots=True)
class PreparedExpert:
    """One feed-forward body. Vectors are float32 columns [channels, 1]; weights stay quantized."""

    activation: ActivationFunction
    ffn: int
    gate_up: Matrices
    gate_up_bias: np.ndarray | None
    gate_up_loras: tuple[PreparedLora, ...]
    down: Matrices
    down_scale: np.ndarray | None
    down_bias: np.ndarray | None
    down_loras: tuple[PreparedLora, ...]


@dataclass(frozen=True, slots=True)
class PreparedMixture:
    """The experts of a layer and what chooses among them."""

    router: Matrices
    experts: tuple[PreparedExpert, ...]
    n_used: int
    normalized: bool
    shared: PreparedExpert | None
    shared_gate: np.ndarray | None  # [1, hidden]


def mixture(
    layer: PreparedMixture,
    x: np.ndarray,
    out: np.ndarray,
    store: WeightStore,
    scratch: Scratch,
    columns: slice | None = None,
) -> tuple[int, ...]:
    """The weighted sum of each token's experts, columns `x` to `out`, both float32 [hidden, n]; the experts used.

    `columns`: those that are tokens in a block with padding, all of which goes through each expert, so that a token's
    place in the products does not depend on the others (`aligned.py`). None: all are, and an expert gets its own only.
    """
    chosen, weights = _route(layer, x, store, scratch)
    if layer.shared is None:
        out.fill(0)
    else:
        _run(layer.shared, x, out, store, scratch)
        if layer.shared_gate is not None:
            gate = np.dot(layer.shared_gate, x)
            sigmoid(gate)
            np.multiply(out, gate, out=out)
    counted = chosen if columns is None else chosen[:, columns]
    used = tuple(np.flatnonzero(np.bincount(counted.reshape(-1))).tolist())
    for number in used:
        rank, token = np.nonzero(chosen == number)
        part = x if columns is not None else np.take(x, token, axis=1)
        y = scratch.array("expert output", *part.shape)
        _run(layer.experts[number], part, y, store, scratch)
        if columns is not None:
            y = np.take(y, token, axis=1)
        np.multiply(y, weights[rank, token], out=y)
        out[:, token] += y
    return used


def _route(
    layer: PreparedMixture, x: np.ndarray, store: WeightStore, scratch: Scratch
) -> tuple[np.ndarray, np.ndarray]:
    """For each token the numbers of its experts and their weights, both [n_used, n]; NaN weights are heaviest."""
    experts = len(layer.experts)
    odds = store.product(x, *layer.router, out=scratch.array("router", experts, x.shape[1]))
    np.subtract(odds, np.maximum.reduce(odds, axis=0), out=odds)
    np.exp(odds, out=odds)
    np.divide(odds, np.add.reduce(odds, axis=0), out=odds)
    others = experts - layer.n_used
    chosen = np.argpartition(odds, others, axis=0)[others:] if others else np.argsort(odds, axis=0)
    weights = np.take_along_axis(odds, chosen, axis=0)
    if layer.normalized:
        weights /= np.add.reduce(weights, axis=0)
    return chosen, weights


def _run(expert: PreparedExpert, x: np.ndarray, out: np.ndarray, store: WeightStore, scratch: Scratch) -> None:
    gate_up = scratch.array("expert gate and up", 2 * expert.ffn, x.shape[1])
    linear(store, x, expert.gate_up, gate_up, bias=expert.gate_up_bias)
    gate, up = gate_up[: expert.ffn], gate_up[expert.ffn :]
    activate(expert.activation, gate, up, scratch)
    linear(store, gate, expert.down, out, scale=expert.down_scale, bias=expert.down_bias)
