"""Streamed text that ends at a stop string, which is never shown, not even the start of one."""

from __future__ import annotations

from collections.abc import Collection

from frink_numba.errors import SettingError
from frink_numba.host.integers import shown


class StopText:
    """Passes text on, but holds back what may be the start of one of the stop strings.

    `found` is the stop string that ended the text, the one that is complete first; None before that. So the answer does
    not depend on how the text is cut into pushes.
    """

    def __init__(self, stops: Collection[str]) -> None:
        if isinstance(stops, str) or not isinstance(stops, Collection):
            raise SettingError(f"stop={shown(stops)}: expected a list of strings")
        if not all(isinstance(stop, str) and stop for stop in stops):
            raise SettingError(f"stop={shown(stops)}: expected a list of strings, none of them empty")
        self.stops = tuple(stops)
        self.found: str | None = None
        self._held = ""

    def push(self, text: str) -> str:
        """The part of all text so far that can be shown now and was not before."""
        if self.found is not None:
            return ""
        self._held += text
        places = [(place + len(stop), place, stop) for stop in self.stops if (place := self._held.find(stop)) >= 0]
        if places:
            _, place, self.found = min(places)
            shown, self._held = self._held[:place], ""
            return shown
        return self._release(self._held_back())

    def flush(self) -> str:
        """The text that is still held back, when nothing follows any more."""
        return self._release(0)

    def _release(self, keep: int) -> str:
        at = len(self._held) - keep
        shown, self._held = self._held[:at], self._held[at:]
        return shown

    def _held_back(self) -> int:
        """How many of the last characters may be the start of a stop string."""
        longest = 0
        for stop in self.stops:
            for length in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
        return longest
