"""What bench_gemm times: layer shapes by name, and random weights of a kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from frink_numba.quant import KINDS, QuantMatrix

# Layer shapes (N, K) of one token's products: Q K V, attention output, gate and up, down.
SHAPES = {
    "3b": {"qkv": (5120, 3072), "o": (3072, 3072), "gate+up": (16384, 3072), "down": (3072, 8192)},
    "8b": {"qkv": (6144, 4096), "o": (4096, 4096), "gate+up": (28672, 4096), "down": (4096, 14336)},
    "70b": {"qkv": (10240, 8192), "o": (8192, 8192), "gate+up": (57344, 8192), "down": (8192, 28672)},
    "smollm2": {"qkv": (960, 576), "o": (576, 576), "gate+up": (3072, 576), "down": (576, 1536)},
}

# Byte offsets of the f16 scale fields of a block, where they are not at 0 alone.
_SCALE_FIELDS = {"Q6_K": (208,), "Q4_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2)}


def random_weights(name: str, rows: int, cols: int, rng: np.random.Generator) -> QuantMatrix:
    """Random codes and scales of one kind."""
    kind = KINDS[name]
    if name == "F16":
        values = (rng.standard_normal((rows, cols)) * 0.02).astype(np.float16)
        return QuantMatrix(kind, values.view(np.uint8), rows, cols)
    raw = rng.integers(0, 256, (rows, cols // kind.block, kind.block_bytes), dtype=np.uint8)
    for at in _SCALE_FIELDS.get(name, (0,)):
        d = rng.uniform(0.5, 1.5, raw.shape[:2]) * (2e-4 if kind.block == 256 else 4e-3)
        raw[..., at : at + 2] = d.astype(np.float16)[..., None].view(np.uint8)
    return QuantMatrix(kind, raw.reshape(rows, -1), rows, cols)


@dataclass
class Case:
    label: str
    kind: str
    m: int
    n: int
    k: int


def cases(text: str) -> Iterator[Case]:
    """The cases of "kinds:shapes:tokens": "Q4_K,F16:8b,70b:512,2048"."""
    kinds, models, counts = text.split(":")
    for model in models.split(","):
        for part, (n, k) in SHAPES[model].items():
            for kind in kinds.split(","):
                for m in (int(count) for count in counts.split(",")):
                    if k % KINDS[kind].block == 0:
                        yield Case(f"{model} {part} {kind} M={m} N={n} K={k}", kind, m, n, k)
