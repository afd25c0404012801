"""`python -m frink_numba`, and the command `frink-numba`: the command line, interrupted at any time in one line."""

import sys


def main() -> int:
    """Run the command line of this process; answers the exit code."""
    try:
        from frink_numba.cli.main import main as run

        return run()
    except KeyboardInterrupt:  # while the command line itself is imported
        if sys.stderr is not None:
            print("\nfrink-numba: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
