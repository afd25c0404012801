"""Fixtures and skips that the whole suite shares. Nothing here downloads: `make test` fetches the model first."""

from __future__ import annotations

import importlib.util
import os
import signal
from pathlib import Path

import pytest

from frink_numba import settings
from frink_numba.driver import query_driver
from frink_numba.errors import ModelNotFoundError
from frink_numba.host.fetch import resolve
from frink_numba.registry import known_backends

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers side by side, each with a BLAS thread per core, wait for one another: five times slower on 2 cores.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

_ORACLE_PACKAGES = ("torch", "transformers")


# A runner in the background may ignore interrupts, and so would every program that the tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _plugins_are_known() -> None:
    """Installed plugins are read once per process, on first use: not within a test that gives its registry back."""
    known_backends()


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real SmolLM2-135M-Instruct file, mapped read-only by whoever opens it."""
    try:
        return resolve("smollm2-135m")
    except ModelNotFoundError as error:
        if settings.parse_flag(os.environ.get("CI") or "0"):
            pytest.fail(f"CI must have the model: {error}")
        pytest.skip(str(error))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with the reason, what this machine cannot run."""
    no_gpu = query_driver().problem
    lacking = [name for name in _ORACLE_PACKAGES if importlib.util.find_spec(name) is None]
    for item in items:
        if no_gpu and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=no_gpu))
        if lacking and item.get_closest_marker("oracle"):
            item.add_marker(pytest.mark.skip(reason=f'needs {", ".join(lacking)}: pip install "frink-numba[oracle]"'))
