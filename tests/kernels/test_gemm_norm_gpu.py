"""Products that norm their rows themselves, on a GPU: to the bit what the norm's own launch and a product give."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from frink_numba.cuda.tensor.kernels import TensorKernels
from frink_numba.kernels.cubins import Source
from frink_numba.kernels.gemm import DeviceWeights, HalfRows
from frink_numba.kernels.gemm_pack import PackedMatrix, pack
from frink_numba.kernels.gemm_variant import FLAG_BYTES
from frink_numba.kernels.launch import KernelShelf
from frink_numba.kernels.thin_gemm import NormRows
from tests.kernels.gemm_device import address, dequantized, filled, relative_error
from tests.kernels.packed_weights import random_matrix
from tests.kernels.test_gemm_norm_machine import EPS, drawn, normed

pytestmark = pytest.mark.gpu

LIMIT = 8e-4  # f16 operands, and an f16 result


@pytest.fixture(scope="module", params=[False, True], ids=["", "invariant"])
def kernels(request: pytest.FixtureRequest) -> Iterator[TensorKernels]:
    from numba import cuda

    device = cuda.get_current_device()
    if tuple(device.compute_capability) != (9, 0):
        pytest.skip("products of the wgmma tier alone norm their rows")
    made = TensorKernels("wgmma", (9, 0), device.MULTIPROCESSOR_COUNT, invariant=request.param)
    yield made
    made.gemms.close()


@dataclass
class Prepared:
    """A norm and a product, apart or in one launch, with poisoned buffers of their own; `launch` takes a stream."""

    launch: Callable[[int], None]
    read: Callable[[], list[np.ndarray]]  # result, its powers of two, operands, their scales and norms


def prepare(
    kernels: TensorKernels,
    packed: PackedMatrix,
    x: np.ndarray,
    weight: np.ndarray,
    inside: bool,
    *,
    gate: str = "",
    tile: dict[str, Any] | None = None,
) -> Prepared:
    from numba import cuda

    m, k = x.shape
    half = bool(gate)
    data, row_scale, source, norm = (cuda.to_device(a) for a in (packed.data, packed.row_scale, x, weight))
    weights = DeviceWeights.of(packed, address(data), address(row_scale))
    rows_to_norm = NormRows(address(source), address(norm), EPS)
    # Cut as the one with the norm is: few rows have kernels of their own otherwise, which sum in another order.
    product: Any = kernels.gemms.product(weights, m, gate=gate, half=half, norm=True, **(tile or {}))
    if not inside:
        product = kernels.gemms.product(weights, m, gate=gate, half=half, plan=product.plan)
    width = -(-packed.outputs // 8) * 8
    out, out_scale = _poison((m, width), np.float16 if half else np.float32), _poison(filled(m), np.float32)
    operand, scale, bound = _poison((m, k), np.float16), *(_poison(filled(m), np.float32) for _ in range(2))
    rows = HalfRows(address(operand), address(scale), address(bound))
    pitch = width * out.dtype.itemsize
    workspace = cuda.to_device(np.zeros(product.workspace, np.uint8))
    maps = cuda.to_device(np.frombuffer(product.maps(rows, address(out), pitch), np.uint8))
    places = {"maps": address(maps), "workspace": address(workspace), "out_scale": address(out_scale) * half}
    bound_rows = rows_to_norm if inside else None
    launch = product.bind(weights, rows, address(out), pitch, norm=bound_rows, **places)
    alone = kernels.norm_half(m, k, rows_to_norm.hidden, rows_to_norm.weight, EPS, rows)
    kept = data, row_scale, source, norm, maps

    def both(stream: int) -> None:
        if not inside:
            alone(stream)
        launch(stream)

    def read() -> list[np.ndarray]:
        assert kept
        assert not workspace.copy_to_host()[:FLAG_BYTES].any(), "the workspace's flags are not back at zero"
        powers = out_scale.copy_to_host()[:m] if half else np.ones(m, np.float32)
        made = (out.copy_to_host()[:, : packed.outputs], powers, operand.copy_to_host())
        return [*made, scale.copy_to_host()[:m], bound.copy_to_host()[:m]]

    cuda.synchronize()
    return Prepared(both, read)


def both_ways(
    kernels: TensorKernels, packed: PackedMatrix, x: np.ndarray, weight: np.ndarray, *, launches: int = 1, **how: Any
) -> list[list[np.ndarray]]:
    """What is read of a norm and a product, then of both in one, the second so often in a row."""
    from numba import cuda

    answers = []
    for inside in (False, True):
        made = prepare(kernels, packed, x, weight, inside, **how)
        for _ in range(launches if inside else 1):
            made.launch(0)
        cuda.synchronize()
        answers.append(made.read())
    return answers


def same(apart: list[np.ndarray], inside: list[np.ndarray]) -> None:
    names = ("result", "powers", "operands", "scales", "norms")
    for name, one, other in zip(names, apart, inside, strict=True):
        bits = (a.view(f"u{a.itemsize}") for a in (one, other))
        assert np.array_equal(*bits), f"{name} differ, first at {np.argwhere(one != other)[:3].tolist()}"


def _poison(shape: Any, kind: Any) -> Any:
    from numba import cuda

    return cuda.to_device(np.full(shape, np.nan, kind))


def check(kernels: TensorKernels, kind: str, m: int, n: int, k: int, **how: Any) -> None:
    rng = np.random.default_rng(zlib.crc32(f"{kind} {m} {n} {k}".encode()))
    x, weight = drawn(m, k, rng)
    gated = bool(how.get("gate"))
    matrices = [random_matrix(kind, n, k, rng) for _ in range(1 + gated)]
    apart, inside = both_ways(kernels, pack(matrices, gated=gated), x, weight, **how)
    same(apart, inside)
    got = inside[0].astype(np.float64) * inside[1][:, None]
    reference, *up = (normed(x, weight) @ dequantized([matrix]).T for matrix in matrices)
    if up:
        with np.errstate(over="ignore"):
            reference = reference / (1 + np.exp(-reference)) * up[0]
    assert relative_error(got, reference) < LIMIT


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(17, 960, 576), (65, 960, 576), (300, 200, 32), (129, 640, 2048), (515, 5120, 3072), (257, 448, 5120),
     (1030, 1600, 768), (2048, 5120, 3072), (24, 300, 8192), (600, 2000, 8192), (1, 128, 512), (40, 256, 7168)],
)  # fmt: skip
def test_shapes_as_planned(kernels: TensorKernels, m: int, n: int, k: int) -> None:
    """Issue 6: few rows and many, on all widths that a group shares in another way; whole tiles and split ones."""
    check(kernels, "Q8_0", m, n, k)


@pytest.mark.parametrize(
    ("kind", "groups", "tokens", "cluster"),
    [("Q4_K", 1, 32, 1), ("Q4_K", 1, 16, 1), ("Q4_K", 2, 128, 1), ("Q6_K", 2, 256, 1), ("Q4_K", 2, 256, 2),
     ("Q6_K", 3, 128, 1), ("F16", 2, 256, 2), ("Q4_1", 1, 128, 1)],
)  # fmt: skip
def test_tiles(kernels: TensorKernels, kind: str, groups: int, tokens: int, cluster: int) -> None:
    """Each form of a block, with more rows than groups and with fewer tiles than multiprocessors."""
    tile = {"groups": groups, "tokens": tokens, "cluster": cluster}
    check(kernels, kind, 2 * tokens + 3, 64 * 5, 768, tile=tile)
    check(kernels, kind, 900, 64 * 7, 3072, tile=tile)


@pytest.mark.parametrize(("m", "k"), [(40, 576), (700, 3072)])
def test_gate_and_up(kernels: TensorKernels, m: int, k: int) -> None:
    check(kernels, "Q4_0", m, 1536, k, gate="swiglu")


def test_many_launches_in_a_row(kernels: TensorKernels) -> None:
    """One behind the other, each begun before the one before has ended: all meet, and leave the same."""
    check(kernels, "Q4_K", 200, 1024, 1024, launches=200)
    check(kernels, "Q4_0", 512, 3072, 576, gate="swiglu", launches=200)


# (kind, m, n, k, more): whole tiles on all multiprocessors, tiles cut along K, blocks that share one, clusters.
CROWDED = [
    ("Q4_K", 512, 5120, 1024, {}),
    ("Q4_K", 300, 2048, 4096, {}),
    ("Q8_0", 600, 960, 576, {}),
    ("Q4_0", 1024, 3072, 576, {"gate": "swiglu"}),
    ("Q6_K", 1024, 5120, 1024, {"tile": {"groups": 2, "tokens": 256, "cluster": 2}}),
]


def crowd(kernels: TensorKernels, case: tuple[str, int, int, int, dict[str, Any]]) -> list[Prepared]:
    """A case's norm and product apart, then twice in one launch."""
    kind, m, n, k, how = case
    rng = np.random.default_rng(m + n)
    x, weight = drawn(m, k, rng)
    packed = pack([random_matrix(kind, n, k, rng) for _ in range(1 + ("gate" in how))], gated="gate" in how)
    return [prepare(kernels, packed, x, weight, inside, **how) for inside in (False, True, True)]


