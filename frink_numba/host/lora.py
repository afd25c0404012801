"""Low-rank updates of projections, computed beside them: W x + scale * up (down x)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from frink_numba.layer import Lora


class PreparedLora(NamedTuple):
    """An update of the rows `first` .. `last`-1 of a fused set; the scale, and that of the projection, are in `up`."""

    first: int
    last: int
    down: np.ndarray  # float32 [rank, cols]
    up: np.ndarray  # float32 [last - first, rank]


def prepare_loras(
    loras: Sequence[Lora], sites: Sequence[tuple[str, int]], scale: np.ndarray | None = None
) -> tuple[PreparedLora, ...]:
    """Those of `loras` that belong to a fused set of projections `sites`, each (name, rows), in stacking order.

    `scale` float32 [rows, 1] or [1, 1]: what the whole projection is multiplied by.
    """
    found = []
    first = 0
    for name, rows in sites:
        for lora in loras:
            if lora.target == name:
                up = np.asarray(lora.up, np.float32) * np.float32(lora.scale)
                up = up if scale is None else up * scale
                down = np.ascontiguousarray(lora.down, np.float32)
                found.append(PreparedLora(first, first + rows, down, np.ascontiguousarray(up)))
        first += rows
    return tuple(found)


def add_loras(x: np.ndarray, loras: Sequence[PreparedLora], out: np.ndarray) -> None:
    """`out` [rows, n] gets what each update makes of the columns `x` [cols, n]."""
    for lora in loras:
        part = out[lora.first : lora.last]
        np.add(part, np.dot(lora.up, np.dot(lora.down, x)), out=part)
