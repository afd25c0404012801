"""The kernels over rows that surround the tensor-core products: norm, gate, rotation, mirror.

Their values on a GPU, and on the machine that needs none, from the same tests with fewer rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from frink_numba.kernels import gated_half, half_rows, mirror_rows, norm_add, norm_half, rope_rows
from frink_numba.kernels.cubins import Source, Target, compile_kernel
from frink_numba.kernels.gemm_epilogue import GATES
from tests.kernels.attention_device import Device, Gpu
from tests.kernels.attention_machine import MachineDevice
from tests.kernels.compiling import missing_tools
from tests.kernels.gate_case import true_activation
from tests.kernels.row_machine import MachineRows

SOURCES: dict[str, Callable[[bool], Source]] = {
    "half_rows": half_rows.source,
    "norm_half": lambda overlap: norm_half.source(512 if overlap else 64, overlap),
    "norm_add": lambda overlap: norm_add.source(512 if overlap else 64, overlap),
    "gated_half": lambda overlap: gated_half.source("swiglu", 512 if overlap else 64, overlap),
    "gated_half geglu_erf": lambda overlap: gated_half.source("geglu_erf", 512 if overlap else 64, overlap),
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


class Rig(NamedTuple):
    """Kernels, and the device that they run on."""

    kernels: Any
    device: Device


@pytest.fixture(scope="module")
def gpu():
    """On the device's best tensor-core tier."""
    from frink_numba.cuda.tensor.kernels import TensorKernels
    from tests.differential.gpu import device_of

    device = device_of("wgmma")
    with device.working():
        yield Rig(TensorKernels("wgmma", device.info.compute_capability, device.info.multiprocessors), Gpu())


def machine() -> Rig:
    device = MachineDevice()
    return Rig(MachineRows(device), device)


no_tools = pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))


@pytest.fixture(params=[pytest.param("gpu", marks=pytest.mark.gpu), pytest.param("machine", marks=no_tools)])
def rig(request) -> Rig:
    return machine() if request.param == "machine" else request.getfixturevalue("gpu")


def shape_on(rig: Rig, m: int, cols: int) -> tuple[int, int]:
    """The shape of a case: the machine takes its time, so that it gets three rows at most."""
    return (min(m, 3) if isinstance(rig.device, MachineDevice) else m), cols


def operand(rig: Rig, m: int, cols: int):
    """Poisoned operands: (what a launch takes, the three addresses)."""
    from frink_numba.kernels.gemm import HalfRows

    half = rig.device.place(np.full((m, cols), np.nan, np.float16))
    scale, norm = (rig.device.place(np.full(m, np.nan, np.float32)) for _ in range(2))
    return HalfRows(half, scale, norm)


def check_operand(rig: Rig, out, want: np.ndarray) -> None:
    half, scale, norm = (rig.device.read(address) for address in (out.half, out.scale, out.norm))
    got = half.astype(np.float64) * scale[:, None]
    assert np.isfinite(got).all()
    error = np.linalg.norm(got - want, axis=1) / np.maximum(np.linalg.norm(want, axis=1), 1e-30)
    assert error.max() < 5e-4
    assert (norm >= np.linalg.norm(want, axis=1)).all()
    assert (norm <= 1.01 * np.linalg.norm(want, axis=1)).all()
    assert (np.log2(scale) % 1 == 0).all()
    largest = np.abs(half.astype(np.float64)).max(axis=1)
    assert ((largest >= 2.0**14) & (largest <= 2.0**15)).all()


SHAPES = [(1, 32), (5, 576), (130, 3072), (3, 14336)]


@pytest.mark.parametrize(("m", "cols"), SHAPES)
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_a_norm_makes_operands(rig: Rig, m: int, cols: int, size: float):
    """Section 5: rows from 1e-6 to 1e6, with an outlier channel, come out as the norm says."""
    m, cols = shape_on(rig, m, cols)
    rng = np.random.default_rng(m + cols)
    x = (size * rng.normal(size=(m, cols))).astype(np.float32)
    x[:, 3] *= 300
    weight = rng.normal(size=cols).astype(np.float32)
    out = operand(rig, m, cols)
    places = rig.device.place(x), rig.device.place(weight)
    rig.device.launch(rig.kernels.norm_half(m, cols, *places, 1e-5, out))
    wide = x.astype(np.float64)
    check_operand(rig, out, wide / np.sqrt((wide * wide).mean(axis=1, keepdims=True) + 1e-5) * weight)


@pytest.mark.parametrize(("m", "cols"), SHAPES)
@pytest.mark.parametrize("size", [1e-12, 1.0, 1e15])
def test_rows_become_operands(rig: Rig, m: int, cols: int, size: float):
    """Section 5: the stream itself, where no norm stands before a product; rows of very different sizes at once."""
    m, cols = shape_on(rig, m, cols)
    rng = np.random.default_rng(m + cols)
    x = (size * rng.normal(size=(m, cols))).astype(np.float32)
    x[:, 3] *= 300
    x[0] *= 1e-6
    out = operand(rig, m, cols)
    rig.device.launch(rig.kernels.gemms.half_rows(rig.device.place(x), m, cols, out))
    check_operand(rig, out, x.astype(np.float64))


