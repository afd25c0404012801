"""Two thin products in one launch, on the GPU or on what stands in for it, against float64 and against two launches."""

from __future__ import annotations

import numpy as np

from frink_numba.kernels.gemm import DeviceWeights
from frink_numba.kernels.gemm_pack import pack
from frink_numba.kernels.thin_gemm import NormRows, ThinGemms
from tests.kernels.attention_device import Device
from tests.kernels.gemm_device import dequantized, relative_error
from tests.kernels.packed_weights import random_matrix

LIMIT = 6e-4


def check(thins: ThinGemms, device: Device, kinds: tuple[str, str], m: int, rows: tuple[int, int], cols: int) -> None:
    """Both results with biases, twice; the bits of two launches with the pair's cut; nothing beside them is written."""
    rng = np.random.default_rng(sum(rows))
    matrices = [random_matrix(kind, n, cols, rng) for kind, n in zip(kinds, rows, strict=True)]
    x = rng.standard_normal((m, cols)).astype(np.float32)
    norm = (1 + rng.standard_normal(cols)).astype(np.float32)
    biases = [rng.standard_normal(-(-n // 64) * 64).astype(np.float32) for n in rows]
    packs = [pack([matrix]) for matrix in matrices]
    first, second = (
        DeviceWeights.of(p, device.place(p.data), device.place(p.row_scale), device.place(b), float(np.abs(b).max()))
        for p, b in zip(packs, biases, strict=True)
    )
    hidden = NormRows(device.place(x), device.place(norm), 1e-5)
    width = sum(rows) + 3
    places = [device.place(np.full((m + 1, width), np.nan, np.float32)) for _ in range(3)]
    pair, cut = thins.pair(first, second, m), thins.pair_row_groups(first, second)
    assert pair is not None
    assert pair.plan.blocks == thins.device.multiprocessors
    for place in places[:2]:
        device.launch(pair.bind((first, second), hidden, (place, place + 4 * rows[0]), 4 * width))
    for w, at in ((first, 0), (second, rows[0])):
        product = thins.product(w, m, norm=True, row_groups=cut)
        device.launch(product.bind(w, hidden, places[2] + 4 * at, 4 * width))
    out, again, alone = (device.read(place) for place in places)
    assert np.isnan(out[m:]).all(), "rows beyond the result were written"
    assert np.isnan(out[:, sum(rows) :]).all(), "columns beyond the result were written"
    operand = x.astype(np.float64)
    operand = operand / np.sqrt((operand**2).mean(axis=1, keepdims=True) + 1e-5) * norm
    for side, (matrix, bias) in enumerate(zip(matrices, biases, strict=True)):
        part = slice(side * rows[0], side * rows[0] + rows[side])
        assert relative_error(out[:m, part], operand @ dequantized([matrix]).T + bias[: rows[side]]) < LIMIT
    for other in (again, alone):
        assert np.array_equal(out[:m, : sum(rows)], other[:m, : sum(rows)])
