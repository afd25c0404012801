"""The command `frink-numba`: reads the arguments, runs one command, and turns every failure into one line.

Exit codes: 0 success, 1 an error (one line on stderr), 2 wrong usage, 130 interrupted, 141 the reader of stdout left.
Answers go to stdout, everything else to stderr. FRINK_DEBUG=1 shows tracebacks.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from frink_numba import __version__
from frink_numba.cli import bench, doctor, fetch, generate, inspect, output, plan, score
from frink_numba.cli.streams import prepare_streams
from frink_numba.errors import FrinkError

EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_INTERRUPT = 130
EXIT_BROKEN_PIPE = 141

COMMANDS = (generate, score, plan, doctor, fetch, inspect, bench)

_EPILOG = """\
exit codes: 0 success, 1 an error (one line on stderr), 2 wrong usage, 130 interrupted, 141 the reader of stdout left
Every command takes --json and then writes one JSON document to stdout. Environment variables are listed by
`frink-numba doctor`."""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; argparse would print the whole usage first."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"frink-numba: error: {message} (see `{self.prog} --help`)\n")


class _CommandParser(_Parser):
    """Lets options stand between MODEL and a text that may be left out; argparse takes it for left out by itself."""

    _mixing = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:  # type: ignore[override]
        if self._mixing:  # called by parse_known_intermixed_args
            return super().parse_known_args(args, namespace)
        self._mixing = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._mixing = False


def build_parser() -> argparse.ArgumentParser:
    """The parser of every command. Command modules import nothing heavy before they run."""
    parser = _Parser(
        prog="frink-numba",
        description="Run GGUF language models with a NumPy host engine and CUDA kernels written in Python.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"frink-numba {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_CommandParser)
    for module in COMMANDS:
        name = module.__name__.rpartition(".")[2]
        summary = (module.__doc__ or "").strip().splitlines()[0]
        child = commands.add_parser(name, help=summary, description=summary)
        child.add_argument("--json", action="store_true", help="write one JSON document to stdout")
        module.add_arguments(child)
        child.set_defaults(run=module.run, parser=child)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (without the program's name); answers the exit code."""
    try:
        prepare_streams()
        try:
            arguments = build_parser().parse_args(argv)
            output.log_to_stderr()
            return int(arguments.run(arguments))
        finally:
            sys.stdout.flush()  # here, where a reader that left is handled, and not at the interpreter's end
    except KeyboardInterrupt:
        print("\nfrink-numba: interrupted", file=sys.stderr)
        return EXIT_INTERRUPT
    except BrokenPipeError:
        # The interpreter flushes stdout once more at its end: that must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except Exception as error:
        _report(error)
        return EXIT_ERROR


def _report(error: Exception) -> None:
    if _debug():
        import traceback

        traceback.print_exception(error)
        return
    text = " ".join(str(error).split())
    # A hostile file's names must not reach the terminal as escape sequences.
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
    if isinstance(error, FrinkError):
        message = text or type(error).__name__
    elif isinstance(error, MemoryError):
        message = (
            "out of memory: a smaller FRINK_HOST_WEIGHTS, --context or model needs less "
            f"({text or 'no detail'}; FRINK_DEBUG=1 shows where)"
        )
    elif isinstance(error, OSError):
        message = f"{text} (FRINK_DEBUG=1 shows where)"
    else:
        message = f"unexpected {type(error).__name__}: {text} (a fault of this program; FRINK_DEBUG=1 shows where)"
    print(f"frink-numba: error: {message}", file=sys.stderr)


def _debug() -> bool:
    from frink_numba import settings

    try:
        return bool(settings.get("FRINK_DEBUG"))
    except FrinkError as error:
        print(f"frink-numba: error: {error}", file=sys.stderr)
        return False
