"""The tensor-core products on a GPU against float64 (design section 5): shapes, kinds, epilogues, range."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import numpy as np
import pytest

from frink_numba.kernels.gemm import Gemms
from frink_numba.kernels.gemm_epilogue import GATES
from frink_numba.kernels.gemm_pack import pack
from tests.kernels.gate_case import check_activation, exact_operands, true_activation
from tests.kernels.gemm_device import dequantized, relative_error, run_product, worst_row_error
from tests.kernels.packed_weights import random_matrix

pytestmark = pytest.mark.gpu

LIMIT = 2e-3  # tensor-core kernels, whole result
EXPECTED = 6e-4  # f16 operands and nothing else: a kernel that loses a step or a scale is far above

BLOCK_32 = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "F16", "BF16", "F32")
BLOCK_256 = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")


@pytest.fixture(scope="module", params=["wgmma", "mma"])
def gemms(request: pytest.FixtureRequest) -> Iterator[Gemms]:
    from numba import cuda

    device = cuda.get_current_device()
    capability = tuple(device.compute_capability)
    if capability < (8, 0) or (request.param == "wgmma" and capability != (9, 0)):
        pytest.skip(f"{request.param} does not run on compute capability {capability}")
    made = Gemms(request.param, capability, device.MULTIPROCESSOR_COUNT)
    yield made
    made.close()


def check(
    gemms: Gemms,
    kind: str,
    m: int,
    n: int,
    k: int,
    tokens: int | None = None,
    cluster: int | None = None,
    groups: int | None = None,
) -> None:
    rng = np.random.default_rng(zlib.crc32(f"{kind} {m} {n} {k}".encode()))
    matrix = random_matrix(kind, n, k, rng)
    x = rng.standard_normal((m, k)).astype(np.float32)
    ran = run_product(gemms, pack([matrix]), x, tokens=tokens, cluster=cluster, groups=groups, runs=2)
    reference = x.astype(np.float64) @ dequantized([matrix]).T
    assert relative_error(ran.out[0], reference) < EXPECTED < LIMIT
    assert worst_row_error(ran.out[0], reference) < LIMIT
    assert np.array_equal(ran.out[0], ran.out[1]), "two runs differ"


@pytest.mark.parametrize(("tokens", "cluster"), [(16, 1), (256, 2)])
@pytest.mark.parametrize("kind", [*BLOCK_32, *BLOCK_256])
def test_every_kind_against_float64(gemms: Gemms, kind: str, tokens: int, cluster: int) -> None:
    """Issue 4, kinds; odd M, N beyond a tile, K of one and of several super-blocks, split and whole tiles."""
    check(gemms, kind, tokens + 5, 328, 1792 if kind in BLOCK_256 else 1760, tokens, cluster)
    check(gemms, kind, 3, 64, 256, tokens, cluster)


@pytest.mark.parametrize(
    ("kind", "groups", "tokens", "cluster"),
    [("Q4_K", 1, 32, 1), ("Q4_K", 1, 128, 1), ("Q4_K", 1, 16, 1), ("Q4_K", 2, 64, 2), ("Q4_K", 2, 104, 1),
     ("Q4_K", 2, 128, 1), ("Q4_K", 2, 176, 1), ("Q4_K", 2, 256, 1), ("Q4_K", 3, 64, 1), ("Q4_K", 3, 128, 1),
     ("F16", 1, 96, 1), ("F16", 2, 104, 1), ("F16", 2, 256, 1), ("F16", 3, 128, 1), ("F16", 3, 64, 2)],
)  # fmt: skip
def test_every_tile_against_float64(gemms: Gemms, kind: str, groups: int, tokens: int, cluster: int) -> None:
    """The range of tiles, with whole tiles, odd slabs, more tiles than multiprocessors, and parts of tiles."""
    if gemms.tier == "mma" and (tokens not in (64, 128) or groups != 2):
        pytest.skip("a tile of the wgmma tier")
    check(gemms, kind, 2 * tokens + 3, 64 * 5, 768, tokens, cluster, groups)
    check(gemms, kind, tokens - 1, 64 * 2 * 132 - 30, 256, tokens, cluster, groups)
    check(gemms, kind, tokens + 1, 64 * 7, 3072, tokens, cluster, groups)


@pytest.mark.parametrize("k", [32, 64, 96, 160, 256, 352, 576, 1536, 14336])
def test_widths_of_plain_blocks(gemms: Gemms, k: int) -> None:
    """K a multiple of 32: half steps, tails of one to three steps, long rows."""
    check(gemms, "Q4_0", 77, 130, k, 256, 2)


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(1, 1, 256), (2, 7, 512), (7, 65, 256), (16, 4096, 4096), (33, 300, 2048), (64, 640, 768), (100, 1000, 1024),
     (129, 129, 512), (257, 448, 5120), (512, 3072, 1024), (515, 2048, 8192), (1030, 1600, 768)],
)  # fmt: skip
def test_shapes_as_planned(gemms: Gemms, m: int, n: int, k: int) -> None:
    """The plan's own tiles and splits."""
    check(gemms, "Q4_K", m, n, k)


