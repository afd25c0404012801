"""How a model's rotation differs from the plain one: every scaling becomes factors and a magnitude of `layer.Rope`.

Linear: every frequency is divided by one factor (Chen et al., "Extending Context Window of Large Language Models via
Positional Interpolation", 2023). Factors of the file: Llama 3's rule, computed when the file was made. YaRN: fast pairs
keep their frequency, slow ones are divided, those between are blended, and the turned channels grow (Peng et al.,
"YaRN", 2023). LongRoPE: one set of factors for short contexts and one for long ones (Ding et al., "LongRoPE", 2024).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import numpy as np

from frink_numba.layer import Rope, RopeLayout


class ScalingKind(Enum):
    """`rope.scaling.type`."""

    NONE = "none"
    LINEAR = "linear"
    YARN = "yarn"
    LONGROPE = "longrope"


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """The scaling of one model."""

    kind: ScalingKind = ScalingKind.NONE
    factor: float = 1.0  # linear and YaRN: what slow pairs are divided by
    original_context: int = 0  # YaRN and LongRoPE: positions that the model was first trained on
    fast_turns: float = 32.0  # YaRN: pairs that turn more often within the original context keep their frequency
    slow_turns: float = 1.0  # YaRN: pairs that turn less often are divided by the whole factor
    magnitude: float = 1.0  # on the turned channels


PLAIN = RopeScaling()


def scaled_rope(
    theta: float, rot_dim: int, layout: RopeLayout, scaling: RopeScaling, stored: np.ndarray | None = None
) -> Rope:
    """The rotation of a layer. `stored`: the file's factors, float32 [rot_dim/2], which come on top of the scaling.

    Numbers beyond float32 give factors of 0 or infinity, which the caller refuses.
    """
    if stored is None and (scaling.kind not in (ScalingKind.LINEAR, ScalingKind.YARN) or scaling.factor == 1):
        return Rope(theta, rot_dim, layout, None, scaling.magnitude)
    factors = np.ones(rot_dim // 2) if stored is None else stored.astype(np.float64)
    with np.errstate(over="ignore", under="ignore", divide="ignore"):
        if scaling.kind is ScalingKind.LINEAR:
            factors *= scaling.factor
        elif scaling.kind is ScalingKind.YARN:
            factors *= _yarn_factors(theta, rot_dim, scaling)
        return Rope(theta, rot_dim, layout, factors.astype(np.float32), scaling.magnitude)


def yarn_magnitude(factor: float) -> float:
    """What YaRN multiplies the turned channels by, unless the model states another: 1.1386 at factor 4."""
    return 0.1 * math.log(factor) + 1 if factor > 1 else 1.0


def _yarn_factors(theta: float, rot_dim: int, scaling: RopeScaling) -> np.ndarray:
    """float64 [rot_dim/2]: 1 for fast pairs, the factor for slow ones, between them a blend of the frequencies."""

    def pair_of(turns: float) -> float:
        """The pair, as a fraction, that turns this often within the original context."""
        return rot_dim * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_of(scaling.fast_turns)), 0)
    high = min(math.ceil(pair_of(scaling.slow_turns)), rot_dim - 1)
    slow = np.clip((np.arange(rot_dim // 2) - low) / max(high - low, 0.001), 0, 1)
    return 1 / (slow / scaling.factor + (1 - slow))
