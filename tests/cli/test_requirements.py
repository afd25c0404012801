"""The packages that doctor checks are those of pyproject.toml."""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from frink_numba.cli import requirements as module
from frink_numba.cli.requirements import Requirement, requirements

_PROJECT = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text("utf-8"))["project"]


@pytest.mark.parametrize("installed", [True, False])
def test_requirements_are_those_of_the_project(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read from the installed metadata, or from the folder that the package runs from: the same packages."""
    if not installed:

        def missing(name: str) -> list[str]:
            raise metadata.PackageNotFoundError(name)

        monkeypatch.setattr(module.metadata, "requires", missing)
    found = requirements()
    base = {wanted.name: wanted for wanted in found if wanted.extra is None}
    assert sorted(base) == sorted(line.split(">")[0].split("<")[0] for line in _PROJECT["dependencies"])
    assert base["numpy"].accepts("2.4.6")
    assert not base["numpy"].accepts("2.5.0")  # numba-cuda needs what 2.5 removed
    for extra in ("cu12", "cu13", "hf"):
        assert len([w for w in found if w.extra == extra]) == len(_PROJECT["optional-dependencies"][extra])


@pytest.mark.parametrize(
    ("versions", "version", "fits"),
    [
        (">=1.26,<2.5", "1.26", True),
        (">=1.26,<2.5", "1.25.9", False),
        (">=1.26,<2.5", "2.4.99", True),
        (">=1.26,<2.5", "2.5", False),
        (">=1.26,<2.5", "2.5.0rc1", False),
        (">=13", "13.0.1.post2", True),
        (">=3.1.6", "3.1", False),
        ("==2.0", "2.0.0", True),
        ("!=2.0", "2.0.0", False),
        ("", "0.1", True),
    ],
)
def test_versions_are_compared_as_numbers(versions: str, version: str, fits: bool) -> None:
    assert Requirement("name", versions, None).accepts(version) is fits