def test_long_split_has_several_parts(gemms: Gemms) -> None:
    """One tile cut over many blocks: its owner adds all the parts, in order."""
    check(gemms, "Q4_K", 20, 128, 14336)
    check(gemms, "Q4_0", 300, 250, 14336, 256)


@pytest.mark.parametrize("tokens", [16, 256])
def test_bias_and_residual(gemms: Gemms, tokens: int) -> None:
    """y = x W^T + bias, and hidden += x W^T, with three matrices in one launch (Q, K, V)."""
    rng = np.random.default_rng(3)
    matrices = [random_matrix("Q4_K", rows, 768, rng) for rows in (160, 40, 40)]
    x = rng.standard_normal((37, 768)).astype(np.float32)
    product = x.astype(np.float64) @ dequantized(matrices).T
    bias = rng.standard_normal(240).astype(np.float32)
    ran = run_product(gemms, pack(matrices), x, bias=bias, tokens=tokens, spare_columns=24)
    assert relative_error(ran.out[0], product + bias) < EXPECTED
    hidden = rng.standard_normal((37, 240)).astype(np.float32)
    ran = run_product(gemms, pack(matrices), x, add_to=hidden, tokens=tokens, runs=2)
    assert relative_error(ran.out[0], product + hidden) < EXPECTED
    assert np.array_equal(ran.out[0], ran.out[1])


@pytest.mark.parametrize("tokens", [16, 256])
@pytest.mark.parametrize("gate", GATES[1:])
def test_each_activation_is_its_own(gemms: Gemms, gate: str, tokens: int) -> None:
    """R4: exact GELU is not its tanh form, which the tolerance of f16 operands would not tell from it."""
    x, matrices, (gate_side, up_side) = exact_operands(40, 96)
    ran = run_product(gemms, pack(matrices, gated=True), x, gate=gate, tokens=tokens)
    check_activation(gate, ran.out[0], gate_side, up_side)


@pytest.mark.parametrize(
    ("gate", "half", "tokens"),
    [
        ("swiglu", True, 16),
        ("swiglu", True, 256),
        ("swiglu", False, 256),
        ("geglu", True, 256),
        ("geglu_erf", True, 256),
    ],
)
def test_gated(gemms: Gemms, gate: str, half: bool, tokens: int) -> None:
    """act(gate x) * (up x) in the epilogue; an f16 result comes with powers of two and never overflows."""
    rng = np.random.default_rng(5)
    matrices = [random_matrix("Q4_K", 328, 1280, rng) for _ in range(2)]
    x = rng.standard_normal((150, 1280)).astype(np.float32) * np.exp2(rng.integers(-12, 12, (150, 1))).astype(
        np.float32
    )
    ran = run_product(gemms, pack(matrices, gated=True), x, gate=gate, half=half, tokens=tokens)
    g, u = (x.astype(np.float64) @ dequantized([m]).T for m in matrices)
    with np.errstate(over="ignore"):
        reference = true_activation(gate, g) * u
    assert worst_row_error(ran.out[0], reference) < LIMIT
    if half:
        assert ran.scale is not None
        assert (np.frexp(ran.scale)[0] == 0.5).all()


@pytest.mark.parametrize("tokens", [16, 256])
def test_half_result(gemms: Gemms, tokens: int) -> None:
    """A plain f16 result with bias and its powers of two."""
    rng = np.random.default_rng(6)
    matrix = random_matrix("Q4_K", 200, 512, rng)
    x = rng.standard_normal((70, 512)).astype(np.float32)
    bias = rng.standard_normal(200).astype(np.float32)
    ran = run_product(gemms, pack([matrix]), x, half=True, bias=bias, tokens=tokens, spare_columns=8)
    assert worst_row_error(ran.out[0], x.astype(np.float64) @ dequantized([matrix]).T + bias) < LIMIT


