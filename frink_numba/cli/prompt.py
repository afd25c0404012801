"""Where a command's text comes from: the argument, a file, or stdin."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from frink_numba.errors import PromptError


def read_text(parser: argparse.ArgumentParser, text: str | None, file: str | None = None) -> str:
    """The text of the argument, of `file`, or of stdin for "-" as either and for nothing.

    Nothing on a terminal is wrong usage: a person would wait for an answer that cannot come. PromptError for a file
    that cannot be read or is not UTF-8.
    """
    if file == "-":  # ./- is a file
        text, file = "-", None
    try:
        if file is not None:
            return Path(file).read_text("utf-8")
        if text is not None and text != "-":
            return text
        if sys.stdin is None:
            raise PromptError("no text: stdin is closed; give the text as an argument or with --file")
        if text is None and sys.stdin.isatty():
            parser.error('no text: give it as an argument, or "-" to type it and end with Ctrl-D')
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise PromptError(f"{file or 'stdin'} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise PromptError(f"cannot read {file or 'stdin'}: {error.strerror or error}") from None
