"""The choice of tiles and splits: every group of steps is done exactly once, and the choice is sane."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frink_numba.errors import ShapeError
from frink_numba.kernels.few_gemm_plan import FewPlan, few_plan
from frink_numba.kernels.gemm import Gemms, plan_workspace
from frink_numba.kernels.gemm_epilogue import Epilogue
from frink_numba.kernels.gemm_kinds import FRAGMENT_KINDS
from frink_numba.kernels.gemm_plan import (
    COMMON,
    TILES,
    Behind,
    Plan,
    blocks_on_multiprocessor,
    layouts,
    make_plan,
    ring_stages,
)
from frink_numba.kernels.gemm_variant import FLAG_BYTES, WgmmaGemm

Q4, Q6 = FRAGMENT_KINDS["Q4_0"], FRAGMENT_KINDS["Q6_K"]
TILE = st.sampled_from([(g, t) for g, tiles in TILES.items() for t in tiles])


def _tiles(plan: Plan, behind: int = 0) -> int:
    """Tiles of a plan whose last `behind` slabs are of a kind of their own (gemm_mixed.slab_sets)."""
    return plan.token_tiles * sum(-(-n // (plan.groups * plan.cluster)) for n in (plan.slabs - behind, behind))


def _work(plan: Plan, behind: int = 0) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """(tile, group) -> who does it, in the kernel's arithmetic (gemm_emit.range_start, next_segment)."""
    clusters = plan.blocks // plan.cluster
    groups = -(-plan.steps // 4)
    tiles = _tiles(plan, behind)
    split = plan.split_tiles * groups
    done: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for cluster in range(clusters):
        first, last = (min(c, plan.workers) * split // plan.workers for c in (cluster, cluster + 1))
        for order, position in enumerate(range(first, last)):
            done.setdefault(divmod(position, groups), []).append((cluster, order))
        for tile in range(plan.split_tiles + cluster, tiles, clusters):
            for group in range(groups):
                done.setdefault((tile, group), []).append((cluster, -1))
    return done


@settings(max_examples=80, deadline=None)
@given(
    m=st.integers(1, 3000),
    rows=st.integers(1, 9000),
    cols=st.integers(1, 200).map(lambda k: 32 * k),
    multiprocessors=st.sampled_from([2, 16, 78, 108, 132]),
    tile=TILE,
    cluster=st.sampled_from([1, 2]),
    second=st.sampled_from([0, 30, 64, 1024]),
)
def test_every_group_is_done_once(
    m: int, rows: int, cols: int, multiprocessors: int, tile: tuple[int, int], cluster: int, second: int
) -> None:
    """All of the product, nothing twice, in every layout that may be chosen, of one kind or two

    no worker of a split is idle; a cluster writes one part at most.
    """
    groups, tokens = tile
    behind = Behind(Q6, second) if second else None
    if behind:
        rows = -(-rows // 64) * 64 + second
    plans = list(layouts(m, rows, cols, Q4, multiprocessors, tokens, cluster, groups, behind))
    assert plans
    for plan in plans[:: max(1, len(plans) // 3)]:
        done = _work(plan, -(-second // 64))
        step_groups = -(-plan.steps // 4)
        tiles = _tiles(plan, -(-second // 64))
        assert len(done) == tiles * step_groups
        assert all(len(who) == 1 for who in done.values())
        assert plan.blocks <= multiprocessors * blocks_on_multiprocessor(cluster, groups)
        assert plan.blocks % plan.cluster == 0
        assert plan.token_tiles * plan.tokens >= m
        if plan.split_tiles:
            assert plan.workers <= plan.blocks // plan.cluster
            assert plan.split_tiles * step_groups >= plan.workers, "a worker without a group would have no part to add"


def test_the_plan_is_a_function_of_the_shape() -> None:
    """Bitwise repeatable results need the same cut each time."""
    assert make_plan(512, 4096, 4096, Q4, 132) == make_plan(512, 4096, 4096, Q4, 132)


@pytest.mark.parametrize("m", [1, 4, 16])
def test_few_tokens_take_small_tiles_and_all_multiprocessors(m: int) -> None:
    plan = make_plan(m, 4096, 4096, Q4, 132)
    assert plan.tokens <= 32
    assert plan.blocks >= 128


@pytest.mark.parametrize("m", [64, 512, 2048])
def test_the_cost_of_two_kinds_lies_between_theirs(m: int) -> None:
    """Issue 4, QKV in one launch: rows behind count as much as they are."""
    first, second = FRAGMENT_KINDS["Q4_K"], Q6
    tile = 128, 1, 2
    costs = [
        make_plan(m, 6144, 4096, first, 132, *tile, True, behind).nanoseconds
        for behind in (None, Behind(second, 128), Behind(second, 3072), Behind(second, 6016))  # whole tiles of each
    ]
    costs.append(make_plan(m, 6144, 4096, second, 132, *tile, True).nanoseconds)
    assert costs == sorted(set(costs))


@pytest.mark.parametrize("m", [512, 1024, 2048, 8192])
def test_blocks_of_two_kinds_do_not_share_tokens(m: int) -> None:
    """On an H200 no such tile of a cluster was as fast as the same one alone."""
    assert make_plan(m, 6144, 4096, FRAGMENT_KINDS["Q4_K"], 132, behind=Behind(Q6, 1024)).cluster == 1


@pytest.mark.parametrize("kind", FRAGMENT_KINDS)
def test_few_stages_of_a_ring_are_known(kind: str) -> None:
    """The latency of a stage is shared by them: one more or less counts where they are few."""
    for groups, tiles in TILES.items():
        for tokens in tiles:
            for epilogue in (Epilogue(), Epilogue(half=True), Epilogue("swiglu", True)):
                stages = WgmmaGemm(kind, tokens, epilogue, 1, groups).stages
                assert stages > 8 or abs(ring_stages(FRAGMENT_KINDS[kind], tokens, 1, groups) - stages) <= 1


@pytest.mark.parametrize("m", [128, 256])
def test_products_of_some_rows_in_f16_have_long_rings(m: int) -> None:
    """Two blocks of a slab have three stages each: 29 and 38 % slower with 256 rows (small-cuts-h200.txt)."""
    for rows, cols in ((4096, 14336), (3072, 8192)):
        assert make_plan(m, rows, cols, FRAGMENT_KINDS["half"], 132).groups > 1


def test_tiles_take_what_they_do_sooner() -> None:
    """256 slabs fill all places with a tile of one slab each; fewer slabs have their kernel (small-cuts-h200.txt)."""
    gemms = Gemms("wgmma", (9, 0), 132)
    gate_up = gemms.plan("Q4_0", 16, 16384, 3072)
    assert isinstance(gate_up, Plan)
    assert (gate_up.groups, gate_up.tokens, gate_up.split_tiles) == (1, 16, 0)
    assert isinstance(gemms.plan("Q4_0", 16, 4096, 4096), FewPlan)


@pytest.mark.parametrize(("rows", "cols"), [(3072, 8192), (4096, 14336), (16384, 3072)])
@pytest.mark.parametrize("m", [16, 33, 64])
def test_a_cut_without_room_for_sums_is_the_faster_one(m: int, rows: int, cols: int) -> None:
    """Whole tiles or the kernel of few rows, neither of which takes a workspace."""
    gemms = Gemms("wgmma", (9, 0), 132)
    found = gemms._few_plan("Q4_0", m, rows, cols, room=0)
    tiles = gemms._tiles("Q4_0", m, rows, cols, whole=True)
    least = few_plan("Q4_0", m, rows, cols, 132, parts=1)
    assert found == (least if least.nanoseconds <= tiles.nanoseconds else None)
    assert least.workspace == plan_workspace("Q4_0", tiles) == 0


@pytest.mark.parametrize(("groups", "tokens"), [(2, 16), (1, 256), (3, 16), (4, 128)])
def test_tiles_that_do_not_exist_are_an_error(groups: int, tokens: int) -> None:
    with pytest.raises(ShapeError, match=f"no tile has {groups} slabs and {tokens} tokens"):
        make_plan(512, 4096, 4096, Q4, 132, tokens=tokens, groups=groups)


def test_small_grids_fill_the_machine() -> None:
    """512 x 3072 x 8192 has 48 tiles of 128 x 256: the probe's weak spot."""
    plan = make_plan(512, 3072, 8192, Q4, 132)
    assert plan.blocks >= 120


@pytest.mark.parametrize("m", [33, 100, 300, 500, 777, 1500])
def test_odd_lengths_share_few_tiles(m: int) -> None:
    """A prompt's length alone does not ask for another kernel."""
    for rows, cols in ((3072, 3072), (28672, 4096), (576, 1536)):
        plan = make_plan(m, rows, cols, Q4, 132)
        assert plan.tokens in COMMON[plan.groups]


def test_forced_tiles_are_taken() -> None:
    for groups, tiles in TILES.items():
        for tokens in tiles:
            for cluster in (1, 2):
                plan = make_plan(300, 1000, 1024, Q4, 132, tokens, cluster, groups)
                assert (plan.tokens, plan.cluster, plan.groups) == (tokens, cluster, groups)


@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(1, 9000),
    rows=st.integers(1, 20_000),
    cols=st.integers(1, 200).map(lambda k: 32 * k),
    kind=st.sampled_from(sorted(FRAGMENT_KINDS)),
    multiprocessors=st.sampled_from([2, 78, 132]),
)
def test_whole_tiles(m: int, rows: int, cols: int, kind: str, multiprocessors: int) -> None:
    """On request no tile is cut along K, whatever the shape; all of the product is done once."""
    plan = make_plan(m, rows, cols, FRAGMENT_KINDS[kind], multiprocessors, whole=True)
    assert plan.split_tiles == 0
    assert plan.token_tiles * plan.tokens >= m
    if plan.token_tiles * plan.slabs * plan.steps < 100_000:
        done = _work(plan)
        tiles = plan.token_tiles * -(-plan.slabs // (plan.groups * plan.cluster))
        assert len(done) == tiles * -(-plan.steps // 4)
        assert all(len(who) == 1 for who in done.values())


def test_the_usual_plan_cuts_along_k_as_the_tokens_ask_for() -> None:
    """What whole tiles are asked for: cuts, and with them the order of sums, follow the number of rows."""
    plans = [make_plan(m, 3072, 3072, Q4, 132) for m in (1, 64, 512, 2048)]
    assert len({(plan.tokens, plan.groups) for plan in plans}) > 1
    assert len({bool(plan.split_tiles) for plan in plans}) == 2


@pytest.mark.parametrize(("groups", "tokens"), [(g, t) for g, tiles in TILES.items() for t in tiles])
def test_registers_fit_what_a_block_is_launched_with(groups: int, tokens: int) -> None:
    """`setmaxnreg` deals out what the launch gave: asking for more would wait for ever."""
    gemm = WgmmaGemm("Q4_K", tokens, groups=groups)
    launched = 65536 // (gemm.threads * gemm.resident) // 8 * 8 * gemm.threads
    producer, consumers = gemm.registers
    assert 128 * (producer + groups * consumers) <= launched


def test_products_say_what_workspace_they_want() -> None:
    """Flags and the sums of every worker where a plan cuts along K; nothing elsewhere, or where it may not."""
    gemms = Gemms("wgmma", (9, 0), 132)
    cut, whole = (make_plan(1024, 1024, 3072, FRAGMENT_KINDS["Q6_K"], 132, whole=whole) for whole in (False, True))
    assert cut.split_tiles > 0 == whole.split_tiles
    sums = cut.workers * 64 * cut.groups * cut.cluster * cut.tokens * 4
    assert gemms.workspace("Q6_K", 1024, 3072, 1024) == plan_workspace("Q6_K", cut) == FLAG_BYTES + sums
    assert plan_workspace("Q6_K", whole) == 0
    assert Gemms("wgmma", (9, 0), 132, invariant=True).workspace("Q6_K", 1024, 3072, 1024) == 0
    assert Gemms("mma", (8, 6), 132).workspace("Q6_K", 1024, 3072, 1024) == 0
