"""Products straight from quantized bytes: every kind against float64 (R24), odd shapes, threads, forks, no numba."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from frink_numba.errors import ShapeError
from frink_numba.host import thin_products
from frink_numba.host.decoder import Decoder
from frink_numba.host.dequantize import dequantize
from frink_numba.host.load import load
from frink_numba.host.team import Team
from frink_numba.host.thin_products import THIN_KINDS, ThinSet, thin_set
from frink_numba.host.weights import WeightStore
from frink_numba.quant import KINDS, QuantMatrix
from tests.random_blocks import random_matrix
from tests.reference import relative_error

ROOT = Path(__file__).parents[2]

pytest.importorskip("numba", reason='needs numba: pip install "frink-numba[fast]"')

ODD_SETS = [(1, 150), (131,), (64, 7, 130), (3, 3, 257)]  # rows of the matrices, each of 512 columns


def stack(kind: str, rows: Sequence[int], cols: int, seed: int, **options: bool) -> tuple[QuantMatrix, ...]:
    rng = np.random.default_rng(seed)
    return tuple(random_matrix(kind, n, cols, rng, **options) for n in rows)


def ready(matrices: tuple[QuantMatrix, ...]) -> ThinSet:
    made = thin_set(matrices)
    assert made is not None
    return made


def float64(matrices: tuple[QuantMatrix, ...]) -> np.ndarray:
    return np.concatenate([dequantize(matrix) for matrix in matrices]).astype(np.float64)


def poisoned(rows: int, n: int) -> np.ndarray:
    return np.full((rows, n), np.nan, np.float32)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", sorted(THIN_KINDS))
def test_every_kind_matches_float64(kind: str, n: int) -> None:
    """R24: under 1e-6, a tenth of what the host may take, at every number of columns and odd numbers of rows."""
    for seed, rows in enumerate(ODD_SETS):
        matrices = stack(kind, rows, 512, seed)
        x = np.random.default_rng(seed).standard_normal((512, n), dtype=np.float32)
        out = poisoned(sum(rows), n)
        ready(matrices).product(x, out)
        assert relative_error(out, float64(matrices) @ x) < 1e-6


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("kind", sorted(THIN_KINDS))
def test_weights_are_dequantized_bit_for_bit(kind: str, n: int) -> None:
    """A product with a unit vector is one weight: zero tolerance, any finite scale (subnormals, the largest)."""
    (matrix,) = stack(kind, (256,), 256, 7, extreme=True)
    want = dequantize(matrix)
    thin = ready((matrix,))
    unit = np.eye(256, dtype=np.float32)
    with np.errstate(all="ignore"):
        for k in range(0, 256, n):
            out = poisoned(256, n)
            thin.product(np.ascontiguousarray(unit[:, k : k + n]), out)
            np.testing.assert_array_equal(out, want[:, k : k + n])


@pytest.mark.parametrize("n", [1, 3])
def test_a_set_of_several_kinds(n: int) -> None:
    rng = np.random.default_rng(0)
    kinds = [("Q4_K", 96), ("Q4_K", 33), ("Q6_K", 65), ("F16", 70), ("Q4_K", 1)]
    matrices = tuple(random_matrix(kind, rows, 768, rng) for kind, rows in kinds)
    x = rng.standard_normal((768, n), dtype=np.float32)
    out = poisoned(265, n)
    ready(matrices).product(x, out)
    assert relative_error(out, float64(matrices) @ x) < 1e-6


@pytest.mark.parametrize(
    ("kind", "rows", "cols"),
    [("F32", 512, 512), ("Q2_K", 512, 512), ("IQ4_NL", 512, 512), ("F16", 4096, 48), ("Q4_1", 64, 512)],
)
def test_what_numpy_serves_instead(kind: str, rows: int, cols: int) -> None:
    """Other kinds, rows that are no whole number of runs, and sets too small to be worth it; the answer stays right."""
    matrices = stack(kind, (rows,), cols, 1)
    assert thin_set(matrices) is None
    x = np.random.default_rng(2).standard_normal((cols, 1), dtype=np.float32)
    out = WeightStore(1 << 30).product(x, *matrices, out=poisoned(rows, 1))
    assert relative_error(out, float64(matrices) @ x) < 1e-6


def test_matrices_of_several_widths_are_refused() -> None:
    matrices = (*stack("Q8_0", (512,), 512, 1), *stack("Q8_0", (512,), 256, 1))
    with pytest.raises(ShapeError, match="different widths cannot be stacked"):
        WeightStore(1 << 30).product(np.zeros((512, 1), np.float32), *matrices, out=poisoned(1024, 1))


def test_bytes_at_any_address() -> None:
    """A tensor lies in the mapped file at any multiple of the file's alignment, which may be 1."""
    rng = np.random.default_rng(3)
    for kind in ("Q4_1", "Q8_0", "Q6_K", "F16"):
        plain = random_matrix(kind, 256, 512, rng)
        memory = np.empty(plain.nbytes + 16, np.uint8)
        for shift in (1, 2, 7):
            data = memory[shift : shift + plain.nbytes].reshape(plain.data.shape)
            data[...] = plain.data
            moved = QuantMatrix(KINDS[kind], data, 256, 512)
            x = rng.standard_normal((512, 1), dtype=np.float32)
            answers = [ready((m,)).product(x, poisoned(256, 1)).tobytes() for m in (plain, moved)]
            assert answers[0] == answers[1]


