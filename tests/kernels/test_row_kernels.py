"""The kernels over rows that surround the tensor-core products: norm, gate, rotation, mirror."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from frink_numba.kernels import gated_half, half_rows, mirror_rows, norm_add, norm_half, rope_rows
from frink_numba.kernels.cubins import Source, Target, compile_kernel
from tests.kernels.compiling import missing_tools

SOURCES: dict[str, Callable[[bool], Source]] = {
    "half_rows": half_rows.source,
    "norm_half": lambda overlap: norm_half.source(512 if overlap else 64, overlap),
    "norm_add": lambda overlap: norm_add.source(512 if overlap else 64, overlap),
    "gated_half": lambda overlap: gated_half.source("swiglu", 512 if overlap else 64, overlap),
    "rope_rows": rope_rows.source,
    "mirror_rows": mirror_rows.source,
}


@pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))
@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("arch", ["80", "90a", "120"])
def test_it_compiles_without_spills(name: str, arch: str):
    cubin = compile_kernel(SOURCES[name](arch == "90a"), Target(arch))
    assert cubin.spilled == 0
    assert cubin.registers <= 96
    assert not cubin.remarks


@pytest.fixture(scope="module")
def kernels():
    """On the device's best tensor-core tier."""
    from frink_numba.cuda.tensor.kernels import TensorKernels
    from tests.differential.gpu import device_of

    device = device_of("wgmma")
    with device.working():
        yield TensorKernels("wgmma", device.info.compute_capability, device.info.multiprocessors)


def on_device(array: np.ndarray):
    from numba import cuda

    return cuda.to_device(np.ascontiguousarray(array))


def at(array) -> int:
    return int(array.__cuda_array_interface__["data"][0])


def operand(m: int, cols: int):
    """Poisoned operands: (what a launch takes, the three arrays)."""
    from frink_numba.kernels.gemm import HalfRows

    half = on_device(np.full((m, cols), np.nan, np.float16))
    scale, norm = (on_device(np.full(m, np.nan, np.float32)) for _ in range(2))
    return HalfRows(at(half), at(scale), at(norm)), (half, scale, norm)


def check_operand(arrays, want: np.ndarray) -> None:
    half, scale, norm = (array.copy_to_host() for array in arrays)
    got = half.astype(np.float64) * scale[:, None]
    assert np.isfinite(got).all()
    error = np.linalg.norm(got - want, axis=1) / np.maximum(np.linalg.norm(want, axis=1), 1e-30)
    assert error.max() < 5e-4
    assert (norm >= np.linalg.norm(want, axis=1)).all()
    assert (np.log2(scale) % 1 == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "cols"), [(1, 32), (5, 576), (130, 3072), (3, 14336)])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_a_norm_makes_operands(kernels, m: int, cols: int, size: float):
    """Section 5: rows from 1e-6 to 1e6, with an outlier channel, come out as the norm says."""
    rng = np.random.default_rng(m + cols)
    x = (size * rng.normal(size=(m, cols))).astype(np.float32)
    x[:, 3] *= 300
    weight = rng.normal(size=cols).astype(np.float32)
    held, device_weight = on_device(x), on_device(weight)
    out, arrays = operand(m, cols)
    kernels.norm_half(m, cols, at(held), at(device_weight), 1e-5, out)(0)
    wide = x.astype(np.float64)
    check_operand(arrays, wide / np.sqrt((wide * wide).mean(axis=1, keepdims=True) + 1e-5) * weight)


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "cols"), [(1, 32), (5, 576), (130, 8192)])
def test_a_gate_makes_operands(kernels, m: int, cols: int):
    rng = np.random.default_rng(cols)
    gate, up = (3e3 * rng.normal(size=(2, m, cols))).astype(np.float32)
    held = [on_device(part) for part in (gate, up)]
    out, arrays = operand(m, cols)
    kernels.gated_half("swiglu", m, cols, at(held[0]), at(held[1]), out)(0)
    wide = gate.astype(np.float64)
    with np.errstate(over="ignore"):
        check_operand(arrays, wide / (1 + np.exp(-wide)) * up)


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "cols"), [(1, 32), (5, 576), (130, 4096)])
def test_a_post_norm_is_added(kernels, m: int, cols: int):
    """R5."""
    rng = np.random.default_rng(cols)
    hidden, y = rng.normal(size=(2, m, cols)).astype(np.float32)
    weight = rng.normal(size=cols).astype(np.float32)
    held, other, device_weight = (on_device(array) for array in (hidden, y, weight))
    kernels.norm_add(m, cols, at(held), at(other), at(device_weight), 1e-6)(0)
    wide = y.astype(np.float64)
    want = hidden + wide / np.sqrt((wide * wide).mean(axis=1, keepdims=True) + 1e-6) * weight
    np.testing.assert_allclose(held.copy_to_host(), want, rtol=0, atol=2e-6 * np.abs(want).max())


@pytest.mark.gpu
def test_the_rotation_of_far_positions(kernels):
    """R17: the angle is float64, so that position 100,000 is as exact as position 1."""
    positions = np.array([0, 1, 3000, 100_000, 131_071], np.int32)
    frequencies = 10000.0 ** -(np.arange(0, 70, 2) / 70)
    cos, sin = (on_device(np.full((5, 35), np.nan, np.float32)) for _ in range(2))
    held, table = on_device(positions), on_device(frequencies)
    kernels.rope_rows(5, 35, at(held), at(table), 1.25, at(cos), at(sin))(0)
    angles = positions[:, None].astype(np.float64) * frequencies
    np.testing.assert_allclose(cos.copy_to_host(), 1.25 * np.cos(angles), atol=3e-7)
    np.testing.assert_allclose(sin.copy_to_host(), 1.25 * np.sin(angles), atol=3e-7)


@pytest.mark.gpu
def test_rows_of_a_cache_go_into_a_mirror(kernels):
    """R11: scaled, at the pitch of the heads; a V row that f16 cannot hold becomes zeros, its K row not-a-number."""
    rng = np.random.default_rng(3)
    k, v = rng.normal(size=(2, 7, 3, 20)).astype(np.float32)
    v[4, 1, 5] = 1e6
    held = [on_device(array) for array in (k, v)]
    mirrors = [on_device(np.zeros((7, 3, 24), np.float16)) for _ in "kv"]
    places = (at(held[0]), at(held[1])), (at(mirrors[0]), at(mirrors[1]))
    kernels.mirror_rows(7, 3, 20, 24, *places, (2.0, 4.0))(0)
    got_k, got_v = (mirror.copy_to_host() for mirror in mirrors)
    fine = np.arange(7) != 4
    np.testing.assert_array_equal(got_k[fine, :, :20], (k[fine] / 2).astype(np.float16))
    np.testing.assert_array_equal(got_v[fine, :, :20], (v[fine] / 4).astype(np.float16))
    assert np.isnan(got_k[4, :, :20]).all()
    assert not got_v[4].any()
    assert not got_k[:, :, 20:].any()
