"""Benchmarks that time kernels through torch: its buffers, graphs and events, and cuBLAS beside them."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from typing import Any


def need_torch(parser: argparse.ArgumentParser) -> None:
    """End the command with what is missing: torch, or a GPU that it sees."""
    if importlib.util.find_spec("torch") is None:
        parser.error("this benchmark times kernels through torch, which is not installed: pip install torch")
    import torch

    if not torch.cuda.is_available():
        parser.error("torch sees no GPU on this machine: run the benchmark where there is one")


def timed(run: Callable[[], Any]) -> float:
    """Seconds that the device takes for what `run` queues, by events; they have passed when this returns."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    seconds: float = start.elapsed_time(end) / 1e3
    return seconds
