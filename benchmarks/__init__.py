"""Benchmarks, and what renders their receipts."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECEIPTS = ROOT / "benchmarks" / "receipts"
