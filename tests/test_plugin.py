"""A backend from an installed package (B2): longest runs, reasons said once, failures isolated, caches untouched.

`make test` installs `tests/plugin_backend`.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

from frink_numba import log, registry
from frink_numba.host.decoder import Decoder
from frink_numba.host.load import load
from frink_numba.host.model import Model

ROOT = Path(__file__).parent.parent
PROMPT = [1, 5, 9, 13, 2, 7]


def _installed() -> bool:
    return any(point.name == "loopback" for point in metadata.entry_points(group=registry.ENTRY_POINT_GROUP))


if os.environ.get("CI") == "true" and not _installed():
    raise RuntimeError("the plugin package is not installed; run: pip install ./tests/plugin_backend")
pytestmark = pytest.mark.skipif(not _installed(), reason="run: pip install ./tests/plugin_backend")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_said", set())
    for name in ("FRINK_BACKEND", "FRINK_LOOPBACK", "FRINK_LOOPBACK_FAIL", "FRINK_LOOPBACK_EXIT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def model(smollm2_path: Path):
    with load(smollm2_path) as model:
        yield model


@pytest.fixture(scope="module")
def host_answer(model: Model) -> np.ndarray:
    decoder = Decoder(model, backends="host")
    return decoder.prefill(PROMPT, decoder.new_cache(), logits="all").logits


def test_the_installed_plugins_are_known_without_being_imported():
    code = (
        "import sys; from frink_numba.registry import known_backends; names = known_backends();"
        "assert {'loopback', 'broken', 'cuda', 'host'} <= set(names), names;"
        "assert not any(m.startswith('frink_loopback') for m in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("1", "ImportError: this plugin is broken on purpose"),
        ("exit", "SystemExit: this plugin exits on purpose"),
    ],
)
def test_a_plugin_that_cannot_be_imported_is_reported_once(model, host_answer, monkeypatch, caplog, how, said):
    """B2."""
    monkeypatch.setenv("FRINK_LOOPBACK_BROKEN", how)
    monkeypatch.delitem(sys.modules, "frink_loopback.broken", raising=False)
    with caplog.at_level(logging.WARNING, "frink_numba"):
        for _ in range(2):
            decoder = Decoder(model, backends="auto")
            logits = decoder.prefill(PROMPT, decoder.new_cache(), logits="all").logits
            np.testing.assert_array_equal(logits, host_answer)
    broken = [r.getMessage() for r in caplog.records if "broken" in r.getMessage()]
    assert broken == [f"backend plugin 'broken' is skipped: {said}"]


def test_the_plan_and_the_runs_are_the_longest(model, host_answer, monkeypatch):
    """R6, B4."""
    monkeypatch.setenv("FRINK_LOOPBACK", "2-9,12,20-29")
    decoder = Decoder(model, backends="loopback,host")
    plan = decoder.plan(batch=len(PROMPT))
    assert [(r.first, r.last, r.backend) for r in plan.rows] == [
        (0, 1, "host"),
        (2, 9, "loopback"),
        (10, 11, "host"),
        (12, 12, "loopback"),
        (13, 19, "host"),
        (20, 29, "loopback"),
    ]
    logits = decoder.prefill(PROMPT, decoder.new_cache(), logits="all").logits
    np.testing.assert_array_equal(logits, host_answer)


def test_a_decline_is_said_once(model, monkeypatch, caplog):
    """R23."""
    monkeypatch.setenv("FRINK_LOOPBACK", "3-5")
    with caplog.at_level(logging.INFO, "frink_numba"):
        for _ in range(3):
            decoder = Decoder(model, backends="loopback,host")
            decoder.prefill(PROMPT, decoder.new_cache())
    assert [r.getMessage() for r in caplog.records] == [
        "backend loopback declines: FRINK_LOOPBACK does not name the layer"
    ]


POINTS = [
    "can_serve",
    "can_serve_answer",
    "mutation",
    "start",
    "layer:0",
    "layer:1",
    "layer:7",
    "none",
    "hidden",
    "rows",
    "missing",
]


@pytest.mark.parametrize("exits", [False, True], ids=["raises", "exits"])
@pytest.mark.parametrize("point", POINTS)
def test_a_failure_at_any_point_leaves_the_host_to_answer(model, host_answer, monkeypatch, caplog, point, exits):
    """R21: the same answer as the host alone, one line, and a cache that goes on as if nothing had happened."""
    if exits:
        monkeypatch.setenv("FRINK_LOOPBACK_EXIT", "1")
    monkeypatch.setenv("FRINK_LOOPBACK", "1-10,15-20")
    monkeypatch.setenv("FRINK_LOOPBACK_FAIL", point)
    decoder = Decoder(model, backends="loopback,host")
    cache = decoder.new_cache()
    with caplog.at_level(logging.INFO, "frink_numba"):
        logits = decoder.prefill(PROMPT, cache, logits="all").logits
        again = decoder.prefill(PROMPT, decoder.new_cache(), logits="all").logits
    np.testing.assert_array_equal(logits, host_answer)
    np.testing.assert_array_equal(again, host_answer)
    assert cache.positions == len(PROMPT)
    assert {(layer.positions, layer.rows) for layer in cache} == {(len(PROMPT), len(PROMPT))}
    lines = [r.getMessage() for r in caplog.records]
    assert len(lines) == len(set(lines))
    assert point == "none" or any("loopback" in line for line in lines)


@pytest.mark.parametrize("point", ["start", "layer:3", "none", "hidden", "rows", "missing"])
def test_without_host_a_failure_is_an_error_and_the_cache_is_untouched(model, host_answer, monkeypatch, point):
    """R10, R21, B3: nothing is half written, and a retry after the fault equals a clean run."""
    monkeypatch.setenv("FRINK_LOOPBACK", "all")
    decoder = Decoder(model, backends="loopback")
    cache = decoder.new_cache()
    decoder.prefill(PROMPT[:4], cache)
    before = [tuple(rows.copy() for rows in layer.prefix()) for layer in cache]
    monkeypatch.setenv("FRINK_LOOPBACK_FAIL", point)
    with pytest.raises(Exception, match="no backend serves layer 0"):
        decoder.prefill(PROMPT[4:], cache, logits="all")
    assert cache.positions == 4
    for layer, (k, v) in zip(cache, before, strict=True):
        np.testing.assert_array_equal(layer.prefix()[0], k)
        np.testing.assert_array_equal(layer.prefix()[1], v)
    monkeypatch.delenv("FRINK_LOOPBACK_FAIL")
    clean = Decoder(model, backends="host")
    other = clean.new_cache()
    clean.prefill(PROMPT[:4], other)
    np.testing.assert_array_equal(
        decoder.prefill(PROMPT[4:], cache, logits="all").logits, clean.prefill(PROMPT[4:], other, logits="all").logits
    )


@pytest.mark.parametrize("point", ["factory", "factory_answer"])
def test_a_factory_that_misbehaves_is_skipped(model, host_answer, monkeypatch, caplog, point):
    monkeypatch.setenv("FRINK_LOOPBACK", "all")
    monkeypatch.setenv("FRINK_LOOPBACK_FAIL", point)
    decoder = Decoder(model, backends="loopback,host")
    np.testing.assert_array_equal(decoder.prefill(PROMPT, decoder.new_cache(), logits="all").logits, host_answer)
    assert "backend loopback is unavailable" in caplog.text


def test_a_factory_that_exits_is_skipped(model, host_answer, monkeypatch, caplog):
    monkeypatch.setenv("FRINK_LOOPBACK", "all")
    monkeypatch.setenv("FRINK_LOOPBACK_FAIL", "factory")
    monkeypatch.setenv("FRINK_LOOPBACK_EXIT", "1")
    decoder = Decoder(model, backends="loopback,host")
    np.testing.assert_array_equal(decoder.prefill(PROMPT, decoder.new_cache(), logits="all").logits, host_answer)
    assert "backend loopback is unavailable: SystemExit: told to fail at factory" in caplog.text


def test_a_plugin_that_exits_in_close_does_not_end_the_process(model, monkeypatch, caplog):
    monkeypatch.setenv("FRINK_LOOPBACK", "all")
    decoder = Decoder(model, backends="loopback,host")
    monkeypatch.setenv("FRINK_LOOPBACK_FAIL", "close")
    monkeypatch.setenv("FRINK_LOOPBACK_EXIT", "1")
    decoder.close()
    assert "backend loopback failed to close: SystemExit: told to fail at close" in caplog.text


def test_a_failure_to_close_is_reported_and_the_rest_is_closed(model, monkeypatch, caplog):
    monkeypatch.setenv("FRINK_LOOPBACK", "all")
    decoder = Decoder(model, backends="loopback,host")
    monkeypatch.setenv("FRINK_LOOPBACK_FAIL", "close")
    decoder.close()
    assert "backend loopback failed to close: RuntimeError: told to fail at close" in caplog.text


SUITES = ("test_decoder*.py", "test_generate.py", "test_tiny_models.py", "test_score.py")


@pytest.mark.parametrize("pattern", SUITES)
def test_the_suites_of_the_decoder_run_through_the_plugin(pattern: str):
    """The loopback: every test of these with FRINK_BACKEND=loopback and no host to fall back to."""
    suite = sorted(str(path) for path in (ROOT / "tests" / "host").glob(pattern))
    assert suite
    environment = dict(os.environ, FRINK_BACKEND="loopback", FRINK_LOOPBACK="all")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *suite]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed
    assert int(passed[1]) >= 10


def test_the_guide_works_as_written(smollm2_path: Path, tmp_path: Path):
    """docs/backends.md: its Python block is a complete program."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "backends.md").read_text(), re.S)
    script = tmp_path / "guide.py"
    script.write_text(blocks[0].replace('"smollm2-135m"', repr(str(smollm2_path))))
    done = subprocess.run([sys.executable, str(script)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "layers 0: every-other" in done.stdout
    assert "Paris" in done.stdout
