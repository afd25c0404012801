"""The standard streams, some of which a caller may have closed (`>&-`)."""

from __future__ import annotations

import os
import sys

from frink_numba.errors import FrinkError


def prepare_streams() -> None:
    """Put the null device where a stream is closed: the next file to be opened would take its number.

    Python has None for a closed stream. stderr becomes one that writes to nowhere, stdin stays None for whoever needs
    it to say so. FrinkError when stdout is closed: an answer would have nowhere to go.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - for the whole process
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        raise FrinkError("stdout is closed, so that the answer has nowhere to go: send it to a file, or to /dev/null")
