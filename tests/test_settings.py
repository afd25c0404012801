"""Environment variables are read in one place and strictly."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from frink_numba import settings
from frink_numba.errors import SettingError

PACKAGE = Path(settings.__file__).parent


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", True), ("TRUE", True), ("yes", True), (" on ", True), ("0", False), ("false", False), ("No", False)],
)
def test_flags(text: str, value: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FRINK_DEBUG", text)
    assert settings.get("FRINK_DEBUG") is value


@pytest.mark.parametrize(
    ("text", "value"),
    [("0", 0), ("123", 123), ("1k", 1024), ("1.5GiB", 3 << 29), ("2 G", 2 << 30), ("7mb", 7 << 20), ("1T", 1 << 40)],
)
def test_bytes(text: str, value: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FRINK_HOST_WEIGHTS", text)
    assert settings.get("FRINK_HOST_WEIGHTS") == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("OMP_NUM_THREADS", "0"),
        ("OMP_NUM_THREADS", "many"),
        ("FRINK_CACHE_DIR", "~nosuchuser/cache"),
        ("FRINK_DEBUG", "maybe"),
        ("FRINK_DEBUG", "2"),
        ("FRINK_HOST_WEIGHTS", "-1"),
        ("FRINK_HOST_WEIGHTS", "lots"),
        ("FRINK_HOST_WEIGHTS", "1Q"),
        ("FRINK_HOST_WEIGHTS", "nan"),
        ("FRINK_HOST_WEIGHTS", "inf"),
        ("FRINK_HOST_WEIGHTS", "1e30"),
        ("FRINK_CUDA_MEMORY", "G"),
        ("FRINK_CUDA_TIER", "tensor"),
    ],
)
def test_nonsense_is_an_error_that_names_the_variable(name: str, text: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(name, text)
    with pytest.raises(SettingError, match=re.escape(f"{name}={text!r}: expected")):
        settings.get(name)


def test_unset_and_empty_are_the_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for name in settings.SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert settings.get("FRINK_BACKEND") == "auto"
    assert settings.get("FRINK_CACHE_DIR") == tmp_path / "frink_numba"
    monkeypatch.setenv("FRINK_CUDA_TIER", "  ")
    assert settings.get("FRINK_CUDA_TIER") == "auto"


def test_a_default_that_cannot_be_found_is_told(monkeypatch: pytest.MonkeyPatch):
    def nobody(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("FRINK_CACHE_DIR", raising=False)
    monkeypatch.setattr(Path, "expanduser", nobody)
    with pytest.raises(SettingError, match="FRINK_CACHE_DIR is not set, and its default cannot be found: Could not"):
        settings.get("FRINK_CACHE_DIR")


def test_every_variable_the_package_names_is_in_the_table():
    """The table is complete, and nobody else reads the environment for FRINK_ variables."""
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        assert set(re.findall(r"FRINK_[A-Z_]+", text)) <= set(settings.SETTINGS), path
        if path.name != "settings.py":
            assert not re.search(r"(environ|getenv)[^\n]*FRINK_", text), path


def test_the_table_lists_every_variable():
    table = settings.markdown_table()
    assert all(f"`{name}`" in table for name in settings.SETTINGS)
