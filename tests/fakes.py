"""Small stand-ins for a model's layers and caches, and a backend whose arithmetic is easy to follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from frink_numba.backend import Decline, Run, Serve, Step
from frink_numba.layer import Activation, AttentionSpec, Expert, FeedForward, Layer
from frink_numba.quant import QuantMatrix

WIDTH = 8
HEADS, HEAD_DIM = 2, 4


def make_layer() -> Layer:
    """A layer of the right shapes: WIDTH wide, two heads, all weights one."""
    square = QuantMatrix.from_float32(np.ones((WIDTH, WIDTH), np.float32))
    norm = np.ones(WIDTH, np.float32)
    attention = AttentionSpec(HEADS, HEADS, HEAD_DIM, square, square, square, square)
    return Layer(norm, attention, norm, FeedForward(Activation.SWIGLU, (Expert(square, square, square),)), 1e-5)


@dataclass
class FakeCache:
    """A layer cache that holds nothing but counts."""

    positions: int = 0
    n_kv_heads: int = HEADS
    key_dim: int = HEAD_DIM
    value_dim: int = HEAD_DIM

    @property
    def rows(self) -> int:
        return self.positions

    def prefix(self) -> tuple[np.ndarray, np.ndarray]:
        rows = np.zeros((self.positions, HEADS, HEAD_DIM), np.float32)
        return rows, rows


def make_step(n_layers: int, batch: int = 5, **fields: object) -> Step:
    layers = [make_layer() for _ in range(n_layers)]
    hidden = np.arange(batch * WIDTH, dtype=np.float32).reshape(batch, WIDTH)
    return Step(layers, [FakeCache() for _ in layers], 0, batch, hidden, **fields)  # type: ignore[arg-type]


class FakeBackend:
    """Adds `amount` to the hidden batch at each layer it serves; its K rows hold layer + 1."""

    def __init__(self, name: str, serves: Sequence[int], amount: float = 1.0, reason: str = "not mine") -> None:
        self.name = name
        self.serves = set(serves)
        self.amount = amount
        self.reason = reason
        self.runs: list[tuple[int, int]] = []
        self.asked = 0
        self.closed = 0

    def can_serve(self, l: int, step: Step) -> Serve | Decline:  # noqa: E741
        self.asked += 1
        return Serve(f"{self.name}'s note") if l in self.serves else Decline(self.reason)

    def run(self, l: int, length: int, step: Step) -> Run | None:  # noqa: E741
        assert step.hidden is not None
        self.runs.append((l, length))
        rows = [np.full((step.batch, HEADS, HEAD_DIM), layer + 1, np.float32) for layer in range(l, l + length)]
        return Run(step.hidden + np.float32(self.amount * length), [(row, -row) for row in rows])

    def close(self) -> None:
        self.closed += 1
