"""The kernels that groups of sequences add: gathered rows, scattered bytes, likelihoods. On a GPU and without one."""

from __future__ import annotations

import numpy as np
import pytest

from frink_numba.kernels import gather_rows, log_likelihood, scatter_bytes
from frink_numba.kernels.cubins import Target, compile_kernel
from tests.kernels.attention_machine import MachineDevice
from tests.kernels.compiling import missing_tools
from tests.kernels.test_row_kernels import Rig, gpu, no_tools, rig  # noqa: F401

SOURCES = {"gather_rows": gather_rows, "scatter_bytes": scatter_bytes, "log_likelihood": log_likelihood}


@pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))
@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("arch", ["80", "90a", "120"])
def test_it_compiles_without_spills(name: str, arch: str):
    cubin = compile_kernel(SOURCES[name].source(arch == "90a"), Target(arch))
    assert cubin.spilled == 0
    assert cubin.registers <= 64
    assert not cubin.remarks


@pytest.mark.parametrize("cols", [4, 576, 4096])
def test_rows_are_gathered_in_any_order(rig: Rig, cols: int):  # noqa: F811
    """Some twice, some never; not-a-numbers too, bit by bit."""
    rng = np.random.default_rng(cols)
    x = rng.normal(size=(9, cols)).astype(np.float32)
    x[4, 1] = np.nan
    rows = np.array([4, 0, 8, 8, 3], np.int32)
    out = rig.device.place(np.full((len(rows), cols), -1, np.float32))
    places = rig.device.place(x), rig.device.place(rows)
    rig.device.launch(rig.kernels.gather_rows(len(rows), cols, *places, out))
    np.testing.assert_array_equal(rig.device.read(out), x[rows])


@pytest.mark.parametrize("blocks", [1, 3])
def test_bytes_go_where_the_table_says(rig: Rig, blocks: int):  # noqa: F811
    """Copies of many lengths, at addresses of every alignment that float32 has; nothing beside them is touched."""
    rng = np.random.default_rng(blocks)
    sizes = [4, 16, 12, 512, 516, 2048, 0, 8, 1540, 64] + [48] * (4 if blocks == 1 else 20)
    source = rng.integers(1, 255, 1 << 14).astype(np.uint8)
    target = np.zeros(1 << 14, np.uint8)
    from_at, to_at = rig.device.place(source), rig.device.place(target)
    table, want, at = np.zeros(len(sizes), scatter_bytes.COPY), target.copy(), 0
    for record, (number, nbytes) in zip(table, enumerate(sizes), strict=True):
        start = 4 * int(rng.integers(0, 1000)) if number % 2 else 16 * int(rng.integers(0, 250))
        at += 4 if number % 3 == 0 else -at % 16 + 16
        record["source"], record["target"], record["nbytes"] = from_at + start, to_at + at, nbytes
        want[at : at + nbytes] = source[start : start + nbytes]
        at += nbytes
    assert at <= target.size
    rig.device.launch(rig.kernels.scatter_bytes(blocks, rig.device.place(table), len(sizes)))
    np.testing.assert_array_equal(rig.device.read(to_at), want)


@pytest.mark.parametrize("count", [1, 33, 1000, 49152])
@pytest.mark.parametrize("size", [0.01, 5.0, 3000.0])
def test_how_likely_tokens_are(rig: Rig, count: int, size: float):  # noqa: F811
    """Against float64; a token outside gives 0, a row with not-a-number nothing but that."""
    m = 3 if isinstance(rig.device, MachineDevice) else 40
    count = min(count, 2000) if isinstance(rig.device, MachineDevice) else count
    rng = np.random.default_rng(count)
    logits = (size * rng.normal(size=(m, count))).astype(np.float32)
    tokens = rng.integers(0, count, m).astype(np.int32)
    tokens[1] = count
    logits[2, count // 2] = np.nan
    out = rig.device.place(np.full(m, np.nan, np.float32))
    places = rig.device.place(logits), rig.device.place(tokens)
    rig.device.launch(rig.kernels.log_likelihood(m, count, *places, out))
    got = rig.device.read(out)
    wide = logits.astype(np.float64)
    top = wide.max(axis=1, keepdims=True)
    chosen = wide[np.arange(m), np.minimum(tokens, count - 1)]
    want = chosen - top[:, 0] - np.log(np.exp(wide - top).sum(axis=1))
    assert got[1] == 0
    assert np.isnan(got[2])
    rest = [0, *range(3, m)]
    np.testing.assert_allclose(got[rest], want[rest], rtol=2e-6, atol=4e-6)
