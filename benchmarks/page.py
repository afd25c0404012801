"""A page of docs/ whose figures stand between two marks, rendered from receipts."""

from __future__ import annotations

import sys
from pathlib import Path

_BEGIN, _END = "<!-- figures -->", "<!-- end of figures -->"


def shows(page: Path, text: str) -> bool:
    """Whether the page's figures are these."""
    return f"{_BEGIN}\n{text}\n{_END}" in page.read_text("utf-8")


def print_or_write(page: Path, text: str) -> None:
    """What a table's command does: print it, or with --write put it into the page."""
    if "--write" not in sys.argv:
        print(text)
        return
    head, begin, rest = page.read_text("utf-8").partition(_BEGIN)
    _, end, tail = rest.partition(_END)
    if not (begin and end):
        sys.exit(f"error: {page} has no place for figures: {_BEGIN} and {_END}")
    page.write_text(f"{head}{_BEGIN}\n{text}\n{_END}{tail}", "utf-8")
