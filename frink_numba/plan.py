"""What would run where, and why not elsewhere (B4): an immutable, printable plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

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
class Plan:
    """Which backend serves which layers of a step of `batch` rows at `start_pos`."""

    batch: int
    start_pos: int
    rows: tuple[PlanRow, ...]
    unavailable: tuple[Unavailable, ...]

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
            "unavailable": [{"backend": entry.name, "reason": entry.reason} for entry in self.unavailable],
        }


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
