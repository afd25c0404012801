"""Random quantized matrices, and a pack read back through the kernels' own fragment code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from frink_numba.kernels.gemm import DeviceWeights, MixedWeights
from frink_numba.kernels.gemm_kinds import SLAB, STEP
from frink_numba.kernels.gemm_pack import PackedMatrix
from frink_numba.quant import KINDS, QuantMatrix
from tests.kernels.array_machine import ArrayMachine

# Byte offsets of the f16 scale fields of a block.
_SCALE_FIELDS = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "IQ4_NL": (0,), "Q2_K": (80, 82),
    "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_XS": (0,),
}  # fmt: skip


def random_matrix(name: str, rows: int, cols: int, rng: np.random.Generator, scale: float = 0.01) -> QuantMatrix:
    """Random bits with scales around `scale` (spread over a factor of 16), signs mixed where the format allows."""
    kind = KINDS[name]
    if name in ("F32", "F16", "BF16"):
        values = (rng.standard_normal((rows, cols)) * scale).astype(np.float32)
        if name == "F16":
            data = values.astype(np.float16).view(np.uint8)
        elif name == "BF16":
            data = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        else:
            data = values.view(np.uint8)
        return QuantMatrix(kind, data.reshape(rows, -1), rows, cols)
    blocks = cols // kind.block
    raw = rng.integers(0, 256, (rows, blocks, kind.block_bytes), dtype=np.uint8)
    for i, at in enumerate(_SCALE_FIELDS[name]):
        d = scale * np.exp2(rng.uniform(-4, 0, (rows, blocks)))
        if i == 0 and name not in ("Q4_K", "Q5_K", "Q2_K"):
            d *= rng.choice([-1.0, 1.0], (rows, blocks))
        raw[..., at : at + 2] = d.astype(np.float16)[..., None].view(np.uint8)
    return QuantMatrix(kind, raw.reshape(rows, -1), rows, cols)


def place_weights(
    packs: Sequence[PackedMatrix], place: Callable[[np.ndarray], int], bias: np.ndarray | None = None
) -> Any:
    """One pack, or two of unlike kinds, as a product takes them; `place` puts an array on the device.

    bias: of all rows, one after another.
    """
    scales = place(np.concatenate([packed.row_scale for packed in packs]))
    biases, bound = 0, 0.0
    if bias is not None:
        filled = np.zeros(sum(SLAB * packed.slabs for packed in packs), np.float32)
        filled[: bias.size] = bias  # only the last pack may end inside a slab
        biases, bound = place(filled), float(np.abs(bias).max())
    parts, at = [], 0
    for packed in packs:
        parts.append(DeviceWeights.of(packed, place(packed.data), scales + at, biases and biases + at, bound))
        at += 4 * SLAB * packed.slabs
    return MixedWeights(*parts) if len(parts) > 1 else parts[0]


def unpack(packed: PackedMatrix) -> np.ndarray:
    """Weights float64 [rows, cols] of a pack, computed by the fragment functions thread by thread."""
    kind, steps = packed.kind, -(-packed.cols // STEP)
    data = packed.data.reshape(packed.slabs, -1)
    thread = np.arange(128, dtype=np.uint32)
    row = (thread >> 5) * 16 + ((thread & 31) >> 2)
    t = thread & 3
    out = np.full((packed.slabs * SLAB, steps * STEP), np.nan)
    for slab in range(packed.slabs):
        machine = ArrayMachine(data[slab])
        header: list[np.ndarray] = []
        for step in range(steps):
            record = step // kind.group_steps * kind.record_size
            inner = step % kind.group_steps
            if inner == 0 and kind.header is not None:
                header = list(kind.header(machine, np.uint32(record), row))
            base = np.uint32(record + kind.header_size + inner * kind.step_size)
            registers = kind.fragments(machine, base, thread, row, inner, header)
            for r, register in enumerate(registers):
                block, i = r // 4, r % 4
                rows = slab * SLAB + row + 8 * (i & 1)
                cols = step * STEP + 16 * block + 8 * (i >> 1) + 2 * t
                halves = np.ascontiguousarray(register).view(np.float16).reshape(128, 2)
                out[rows, cols], out[rows, cols + 1] = halves[:, 0], halves[:, 1]
    assert not np.isnan(out).any(), "an element was not written, or is not a number"
    out *= packed.row_scale[:, None].astype(np.float64)
    return out[: packed.rows, : packed.cols]
