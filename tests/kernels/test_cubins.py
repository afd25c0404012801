"""The cache of compiled kernels: keyed by all that matters, whole files only, shared by processes.

Field reports 25 and 26.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from frink_numba.kernels import cubins
from frink_numba.kernels.cubins import Cubin, Source, Target


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FRINK_CACHE_DIR", str(tmp_path))
    return tmp_path / "cubins"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what was compiled; the compiler itself is stood in for."""
    names: list[str] = []

    def stand_in(source: Source, target: Target) -> Cubin:
        names.append(source.name)
        return Cubin(f"{source.name} for {target.arch}\n\0".encode(), "_Zentry", 40, 0, ("info : C7510 said",))

    monkeypatch.setattr(cubins, "compile_kernel", stand_in)
    return names


def _source(name: str = "k", threads: int = 128, blocks: int = 1) -> Source:
    return Source(name, lambda: (None, None), threads, blocks)


def test_the_second_load_reads_the_file(folder: Path, compiled: list[str]) -> None:
    first = cubins.load(_source(), Target("90a"))
    second = cubins.load(_source(), Target("90a"))
    assert first == second
    assert compiled == ["k"]
    assert [p.suffix for p in folder.iterdir()] == [".cubin"]


def test_everything_that_shapes_a_kernel_is_in_the_key(
    folder: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field report 26: an edit of the source, another compiler, target, name or launch bound compiles anew."""
    cubins.load(_source(), Target("90a"))
    cubins.load(_source("other"), Target("90a"))
    cubins.load(_source(), Target("80"))
    cubins.load(_source(threads=256), Target("90a"))
    cubins.load(_source(blocks=2), Target("90a"))
    monkeypatch.setattr(cubins, "source_digest", lambda build: "edited")
    cubins.load(_source(), Target("90a"))
    monkeypatch.setattr(cubins, "_toolchain", lambda: "numba=9")
    cubins.load(_source(), Target("90a"))
    assert len(compiled) == 7
    assert len(list(folder.iterdir())) == 7


@pytest.mark.parametrize("damage", [b"", b"{}\n", b"not json\nabc", None])
def test_a_damaged_file_is_compiled_again(folder: Path, compiled: list[str], damage: bytes | None) -> None:
    whole = cubins.load(_source(), Target("90a"))
    path = next(folder.iterdir())
    path.write_bytes(path.read_bytes()[:-3] if damage is None else damage)
    assert cubins.load(_source(), Target("90a")) == whole
    assert compiled == ["k", "k"]
    assert cubins.load(_source(), Target("90a")) == whole
    assert compiled == ["k", "k"]


def test_threads_at_once(folder: Path, compiled: list[str]) -> None:
    """Field report 25: eight threads load one kernel; all get it, and one whole file is left."""
    got: list[Cubin] = []
    threads = [threading.Thread(target=lambda: got.append(cubins.load(_source(), Target("90a")))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 8
    assert len(set(got)) == 1
    assert len(list(folder.iterdir())) == 1


def test_a_folder_that_cannot_be_written_is_no_error(
    tmp_path: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FRINK_CACHE_DIR", str(tmp_path / "file"))
    assert cubins.load(_source(), Target("90a")).registers == 40


@pytest.mark.parametrize(("arch", "capability"), [("90a", (9, 0, "a")), ("80", (8, 0)), ("120", (12, 0))])
def test_targets(arch: str, capability: tuple[object, ...]) -> None:
    assert Target(arch).capability == capability


_CHILD = """
import sys
from frink_numba.kernels.cubins import Target, load
from frink_numba.kernels.gemm import source_of
cubin = load(source_of(None, overlap=False), Target("80"))
print(len(cubin.code), "numba" in sys.modules)
"""


def test_a_second_process_needs_no_compiler(folder: Path) -> None:
    """Issue 4: a warm start imports no numba; two processes that compile at once leave one whole file."""
    environment = {**os.environ, "FRINK_CACHE_DIR": str(folder.parent)}

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, "-c", _CHILD], env=environment, stdout=subprocess.PIPE, text=True)

    cold = [start() for _ in range(2)]
    sizes = {process.communicate()[0].split()[0] for process in cold}
    warm = start().communicate()[0].split()
    assert sizes == {warm[0]}
    assert warm[1] == "False"
    assert len(list(folder.iterdir())) == 1