@pytest.mark.parametrize("size", [1e6, 1e-6, 3e30])
def test_activations_beyond_f16(gemms: Gemms, size: float) -> None:
    """Design section 5: f16 operands never overflow; rows of very different sizes side by side."""
    rng = np.random.default_rng(7)
    matrix = random_matrix("Q4_K", 130, 512, rng)
    x = rng.standard_normal((40, 512))
    x[::2] *= size
    ran = run_product(gemms, pack([matrix]), x.astype(np.float32), tokens=256)
    assert worst_row_error(ran.out[0], x.astype(np.float32).astype(np.float64) @ dequantized([matrix]).T) < LIMIT


def test_outlier_channels(gemms: Gemms) -> None:
    """A few channels 10,000 times larger than the others, as trained models have; a row of zeros among them."""
    rng = np.random.default_rng(8)
    matrix = random_matrix("Q6_K", 130, 768, rng)
    x = rng.standard_normal((40, 768)).astype(np.float32)
    x[:, [5, 300, 511]] *= 1e4
    x[11] = 0
    ran = run_product(gemms, pack([matrix]), x, tokens=256)
    reference = x.astype(np.float64) @ dequantized([matrix]).T
    assert not ran.out[0][11].any()
    keep = np.arange(40) != 11
    assert worst_row_error(ran.out[0][keep], reference[keep]) < LIMIT


@pytest.mark.parametrize("scale", [1e-4, 10.0])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q6_K"])
def test_weights_of_any_size(gemms: Gemms, kind: str, scale: float) -> None:
    """Weights whose scales leave the range of the subnormal trick are brought back by a power of two per row."""
    rng = np.random.default_rng(9)
    matrix = random_matrix(kind, 130, 512, rng, scale)
    x = rng.standard_normal((40, 512)).astype(np.float32)
    ran = run_product(gemms, pack([matrix]), x, tokens=256)
    assert relative_error(ran.out[0], x.astype(np.float64) @ dequantized([matrix]).T) < EXPECTED


def test_captured_in_a_graph(gemms: Gemms) -> None:
    """Launches are capturable, and a replay gives the same bits (split tiles included)."""
    from cuda.bindings import driver
    from numba import cuda

    from frink_numba.kernels.gemm import DeviceWeights, HalfRows
    from frink_numba.kernels.launch import check as ok
    from tests.kernels.gemm_device import address

    rng = np.random.default_rng(10)
    packed = pack([random_matrix("Q4_K", 256, 4096, rng)])
    x = cuda.to_device(rng.standard_normal((48, 4096)).astype(np.float32))
    data, row_scale = cuda.to_device(packed.data), cuda.to_device(packed.row_scale)
    weights = DeviceWeights.of(packed, address(data), address(row_scale))
    product = gemms.product(weights, 48, tokens=256 if gemms.tier == "wgmma" else 64)
    assert product.workspace or gemms.tier != "wgmma", "tiles are split"
    half = cuda.device_array((48, 4096), np.float16)
    scale, norm = cuda.device_array(256, np.float32), cuda.device_array(256, np.float32)
    rows = HalfRows(address(half), address(scale), address(norm))
    out = cuda.to_device(np.full((48, 256), np.nan, np.float32))
    maps = cuda.to_device(np.frombuffer(product.maps(rows, address(out)) or bytes(256), np.uint8))
    workspace = cuda.to_device(np.zeros(max(8192, product.workspace), np.uint8))
    convert = gemms.half_rows(address(x), 48, 4096, rows)
    launch = product.bind(weights, rows, address(out), maps=address(maps), workspace=address(workspace))
    stream = ok(driver.cuStreamCreate(1), "stream")
    convert(int(stream))
    launch(int(stream))
    ok(driver.cuStreamSynchronize(stream), "wait")
    first = out.copy_to_host()
    ok(driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED), "capture")
    for _ in range(3):
        convert(int(stream))
        launch(int(stream))
    graph = ok(driver.cuStreamEndCapture(stream), "end of capture")
    runnable = ok(driver.cuGraphInstantiate(graph, 0), "instantiate")
    out.copy_to_device(np.full((48, 256), np.nan, np.float32))
    ok(driver.cuGraphLaunch(runnable, stream), "launch")
    ok(driver.cuStreamSynchronize(stream), "wait")
    assert np.isfinite(first).all()
    assert np.array_equal(out.copy_to_host(), first)
