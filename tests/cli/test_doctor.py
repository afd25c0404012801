"""`frink-numba doctor`: every section, and what it says when something is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from frink_numba import settings
from frink_numba.cli import checks
from frink_numba.driver import Device, Driver
from tests.cli.runner import ROOT, frink, frink_json

_GPU = Device(0, "A GPU", 80 * 2**30, (9, 0), 132)


def test_a_sound_machine_is_healthy(smollm2_path: Path) -> None:
    document = frink_json("doctor")
    assert document["healthy"] is True
    assert list(document) == ["healthy", "machine", "packages", "gpu", "backends", "settings", "cache"]
    found = {check["name"]: check for section in list(document)[1:] for check in document[section]}
    assert found["numpy"]["status"] == "ok"
    assert found["host"]["found"].startswith("available")
    assert "cuda" in found
    assert set(settings.SETTINGS) <= set(found)
    assert f"{smollm2_path.name}, 98 MB" in [check["found"] for check in document["cache"]]


def test_the_tables_say_the_same() -> None:
    done = frink("doctor")
    assert (done.returncode, done.stderr) == (0, "")
    for title in ("machine", "packages", "gpu", "backends", "settings", "cache"):
        assert f"\n{title}" in f"\n{done.stdout}"
    assert "The host engine can run." in done.stdout


def test_a_setting_that_cannot_be_read_is_found_with_its_remedy() -> None:
    done = frink("doctor", environment={"FRINK_HOST_WEIGHTS": "plenty"})
    assert done.returncode == 1
    assert "The host engine cannot run as things are." in done.stdout
    assert "FRINK_HOST_WEIGHTS: unset FRINK_HOST_WEIGHTS, or give it such a value" in done.stdout


def test_an_empty_cache_folder_names_the_command(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "yet"
    done = frink("doctor", environment={"FRINK_CACHE_DIR": str(folder)})
    assert done.returncode == 0
    assert "model: frink-numba fetch smollm2-135m" in done.stdout
    assert not folder.exists()


def test_a_cache_folder_that_is_a_file_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for folder in (file, file / "below"):
        done = frink("doctor", environment={"FRINK_CACHE_DIR": str(folder)})
        assert done.returncode == 0
        assert "is no folder" in " ".join(done.stdout.split())
        assert "cache folder: set FRINK_CACHE_DIR to a folder that can be read and written" in done.stdout


def _packages(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    """Play installed packages; "_" stands for "-" in a name, None for a missing one."""
    really = checks.installed
    played = {name.replace("_", "-"): version for name, version in versions.items()}
    monkeypatch.setattr(checks, "installed", lambda name: played[name] if name in played else really(name))


def _by_name(found: list[checks.Check]) -> dict[str, checks.Check]:
    return {check.name: check for check in found}


def test_a_missing_package_is_broken_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    _packages(monkeypatch, tokenizers=None)
    check = _by_name(checks.packages(Driver(None, None, (), "none")))["tokenizers"]
    assert check.status == checks.BROKEN
    assert check.remedy.startswith('pip install "tokenizers>=')


@pytest.mark.parametrize("name", ["jinja2", "tokenizers", "gguf"])
def test_a_package_that_is_there_but_broken_is_broken(name: str) -> None:
    code = (
        f"import sys; sys.modules[{name!r}] = None\n"
        "from frink_numba.cli import checks; from frink_numba.driver import Driver\n"
        f"(check,) = [c for c in checks.packages(Driver(None, None, (), 'none')) if c.name == {name!r}]\n"
        "print(check.status, '|', check.found, '|', check.remedy)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("broken | ")
    assert "but its import fails: ModuleNotFoundError" in done.stdout
    assert f"| pip install --force-reinstall {name}\n" in done.stdout


def test_a_models_folder_that_may_not_be_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.setenv("FRINK_CACHE_DIR", str(tmp_path))

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(checks.os, "listdir", refuse)
        found = _by_name(checks.cache())
    assert found["models"].status == checks.WARN
    assert found["models"].found == f"{tmp_path / 'models'} cannot be read: Permission denied"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "exists", refuse)
        (check,) = checks.cache()
    assert (check.status, check.found) == (checks.WARN, f"{tmp_path}: Permission denied")


def test_a_check_that_fails_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ZeroDivisionError("no\nreason")

    fail.__name__ = "backends"
    monkeypatch.setattr(checks, "backends", fail)
    sections = dict(checks.examine())
    assert sections["backends"] == [
        checks.Check("backends", checks.WARN, "could not be examined: ZeroDivisionError: no reason")
    ]
    assert len(sections) == 6


def test_a_numpy_too_new_is_broken_with_the_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    _packages(monkeypatch, numpy="2.5.1")
    check = _by_name(checks.packages(Driver(None, None, (), "none")))["numpy"]
    assert check.status == checks.BROKEN
    assert "<2.5" in check.remedy


@pytest.mark.parametrize(("cuda", "extra"), [((12, 8), "cu12"), ((13, 2), "cu13")])
def test_a_gpu_without_packages_names_the_extra_for_its_driver(
    cuda: tuple[int, int], extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _packages(monkeypatch, numba_cuda=None)
    found = _by_name(checks.gpu(Driver("580.1", cuda, (_GPU,), None)))
    assert found["driver"].found == f"580.1, CUDA {cuda[0]}.{cuda[1]}"
    assert found["device 0"].found.startswith(
        "A GPU, 80.0 GiB, compute capability 9.0, 132 multiprocessors, kernel tier "
    )
    assert found["CUDA packages"].remedy == f'pip install "frink-numba[{extra}]"'


def test_a_driver_that_does_not_answer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _by_name(checks.gpu(Driver("580.1", None, (), "cuInit answered CUDA_ERROR_UNKNOWN (999)")))
    assert found["driver"].status == checks.WARN
    assert "CUDA_ERROR_UNKNOWN" in found["devices"].found
    assert "nvidia-smi" in found["devices"].remedy


def test_no_driver_is_no_fault() -> None:
    (check,) = checks.gpu(Driver(None, None, (), "no NVIDIA driver is installed"))
    assert (check.status, check.remedy) == (checks.ABSENT, "")


def test_a_tier_that_the_device_lacks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRINK_CUDA_TIER", "wgmma")
    old = Device(0, "An old GPU", 8 * 2**30, (7, 5), 40)
    check = _by_name(checks.gpu(Driver("580.1", (13, 0), (old,), None)))["device 0"]
    assert check.status == checks.WARN
    assert "FRINK_CUDA_TIER=wgmma needs compute capability 9.0" in check.found
    assert check.remedy == "unset FRINK_CUDA_TIER"