@pytest.mark.parametrize("case", CROWDED, ids=lambda case: f"{case[0]}-{case[1]}-{case[2]}-{case[3]}")
def test_two_streams_at_once(kernels: TensorKernels, case: Any) -> None:
    """Issue 6: grids as large as the device, of which each has got a part of it; nobody waits for ever."""
    from numba import cuda

    apart, *pair = crowd(kernels, case)
    apart.launch(0)
    cuda.synchronize()
    streams = [cuda.stream() for _ in pair]
    for _ in range(150):
        for made, stream in zip(pair, streams, strict=True):
            made.launch(int(stream.handle))
    cuda.synchronize()
    for made in pair:
        same(apart.read(), made.read())


@pytest.mark.parametrize("launches", [1, 3])
@pytest.mark.parametrize("left", [1, 5, 40])
@pytest.mark.parametrize("case", CROWDED, ids=lambda case: f"{case[0]}-{case[1]}-{case[2]}-{case[3]}")
def test_where_a_part_of_the_grid_has_room(kernels: TensorKernels, case: Any, left: int, launches: int) -> None:
    """Issue 6: another kernel holds all multiprocessors but a few, until the products have ended.

    The stream is asked again and again: cuStreamSynchronize right behind the launch waits for the other kernel too.
    """
    from cuda.bindings import driver
    from numba import cuda

    if case[4].get("tile", {}).get("cluster", 1) > 1 and left < 40:
        pytest.skip("a cluster takes neighbours, which the few that are left may not be")
    apart, made, _ = crowd(kernels, case)
    for one in (apart, made):  # a kernel's first launch loads it, for which CUDA may wait for those that run
        one.launch(0)
    let_go = cuda.to_device(np.zeros(1, np.uint32))
    shelf = KernelShelf((9, 0), "wgmma")
    kernel = shelf.kernel(
        Source("holds its multiprocessor", holding, 32), [("let_go", "u64"), ("most", "u64")], 200 << 10
    )
    cuda.synchronize()
    holder, stream, third = (cuda.stream() for _ in range(3))

    def busy(of: Any) -> bool:
        (state,) = driver.cuStreamQuery(int(of.handle))
        return state == driver.CUresult.CUDA_ERROR_NOT_READY

    kernel.bind(kernels.gemms.multiprocessors - left, address(let_go), 2_000_000_000)(int(holder.handle))
    time.sleep(0.002)
    begun = time.perf_counter()
    before = busy(holder)
    for _ in range(launches):
        made.launch(int(stream.handle))
    while busy(stream):
        pass
    after, took = busy(holder), time.perf_counter() - begun
    let_go.copy_to_device(np.ones(1, np.uint32), stream=third)
    cuda.synchronize()
    shelf.close()
    assert before, "the multiprocessors were not held when the products began"
    assert after, f"the multiprocessors were free before the products ended, {took:.3f} s after they began"
    same(apart.read(), made.read())


