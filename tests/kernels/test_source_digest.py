"""The digest of a kernel's source (field report 26): everything it is made of, and nothing else."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from frink_numba.kernels import source_digest as module
from frink_numba.kernels.source_digest import source_digest

FOLDER = Path(module.__file__).parent


def _imported(path: Path) -> set[str]:
    """What a file imports of the package, as Python's own parser reads it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "frink_numba.kernels":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("frink_numba.kernels."):
            found.add((node.module or "").split(".")[2])
        elif isinstance(node, ast.Import):
            assert not any(alias.name.startswith("frink_numba.kernels") for alias in node.names), path
    return {name for name in found if (FOLDER / f"{name}.py").exists()}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_all_imports_are_seen(path: Path) -> None:
    """Those inside functions, in brackets and under other names too."""
    assert module._imports(path.stem) == _imported(path)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    texts = {
        "product": "def build():\n    from frink_numba.kernels.loads import fetch\n",
        "loads": "from frink_numba.kernels import (\n    words as w,\n)\n",
        "words": "",
        "plan": "from frink_numba.kernels.product import build\n",
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setattr(module, "_FOLDER", tmp_path)
    yield tmp_path
    _forget()


def _forget() -> None:
    for cached in (module._digest, module._imports, module._text):
        cached.cache_clear()


def _builder(name: str) -> Callable[[], Any]:
    def build() -> None: ...

    build.__module__ = f"frink_numba.kernels.{name}"
    return build


@pytest.mark.parametrize(("edited", "changes"), [("product", True), ("loads", True), ("words", True), ("plan", False)])
def test_an_edit_counts_where_it_is_reached(folder: Path, edited: str, changes: bool) -> None:
    """Two steps away as well; what merely uses the kernel does not count."""
    _forget()
    build = functools.partial(functools.partial(_builder("product")))
    before = source_digest(build)
    assert source_digest(build) == before
    (folder / f"{edited}.py").write_text("# edited\n")
    _forget()
    assert (source_digest(build) != before) == changes


@pytest.mark.parametrize("edited", ["product", "loads", "words", "plan"])
def test_a_stranger_counts_with_every_file(folder: Path, edited: str) -> None:
    """A kernel made outside the package: nothing tells what it uses."""
    _forget()

    def build() -> None: ...

    before = source_digest(build)
    (folder / f"{edited}.py").write_text("# edited\n")
    _forget()
    assert source_digest(build) != before
