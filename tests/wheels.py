"""A small wheel and a stand-in for pip, so that fetching is tested without an index."""

from __future__ import annotations

import hashlib
import textwrap
import zipfile
from pathlib import Path

from frink_numba.host.known_models import KnownModel, WheelSource

MEMBER = "tiny_model/tiny.gguf"
CONTENT = bytes(range(256)) * 4000  # about 1 MB: several chunks


def tiny_model(content: bytes = CONTENT) -> KnownModel:
    """A known model whose wheel `write_wheel` makes."""
    return KnownModel(
        name="tiny",
        title="tiny",
        source=WheelSource("tiny-model", "1.0", MEMBER, len(content)),
        file="tiny.gguf",
        size=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        licence="Apache-2.0",
    )


def write_wheel(folder: Path, content: bytes = CONTENT, member: str = MEMBER) -> Path:
    """A wheel tiny_model 1.0 in `folder` with `content` as its file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(member, content)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


def write_fake_pip(folder: Path, body: str) -> Path:
    """A package `pip` in `folder`, for PYTHONPATH, whose `python -m pip` runs `body` with `dest` set to --dest."""
    package = folder / "pip"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    head = "import os, pathlib, shutil, sys, time\ndest = pathlib.Path(sys.argv[sys.argv.index('--dest') + 1])\n"
    (package / "__main__.py").write_text(head + textwrap.dedent(body))
    return folder
