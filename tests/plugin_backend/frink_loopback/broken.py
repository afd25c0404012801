"""A plugin that cannot be imported where FRINK_LOOPBACK_BROKEN is set: it must be reported once and skipped."""

import os
import sys
from typing import NoReturn

from frink_numba.errors import BackendUnavailable

if os.environ.get("FRINK_LOOPBACK_BROKEN") == "exit":
    sys.exit("this plugin exits on purpose")
if "FRINK_LOOPBACK_BROKEN" in os.environ:
    raise ImportError("this plugin is broken on purpose")


def create(layers: object) -> NoReturn:
    raise BackendUnavailable("FRINK_LOOPBACK_BROKEN is not set", absent=True)
