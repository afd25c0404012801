"""What would run where, and why not elsewhere (B4): an immutable, printable plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from frink_numba.registry import Unavailable


@dataclass(frozen=True, slots=True)
class PlanRow:
    """Layers first .. last with one verdict: the serving backend (None: nobody) and what the ones before it said."""

    first: int
    last: int
    backend: str | None
    note: str
    declined: tuple[tuple[str, str], ...]  # (backend, reason), in the order they were asked

    @property
    def layers(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"

    @property
    def why(self) -> str:
        return "; ".join(f"{name}: {reason}" for name, reason in self.declined)


@dataclass(frozen=True, slots=True)
class Memory:
    """What a backend's device will hold once a step has run, in bytes; a backend may say so (`memory`).

    weights: of the layers. edges: embedding, output matrix and the logits they make. scratch: what a run works in.
    kv_rows: of all positions so far. others: what other models and caches hold. budget: the most that all of these may
    take together. page_locked: host memory, of the cache's rows, from which the device copies. Code of kernels and what
    the driver needs itself are no part of it.
    """

    backend: str
    weights: int
    edges: int
    scratch: int
    kv_rows: int
    others: int
    budget: int
    page_locked: int

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return self.weights + self.edges + self.scratch + self.kv_rows + self.others

    def as_dict(self) -> dict[str, Any]:
        """In plain types, for JSON."""
        return {**asdict(self), "total": self.total}

    def __str__(self) -> str:
        parts = {"weights": self.weights, "embedding and output": self.edges, "scratch": self.scratch}
        parts |= {"K/V rows": self.kv_rows, "others": self.others}
        said = ", ".join(f"{name} {in_units(nbytes)}" for name, nbytes in parts.items() if nbytes)
        text = f"memory of {self.backend}: {in_units(self.total)} of {in_units(self.budget)} ({said})"
        return f"{text}, {in_units(self.page_locked)} page-locked on the host" if self.page_locked else text


@dataclass(frozen=True, slots=True)
class Plan:
    """Which backend serves which layers of a step of `batch` rows at `start_pos`, and what that takes."""

    batch: int
    start_pos: int
    rows: tuple[PlanRow, ...]
    unavailable: tuple[Unavailable, ...]
    memory: tuple[Memory, ...] = ()

    def backend_of(self, layer: int) -> str | None:
        """The backend that serves `layer`; None when nobody does. IndexError beyond the model."""
        for row in self.rows:
            if row.first <= layer <= row.last:
                return row.backend
        raise IndexError(f"layer {layer} is beyond the plan's last layer")

    def __str__(self) -> str:
        lines = [f"a step of {self.batch} rows from position {self.start_pos}:"]
        for row in self.rows:
            note = f" ({row.note})" if row.note else ""
            why = f"  not {row.why}" if row.declined else ""
            lines.append(f"  layers {row.layers}: {row.backend or 'NOBODY'}{note}{why}")
        lines += [f"  {entry}" for entry in self.memory]
        lines += [f"  unavailable: {entry.name}: {entry.reason}" for entry in self.unavailable]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """The plan in plain types, for JSON."""
        return {
            "batch": self.batch,
            "start_pos": self.start_pos,
            "runs": [
                {
                    "first": row.first,
                    "last": row.last,
                    "backend": row.backend,
                    "note": row.note,
                    "declined": [{"backend": name, "reason": reason} for name, reason in row.declined],
                }
                for row in self.rows
            ],
            "memory": [entry.as_dict() for entry in self.memory],
            "unavailable": [{"backend": entry.name, "reason": entry.reason} for entry in self.unavailable],
        }


@dataclass(slots=True)
class CacheAt:
    """A layer's cache at some position, to be asked about and never run: a `LayerCache` without rows."""

    n_kv_heads: int
    key_dim: int
    value_dim: int
    positions: int
    dtype: np.dtype[Any] = field(default_factory=lambda: np.dtype(np.float32))

    @property
    def rows(self) -> int:
        return self.positions

    def prefix(self) -> tuple[np.ndarray, np.ndarray]:
        """Of the right type, and empty."""
        widths = (self.key_dim, self.value_dim)
        k, v = (np.empty((0, self.n_kv_heads, width), self.dtype) for width in widths)
        return k, v


def in_units(nbytes: int, digits: int = 1) -> str:
    """Bytes for people: "1.5 GiB"."""
    size, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.{digits}f} {units[0]}"


def fold(rows: Iterable[PlanRow], cuts: frozenset[int]) -> tuple[PlanRow, ...]:
    """Join neighbours of equal verdict, except after the layers in `cuts`, where a run ends."""
    folded: list[PlanRow] = []
    for row in rows:
        last = folded[-1] if folded else None
        if last and last.last not in cuts and _verdict(last) == _verdict(row):
            folded[-1] = replace(last, last=row.last)
        else:
            folded.append(row)
    return tuple(folded)


def _verdict(row: PlanRow) -> tuple[str | None, str, tuple[tuple[str, str], ...]]:
    return row.backend, row.note, row.declined