@pytest.mark.parametrize("gate_name", [name for name in GATES if name])
@pytest.mark.parametrize("size", [0.7, 3e3])
@pytest.mark.parametrize(("m", "cols"), [(1, 32), (5, 576), (130, 8192)])
def test_a_gate_makes_operands(rig: Rig, m: int, cols: int, gate_name: str, size: float):
    """R4: each activation, where it bends and far out."""
    m, cols = shape_on(rig, m, cols)
    rng = np.random.default_rng(cols)
    gate, up = (size * rng.normal(size=(2, m, cols))).astype(np.float32)
    out = operand(rig, m, cols)
    places = rig.device.place(gate), rig.device.place(up)
    rig.device.launch(rig.kernels.gated_half(gate_name, m, cols, *places, out))
    check_operand(rig, out, true_activation(gate_name, gate.astype(np.float64)) * up)


def test_exact_gelu_is_as_exact_as_float32(rig: Rig):
    """R4: within 4e-7 of |g|, in the tail of negative gates too; the tanh form is up to 5e-4 away.

    One gate a row, the others zero: the row's norm shows the value in float32, which the f16 operand would round.
    """
    gates = np.concatenate([np.linspace(-6, 6, 62), [-30.0, 30.0]]).astype(np.float32)
    rows = np.zeros((gates.size, 4), np.float32)
    rows[:, 2] = gates
    out = operand(rig, *rows.shape)
    places = rig.device.place(rows), rig.device.place(np.ones_like(rows))
    rig.device.launch(rig.kernels.gated_half("geglu_erf", *rows.shape, *places, out))
    wide = gates.astype(np.float64)
    want, half = true_activation("geglu_erf", wide), rig.device.read(out.half).astype(np.float64)
    got = np.sign(half[:, 2]) * rig.device.read(out.norm) / 1.002
    bound = 4e-7 * np.abs(wide) + 3e-7 * np.abs(want)
    assert (np.abs(got - want) <= bound).all()
    assert (np.abs(true_activation("geglu", wide) - want) > 100 * bound).any()


@pytest.mark.parametrize(("m", "cols"), [(1, 32), (5, 576), (130, 4096)])
def test_a_post_norm_is_added(rig: Rig, m: int, cols: int):
    """R5."""
    m, cols = shape_on(rig, m, cols)
    rng = np.random.default_rng(cols)
    hidden, y = rng.normal(size=(2, m, cols)).astype(np.float32)
    weight = rng.normal(size=cols).astype(np.float32)
    held, other, device_weight = (rig.device.place(array) for array in (hidden, y, weight))
    rig.device.launch(rig.kernels.norm_add(m, cols, held, other, device_weight, 1e-6))
    wide = y.astype(np.float64)
    want = hidden + wide / np.sqrt((wide * wide).mean(axis=1, keepdims=True) + 1e-6) * weight
    np.testing.assert_allclose(rig.device.read(held), want, rtol=0, atol=2e-6 * np.abs(want).max())


@pytest.mark.gpu
def test_the_rotation_of_far_positions(gpu: Rig):
    """R17: the angle is float64, so that position 100,000 is as exact as position 1."""
    positions = np.array([0, 1, 3000, 100_000, 131_071], np.int32)
    frequencies = 10000.0 ** -(np.arange(0, 70, 2) / 70)
    cos, sin = (gpu.device.place(np.full((5, 35), np.nan, np.float32)) for _ in range(2))
    held, table = gpu.device.place(positions), gpu.device.place(frequencies)
    gpu.device.launch(gpu.kernels.rope_rows(5, 35, held, table, 1.25, cos, sin))
    angles = positions[:, None].astype(np.float64) * frequencies
    np.testing.assert_allclose(gpu.device.read(cos), 1.25 * np.cos(angles), atol=3e-7)
    np.testing.assert_allclose(gpu.device.read(sin), 1.25 * np.sin(angles), atol=3e-7)


def test_rows_of_a_cache_go_into_a_mirror(rig: Rig):
    """R11: scaled, at the pitch of the heads; a head that f16 cannot hold is zeros in V, not-a-number in K."""
    rng = np.random.default_rng(3)
    k, v = rng.normal(size=(2, 7, 3, 20)).astype(np.float32)
    v[4, 1, 5] = 1e6
    k[2, 0, 19] = -131040  # just beyond what rounds to a finite f16, after the division
    v[5, 2, 0] = 262070  # just below
    sources = rig.device.place(k), rig.device.place(v)
    targets = tuple(rig.device.place(np.zeros((7, 3, 24), np.float16)) for _ in "kv")
    rig.device.launch(rig.kernels.mirror_rows(7, 3, 20, 24, sources, targets, (2.0, 4.0)))
    got_k, got_v = (rig.device.read(mirror) for mirror in targets)
    fine = np.ones((7, 3), bool)
    fine[4, 1] = fine[2, 0] = False
    np.testing.assert_array_equal(got_k[fine, :20], (k[fine] / 2).astype(np.float16))
    np.testing.assert_array_equal(got_v[fine, :20], (v[fine] / 4).astype(np.float16))
    assert got_v[5, 2, 0] == 65504
    assert np.isnan(got_k[~fine, :20]).all()
    assert not got_v[~fine].any()
    assert not got_k[:, :, 20:].any()
