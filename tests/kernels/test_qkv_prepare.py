"""QK norm, rotation and the stores of Q, K and V (R9, R14, R17): indexing, machine code, and values on a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from frink_numba.errors import ShapeError
from frink_numba.kernels.cubins import Target, compile_kernel
from frink_numba.kernels.fused_attention import Attentions, HeadShape, RopeForm, f16_scale, sequence_table
from frink_numba.kernels.qkv_prepare import NORMS, QkvPrepare, _Head, source
from frink_numba.layer import RopeLayout
from tests.kernels.array_emitter import ArrayEmitter
from tests.kernels.attention_device import Device, Gpu
from tests.kernels.attention_machine import MachineAttentions, MachineDevice
from tests.kernels.compiling import missing_tools

NORM, NEOX = RopeLayout.NORM, RopeLayout.NEOX
VARIANTS = [
    (128, NEOX, 128),
    (128, NORM, 128),
    (64, NEOX, 32),
    (64, NORM, 20),
    (80, NEOX, 80),
    (80, NORM, 32),
    (96, NEOX, 48),
    (256, NEOX, 64),
    (256, NORM, 256),
    (100, NEOX, 50),
    (72, NEOX, 36),
    (66, NORM, 34),
    (2, NEOX, 2),
    (192, None, 0),
    (90, None, 0),
]


@pytest.mark.parametrize(("head_dim", "layout", "rot_dim"), VARIANTS)
def test_every_channel_once_and_the_right_pairs(head_dim: int, layout: RopeLayout | None, rot_dim: int) -> None:
    """Each channel is some lane's, once; what turns together are the layout's pairs, by their own angles (R17)."""
    variant = QkvPrepare(head_dim, "", layout, rot_dim)
    e = ArrayEmitter()
    head = _Head(e, variant, e.array("u32", np.arange(32)))
    channels: list[int] = []
    pairs = {}
    for i in range(variant.per_lane):
        flag = head.inside(i)
        inside = np.ones(32, bool) if flag is None else flag.value.astype(bool)
        unit = []
        for first, run in head.places(i):
            unit += [first.value + k for k in range(run)]
        channels += np.stack(unit)[:, inside].ravel().tolist()
        for k, (a, b) in enumerate(head.pairs()):
            for lane in np.flatnonzero(inside):
                # The unit's angles are read from 2 * unit bytes each: pair number unit / 2 * (the lane's unit) + k.
                pairs[variant.unit // 2 * (lane + 32 * i) + k] = (int(unit[a][lane]), int(unit[b][lane]))
    assert sorted(channels) == list(range(head_dim))
    for i in range(rot_dim // 2):
        assert pairs[i] == ((2 * i, 2 * i + 1) if layout is NORM else (i, i + rot_dim // 2))


@pytest.mark.parametrize(
    ("variant", "arch"),
    [
        (QkvPrepare(128, "head", NEOX, 128, True), "90a"),
        (QkvPrepare(256, "whole", NORM, 128), "80"),
        (QkvPrepare(100, "", NEOX, 50), "120"),
        (QkvPrepare(256, "whole", NEOX, 128, norm_last=True), "86"),
    ],
    ids=lambda v: f"{v.head_dim}-{v.norm_last}" if isinstance(v, QkvPrepare) else v,
)
def test_compiles(variant: QkvPrepare, arch: str) -> None:
    cubin = compile_kernel(source(variant), Target(arch))
    assert cubin.spilled == 0
    assert cubin.registers <= 128


def test_f16_scale() -> None:
    """Powers of two, one for what f16 holds well; never a result of 2**15 or more."""
    assert f16_scale(0) == f16_scale(30000) == 1.0
    for bound in (32768.0, 65504.0, 1e6, 3e30):
        scale = f16_scale(bound)
        assert np.frexp(scale)[0] == 0.5
        assert 2.0**14 <= bound / scale < 2.0**15
    with pytest.raises(ShapeError, match="finite"):
        f16_scale(float("nan"))


@pytest.mark.parametrize("heads", [(4, 3, 64), (0, 0, 64), (2, 1, 0), (2, 1, 7), (2, 1, 258)])
def test_shapes_that_are_refused(heads: tuple[int, int, int]) -> None:
    with pytest.raises(ShapeError):
        HeadShape(*heads)


# ---- values: on a GPU, and on the machine that needs none ----------------------------------------------------------

Place = tuple[Attentions, Device]
on_machine = pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))


def _machine() -> Place:
    device = MachineDevice(1 << 20)
    return MachineAttentions("mma", (8, 0), device), device


@pytest.fixture(scope="module")
def gpu() -> Iterator[Place]:
    from numba import cuda

    device = cuda.get_current_device()
    made = Attentions("mma", tuple(device.compute_capability), device.MULTIPROCESSOR_COUNT)
    yield made, Gpu()
    made.close()


@pytest.fixture(params=[pytest.param("gpu", marks=pytest.mark.gpu), pytest.param("machine", marks=on_machine)])
def place(request: pytest.FixtureRequest) -> Place:
    if request.param == "machine":
        return _machine()
    found: Place = request.getfixturevalue("gpu")
    return found


def _turned(
    x: np.ndarray, angles: np.ndarray, layout: RopeLayout | None, rot_dim: int, size: float = 1.0
) -> np.ndarray:
    if layout is None:
        return x
    x = x.copy()
    c, s = size * np.cos(angles)[:, None], size * np.sin(angles)[:, None]
    first = slice(0, rot_dim, 2) if layout is NORM else slice(0, rot_dim // 2)
    second = slice(1, rot_dim, 2) if layout is NORM else slice(rot_dim // 2, rot_dim)
    a, b = x[..., first].copy(), x[..., second].copy()
    x[..., first], x[..., second] = a * c - b * s, a * s + b * c
    return x


def _normed(x: np.ndarray, weights: np.ndarray, kind: str, eps: float) -> np.ndarray:
    if not kind:
        return x
    axes = (2,) if kind == "head" else (1, 2)
    mean = (x**2).mean(axis=axes, keepdims=True)
    return x / np.sqrt(mean + eps) * weights.reshape((1, -1, x.shape[2]) if kind == "whole" else (1, 1, -1))


class Ran:
    """The kernel's results as arrays, mirrors included, from host arrays; everything poisoned before."""

    def __init__(
        self,
        place: Place,
        shape: HeadShape,
        qkv: np.ndarray,
        sequences: Sequence[tuple[int, int]],
        *,
        rope: RopeForm | None = None,
        norm: str = "",
        norm_last: bool = False,
        tables: tuple[np.ndarray, ...] = (),
        weights: tuple[np.ndarray, ...] = (),
        **scales: float,
    ) -> None:
        attentions, device = place
        m, heads, kv, d, pitch = qkv.shape[0], shape.n_heads, shape.n_kv_heads, shape.head_dim, shape.pitch
        q = device.place(np.full((m + 1, heads, pitch), np.nan, np.float16))
        rows = [device.place(np.full((m + 1, kv, d), np.nan, np.float32)) for _ in range(2)]
        mirrors, records, first = [], [], 0
        for start, count in sequences:
            pair = [device.place(np.full((start + count + 2, kv, pitch), np.nan, np.float16)) for _ in range(2)]
            mirrors.append(pair)
            records.append((first, count, start, *pair))
            first += count
        names = [*(("cos", "sin") if tables else ()), *(("q_norm", "k_norm") if weights else ())]
        optional = {name: device.place(x) for name, x in zip(names, (*tables, *weights), strict=True)}
        bound = attentions.prepare(shape, rope=rope, norm=norm, norm_last=norm_last).bind(
            m,
            device.place(qkv),
            q,
            device.place(np.frombuffer(sequence_table(records), np.uint8)),
            len(records),
            k_rows=rows[0],
            v_rows=rows[1],
            eps=1e-5,
            **optional,  # type: ignore[arg-type]
            **scales,  # type: ignore[arg-type]
        )
        device.launch(bound)
        self.q, self.k, self.v = (device.read(x).astype(np.float64) for x in (q, *rows))
        self.mirrors = [[device.read(x).astype(np.float64) for x in pair] for pair in mirrors]


