"""The two ways to a plane of nibbles: straight from the file's bytes, and through one byte an element."""

from __future__ import annotations

import numpy as np
import pytest

from frink_numba.kernels.gemm_codes import CODES
from frink_numba.kernels.gemm_kinds import FRAGMENT_KINDS, STEP
from frink_numba.kernels.gemm_planes import code_planes, has_nibbles, nibble_plane
from frink_numba.quant import KINDS

NIBBLES = [name for name in CODES if has_nibbles(name)]


def test_the_kinds_of_large_models_take_the_short_way() -> None:
    assert {"Q4_0", "Q4_1", "Q4_K"} <= set(NIBBLES)


@pytest.mark.parametrize("name", NIBBLES)
@pytest.mark.parametrize("cols", [256, 768, 352])
def test_nibbles_from_bytes_are_those_of_codes(name: str, cols: int) -> None:
    """Bit for bit, also where the last step is half empty."""
    kind = KINDS[name]
    if cols % kind.block:
        pytest.skip(f"{name} has no rows of {cols}")
    raw = np.random.default_rng(cols).integers(0, 256, (192, cols // kind.block, kind.block_bytes), dtype=np.uint8)
    steps = -(-cols // STEP)
    codes = np.zeros((192, steps * STEP), np.uint8)
    codes[:, :cols] = CODES[name](raw).codes()
    (want,) = code_planes(FRAGMENT_KINDS[name], name, codes)
    np.testing.assert_array_equal(nibble_plane(name, raw, steps), want)
