"""`frink_numba.cuda` imports beside numba-cuda's own import hook, and nothing else changes its way."""

from __future__ import annotations

import subprocess
import sys

from frink_numba.finder import OwnCudaFinder


def test_it_answers_for_our_cuda_package_alone():
    """Names of others, also those that only look alike, are left to the other finders."""
    for name in ("numba.cuda", "numba.cuda.api", "frink_numba", "frink_numba.cudax", "frink_numba.host", "numpy"):
        assert OwnCudaFinder.find_spec(name, None) is None


def test_the_package_imports_with_the_hook_in_place():
    """In a fresh interpreter: the hook of numba-cuda is there, and our package is found without importing numba."""
    code = (
        "import sys; hooks = [type(f).__module__ for f in sys.meta_path]\n"
        "assert '_numba_cuda_redirector' in hooks, hooks\n"
        "import frink_numba.cuda, frink_numba.cuda.traffic as t; assert t.__name__ == 'frink_numba.cuda.traffic'\n"
        "assert 'numba' not in sys.modules\n"
        "import numba.cuda; assert 'numba_cuda' in numba.cuda.__file__"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
