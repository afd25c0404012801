"""Benchmarks that time kernels through torch: its buffers, graphs and events, and cuBLAS beside them."""

from __future__ import annotations

import argparse
import importlib.util


def need_torch(parser: argparse.ArgumentParser) -> None:
    """End the command with what is missing: torch, or a GPU that it sees."""
    if importlib.util.find_spec("torch") is None:
        parser.error("this benchmark times kernels through torch, which is not installed: pip install torch")
    import torch

    if not torch.cuda.is_available():
        parser.error("torch sees no GPU on this machine: run the benchmark where there is one")
