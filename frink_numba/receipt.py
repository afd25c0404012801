"""Receipts: one JSON file per benchmark run, the only source of a published figure.

    {"benchmark": "prefill", "date": "...", "commit": "...", "command": "...", "machine": "NVIDIA H200",
     "versions": {"driver": "...", "numba-cuda": "...", ...}, "rows": [{"case": ..., "metric": "tok/s", "value": ...,
     "p20": ..., "p80": ..., "runs": ..., "backend": ..., "tier": ..., "baseline": ..., "baseline_value": ...,
     "ratio": ...}, ...]}

A row's baseline was measured in the same run on the same machine; a ratio above 1 means that we are better.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from frink_numba.errors import SettingError

# Rates are better when higher, durations and sizes when lower.
_LOWER_IS_BETTER = frozenset({"s", "ms", "us", "MB", "GB"})

_PACKAGES = ("frink-numba", "numpy", "numba", "numba-cuda", "cuda-core", "cuda-bindings", "tokenizers")


@dataclass(frozen=True, slots=True)
class Row:
    """One figure: the median, 20th and 80th percentile of `runs` runs, in the unit `metric`.

    `tier` only where the backend has tiers. The baseline's two fields come together; `ratio` follows from them.
    """

    case: str
    metric: str
    value: float
    p20: float
    p80: float
    runs: int
    backend: str
    tier: str | None = None
    baseline: str | None = None
    baseline_value: float | None = None

    @classmethod
    def from_samples(cls, case: str, metric: str, samples: Sequence[float], backend: str, **more: Any) -> Row:
        """The row of measured `samples`, at least one; percentiles are interpolated linearly."""
        ordered = sorted(samples)
        p20, median, p80 = (_quantile(ordered, q) for q in (0.2, 0.5, 0.8))
        return cls(case, metric, median, p20, p80, len(ordered), backend, **more)

    @property
    def ratio(self) -> float | None:
        if self.baseline_value is None:
            return None
        if self.metric in _LOWER_IS_BETTER:
            return self.baseline_value / self.value
        return self.value / self.baseline_value

    def as_dict(self) -> dict[str, Any]:
        row = {**asdict(self), "ratio": self.ratio}
        return {key: _rounded(value) for key, value in row.items() if value is not None}


def receipt(
    benchmark: str, command: str, rows: Sequence[Row], *, machine: str, driver: str | None = None
) -> dict[str, Any]:
    """The document of one run; `driver` is the GPU driver's version where a GPU was measured."""
    versions = package_versions()
    if driver is not None:
        versions = {"driver": driver, **versions}
    return {
        "benchmark": benchmark,
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": commit(),
        "command": command,
        "machine": machine,
        "versions": versions,
        "rows": [row.as_dict() for row in rows],
    }


def write_receipt(path: Path, document: dict[str, Any]) -> None:
    """Write `document` to `path`, whole or not at all; makes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n", "utf-8")
    os.replace(temporary, path)


def check_place(path: Path) -> None:
    """SettingError unless `write_receipt` can put a file there: to be asked before the minutes of a measurement."""
    if path.is_dir():
        raise SettingError(f"{path} is a folder: name a file in it for the receipt")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise SettingError(f"no receipt can be written to {path}: {error.strerror or error}") from None


def package_versions() -> dict[str, str]:
    """Versions of Python and of the installed packages that decide a figure."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def cpu_name() -> str:
    """The processor's name and the number of cores that this process may use."""
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name}, {cores} cores"


def commit() -> str | None:
    """The checkout's commit, with "-dirty" when package files differ from it; None outside a checkout."""
    root = Path(__file__).resolve().parent.parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=20, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if not (root / ".git").exists():
        return None
    head = git("rev-parse", "--short=12", "HEAD")
    changed = git("status", "--porcelain", "--", "frink_numba", "benchmarks/*.py")
    return f"{head}-dirty" if head and changed else head


def _quantile(ordered: Sequence[float], q: float) -> float:
    position = q * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def _rounded(value: Any) -> Any:
    """Five significant digits: what a timer of this kind can mean."""
    return float(f"{value:.5g}") if isinstance(value, float) else value
