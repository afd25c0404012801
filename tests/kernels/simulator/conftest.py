"""Tests of this folder run in a process of their own, which `tests/kernels/test_simulator.py` starts.

Numba decides at its import whether kernels are simulated: beside tests that compile kernels these could not run.
"""

from __future__ import annotations

import sys

from numba.cuda import config

collect_ignore_glob = [] if config.ENABLE_CUDASIM else ["test_*.py"]

if config.ENABLE_CUDASIM:
    # The simulator's threads wait for each other at every barrier: hand the interpreter over sooner than after 5 ms.
    sys.setswitchinterval(1e-4)
