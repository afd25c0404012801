"""The fused attention on a GPU against float64 (R11, R18, design section 5): heads, lengths, masks, ragged batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from frink_numba.kernels.fused_attention import Attentions, HeadShape, Mirror, sequence_table
from tests.kernels.attention_device import Gpu, attention_case, relative_error, run_attention
from tests.kernels.far_mirrors import far_mirrors

pytestmark = pytest.mark.gpu

LIMIT = 6e-4  # f16 weights and result, and nothing else: design section 5 allows 2e-3


@pytest.fixture(scope="module", params=["wgmma", "mma"])
def attentions(request: pytest.FixtureRequest) -> Iterator[Attentions]:
    from numba import cuda

    device = cuda.get_current_device()
    capability = tuple(device.compute_capability)
    if capability < (8, 0) or (request.param == "wgmma" and capability != (9, 0)):
        pytest.skip(f"{request.param} does not run on compute capability {capability}")
    made = Attentions(request.param, capability, device.MULTIPROCESSOR_COUNT)
    yield made
    made.close()


def check(attentions: Attentions, heads: tuple[int, int, int], lengths: list[tuple[int, int]], **options: Any) -> None:
    attention_case(attentions, Gpu(), heads, lengths, limit=LIMIT, **options)


@pytest.mark.parametrize("head_dim", [128, 64, 96, 80, 256, 72, 100, 32, 16, 192, 40, 2])
def test_head_dims(attentions: Attentions, head_dim: int) -> None:
    """Issue 5: 64, 80, 96, 128, 256, others filled up; grouped queries, odd lengths, a prefix."""
    check(attentions, (4, 2, head_dim), [(0, 1)])
    check(attentions, (4, 2, head_dim), [(0, 333)])
    check(attentions, (4, 1, head_dim), [(301, 77)])


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("start", [0, 1, 63, 127, 128, 129, 700])
@pytest.mark.parametrize("rows", [1, 5, 64, 128, 129, 191, 385])
def test_lengths(attentions: Attentions, head_dim: int, start: int, rows: int) -> None:
    """Prefix and batch in one pass (R11), at the edges of tiles."""
    check(attentions, (2, 2, head_dim), [(start, rows)])


@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (5, 1), (7, 1), (8, 1), (9, 3), (12, 2), (32, 4), (71, 1), (12, 12)])
def test_grouped_queries(attentions: Attentions, heads: tuple[int, int]) -> None:
    """All ratios of query heads to K/V heads, powers of two or not."""
    check(attentions, (*heads, 64), [(50, 150)])
    check(attentions, (*heads, 128), [(0, 97)])


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("window", [1, 2, 31, 128, 129, 300, 5000])
def test_windows(attentions: Attentions, head_dim: int, window: int) -> None:
    """Key j is visible iff 0 <= i - j < window (R18): shorter than a block, longer than the sequence."""
    check(attentions, (4, 2, head_dim), [(0, 700)], window=window)
    check(attentions, (4, 4, head_dim), [(1111, 130)], window=window)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_soft_cap(attentions: Attentions, head_dim: int) -> None:
    """Scores far beyond the cap, and far below; with and without a window (R18)."""
    check(attentions, (4, 2, head_dim), [(77, 300)], softcap=30.0, q_size=6.0)
    check(attentions, (4, 2, head_dim), [(77, 300)], softcap=50.0, window=100)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("level", [-20.0, 0.0, 5.0])
def test_sinks(attentions: Attentions, head_dim: int, level: float) -> None:
    """An extra logit of each head takes weight and gives no value."""
    sinks = (np.random.default_rng(1).standard_normal(6) + level).astype(np.float32)
    check(attentions, (6, 2, head_dim), [(20, 200)], sinks=sinks)
    check(attentions, (6, 2, head_dim), [(0, 300)], sinks=sinks, window=64)


def test_scales(attentions: Attentions) -> None:
    """An explicit scale; operands divided by powers of two (design section 5: f16 never overflows)."""
    check(attentions, (4, 2, 128), [(0, 200)], scale=0.3)
    check(attentions, (4, 2, 128), [(0, 200)], q_size=0.25, size=0.125, q_scale=4.0, k_scale=8.0)


def test_steep_scores(attentions: Attentions) -> None:
    """Scores of hundreds: the weights are nearly one and zero, nothing overflows."""
    check(attentions, (2, 1, 128), [(100, 300)], q_size=12.0, size=5.0)


def test_ragged_batch(attentions: Attentions) -> None:
    """Several sequences in one launch, empty ones among them, each with its own prefix and mirror."""
    lengths = [(500, 300), (0, 1), (1000, 40), (3, 0), (0, 129), (64, 64), (0, 0)]
    check(attentions, (8, 2, 128), lengths)
    check(attentions, (6, 3, 64), lengths, window=90)
    check(attentions, (4, 4, 256), lengths[:4])


def test_many_tiles(attentions: Attentions) -> None:
    """More tiles than blocks: every block takes several, in whatever order."""
    check(attentions, (32, 8, 128), [(0, 1100)])
    check(attentions, (24, 24, 64), [(100, 1500)])


def test_long_context(attentions: Attentions) -> None:
    """Far positions: 5 rows at 131,000, with and without a window."""
    check(attentions, (2, 1, 128), [(131000, 5)])
    check(attentions, (2, 1, 64), [(131000, 72)], window=1000)


@pytest.mark.parametrize("rows", [1, 70])
def test_mirrors_beyond_4_gigabytes(attentions: Attentions, rows: int) -> None:
    """Addresses of far rows take 64 bits: 131,000 positions of 72 K/V heads with 256 channels."""
    from numba import cuda

    heads, width, start = 72, 256, 131000
    shape = HeadShape(heads, heads, width)
    q = np.random.default_rng(1).standard_normal((rows, heads, width)).astype(np.float16)
    with far_mirrors(start + rows, heads, width) as far:
        device = Gpu()
        attention = attentions.attention(shape, rows)
        maps = attention.maps([Mirror(far.k, far.v, start + rows)]) or bytes(128)
        out = device.place(np.full(q.shape, np.nan, np.float16))
        launch = attention.bind(
            device.place(q),
            out,
            device.place(np.frombuffer(sequence_table([(0, rows, start, far.k, far.v)]), np.uint8)),
            1,
            maps=device.place(np.frombuffer(maps, np.uint8)),
            workspace=device.place(np.zeros(max(128, attention.workspace), np.uint8)),
        )
        device.launch(launch)
        got = device.read(out)
        cuda.synchronize()
    for row in {0, rows // 2, rows - 1}:
        assert relative_error(got[row], far.attended(q[row], start + row)) < LIMIT


def test_many_runs_have_the_same_bits(attentions: Attentions) -> None:
    """Whichever block takes a tile, and when: 20 launches of 500 tiles, heads of the wide kernel among them."""
    check(attentions, (32, 8, 128), [(300, 700), (0, 900)], runs=20)
    check(attentions, (16, 16, 256), [(0, 1500)], runs=20)


def test_sequences_do_not_touch_each_other(attentions: Attentions) -> None:
    """In a launch with others, a sequence has the bits that it has alone."""
    rng = np.random.default_rng(3)
    shape = HeadShape(8, 2, 128)
    lengths = [(200, 150), (0, 1), (33, 300), (0, 129)]
    sequences = []
    for start, rows in lengths:
        k, v = (rng.standard_normal((start + rows, 2, 128)).astype(np.float16) for _ in "kv")
        sequences.append((k, v, rows))
    q = rng.standard_normal((sum(rows for _, rows in lengths), 8, 128)).astype(np.float16)
    together = run_attention(attentions, Gpu(), shape, q, sequences)[0]
    first = 0
    for sequence, (_, rows) in zip(sequences, lengths, strict=True):
        alone = run_attention(attentions, Gpu(), shape, q[first : first + rows], [sequence])[0]
        assert np.array_equal(alone.view(np.uint16), together[first : first + rows].view(np.uint16))
        first += rows


@pytest.mark.parametrize("head_dim", [64, 128])
def test_not_a_number_stays_with_those_who_see_it(attentions: Attentions, head_dim: int) -> None:
    """A spoilt row of K (as qkv_prepare marks it) reaches the rows from its position on, and no others."""
    rng = np.random.default_rng(2)
    shape = HeadShape(4, 2, head_dim)
    q = rng.standard_normal((300, 4, head_dim)).astype(np.float16)
    k, v = (rng.standard_normal((310, 2, head_dim)).astype(np.float16) for _ in range(2))
    k[150, 1] = np.nan
    v[150, 1] = 0
    out = run_attention(attentions, Gpu(), shape, q, [(k, v, 300)])[0]
    assert np.isnan(out[140:, 2:]).all()
    assert np.isfinite(out[:140]).all()
    assert np.isfinite(out[:, :2]).all()
