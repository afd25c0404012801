"""What holds for every command: help, usage, exit codes, one-line errors, debug tracebacks."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import frink_numba
from frink_numba.cli import main as cli
from frink_numba.errors import GgufError
from tests.cli.runner import ROOT, command, frink, one_line_error

_NAMES = [module.__name__.rpartition(".")[2] for module in cli.COMMANDS]


def test_help_lists_every_command_and_the_exit_codes() -> None:
    done = frink("--help")
    assert done.returncode == 0
    for name in _NAMES:
        assert f"\n    {name} " in done.stdout
    assert "130 interrupted" in done.stdout


@pytest.mark.parametrize("name", _NAMES)
def test_every_command_has_help_and_json(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.build_parser().parse_args([name, "--help"])
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: frink-numba {name} ")
    assert "--json" in shown


def test_help_into_a_closed_pipe_is_quiet() -> None:
    """Text that waits in the buffer fails at the end of `main`; unbuffered, argparse itself overlooks the failure."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(
        command("--help"),
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(30) == 141


@pytest.mark.parametrize("where", ["frink_numba.cli.bench", "frink_numba.cli.main", "argparse"])
def test_control_c_while_it_starts(where: str) -> None:
    """An interrupt while modules are imported, or arguments read, is one line, too."""
    code = (
        "import signal, sys, os, importlib.abc\n"
        "class Interrupted(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        f"        if name == {where!r}: os.kill(os.getpid(), signal.SIGINT)\n"
        f"if {where!r} != 'argparse':\n"
        "    sys.meta_path.insert(0, Interrupted())\n"
        "else:\n"
        "    import argparse; argparse.ArgumentParser.parse_args = lambda *a: os.kill(os.getpid(), signal.SIGINT)\n"
        "from frink_numba.__main__ import main\n"
        "sys.exit(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code, "doctor"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\nfrink-numba: interrupted\n")


def test_version() -> None:
    assert frink("--version").stdout == f"frink-numba {frink_numba.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "the following arguments are required: COMMAND (see `frink-numba --help`)"),
        (("dance",), "argument COMMAND: invalid choice: 'dance'"),
        (("generate",), "the following arguments are required: MODEL (see `frink-numba generate --help`)"),
        (("generate", "m", "p", "--temperature", "-1"), "argument --temperature: expected a number from 0 up, got -1"),
        (
            ("generate", "m", "p", "--temperature", "nan"),
            "argument --temperature: expected a number from 0 up, got nan",
        ),
        (("generate", "m", "p", "--top-p", "0"), "argument --top-p: expected a number above 0 to 1, got 0"),
        (("generate", "m", "p", "--max-new-tokens", "0"), "argument --max-new-tokens: expected at least 1, got 0"),
        (("generate", "m", "p", "--file", "f"), "give a prompt or --file, not both"),
        (("plan", "m", "--batch", "many"), "argument --batch: expected an integer, got 'many'"),
        (("bench", "m", "-p", "0", "-n", ""), "nothing to measure"),
        (("generate", "m", "p", "q"), "unrecognized arguments: q"),
        (("generate", "m", "--no-such-option"), "unrecognized arguments: --no-such-option"),
        (("fetch",), "name a model, or ask for --list"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_2(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def parse_and_run() -> None:
        parsed = cli.build_parser().parse_args(arguments)
        parsed.run(parsed)

    with pytest.raises(SystemExit) as exit_:
        parse_and_run()
    shown = capsys.readouterr()
    assert exit_.value.code == 2
    assert shown.out == ""
    assert shown.err.startswith(f"frink-numba: error: {message}")
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["m", "text", "--chat", "--seed", "3"],
        ["m", "--chat", "text", "--seed", "3"],
        ["m", "--chat", "--seed", "3", "text"],
        ["--chat", "m", "--seed", "3", "text"],
        ["--chat", "--seed", "3", "m", "text"],
        ["m", "--chat", "--seed", "3", "--", "text"],
    ],
)
def test_options_may_stand_anywhere(arguments: list[str]) -> None:
    """Also between the model and a text that may be left out, where argparse by itself loses the text."""
    parsed = cli.build_parser().parse_args(["generate", *arguments])
    assert (parsed.command, parsed.model, parsed.prompt, parsed.chat, parsed.seed) == ("generate", "m", "text", True, 3)
    assert cli.build_parser().parse_args(["generate", "m", "--chat"]).prompt is None
    assert cli.build_parser().parse_args(["generate", "m", "--", "--text"]).prompt == "--text"


@pytest.mark.parametrize("command", ["generate", "score", "plan", "inspect", "bench"])
def test_an_unknown_model_is_one_line_with_a_remedy(command: str) -> None:
    message = one_line_error(frink(command, "absent.gguf", stdin="text"))
    assert message.startswith("no file 'absent.gguf', and no known model of that name")
    assert "smollm2-135m" in message


@pytest.mark.parametrize("command", ["plan", "inspect"])
def test_a_file_that_is_no_model_is_one_line(command: str, tmp_path: Path) -> None:
    page = tmp_path / "page.gguf"
    page.write_text("<!DOCTYPE html><html></html>" * 10)
    assert str(page) in one_line_error(frink(command, str(page)))


def test_a_setting_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    page = tmp_path / "page.gguf"
    page.write_text("x")
    done = frink("inspect", str(page), environment={"FRINK_DEBUG": "perhaps"})
    assert done.returncode == 1
    assert "FRINK_DEBUG='perhaps': expected 1, true" in done.stderr
    assert "Traceback" not in done.stderr


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    page = tmp_path / "page.gguf"
    page.write_text("x")
    done = frink("inspect", str(page), environment={"FRINK_DEBUG": "1"})
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback (most recent call last):")
    assert "GgufError" in done.stderr


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (GgufError("a\n  b"), "a b"),
        (KeyError("lost"), "unexpected KeyError: 'lost' (a fault of this program; FRINK_DEBUG=1 shows where)"),
        (MemoryError("Unable to allocate 9 GiB"), "out of memory: a smaller FRINK_HOST_WEIGHTS"),
        (PermissionError(13, "Permission denied", "x.json"), "[Errno 13] Permission denied: 'x.json' (FRINK_DEBUG=1"),
    ],
)
def test_every_failure_is_one_line(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also those that nobody foresaw; `main` is given a command that raises them."""

    def fail(_: argparse.Namespace) -> int:
        raise error

    class Parser:
        def parse_args(self, _: Any) -> argparse.Namespace:
            return argparse.Namespace(run=fail)

    monkeypatch.setattr(cli, "build_parser", Parser)
    monkeypatch.setattr(cli.output, "log_to_stderr", lambda: None)
    monkeypatch.delenv("FRINK_DEBUG", raising=False)
    assert cli.main([]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith(f"frink-numba: error: {said}")
    assert shown.count("\n") == 1