def test_infinities_and_nans_of_the_input_show() -> None:
    matrices = stack("Q4_0", (200,), 512, 4)
    for value in (np.inf, -np.inf, np.nan):
        x = np.ones((512, 1), np.float32)
        x[17] = value
        out = ready(matrices).product(x, poisoned(200, 1))
        assert not np.isfinite(out[float64(matrices)[:, 17] != 0]).any()


def test_a_read_only_input() -> None:
    matrices = stack("Q8_0", (300,), 256, 5)
    x = np.ones((256, 1), np.float32)
    x.flags.writeable = False
    out = ready(matrices).product(x, poisoned(300, 1))
    assert relative_error(out, float64(matrices).sum(1, keepdims=True)) < 1e-6


def test_columns_that_do_not_lie_together() -> None:
    """A column of a larger array, and a result that is one."""
    matrices = stack("Q8_0", (300,), 256, 5)
    wide = np.random.default_rng(1).standard_normal((256, 7), dtype=np.float32)
    results = np.zeros((300, 3), np.float32)
    for n in (1, 2):
        ready(matrices).product(wide[:, 2 : 2 + n], results[:, 1 : 1 + n])
        assert relative_error(results[:, 1 : 1 + n], float64(matrices) @ wide[:, 2 : 2 + n]) < 1e-6
    assert not results[:, 0].any()


def test_what_does_not_fit_is_refused_before_it_is_read() -> None:
    """R20: compiled code checks no bounds."""
    thin = ready(stack("Q8_0", (300,), 256, 5))

    def zeros(*shape: int, dtype: type = np.float32) -> np.ndarray:
        return np.zeros(shape, dtype)

    for x, out in (
        (zeros(255, 1), zeros(300, 1)),
        (zeros(256, 1), zeros(299, 1)),
        (zeros(256, 1), zeros(300, 2)),
        (zeros(256, 5), zeros(300, 5)),
        (zeros(256, 0), zeros(300, 0)),
        (zeros(256), zeros(300)),
        (zeros(256, 1, dtype=np.float64), zeros(300, 1)),
        (zeros(256, 1), zeros(300, 1, dtype=np.float64)),
    ):
        with pytest.raises(ShapeError, match=r"weights do not take|products of float32"):
            thin.product(x, out)