def holding() -> tuple[Any, Any]:
    """The kernel that lasts until a number is not zero, or for so many nanoseconds at most; and its signature."""
    from numba import types

    from frink_numba.kernels.instructions import load_acquire
    from frink_numba.kernels.ptx import instruction

    clock = instruction("mov.u64 $0, %globaltimer;", "u64")

    def hold(let_go, most):  # type: ignore[no-untyped-def]
        end = clock() + most
        while load_acquire(let_go) == 0 and clock() < end:
            pass

    return hold, types.void(types.uint64, types.uint64)


def test_zeros_and_what_is_no_number(kernels: TensorKernels) -> None:
    """They stay in their rows, as behind the norm's own launch."""
    rng = np.random.default_rng(2)
    x, weight = drawn(80, 576, rng)
    x[3], x[7, 5], x[11, 9] = 0, np.nan, np.inf
    matrix = random_matrix("Q8_0", 200, 576, rng)
    apart, inside = both_ways(kernels, pack([matrix]), x, weight)
    for one, other in zip(apart, inside, strict=True):
        assert np.array_equal(np.isfinite(one), np.isfinite(other))
        assert np.array_equal(one[np.isfinite(one)], other[np.isfinite(other)])
    assert not inside[0][3].any()
    assert np.isfinite(np.delete(inside[0], [7, 11], axis=0)).all()
    assert not np.isfinite(inside[0][[7, 11]]).any()