def _random(m: int, shape: HeadShape, seed: int) -> tuple[np.ndarray, list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    sizes = [shape.n_heads, shape.n_kv_heads, shape.n_kv_heads]
    parts = [rng.standard_normal((m, n, shape.head_dim)).astype(np.float32) for n in sizes]
    return np.concatenate([p.reshape(m, -1) for p in parts], axis=1), parts


@pytest.mark.gpu
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(("head_dim", "layout", "rot_dim"), VARIANTS)
def test_against_float64(gpu: Place, head_dim: int, layout: RopeLayout | None, rot_dim: int, norm: str) -> None:
    _check(gpu, head_dim, layout, rot_dim, norm)


@pytest.mark.gpu
@pytest.mark.parametrize("norm", NORMS[1:])
@pytest.mark.parametrize(("head_dim", "layout", "rot_dim"), VARIANTS[1:12:2])
def test_the_norm_after_the_rotation(gpu: Place, head_dim: int, layout: RopeLayout, rot_dim: int, norm: str) -> None:
    """R14 in the other order: a magnitude other than 1 changes what is normed."""
    _check(gpu, head_dim, layout, rot_dim, norm, norm_last=True)


@on_machine
@pytest.mark.parametrize(
    ("head_dim", "layout", "rot_dim", "norm"),
    [(64, NEOX, 32, "head"), (80, NORM, 32, "whole"), (100, NEOX, 50, "whole"), (90, None, 0, "head")],
)
def test_the_norm_after_the_rotation_without_a_gpu(
    head_dim: int, layout: RopeLayout | None, rot_dim: int, norm: str
) -> None:
    _check(_machine(), head_dim, layout, rot_dim, norm, m=11, sequences=((5, 4), (0, 6)), norm_last=True)


@on_machine
@pytest.mark.parametrize(
    ("head_dim", "layout", "rot_dim", "norm"),
    [(*variant, NORMS[i % 3]) for i, variant in enumerate(VARIANTS) if i % 4 != 3],
)
def test_against_float64_without_a_gpu(head_dim: int, layout: RopeLayout | None, rot_dim: int, norm: str) -> None:
    _check(_machine(), head_dim, layout, rot_dim, norm, m=11, sequences=((5, 4), (0, 6)))


def _check(
    place: Place,
    head_dim: int,
    layout: RopeLayout | None,
    rot_dim: int,
    norm: str,
    m: int = 40,
    sequences: tuple[tuple[int, int], ...] = ((5, 17), (0, 22)),
    norm_last: bool = False,
) -> None:
    """All results of two sequences and a row of none; the rows around them stay untouched."""
    shape = HeadShape(6, 2, head_dim)
    qkv, (q, k, v) = _random(m, shape, head_dim + rot_dim)
    rng = np.random.default_rng(7)
    angles = rng.uniform(0, 100, (m, rot_dim // 2))
    size = 1.7 if norm_last else 1.0  # the magnitude that R17 folds into the tables
    tables = tuple((size * table(angles)).astype(np.float32) for table in (np.cos, np.sin)) if layout else ()
    weights: tuple[np.ndarray, ...] = ()
    if norm:
        counts = (1, 1) if norm == "head" else (6, 2)
        weights = tuple(rng.uniform(0.5, 2, n * head_dim).astype(np.float32) for n in counts)
    rope = RopeForm(layout, rot_dim) if layout else None
    ran = Ran(
        place, shape, qkv, sequences, rope=rope, norm=norm, norm_last=norm_last, tables=tables, weights=weights,
        q_scale=2.0, k_scale=4.0, v_scale=0.5,
    )  # fmt: skip
    true_q, true_k = (x.astype(np.float64) for x in (q, k))
    steps = [lambda x, w: _normed(x, w, norm, 1e-5), lambda x, w: _turned(x, angles, layout, rot_dim, size)]
    for step in reversed(steps) if norm_last else steps:
        true_q, true_k = (step(x, w) for x, w in zip((true_q, true_k), weights or (None, None), strict=True))
    assert np.abs(ran.k[:m] - true_k).max() < 1e-5 * np.abs(true_k).max()
    assert np.array_equal(ran.v[:m], v.astype(np.float64))
    assert np.abs(ran.q[:m, :, :head_dim] * 2 - true_q).max() < 1e-3 * np.abs(true_q).max()
    assert not ran.q[:m, :, head_dim:].any(), "channels that fill up to the pitch are zeros"
    for rest in (ran.q[m:], ran.k[m:], ran.v[m:]):
        assert np.isnan(rest).all()
    first = 0
    for (start, count), (mirror_k, mirror_v) in zip(sequences, ran.mirrors, strict=True):
        rows = slice(first, first + count)
        assert (
            np.abs(mirror_k[start : start + count, :, :head_dim] * 4 - true_k[rows]).max() < 1e-3 * np.abs(true_k).max()
        )
        assert np.abs(mirror_v[start : start + count, :, :head_dim] * 0.5 - v[rows]).max() < 1e-3 * np.abs(v).max()
        assert not mirror_k[start : start + count, :, head_dim:].any()
        for mirror in (mirror_k, mirror_v):
            assert np.isnan(mirror[:start]).all()
            assert np.isnan(mirror[start + count :]).all()
        first += count


def test_rows_of_no_sequence_and_many_sequences(place: Place) -> None:
    """70 sequences of one row, the last rows of the batch belonging to none."""
    shape = HeadShape(2, 2, 64)
    qkv, (_, k, v) = _random(75, shape, 3)
    ran = Ran(place, shape, qkv, [(i % 3, 1) for i in range(70)])
    for i, (mirror_k, mirror_v) in enumerate(ran.mirrors):
        assert np.abs(mirror_k[i % 3] - k[i]).max() < 1e-2
        assert np.abs(mirror_v[i % 3] - v[i]).max() < 1e-2
        assert np.isnan(mirror_k[i % 3 + 1 :]).all()
    assert np.isfinite(ran.q[:75]).all()
    assert np.array_equal(ran.k[:75], k.astype(np.float64))


@pytest.mark.parametrize("bad", [np.nan, -np.inf, 7e4])
def test_what_f16_cannot_hold(place: Place, bad: float) -> None:
    """Marked in K, zero in V, true in the host's rows, and no other head or row is touched."""
    shape = HeadShape(4, 2, 64)
    qkv, _ = _random(6, shape, 4)
    rows = qkv.reshape(6, 8, 64)
    rows[1, 2, 5] = rows[2, 4, 63] = rows[3, 7, 0] = bad  # a head of q, of K, of V
    ran = Ran(place, shape, qkv, [(2, 6)])
    mirror_k, mirror_v = ran.mirrors[0]
    assert np.isnan(ran.q[1, 2]).all()
    assert np.isnan(mirror_k[2 + 2, 0]).all()
    assert np.isnan(mirror_k[2 + 3, 1]).all()
    assert not mirror_v[2 + 2, 0].any()
    assert not mirror_v[2 + 3, 1].any()
    assert np.isnan(ran.q[:6]).sum() == 64
    assert np.isnan(mirror_k[2:8]).sum() == 2 * 64
    assert np.isfinite(mirror_v[2:8]).all()
    assert np.array_equal(ran.k[:6].reshape(6, -1), rows[:, 4:6].reshape(6, -1), equal_nan=True)
    assert np.array_equal(ran.v[:6].reshape(6, -1), rows[:, 6:].reshape(6, -1), equal_nan=True)
