"""What the commands write: JSON and tables on stdout, log lines and progress on stderr."""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

Progress = Callable[[str, int, int], None]


def write_json(document: Any) -> None:
    """One JSON document on stdout, in UTF-8 whatever the locale."""
    text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)
    sys.stdout.flush()
    sys.stdout.buffer.write(text.encode("utf-8", "replace") + b"\n")


def write_text(text: str) -> None:
    """Text on stdout at once; characters that the terminal's encoding lacks become "?"."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


def write_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], *, right: Sequence[str] = ()
) -> None:
    """A table on stdout, drawn by rich; `right` names the columns that hold figures."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title or None, title_justify="left", show_lines=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    # Piped to a file or a pager, a table is not squeezed into 80 columns. A COLUMNS of 0 tells no width.
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 160
    console = Console(width=width, markup=False, emoji=False, highlight=False)
    with console.capture() as drawn:
        console.print(table)
    write_text(drawn.get())  # rich itself would hide a reader that left, and stop at a character stdout cannot spell


def in_thousands(count: int) -> str:
    """A large number for people: "134.52 M"."""
    size, units = float(count), ["", " K", " M", " B", " T"]
    while size >= 1000 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return str(count) if not units[0] else f"{size:.2f}{units[0]}"


def log_to_stderr() -> None:
    """Warnings of the package as `frink-numba: ...` lines on stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("frink-numba: %(message)s"))
    logger = logging.getLogger("frink_numba")
    logger.addHandler(handler)
    logger.propagate = False


@contextmanager
def progress_bar(unit: str = "") -> Iterator[Progress | None]:
    """A bar on stderr to be called with (stage, done, total); None when stderr is no terminal.

    It appears at the first call that tells of unfinished work, so a short task shows none. `unit` "bytes" shows sizes,
    "" plain counts.
    """
    if not sys.stderr.isatty():
        yield None
        return
    with ExitStack() as shown:
        bar: Progress | None = None

        def report(stage: str, done: int, total: int) -> None:
            nonlocal bar
            if bar is None and (done < total or not total):
                bar = shown.enter_context(_rich_bar(unit))
            if bar is not None:
                bar(stage, done, total)

        yield report


@contextmanager
def _rich_bar(unit: str) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    amount = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), amount, TimeRemainingColumn())
    with RichProgress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task("", total=None)
        yield lambda stage, done, total: shown.update(task, description=stage, completed=done, total=total or None)
