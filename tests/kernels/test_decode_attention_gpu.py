"""The decode attention on a GPU against float64 (issue 7; rules R4, R9, R14, R17): lengths, shapes, parts, rows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from frink_numba.kernels.decode_attention import DecodeAttentions, DecodeShape
from frink_numba.kernels.fused_attention import sequence_table
from frink_numba.layer import RopeLayout
from tests.kernels.decode_attention_case import Case
from tests.kernels.far_mirrors import far_mirrors
from tests.kernels.gemm_device import address, relative_error

pytestmark = pytest.mark.gpu

LIMIT = 1.5e-3  # f16 keys, values, queries and weights

NORM, NEOX = RopeLayout.NORM, RopeLayout.NEOX


@pytest.fixture(scope="module")
def attentions() -> Iterator[DecodeAttentions]:
    from numba import cuda

    device = cuda.get_current_device()
    capability = tuple(device.compute_capability)
    if capability < (8, 0):
        pytest.skip(f"the decode attention does not run on compute capability {capability}")
    made = DecodeAttentions(capability, device.MULTIPROCESSOR_COUNT)
    yield made
    made.close()


def check(attentions: DecodeAttentions, case: Case, parts: int | None = None) -> None:
    out, k, v = case.expected()
    ran = case.run(attentions, parts=parts)
    for row in range(case.m):
        assert relative_error(ran["out"][0][row], out[row]) < LIMIT, f"row {row}"
    assert np.array_equal(ran["out"][0], ran["out"][1]), "two runs differ"
    assert np.abs(ran["k_rows"] - k).max() < 1e-5
    assert np.array_equal(ran["v_rows"], v.astype(np.float32))
    for name, true, scale in (("k", ran["k_rows"], case.k_scale), ("v", ran["v_rows"], case.v_scale)):
        assert np.array_equal(ran[f"{name}_mirror"], (true / scale).astype(np.float16).astype(np.float32) * scale)


@pytest.mark.parametrize("start", [0, 1, 15, 16, 100, 127, 128, 255, 256, 257, 1000, 3333])
def test_lengths(attentions: DecodeAttentions, start: int) -> None:
    """One row at every kind of length: parts of one step, whole parts, a last part of one key."""
    check(attentions, Case(DecodeShape(8, 2, 64, rot_dim=64, layout=NEOX), [(1, start)]))


@pytest.mark.parametrize("parts", [1, 2, 5, 32])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_parts_and_rows(attentions: DecodeAttentions, rows: int, parts: int) -> None:
    """Rows of one sequence see each other's keys, wherever the parts' edges fall."""
    check(attentions, Case(DecodeShape(8, 2, 128, rot_dim=128), [(rows, 2045)]), parts)
    check(attentions, Case(DecodeShape(8, 2, 128, rot_dim=128), [(rows, 510)]), parts)


@pytest.mark.parametrize(
    "shape",
    [
        DecodeShape(9, 3, 64, rot_dim=64, layout=NEOX),
        DecodeShape(32, 8, 128, rot_dim=128),
        DecodeShape(4, 4, 32),
        DecodeShape(6, 2, 96, rot_dim=48, layout=NEOX),
        DecodeShape(6, 1, 160, rot_dim=20, layout=NORM),
        DecodeShape(10, 2, 192, rot_dim=192, layout=NEOX, q_norm=True, k_norm=True),
        DecodeShape(8, 4, 256, rot_dim=256, layout=NEOX, softcap=50.0, scale=0.0625),
        DecodeShape(16, 1, 224, rot_dim=64, layout=NEOX, q_norm=True),
        DecodeShape(12, 1, 128, rot_dim=128, softcap=5.0),
        DecodeShape(40, 2, 128, rot_dim=128, k_norm=True),
        DecodeShape(8, 2, 64, rot_dim=32, layout=NEOX, q_norm=True, k_norm=True, norm_last=True),
        DecodeShape(6, 2, 96, rot_dim=96, layout=NORM, q_norm=True, norm_last=True),
    ],
    ids=lambda s: f"{s.n_heads}-{s.n_kv_heads}-{s.head_dim}",
)
def test_shapes(attentions: DecodeAttentions, shape: DecodeShape) -> None:
    """Widths of heads, groups beyond a tile, norms, rotations, caps: one row, and four of two sequences."""
    check(attentions, Case(shape, [(1, 700)]))
    check(attentions, Case(shape, [(4, 300), (2, 21)]))


@pytest.mark.parametrize("window", [1, 16, 100, 513])
def test_windows(attentions: DecodeAttentions, window: int) -> None:
    """R4: key j is visible to query i iff 0 <= i - j < window; parts begin at the window."""
    shape = DecodeShape(8, 2, 64, rot_dim=64, window=window)
    check(attentions, Case(shape, [(1, 1500)]))
    check(attentions, Case(shape, [(7, 620), (3, 0), (1, 15)]))


def test_sequences_of_different_lengths(attentions: DecodeAttentions) -> None:
    """Eight sequences in one launch, some of which need parts."""
    shape = DecodeShape(8, 2, 128, rot_dim=128, layout=NEOX)
    check(attentions, Case(shape, [(1, p) for p in (0, 5000, 3, 400, 17, 255, 1200, 64)]))


@pytest.mark.parametrize("start", [40, 2000])
def test_sinks_and_scales(attentions: DecodeAttentions, start: int) -> None:
    """A sink takes weight and gives no value; mirrors hold values divided by powers of two."""
    shape = DecodeShape(8, 2, 64, rot_dim=64, layout=NEOX)
    check(attentions, Case(shape, [(2, start)], sinks=True))
    check(attentions, Case(shape, [(2, start)], k_scale=4.0, v_scale=16.0))


def alone(case: Case, ran: dict[str, np.ndarray], row: int) -> Case:
    """A row of the only sequence of `case` as a launch of its own, behind the mirrors that the rows before it left."""
    start = case.sequences[0][1]
    single = Case(case.shape, [(1, start + row)], case.k_scale, case.v_scale, case.sinks)
    single.qkv, single.cos, single.sin = (x[row : row + 1] for x in (case.qkv, case.cos, case.sin))
    single.weights, single.sink = case.weights, case.sink
    for side, (name, scale) in enumerate((("k", case.k_scale), ("v", case.v_scale))):
        rows = (ran[f"{name}_mirror"][:row] / scale).astype(np.float16)
        single.mirrors[0][side] = np.concatenate([case.mirrors[0][side][:start], rows, np.full_like(rows[:1], 777)])
        if not row:
            single.mirrors[0][side] = case.mirrors[0][side].copy()
    return single


@pytest.mark.parametrize(
    "shape",
    [
        DecodeShape(9, 3, 64, rot_dim=64, layout=NEOX),
        DecodeShape(32, 8, 128, rot_dim=128),
        DecodeShape(8, 2, 128, rot_dim=128, window=300),
        DecodeShape(8, 4, 256, rot_dim=256, layout=NEOX, softcap=50.0, q_norm=True, k_norm=True),
        DecodeShape(40, 2, 96),
    ],
    ids=lambda s: f"{s.n_heads}-{s.n_kv_heads}-{s.head_dim}-{s.window}",
)
@pytest.mark.parametrize("start", [0, 37, 250, 500, 2045, 8190, 20000])
@pytest.mark.parametrize("rows", [2, 4, 8])
def test_rows_have_the_bits_of_launches_of_their_own(
    attentions: DecodeAttentions, shape: DecodeShape, start: int, rows: int
) -> None:
    """Issue 7: what several rows verify is what one row after the other would have said.

    A launch cuts the keys by its last row: it may have as many rows as `alike` says, and no more.
    """
    alike = attentions.alike(shape, start, rows)
    case = Case(shape, [(alike, start)], sinks=start % 2 == 1)
    ran = case.run(attentions)
    for row in range(alike):
        single = alone(case, ran, row).run(attentions)
        assert np.array_equal(single["out"][0][0], ran["out"][0][row]), f"row {row} of {alike} that are alike"
        assert np.array_equal(single["k_rows"][0], ran["k_rows"][row])
        assert np.array_equal(single["k_mirror"][0], ran["k_mirror"][row])


def test_mirrors_beyond_4_gigabytes(attentions: DecodeAttentions) -> None:
    """Addresses of far rows take 64 bits: nothing is read from, or written to, where they would wrap."""
    from numba import cuda

    heads, width, start, rows = 72, 256, 131000, 2
    shape = DecodeShape(heads, heads, width)
    with far_mirrors(start + rows + 3, heads, width) as far:
        rng = np.random.default_rng(0)
        qkv = rng.standard_normal((rows, 3 * heads, width)).astype(np.float32)
        attention = attentions.attention(shape, sequences=1, most_rows=rows)
        table = cuda.to_device(np.frombuffer(sequence_table([(0, rows, start, far.k, far.v)]), np.uint8))
        workspace = cuda.to_device(np.zeros(attention.workspace, np.uint8))
        out = cuda.to_device(np.full((rows, heads, width), np.nan, np.float16))
        given = cuda.to_device(qkv)
        attention.bind(address(given), address(out), address(table), workspace=address(workspace))(0)
        cuda.synchronize()
        halves = qkv.astype(np.float16)
        for side, first in ((0, heads), (1, 2 * heads)):
            assert np.array_equal(far.read(side, start, rows), halves[:, first : first + heads])
            far.put(side, start, halves[:, first : first + heads])  # for the twin
        got = out.copy_to_host()
    for row in range(rows):
        want = far.attended(halves[row, :heads], start + row)
        assert relative_error(got[row].astype(np.float64), want) < LIMIT


def test_spoilt_rows_stay_their_own(attentions: DecodeAttentions) -> None:
    """R9: what f16 cannot hold makes not-a-numbers for those who see it, and for nobody else."""
    case = Case(DecodeShape(4, 2, 64), [(3, 30), (2, 10)])
    case.qkv[1, 4] = 1e6  # K head 0 of the first sequence's second row
    case.qkv[4, 6, 3] = np.inf  # V head 0 of the second sequence's second row
    out, _, _ = case.expected()
    ran = case.run(attentions)["out"][0]
    spoilt = np.zeros((5, 4), bool)
    spoilt[1:3, :2] = True
    spoilt[4, :2] = True
    assert np.isnan(ran[spoilt]).all()
    assert relative_error(ran[~spoilt], out[~spoilt]) < LIMIT
