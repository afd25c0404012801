"""Every test starts with no line said and no setting of the machine's."""

from __future__ import annotations

import pytest

from frink_numba import log
from frink_numba.cuda.tensor import cuts


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_said", set())
    for name in ("FRINK_BACKEND", "FRINK_CUDA_MEMORY", "FRINK_CUDA_TIER"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many segments as a run can have, however few rows there are."""
    monkeypatch.setattr(cuts, "_SEGMENT_BYTES", 1)
