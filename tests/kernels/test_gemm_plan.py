"""The choice of tiles and splits: every group of steps is done exactly once, and the choice is sane."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frink_numba.kernels.gemm_plan import TOKEN_TILES, Plan, blocks_on_multiprocessor, make_plan


def _work(plan: Plan) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """(tile, group) -> who does it, in the kernel's arithmetic (gemm_emit.range_start, next_segment)."""
    workers = plan.blocks // plan.cluster
    groups = -(-plan.steps // 4)
    tiles = plan.token_tiles * -(-plan.slabs // (2 * plan.cluster))
    split = plan.split_tiles * groups
    done: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for worker in range(workers):
        first, last = worker * split // workers, (worker + 1) * split // workers
        for order, position in enumerate(range(first, last)):
            done.setdefault(divmod(position, groups), []).append((worker, order))
        for tile in range(plan.split_tiles + worker, tiles, workers):
            for group in range(groups):
                done.setdefault((tile, group), []).append((worker, -1))
    return done


@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(1, 3000),
    rows=st.integers(1, 9000),
    cols=st.integers(1, 200).map(lambda k: 32 * k),
    multiprocessors=st.sampled_from([1, 16, 78, 108, 132]),
    tokens=st.sampled_from([None, *TOKEN_TILES]),
)
def test_every_group_is_done_once(m: int, rows: int, cols: int, multiprocessors: int, tokens: int | None) -> None:
    """All of the product, nothing twice

    no worker of a split is idle; a part is written by at most one segment each.
    """
    plan = make_plan(m, rows, cols, 2304, multiprocessors, tokens, None if multiprocessors > 1 else 1)
    done = _work(plan)
    groups = -(-plan.steps // 4)
    tiles = plan.token_tiles * -(-plan.slabs // (2 * plan.cluster))
    assert len(done) == tiles * groups
    assert all(len(who) == 1 for who in done.values())
    assert plan.blocks <= max(multiprocessors * blocks_on_multiprocessor(plan.tokens, plan.cluster), plan.cluster)
    assert plan.blocks % plan.cluster == 0
    assert plan.token_tiles * plan.tokens >= m
    if plan.split_tiles:
        workers = plan.blocks // plan.cluster
        assert plan.split_tiles * groups >= workers, "a worker without a group would have no part to add"


def test_the_plan_is_a_function_of_the_shape() -> None:
    """Bitwise repeatable results need the same cut each time."""
    assert make_plan(512, 4096, 4096, 2304, 132) == make_plan(512, 4096, 4096, 2304, 132)


@pytest.mark.parametrize("m", [1, 4, 16])
def test_few_tokens_take_small_tiles_and_all_multiprocessors(m: int) -> None:
    plan = make_plan(m, 4096, 4096, 2304, 132)
    assert plan.tokens <= 32
    assert plan.blocks >= 128


def test_small_grids_are_split() -> None:
    """512 x 3072 x 8192 has 48 tiles of 128 x 256: the probe's weak spot."""
    plan = make_plan(512, 3072, 8192, 2304, 132)
    assert plan.blocks >= 128


def test_forced_tiles_are_taken() -> None:
    for tokens in TOKEN_TILES:
        for cluster in (1, 2):
            plan = make_plan(300, 1000, 1024, 2304, 132, tokens, cluster)
            assert (plan.tokens, plan.cluster) == (tokens, cluster)
