"""How a benchmark's command ends where it cannot measure: with one line, as the product's own commands do."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import NoReturn

from frink_numba.errors import FrinkError


def exit_with(main: Callable[[], int | None]) -> NoReturn:
    """Run `main` and exit with its status, or with what was wrong."""
    try:
        sys.exit(main())
    except FrinkError as error:
        sys.exit(f"error: {error}")
    except subprocess.CalledProcessError as error:  # a process of ours, which has said what was wrong
        sys.exit(error.returncode)
