"""get a model by name into the cache folder"""

from __future__ import annotations

import argparse
import time
from typing import Any

from frink_numba.cli import output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", nargs="?", help="a known name, or hf:OWNER/REPO/FILE.gguf")
    parser.add_argument("--verify", action="store_true", help="check the SHA-256 of a file that is there already")
    parser.add_argument("--list", action="store_true", help="list the known names and which are fetched")


def run(arguments: argparse.Namespace) -> int:
    if arguments.list or arguments.name is None:
        if not arguments.list:
            arguments.parser.error("name a model, or ask for --list")
        _list(arguments.json)
        return 0
    from frink_numba.host.fetch import fetch

    start = time.perf_counter()
    with output.progress_bar("bytes") as progress:
        path = fetch(arguments.name, progress=progress, verify=arguments.verify)
    seconds = time.perf_counter() - start
    if arguments.json:
        output.write_json(
            {
                "name": arguments.name,
                "path": str(path),
                "bytes": path.stat().st_size,
                "seconds": round(seconds, 3),
            }
        )
    else:
        output.write_text(f"{path}\n")
    return 0


def _list(as_json: bool) -> None:
    from frink_numba.errors import ModelNotFoundError
    from frink_numba.host.fetch import resolve
    from frink_numba.host.known_models import KNOWN_MODELS

    entries: list[dict[str, Any]] = []
    for model in KNOWN_MODELS.values():
        try:
            path: str | None = str(resolve(model.name))
        except ModelNotFoundError:
            path = None
        entries.append(
            {
                "name": model.name,
                "title": model.title,
                "bytes": model.size,
                "licence": model.licence,
                "source": str(model.source),
                "sha256": model.sha256,
                "path": path,
            }
        )
    if as_json:
        output.write_json(entries)
        return
    output.write_table(
        "",
        ("name", "model", "MB", "licence", "source", "file"),
        [
            (e["name"], e["title"], f"{e['bytes'] / 1e6:.1f}", e["licence"], e["source"], e["path"] or "not fetched")
            for e in entries
        ],
        right=("MB",),
    )
