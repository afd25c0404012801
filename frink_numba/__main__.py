"""`python -m frink_numba`: the command line."""

from frink_numba.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
