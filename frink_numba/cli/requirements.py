"""The packages that frink-numba asks for, extra by extra, read from its own metadata, so that no list can go stale."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

_REQUIREMENT = re.compile(r"^\s*([A-Za-z0-9._-]+)\s*(?:\[[^\]]*\])?\s*\(?([^;()]*)\)?\s*(?:;(.*))?$")
_EXTRA = re.compile(r"""extra\s*==\s*['"]([^'"]+)['"]""")
_CLAUSE = re.compile(r"^(>=|<=|==|!=|<|>)\s*([0-9][0-9.]*)$")


@dataclass(frozen=True, slots=True)
class Requirement:
    """A package and the versions that fit, such as ">=1.26,<2.5"; `extra` is None for one that is always needed."""

    name: str
    versions: str
    extra: str | None

    def accepts(self, version: str) -> bool:
        """Whether the installed `version` fits. Only plain numbers are compared: 2.5.0rc1 counts as 2.5.0."""
        have = _numbers(version)
        for clause in filter(None, (part.strip() for part in self.versions.split(","))):
            match = _CLAUSE.match(clause)
            if match is None:
                continue
            operator, want = match[1], _numbers(match[2])
            width = max(len(have), len(want))
            left, right = (part + (0,) * (width - len(part)) for part in (have, want))
            fits = {
                ">=": left >= right,
                "<=": left <= right,
                "==": left == right,
                "!=": left != right,
                "<": left < right,
                ">": left > right,
            }[operator]
            if not fits:
                return False
        return True


def requirements() -> list[Requirement]:
    """Every requirement, from the installed package's metadata, else from the pyproject.toml beside the package."""
    try:
        lines = metadata.requires("frink-numba") or []
    except metadata.PackageNotFoundError:
        lines = _source_lines()
    return [read for line in lines if (read := _read(line)) is not None]


def installed(name: str) -> str | None:
    """The installed version of a distribution; None when it is missing."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _source_lines() -> list[str]:
    import tomllib

    path = Path(__file__).resolve().parents[2] / "pyproject.toml"
    try:
        project = tomllib.loads(path.read_text("utf-8"))["project"]
    except (OSError, KeyError, tomllib.TOMLDecodeError):
        return []
    lines = list(project.get("dependencies", []))
    for extra, wanted in project.get("optional-dependencies", {}).items():
        lines += [f'{line}; extra == "{extra}"' for line in wanted]
    return lines


def _read(line: str) -> Requirement | None:
    match = _REQUIREMENT.match(line)
    if match is None or match[1].lower() == "frink-numba":
        return None
    extra = _EXTRA.search(match[3] or "")
    return Requirement(match[1].lower(), match[2].replace(" ", ""), extra[1] if extra else None)


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"[0-9]+(?:\.[0-9]+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()
