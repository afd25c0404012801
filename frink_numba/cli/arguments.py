"""Arguments that several commands share, and how their values are read."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="a .gguf file, a fetched name (smollm2-135m) or hf:OWNER/REPO/FILE.gguf"
    )


def engine(parser: argparse.ArgumentParser) -> None:
    """The model and how it runs."""
    model(parser)
    parser.add_argument(
        "--backend",
        metavar="NAMES",
        help="backends in order, as FRINK_BACKEND: auto, host, cuda, cuda:N, a registered name, or a comma list",
    )
    parser.add_argument(
        "--context", type=at_least(1), metavar="N", help="context length in tokens (default: the model's)"
    )
    parser.add_argument(
        "--adapter",
        dest="adapters",
        action="append",
        default=[],
        type=adapter,
        metavar="FILE[=SCALE]",
        help="a LoRA adapter in GGUF form, times SCALE (1); may be given several times",
    )


def adapter(text: str) -> tuple[str, float]:
    """Reads "lora.gguf" or "lora.gguf=0.5"; a name with a "=" that no number follows is a name."""
    path, _, scale = text.rpartition("=")
    try:
        return (path, float(scale)) if path else (text, 1.0)
    except ValueError:
        return text, 1.0


def at_least(low: int) -> Callable[[str], int]:
    """Reads an integer from `low` up."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected an integer, got {text!r}") from None
        if value < low:
            raise argparse.ArgumentTypeError(f"expected at least {low}, got {value}")
        return value

    return read


def within(low: float, high: float = math.inf, *, above: bool = False) -> Callable[[str], float]:
    """Reads a number from `low` to `high`; `above` leaves `low` itself out."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected a number, got {text!r}") from None
        if not (low < value if above else low <= value) or not value <= high or math.isinf(value):
            start = f"above {low:g}" if above else f"from {low:g}"
            end = "up" if math.isinf(high) else f"to {high:g}"
            raise argparse.ArgumentTypeError(f"expected a number {start} {end}, got {text}")
        return value

    return read


def counts(text: str) -> list[int]:
    """Reads a comma list of integers from 0 up, such as "512,1024"; "0" or "" for none."""
    return [value for value in map(at_least(0), text.split(",")) if value] if text.strip() else []
