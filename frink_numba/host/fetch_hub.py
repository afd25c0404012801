"""Gets a GGUF file, or all parts of a split one, from the Hugging Face Hub through the huggingface_hub package."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from frink_numba.errors import FetchError, ModelNotFoundError

_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


@dataclass(frozen=True, slots=True)
class HubFile:
    """`hf:OWNER/REPO/FILE.gguf`; FILE may lie in folders of the repository."""

    repo: str
    file: str

    @classmethod
    def parse(cls, name: str) -> HubFile:
        """Read `hf:OWNER/REPO/FILE.gguf`; ModelNotFoundError tells the form when `name` is another."""
        parts = name.removeprefix("hf:").split("/")
        if len(parts) < 3 or not name.endswith(".gguf") or any(part in ("", ".", "..") for part in parts):
            raise ModelNotFoundError(f"{name!r}: expected hf:OWNER/REPO/FILE.gguf")
        return cls("/".join(parts[:2]), "/".join(parts[2:]))

    def parts(self) -> list[str]:
        """The file, or every part when it is one of a split file `-00001-of-0000N.gguf`; the first part leads."""
        match = _PART.search(self.file)
        if match is None:
            return [self.file]
        stem, count = self.file[: match.start()], int(match[2])
        return [f"{stem}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]

    def folder(self, models: Path) -> Path:
        return models / "hf" / self.repo

    def local_parts(self, models: Path) -> list[Path]:
        """Where each part lies once it is fetched."""
        return [self.folder(models) / part for part in self.parts()]


def fetch_from_hub(wanted: HubFile, models: Path, *, quiet: bool) -> Path:
    """Download every part that is missing below `models`; answers the first part's path.

    huggingface_hub checks each size, resumes after an interruption and locks against a second process. `quiet` keeps
    its progress bars away. FetchError when it is not installed, or with its own words when it fails.
    """
    try:
        import huggingface_hub
        from huggingface_hub.utils import disable_progress_bars
    except ImportError:
        raise FetchError(
            'hf: names need the huggingface_hub package: run `pip install "frink-numba[hf]"`, then fetch again'
        ) from None
    if quiet:
        disable_progress_bars()
    for part in wanted.parts():
        try:
            huggingface_hub.hf_hub_download(wanted.repo, part, local_dir=wanted.folder(models))
        except Exception as error:  # its errors have no common base: HTTP, validation, offline, disk
            said = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
            raise FetchError(
                f"hf:{wanted.repo}/{part}: {type(error).__name__}: {said} (a private or gated model needs "
                "`hf auth login`; check the name and the network)"
            ) from error
    return wanted.local_parts(models)[0]
