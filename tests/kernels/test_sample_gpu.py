"""The ends of a generated token on a GPU: rows of a packed embedding, and the largest logit (issue 7)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from frink_numba.kernels.fused_attention import SEQUENCE
from frink_numba.kernels.gemm import DeviceWeights
from frink_numba.kernels.gemm_pack import pack
from frink_numba.kernels.sample import NextStep, Samplers
from tests.kernels.gemm_device import address, dequantized
from tests.kernels.packed_weights import random_matrix

pytestmark = pytest.mark.gpu

KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "F16", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")


@pytest.fixture(scope="module")
def samplers() -> Iterator[Samplers]:
    from numba import cuda

    capability = tuple(cuda.get_current_device().compute_capability)
    if capability < (8, 0):
        pytest.skip(f"packed weights are not served on compute capability {capability}")
    made = Samplers(capability)
    yield made
    made.close()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_pack(samplers: Samplers, kind: str) -> None:
    """Every kind: rows of all parts of a slab, the file's values rounded to float32 once."""
    from numba import cuda

    rng = np.random.default_rng(1)
    cols = 2816 if kind in KINDS[7:] else 96
    matrix = random_matrix(kind, 150, cols, rng)
    packed = pack([matrix])
    data, scale = cuda.to_device(packed.data), cuda.to_device(packed.row_scale)
    weights = DeviceWeights.of(packed, address(data), address(scale))
    ids = np.array([0, 1, 7, 8, 15, 16, 31, 40, 63, 64, 100, 127, 149, 3, 149], np.int32)
    hidden = cuda.to_device(np.full((len(ids) + 1, cols), np.nan, np.float32))
    device_ids = cuda.to_device(ids)
    samplers.embed(weights, address(device_ids), len(ids), address(hidden), scale=3.0)(0)
    cuda.synchronize()
    back = hidden.copy_to_host()
    expected = dequantized([matrix])[ids] * 3.0
    assert np.isnan(back[-1]).all()
    # A difference of two products of one block's scales is not exact in float32: an ulp of the larger.
    largest = np.abs(expected).max(axis=1, keepdims=True)
    assert (np.abs(back[:-1] - expected) <= largest * 2.0**-22).all()


@pytest.mark.parametrize("count", [1, 5, 255, 49152, 128256])
def test_largest_logit(samplers: Samplers, count: int) -> None:
    """The first of equals, negative numbers, zeros of both signs, infinities; not-a-numbers as NumPy has them."""
    from numba import cuda

    rng = np.random.default_rng(count)
    logits = (rng.standard_normal((7, count)) - 3).astype(np.float32)
    logits[1] = -np.abs(logits[1])
    logits[2, :] = -1.5
    logits[3, count // 2] = np.inf
    logits[4] = -np.inf
    logits[5, :: max(1, count // 3)] = np.nan
    logits[6] = np.where(np.arange(count) % 2, 0.0, -0.0)
    device = cuda.to_device(logits)
    workspace = cuda.to_device(np.zeros(samplers.argmax_workspace(7), np.uint8))
    for _ in range(2):
        ids = cuda.to_device(np.full(8, -1, np.int32))
        samplers.argmax(address(device), 7, count, address(ids), workspace=address(workspace))(0)
        cuda.synchronize()
        back = ids.copy_to_host()
        assert back[-1] == -1
        assert np.array_equal(back[:7], logits.argmax(axis=1))
    assert not workspace.copy_to_host().any()


@pytest.mark.parametrize("rows", [1, 5])
def test_the_next_step_of_each_sequence(samplers: Samplers, rows: int) -> None:
    """Ids and answers, one position further in every record, padding of the vocabulary never, -1 for no numbers."""
    from numba import cuda

    rng = np.random.default_rng(rows)
    layers, most, count, pitch, start = 300, 6, 1000, 1024, 17
    records = np.zeros((layers, rows), SEQUENCE)
    records["start_pos"], records["rows"], records["first_row"] = start, 1, np.arange(rows)
    records["kv_row"], records["k_base"], records["v_base"] = 2, 1 << 40, 3 << 40
    table = cuda.to_device(records.view(np.uint8).ravel())
    answers = cuda.to_device(np.full((rows, most), -9, np.int32))
    done = cuda.to_device(np.zeros(rows, np.int32))
    positions = cuda.to_device(np.full(rows, start, np.int32))
    ids = cuda.to_device(np.full(rows, -9, np.int32))
    workspace = cuda.to_device(np.zeros(samplers.argmax_workspace(rows), np.uint8))
    step = NextStep(*(address(x) for x in (answers, done, positions, table)), layers, most)
    want = []
    for number in range(4):
        logits = rng.standard_normal((rows, pitch)).astype(np.float32)
        logits[:, count:] = 100
        if number == 2:
            logits[rows - 1, 333] = np.nan
        held = cuda.to_device(logits)
        how = {"workspace": address(workspace), "pitch": pitch, "next_step": step}
        samplers.argmax(address(held), rows, count, address(ids), **how)(0)
        cuda.synchronize()
        want.append(logits[:, :count].argmax(axis=1))
        assert np.array_equal(ids.copy_to_host(), want[-1])
        if number == 2:
            assert want[-1][rows - 1] == 333
            want[-1][rows - 1] = -1
    back = answers.copy_to_host()
    assert np.array_equal(back[:, :4], np.array(want).T)
    assert (back[:, 4:] == -9).all()
    assert (done.copy_to_host() == 4).all()
    assert (positions.copy_to_host() == start + 4).all()
    records["start_pos"] += 4
    records["kv_row"] += 4
    assert table.copy_to_host().tobytes() == records.tobytes()
    assert not workspace.copy_to_host().any()
