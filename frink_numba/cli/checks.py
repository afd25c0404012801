"""What `doctor` looks at: each check says what was found and, where something is wrong, the command that mends it.

Nothing here imports numba or makes a CUDA context; the driver is asked through ctypes.
"""

from __future__ import annotations

import logging
import os
import platform
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module

from frink_numba import registry, settings
from frink_numba.backend import Backend
from frink_numba.cli.requirements import installed, requirements
from frink_numba.driver import Device, Driver, query_driver
from frink_numba.errors import FrinkError
from frink_numba.layer import Layer

OK = "ok"
ABSENT = "-"  # optional, and not here
WARN = "warn"  # the host engine runs, something else does not
BROKEN = "broken"  # the host engine needs it


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at. `remedy` is a command or an action, empty where there is nothing to mend."""

    name: str
    status: str
    found: str
    remedy: str = ""

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


Section = tuple[str, list[Check]]


def examine() -> list[Section]:
    """Every check, in sections; takes well under a second, and no check stops another."""
    driver = query_driver()
    return [
        ("machine", _guarded(machine)),
        ("packages", _guarded(packages, driver)),
        ("gpu", _guarded(gpu, driver)),
        ("backends", _guarded(backends)),
        ("settings", _guarded(environment)),
        ("cache", _guarded(cache)),
    ]


def _guarded(look: Callable[..., list[Check]], *arguments: Driver) -> list[Check]:
    """What `look` found, or that it failed: a machine on which nothing is as expected is what doctors are for."""
    try:
        return look(*arguments)
    except Exception as error:
        return [Check(look.__name__, WARN, f"could not be examined: {registry.describe(error)}")]


def machine() -> list[Check]:
    version = platform.python_version()
    supported = (3, 11) <= sys.version_info[:2] <= (3, 13)
    python = Check(
        "Python",
        OK if supported else WARN,
        f"{version} ({sys.executable})",
        "" if supported else "tested with 3.11 to 3.13: make a virtual environment with one of them",
    )
    memory = _memory_bytes()
    return [
        python,
        Check("system", OK, f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"),
        Check("memory", OK if memory else ABSENT, f"{memory / 2**30:.1f} GiB" if memory else "unknown"),
    ]


def packages(driver: Driver) -> list[Check]:
    """Needed packages first, then those of the extras that a person chooses between."""
    found = []
    own = installed("frink-numba")
    if own is None:
        found.append(Check("frink-numba", WARN, "runs from a folder, not installed", "pip install -e ."))
    else:
        found.append(Check("frink-numba", OK, own))
    wanted = requirements()
    for need in (w for w in wanted if w.extra is None):
        version = installed(need.name)
        remedy = f'pip install "{need.name}{need.versions}"'
        if version is None:
            found.append(Check(need.name, BROKEN, f"missing, needs {need.versions}", remedy))
        elif not need.accepts(version):
            found.append(Check(need.name, BROKEN, f"{version}, needs {need.versions}", remedy))
        elif problem := _import_problem(need.name):
            remedy = f"pip install --force-reinstall {need.name}"
            found.append(Check(need.name, BROKEN, f"{version}, but its import fails: {problem}", remedy))
        else:
            found.append(Check(need.name, OK, version))
    extra = _cuda_extra(driver)
    # numba is in two extras: the first that names it is enough.
    optional = [w for w in wanted if w.extra in ("fast", extra, "hf")]
    for need in reversed({w.name: w for w in reversed(optional)}.values()):
        version = installed(need.name)
        remedy = f'pip install "frink-numba[{need.extra}]"'
        if version is None:
            found.append(Check(need.name, ABSENT, f"missing (extra {need.extra})"))
        elif not need.accepts(version):
            found.append(Check(need.name, WARN, f"{version}, extra {need.extra} needs {need.versions}", remedy))
        else:
            found.append(Check(need.name, OK, version))
    found.append(_blas())
    return found


def gpu(driver: Driver) -> list[Check]:
    if driver.problem and driver.version is None and driver.cuda_version is None:
        return [Check("driver", ABSENT, driver.problem)]
    cuda = "{}.{}".format(*driver.cuda_version) if driver.cuda_version else "unknown"
    found = [Check("driver", WARN if driver.problem else OK, f"{driver.version or 'unknown version'}, CUDA {cuda}")]
    if driver.problem:
        found.append(Check("devices", WARN, driver.problem, "nvidia-smi tells more; reinstall or restart the driver"))
    found += [_device(device) for device in driver.devices]
    extra = _cuda_extra(driver)
    missing = [w.name for w in requirements() if w.extra == extra and installed(w.name) is None]
    if driver.devices and missing:
        found.append(
            Check("CUDA packages", WARN, f"missing: {', '.join(missing)}", f'pip install "frink-numba[{extra}]"')
        )
    return found


def backends() -> list[Check]:
    """Every known backend, made for a model of no layers to see whether it can run here."""
    from frink_numba.host.backend import HostBackend
    from frink_numba.host.weights import WeightStore

    def host(layers: Sequence[Layer]) -> Backend:
        return HostBackend(layers, WeightStore(budget_bytes=0))

    names = tuple(name for name in registry.known_backends() if name != registry.HOST)
    logger = logging.getLogger("frink_numba")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # the table says it
    try:
        made, missing = registry.create_backends(
            registry.Order((*names, registry.HOST), frozenset(), "doctor"), (), host
        )
        for backend in made:
            backend.close()
    finally:
        logger.setLevel(level)
    reasons = {entry.name: entry.reason for entry in missing}
    return [
        Check(name, ABSENT, reasons[name]) if name in reasons else Check(name, OK, "available")
        for name in (*names, registry.HOST)
    ]


def environment() -> list[Check]:
    found = []
    for name in settings.SETTINGS:
        raw = os.environ.get(name, "").strip()
        try:
            value = settings.get(name)
        except FrinkError as error:
            found.append(Check(name, BROKEN, str(error), f"unset {name}, or give it such a value"))
            continue
        shown = settings.SETTINGS[name].shown_default.strip("`") if value is None else str(value)
        found.append(Check(name, OK, shown if raw else f"{shown} (default)"))
    return found


def cache() -> list[Check]:
    from frink_numba.host.fetch import models_dir

    try:
        models = models_dir()
    except FrinkError as error:
        return [Check("cache folder", BROKEN, str(error))]
    folder = models.parent
    elsewhere = "set FRINK_CACHE_DIR to a folder that can be read and written"
    try:
        nearest = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    except OSError as error:
        return [Check("cache folder", WARN, f"{folder}: {error.strerror or error}", elsewhere)]
    if not nearest.is_dir():
        return [Check("cache folder", WARN, f"{folder}: {nearest} is no folder", elsewhere)]
    writable = os.access(nearest, os.W_OK)
    free = shutil.disk_usage(nearest).free / 1e9
    found = [
        Check(
            "cache folder",
            OK if writable else WARN,
            f"{folder}, {free:.0f} GB free" + ("" if writable else ", not writable"),
            "" if writable else elsewhere,
        )
    ]
    try:
        if models.is_dir():
            os.listdir(models)  # rglob passes over a folder that it may not read
        fetched = sorted(path for path in models.rglob("*.gguf") if path.is_file())
        for path in fetched:
            found.append(Check("model", OK, f"{path.relative_to(models)}, {path.stat().st_size / 1e6:.0f} MB"))
    except OSError as error:
        found.append(Check("models", WARN, f"{models} cannot be read: {error.strerror or error}", elsewhere))
        return found
    if not fetched:
        found.append(Check("model", ABSENT, "none fetched yet", "frink-numba fetch smollm2-135m"))
    return found


def _import_problem(name: str) -> str | None:
    """Why a package that is installed cannot be imported, in one line."""
    try:
        import_module(name)
    except registry.PLUGIN_ERRORS as error:
        return registry.describe(error)
    return None


def _cuda_extra(driver: Driver) -> str:
    """The extra for the newest CUDA that the driver runs."""
    return "cu12" if driver.cuda_version and driver.cuda_version[0] <= 12 else "cu13"


def _device(device: Device) -> Check:
    from frink_numba.cuda.tier import choose_tier

    major, minor = device.compute_capability
    facts = (
        f"{device.name}, {device.memory / 2**30:.1f} GiB, compute capability {major}.{minor}, "
        f"{device.multiprocessors} multiprocessors"
    )
    try:
        tier = choose_tier(settings.get("FRINK_CUDA_TIER"), device.compute_capability)
    except FrinkError as error:
        return Check(f"device {device.number}", WARN, f"{facts}; {error}", "unset FRINK_CUDA_TIER")
    return Check(f"device {device.number}", OK, f"{facts}, kernel tier {tier}")


def _blas() -> Check:
    try:
        import numpy

        blas = numpy.show_config(mode="dicts")["Build Dependencies"]["blas"]
        name, version = blas.get("name", "unknown"), blas.get("version", "")
    except (ImportError, KeyError, TypeError, AttributeError):
        return Check("BLAS", ABSENT, "unknown")
    return Check("BLAS", OK, f"{name} {version}".strip())


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0
