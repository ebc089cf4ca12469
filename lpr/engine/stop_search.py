"""Incremental search for stop strings."""

from __future__ import annotations

from collections.abc import Sequence


class StopSearch:
    """Finds the first of several strings in a growing text; reads each character once (Knuth-Morris-Pratt)."""

    def __init__(self, stops: Sequence[str]) -> None:
        """Search for `stops`, none of them empty."""
        self._stops = tuple(dict.fromkeys(stops))
        self._borders = [[0] for _ in self._stops]  # failure tables, computed as far as needed
        self._matched = [0] * len(self._stops)  # per stop, its longest prefix that ends the text
        self._ahead: tuple[str, list[int]] = ("", self._matched)
        """Pending text that was searched, and `_matched` after it."""

    @property
    def num_possible(self) -> int:
        """Length of the longest suffix of the text that is a proper prefix of a stop string."""
        return max(self._matched, default=0)

    def find(self, final: str, pending: str) -> tuple[int, str] | None:
        """Read `final`, and search the following `pending`, which may change later.

        Returns the start of the first stop, relative to `final` and possibly negative, and the stop; None without one.
        """
        found: list[tuple[int, int]] = []
        if final:
            self._matched = self._read(final, self._matched, 0, found)
            self._ahead = ("", self._matched)
        if pending and len(found) < len(self._stops):
            known, matched = self._ahead if pending.startswith(self._ahead[0]) else ("", self._matched)
            matched = self._read(pending[len(known) :], matched, len(final) + len(known), found)
            self._ahead = (pending, matched)
        if not found:
            return None
        start, number = min(found)
        return start, self._stops[number]

    def _read(self, text: str, before: list[int], offset: int, found: list[tuple[int, int]]) -> list[int]:
        """Read `text`, which starts at `offset`, and add the first occurrence of each stop to `found`.

        Returns the new `_matched`.
        """
        after = []
        for number, stop in enumerate(self._stops):
            matched, end = _match(stop, self._borders[number], before[number], text)
            if end:
                found.append((offset + end - len(stop), number))
            after.append(matched)
        return after


def _match(stop: str, borders: list[int], matched: int, text: str) -> tuple[int, int]:
    """Read `text` after the first `matched` characters of `stop`; returns the number matched at its end.

    The second value is the end of the first occurrence in `text`, 0 without one. `borders` grows as needed: per prefix
    of `stop`, the length of its longest proper prefix that is also its suffix.
    """
    at = 0
    while at < len(text):
        if not matched:
            at = text.find(stop[0], at)
            if at < 0:
                return 0, 0
        while matched and stop[matched] != text[at]:
            matched = borders[matched - 1]
        matched += stop[matched] == text[at]
        at += 1
        if matched == len(stop):
            return 0, at
        if matched > len(borders):  # grows by one
            border = borders[-1]
            while border and stop[border] != stop[matched - 1]:
                border = borders[border - 1]
            borders.append(border + (stop[border] == stop[matched - 1]))
    return matched, 0
