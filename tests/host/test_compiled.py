"""Machine code on disk: only the first process compiles, whatever happens to the folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from frink_numba.host import compiled

ROOT = Path(__file__).parents[2]
pytest.importorskip("numba", reason='needs numba: pip install "frink-numba[fast]"')

_ADD = """
import ctypes, sys
from frink_numba.host import compiled
def make():
    from frink_numba.host.lanes import fetch_and_add
    def add(address, number):
        fetch_and_add(address, number)
    return add
def run():
    total = ctypes.c_int64(40)
    compiled.compiled("add", make, 2, ("lanes.py",))(ctypes.addressof(total), 2)
    assert total.value == 42
    return "numba" in sys.modules
"""


def start(folder: Path, code: str = "print(run())") -> subprocess.Popen[str]:
    environment = {**os.environ, "FRINK_CACHE_DIR": str(folder)}
    return subprocess.Popen(
        [sys.executable, "-c", _ADD + code], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    )


def compiles(folder: Path, code: str = "print(run())") -> bool:
    process = start(folder, code)
    said = process.communicate(timeout=60)[0].strip()
    assert process.returncode == 0
    return {"True": True, "False": False}[said]


def test_the_second_process_imports_no_compiler(tmp_path: Path) -> None:
    assert compiles(tmp_path)
    assert not compiles(tmp_path)
    assert len(list((tmp_path / "cpu").iterdir())) == 1


@pytest.mark.parametrize("damage", [b"", b"nonsense", b"0" * 64 + b"\nsymbol\nELF"])
def test_a_damaged_file_is_made_anew(tmp_path: Path, damage: bytes) -> None:
    compiles(tmp_path)
    (path,) = (tmp_path / "cpu").iterdir()
    sound = path.read_bytes()
    for content in (damage, sound[:-1], sound[:70]):
        path.write_bytes(content)
        assert compiles(tmp_path)
        assert not compiles(tmp_path)


def test_a_change_of_the_source_or_of_the_processor_is_noticed(tmp_path: Path) -> None:
    """Field report 26: kernels that miss an edit in an imported module."""
    compiles(tmp_path)
    other = tmp_path / "source"
    other.mkdir()
    for name in ("lanes.py", "compiled.py"):
        (other / name).write_bytes((ROOT / "frink_numba" / "host" / name).read_bytes())
    moved = f"from pathlib import Path\ncompiled._HERE = Path({str(other)!r})\nprint(run())"
    assert not compiles(tmp_path, moved)
    with (other / "lanes.py").open("a") as file:
        file.write("# an edit\n")
    assert compiles(tmp_path, moved)
    target = "compiled._target = lambda: ('other processor', '+f16c')\nprint(run())"
    assert compiles(tmp_path, target)


def test_a_folder_that_cannot_be_written_means_compiling_anew(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    assert compiles(in_the_way)
    assert compiles(in_the_way)


def test_no_home_folder_means_compiling_anew(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path\n"
        "def nobody(path): raise RuntimeError('Could not determine home directory.')\n"
        "Path.expanduser = nobody\nprint(run())"
    )
    assert compiles(tmp_path, code)
    assert list(tmp_path.iterdir()) == []


def test_processes_that_start_together_get_along(tmp_path: Path) -> None:
    processes = [start(tmp_path) for _ in range(3)]
    assert all(process.communicate(timeout=60)[0] in ("True\n", "False\n") for process in processes)
    assert all(process.returncode == 0 for process in processes)
    assert [path.suffix for path in (tmp_path / "cpu").iterdir()] == [".o"]
    assert not compiles(tmp_path)


def test_a_processor_without_the_instructions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import llvmlite.binding as llvm

    compiled._target.cache_clear()
    monkeypatch.setattr(compiled.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: {"avx2": True, "f16c": False})
    with pytest.raises(compiled.CannotCompile, match="F16C"):
        compiled._target()
    compiled._target.cache_clear()


@pytest.mark.parametrize("variable", ["NUMBA_DISABLE_JIT", "NUMBA_CPU_NAME"])
def test_a_numba_set_up_otherwise_is_refused(tmp_path: Path, variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "1" if variable == "NUMBA_DISABLE_JIT" else "generic")
    refused = "try:\n    run()\nexcept compiled.CannotCompile as e:\n    print('NUMBA_*' in str(e))"
    assert compiles(tmp_path, refused)
