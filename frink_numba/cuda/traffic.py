"""What went over the bus: bytes by purpose, runs and synchronizations, counted where they happen (R8)."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True)
class Traffic:
    """Counts since a backend was made; every figure but the last two is in bytes."""

    weights_up: int = 0  # matrices, norms, biases, inverse frequencies: once per layer
    hidden_up: int = 0
    hidden_down: int = 0
    kv_down: int = 0
    logits_down: int = 0
    prefix_up: int = 0
    synchronizations: int = 0  # times a run made the calling thread wait for the device
    runs: int = 0  # runs that succeeded

    def add(self, other: Traffic) -> None:
        for name in _NAMES:
            count = getattr(other, name)
            if count:
                setattr(self, name, getattr(self, name) + count)

    def copy(self) -> Traffic:
        return Traffic(*(getattr(self, name) for name in _NAMES))


_NAMES = tuple(field.name for field in fields(Traffic))
