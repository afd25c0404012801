"""Runs llama-bench of llama.cpp on the same file and lengths, and reads what it measured.

Its options and fields as of build 11434: -m, -p, -n, -r, -ngl and -o json, which prints a list of objects to stdout,
one a test, with n_prompt, n_gen and samples_ts (tokens per second of each repetition).
"""

from __future__ import annotations

import json
import shlex
import shutil
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frink_numba.errors import FrinkError

_SHOWN = 300  # characters of what a failing program said


@dataclass(frozen=True, slots=True)
class Compared:
    """`name` for figures: "llama.cpp 11434 (CUDA)". rates: median tokens per second by test: "pp512", "tg128"."""

    name: str
    rates: dict[str, float]


def find(command: str) -> list[str]:
    """The program and its arguments of `command`, such as "llama-bench -fa 1". FrinkError when it is not there."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise FrinkError(f"--compare {command!r} cannot be read: {error}") from None
    if not words:
        raise FrinkError("--compare needs a program, such as llama-bench")
    program = shutil.which(words[0])
    if program is None:
        raise FrinkError(
            f"--compare: {words[0]} is not on the PATH; build llama.cpp and add its bin folder, or give a path"
        )
    return [program, *words[1:]]


def run(
    program: Sequence[str], model: Path, prompts: Sequence[int], generated: Sequence[int], repetitions: int, gpu: bool
) -> Compared:
    """Measure `model` with the program that `find` found. FrinkError says how it failed.

    gpu: with all layers on its GPU, if it has one; else without any of them. Words of the program come last and count.
    """
    command = [program[0], "-m", str(model), "-r", str(repetitions), "-o", "json"]
    for option, numbers in (("-p", prompts), ("-n", generated)):  # 0: none, where it would take a length of its own
        command += [option, ",".join(map(str, numbers)) or "0"]
    command += ["-ngl", "99" if gpu else "0", *program[1:]]
    shown = shlex.join(command)
    try:
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, check=False)
    except OSError as error:
        raise FrinkError(f"{program[0]} cannot be started: {error.strerror or error}") from None
    said = done.stderr.decode("utf-8", "replace").strip()
    if done.returncode:
        how = f"was ended by signal {-done.returncode}" if done.returncode < 0 else f"failed with {done.returncode}"
        raise FrinkError(f"{shown} {how}: {said[-_SHOWN:] or 'it said nothing'}")
    try:
        return _read(json.loads(done.stdout), [*(f"pp{n}" for n in prompts), *(f"tg{n}" for n in generated)])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        text = done.stdout.decode("utf-8", "replace").strip()[:_SHOWN]
        raise FrinkError(f"{shown} answered what is not llama-bench's JSON ({error}): {text or 'nothing'}") from None


def _read(document: Any, tests: Sequence[str]) -> Compared:
    rates: dict[str, float] = {}
    for entry in document:
        prompt, made = int(entry["n_prompt"]), int(entry["n_gen"])
        if int(entry.get("n_depth", 0)) or (prompt and made):
            continue
        samples = [float(sample) for sample in entry.get("samples_ts") or [entry["avg_ts"]]]
        rates[f"pp{prompt}" if prompt else f"tg{made}"] = statistics.median(samples)
    missing = [test for test in tests if not rates.get(test, 0) > 0]
    if missing:
        raise ValueError(f"no figure for {', '.join(missing)}")
    first = document[0]
    where = first.get("backends") or ("CUDA" if first.get("cuda") else "CPU")
    return Compared(f"llama.cpp {first.get('build_number') or first.get('build_commit', '?')} ({where})", rates)