def test_threads_never_change_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit: alone, with three helpers, and from six threads at once, of which five work alone."""
    matrices = stack("Q4_1", (900, 500, 700), 512, 6)
    xs = [np.random.default_rng(i).standard_normal((512, 1), dtype=np.float32) for i in range(6)]
    lonely = Team(1)
    monkeypatch.setattr(thin_products, "team", lambda: lonely)
    thin = ready(matrices)
    alone = [thin.product(x, poisoned(2100, 1)) for x in xs]
    team = Team(4)
    monkeypatch.setattr(thin_products, "team", lambda: team)
    for _ in range(50):
        for x, want in zip(xs, alone, strict=True):
            np.testing.assert_array_equal(thin.product(x, poisoned(2100, 1)), want)
    wrong: list[int] = []

    def many(i: int) -> None:
        for _ in range(50):
            if thin.product(xs[i], poisoned(2100, 1)).tobytes() != alone[i].tobytes():
                wrong.append(i)

    threads = [threading.Thread(target=many, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_store_multiplies_few_columns_without_float32_weights() -> None:
    """The float32 copies come with the fifth column, and both ways agree."""
    matrices = stack("Q5_K", (130, 70), 512, 8)
    store = WeightStore(1 << 30)
    x = np.random.default_rng(9).standard_normal((512, 5), dtype=np.float32)
    few = [store.product(np.ascontiguousarray(x[:, :n]), *matrices, out=poisoned(200, n)) for n in (1, 4)]
    rows = store.matmul(np.ascontiguousarray(x[:, :3].T), *matrices)
    one = store.matmul(np.ascontiguousarray(x[:, :1].T), *matrices)
    assert store.used_bytes == 0
    many = store.product(x, *matrices, out=poisoned(200, 5))
    assert store.used_bytes == 4 * 200 * 512
    for got in (*few, rows.T, one.T):
        assert relative_error(got, many[:, : got.shape[1]]) < 1e-6


def test_decoding_the_real_model_agrees_with_its_prefill(smollm2_path: Path) -> None:
    """R24: the logits of each step from quantized bytes are those of float32 weights, and no such copy is made."""
    with load(smollm2_path) as model:
        decoder = Decoder(model, "host")
        tokens = model.tokenizer.encode("The capital of France is Paris, and the sky is blue because")
        cache = decoder.new_cache()
        steps = [decoder.decode(token, cache).logits for token in tokens]
        assert model.weights.used_bytes == 0
        whole = decoder.prefill(tokens, decoder.new_cache(), logits="all").logits
        assert model.weights.used_bytes > 4e8
        for step, want in zip(steps, whole, strict=True):
            assert relative_error(step, want.astype(np.float64)) < 1e-5
            assert step.argmax() == want.argmax()


def python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


_PRODUCT = """
import os, sys, numpy as np
from frink_numba.host.weights import WeightStore
from tests.random_blocks import random_matrix
matrix = random_matrix("Q4_0", 2048, 512, np.random.default_rng(0))
store = WeightStore(1 << 30)
def product():
    return store.product(np.ones((512, 1), np.float32), matrix, out=np.empty((2048, 1), np.float32)).tobytes()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_has_helpers_of_its_own() -> None:
    """The parent's helpers do not exist in the child, which must neither wait for them nor lose its speed for good."""
    code = (
        _PRODUCT
        + """
import threading
import frink_numba.host.team as team
team.usable_processors = lambda: 3
want = product()
parents = threading.active_count()
child = os.fork()
if not child:
    right = product() == want and product() == want
    os._exit(0 if right and threading.active_count() == parents == 3 else 1)
assert os.waitpid(child, 0)[1] == 0
assert product() == want
"""
    )
    python(code, OPENBLAS_NUM_THREADS="3")


def test_without_numba_numpy_serves_and_it_is_said() -> None:
    code = (
        "import logging, sys\nsys.modules['llvmlite'] = None\nlogging.basicConfig(level='INFO', stream=sys.stdout)"
        + _PRODUCT
        + "product(); print(store.used_bytes == 4 * 2048 * 512)"
    )
    said = python(code)
    assert said.count('numba is not installed: pip install "frink-numba[fast]"') == 1
    assert said.endswith("True\n")


def test_a_compiler_that_fails_leaves_the_work_to_numpy() -> None:
    code = (
        "import logging, sys\nlogging.basicConfig(level='INFO', stream=sys.stdout)\n"
        "import llvmlite.binding as llvm\n"
        "def broken(*a, **k): raise RuntimeError('no such\\ncode')\nllvm.create_mcjit_compiler = broken\n"
        + _PRODUCT
        + "product(); product(); print(store.used_bytes == 4 * 2048 * 512)"
    )
    said = python(code)
    assert said.count("decoding runs in NumPy: numba failed to compile (RuntimeError: no such code)") == 1
    assert said.endswith("True\n")
