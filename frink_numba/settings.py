"""The one place that reads the environment: every variable, how it is parsed, and what it means.

A value that cannot be read is an error, never a guess. The README's table is rendered from `SETTINGS`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frink_numba.errors import SettingError


def _text(value: str) -> str:
    return value.strip()


def parse_flag(value: str) -> bool:
    """1/true/yes/on or 0/false/no/off, any case; ValueError else."""
    word = value.strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise ValueError("expected 1, true, yes, on, 0, false, no or off")


_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_bytes(value: str) -> int:
    """Bytes: a number with an optional unit K, M, G or T (powers of 1024, "iB" or "B" may follow): "512M", "1.5GiB"."""
    word = value.strip().lower()
    digits = word.rstrip("abcdefghijklmnopqrstuvwxyz ")
    unit = word[len(digits) :].strip().removesuffix("ib").removesuffix("b")
    if unit not in _UNITS:
        raise ValueError("expected a number of bytes such as 2G or 512M")
    try:
        size = float(digits) * _UNITS[unit]
    except ValueError:
        raise ValueError("expected a number of bytes such as 2G or 512M") from None
    if not 0 <= size < 2**63:
        raise ValueError("expected a size from 0 to 8 EiB")
    return int(size)


def _folder(value: str) -> Path:
    if not value.strip():
        raise ValueError("expected a folder")
    try:
        return Path(value).expanduser()
    except RuntimeError as error:  # ~ of a user that does not exist
        raise ValueError(f"expected a folder: {error}") from None


def _tier(value: str) -> str:
    word = value.strip().lower()
    if word not in ("auto", "simt", "mma", "wgmma"):
        raise ValueError("expected auto, simt, mma or wgmma")
    return word


def _threads(value: str) -> int:
    # OMP_NUM_THREADS may list one number for each level of nested parallelism: the first is the outermost.
    count = value.split(",")[0].strip()
    if not count.isdecimal() or not int(count):
        raise ValueError("expected a number of threads from 1 up")
    return int(count)


def _default_cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "frink_numba"


@dataclass(frozen=True, slots=True)
class Setting:
    """One environment variable. `default` is used when it is unset or empty; a callable is called then."""

    name: str
    parse: Callable[[str], Any]
    default: Any
    shown_default: str
    meaning: str


SETTINGS: dict[str, Setting] = {
    s.name: s
    for s in (
        Setting(
            "FRINK_BACKEND",
            _text,
            "auto",
            "`auto`",
            "Backends in order: `auto`, `host`, `cuda`, `cuda:N`, a registered name, or a comma list. A list without "
            "`host` forbids the fallback to it.",
        ),
        Setting(
            "FRINK_CACHE_DIR",
            _folder,
            _default_cache_dir,
            "`~/.cache/frink_numba`",
            "Folder of fetched models and compiled kernels; by default in `XDG_CACHE_HOME` where that is set.",
        ),
        Setting(
            "FRINK_HOST_WEIGHTS",
            parse_bytes,
            None,
            "half of the memory",
            "Byte budget for weights kept as float32 by the host backend; least recently used go first.",
        ),
        Setting(
            "FRINK_CUDA_MEMORY",
            parse_bytes,
            None,
            "nine tenths of the free memory",
            "Byte budget for weights and scratch on each device; layers that do not fit run on the host.",
        ),
        Setting("FRINK_CUDA_TIER", _tier, "auto", "`auto`", "Kernel tier: `auto`, `simt`, `mma` or `wgmma`."),
        Setting(
            "FRINK_INVARIANT",
            parse_flag,
            False,
            "`0`",
            "Results do not depend, to the bit, on how a text is cut into chunks or on what runs beside it; slower.",
        ),
        Setting(
            "OPENBLAS_NUM_THREADS",
            _threads,
            None,
            "all processors",
            "OpenBLAS's own: threads of NumPy's matrix products. Products from quantized bytes take as many.",
        ),
        Setting(
            "OMP_NUM_THREADS", _threads, None, "all processors", "OpenMP's own: counts where the former is not set."
        ),
        Setting(
            "FRINK_NVTX",
            parse_flag,
            False,
            "`0`",
            "Ranges for NVIDIA's profilers: the launches of the tensor-core tiers one by one, each named by layer and "
            "operation (extra `profile`). Read when a device is first used.",
        ),
        Setting("FRINK_DEBUG", parse_flag, False, "`0`", "The command line shows tracebacks."),
        Setting(
            "NUMBA_ENABLE_CUDASIM",
            parse_flag,
            False,
            "`0`",
            "Numba's own: `cuda` runs in Numba's CUDA simulator, on the CPU and very slowly; for tests.",
        ),
    )
}


def raw(name: str) -> str:
    """The text of one variable as it stands, "" where it is not set: for who asks often whether it has changed."""
    return os.environ.get(name, "")


def get(name: str) -> Any:
    """The value of one variable, parsed anew at each call; SettingError names the variable and what it takes."""
    setting, text = SETTINGS[name], raw(name)
    if not text.strip():
        try:
            return setting.default() if callable(setting.default) else setting.default
        except RuntimeError as error:  # no home folder
            raise SettingError(f"{name} is not set, and its default cannot be found: {error}") from None
    try:
        return setting.parse(text)
    except ValueError as error:
        raise SettingError(f"{name}={text!r}: {error}") from None


def markdown_table() -> str:
    """The README's table of environment variables."""
    lines = ["| variable | default | meaning |", "| --- | --- | --- |"]
    lines += [f"| `{s.name}` | {s.shown_default} | {s.meaning} |" for s in SETTINGS.values()]
    return "\n".join(lines)
