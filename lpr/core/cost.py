"""t(n): how long a decode step takes that evaluates n tokens; what every decision about a tree's size rests on.

One table, in milliseconds, that all ranks share: it is rank 0's, so that ranks with other clocks still decide alike. It
has a row per batch size and cached length, both in powers of two, measured or, until a step of that kind has run,
taken over from the nearest row. Between the measured numbers of tokens it is linear. The knee of such a row is the
*critical decoding length* of Zhao et al. 2024, section 4.1.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

KNOTS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Numbers of evaluated tokens, per rank, that a row has times for."""
SHORTEST_KV = 256
"""Cached lengths up to this share a row."""
BLEND = 0.1
"""Weight of a step's time in the moving average of its row."""
FORGET = 0.98
"""Per step elsewhere, what is left of a knot's own evidence."""

Key = tuple[int, int]
"""Batch size and cached length of a row, rounded up to powers of two."""


class StepCost:
    """A table of step times; `time` reads it and `observe` keeps it current."""

    def __init__(self, rows: Mapping[Key, Sequence[float]], fixed: bool = False) -> None:
        """A table of at least one row of times at `KNOTS`; a `fixed` one is not changed by what is observed."""
        if not rows or any(len(row) != len(KNOTS) for row in rows.values()):
            raise ValueError(f"a cost table needs at least one row of {len(KNOTS)} times")
        self.fixed = fixed
        self._rows = {key: _rising(row) for key, row in rows.items()}
        self._seen: dict[Key, list[float]] = {}
        """Per row and knot, how many steps have shown its time, older ones for less."""

    def row(self, batch: int, kv: int) -> list[float]:
        """Milliseconds at each of `KNOTS` for a batch of `batch` sequences with up to `kv` cached tokens."""
        key = key_of(batch, kv)
        found = self._rows.get(key)
        if found is None:
            found = self._rows[key] = list(self._rows[min(self._rows, key=lambda known: _distance(known, key))])
        return found

    def time(self, count: float, batch: int = 1, kv: int = SHORTEST_KV) -> float:
        """Milliseconds of a step that evaluates `count` tokens."""
        return interpolate(self.row(batch, kv), count)

    def observe(self, count: int, batch: int, kv: int, milliseconds: float) -> None:
        """Take in the time of one step.

        The knots that enclose `count` move towards it, the nearer one more, so that their slope is learnt as well (the
        normalised least mean squares rule). What moves them (the host's work, the gather, another load of
        the machine) moves the others too, in so far as no step has shown of late what they take: a late step adds its
        delay, an early one takes off in proportion. A step that is far off moves them by a bounded part.
        """
        if self.fixed:
            return
        row = self.row(batch, kv)
        seen = self._seen.setdefault(key_of(batch, kv), [0.0] * len(KNOTS))
        expected = interpolate(row, count)
        part = BLEND * min(max(milliseconds / expected - 1, -0.5), 0.5)
        high = min(max(bisect_left(KNOTS, count), 1), len(KNOTS) - 1)
        near = min(max((count - KNOTS[high - 1]) / (KNOTS[high] - KNOTS[high - 1]), 0.0), 1.0)
        weights = {high - 1: 1.0 - near, high: near}
        total = near * near + (1.0 - near) * (1.0 - near)
        for index, ms in enumerate(row):
            change = part * (expected if part > 0 else ms)
            weight = weights.get(index, 0.0)
            if weight:
                seen[index] += weight
                row[index] += part * expected * weight / total
            else:
                row[index] += change / (1.0 + seen[index])
                seen[index] *= FORGET
        row[:] = _rising(row)

    def longest(self, factor: float, most: int) -> int:
        """The largest knot, at most `most`, whose step takes no longer than `factor` times that of one token."""
        row = self.row(1, SHORTEST_KV)
        fitting = [knot for knot, ms in zip(KNOTS, row, strict=True) if knot <= most and ms <= factor * row[0]]
        return fitting[-1] if fitting else 1

    def differs(self, other: StepCost, part: float) -> bool:
        """Is any time of this table further than `part` of it from the other's?"""
        for key, row in self._rows.items():
            for mine, theirs in zip(row, other.row(*key), strict=True):
                if abs(mine - theirs) > part * mine:
                    return True
        return False

    def to_json(self) -> dict[str, Any]:
        """What `from_json` reads: `{"nodes": [...], "rows": [{"batch": 1, "kv": 256, "ms": [...]}]}`."""
        rows = [
            {"batch": batch, "kv": kv, "ms": [round(ms, 4) for ms in row]} for (batch, kv), row in self._rows.items()
        ]
        return {"nodes": list(KNOTS), "rows": rows}

    @classmethod
    def from_json(cls, record: Mapping[str, Any], fixed: bool = False) -> StepCost:
        """A table from `to_json`, or from measurements at other numbers of nodes; raises ValueError."""
        try:
            nodes = [float(count) for count in record["nodes"]]
            rows = {key_of(row["batch"], row["kv"]): [float(ms) for ms in row["ms"]] for row in record["rows"]}
        except (KeyError, TypeError, IndexError) as failure:
            raise ValueError(f"not a table of step times: {type(failure).__name__} {failure}") from failure
        if not rows or len(nodes) < 2 or nodes != sorted(set(nodes)) or nodes[0] < 1:
            raise ValueError("a table of step times needs two or more ascending numbers of nodes and a row")
        for row in rows.values():
            if len(row) != len(nodes) or min(row) <= 0:
                raise ValueError("each row of step times needs one positive time per number of nodes")
        return cls({key: at_knots(nodes, row) for key, row in rows.items()}, fixed)

    def copy(self) -> StepCost:
        """A table that changes on its own."""
        return StepCost.from_json(json.loads(json.dumps(self.to_json())), self.fixed)


def key_of(batch: int, kv: int) -> Key:
    """The row that a step belongs to."""
    return 1 << (max(batch, 1) - 1).bit_length(), 1 << (max(kv, SHORTEST_KV) - 1).bit_length()


def at_knots(nodes: Sequence[float], milliseconds: Sequence[float]) -> list[float]:
    """A row from times that were measured at other numbers of nodes, two or more in ascending order."""
    rising = _rising(milliseconds)
    return [interpolate(rising, knot, nodes) for knot in KNOTS]


def interpolate(row: Sequence[float], count: float, knots: Sequence[float] = KNOTS) -> float:
    """The time of `count` tokens by a row of times at `knots`, linear between them and beyond the last."""
    high = min(max(bisect_left(knots, count), 1), len(knots) - 1)
    low = high - 1
    slope = (row[high] - row[low]) / (knots[high] - knots[low])
    if count <= knots[0]:
        return row[0]
    return row[low] + slope * (count - knots[low])


def _rising(row: Sequence[float]) -> list[float]:
    """More tokens never take less time: where a row says so, it was late on the smaller number, so that comes down."""
    rising, lowest = [], math.inf
    for ms in reversed(row):
        lowest = min(lowest, ms)
        rising.append(lowest)
    return rising[::-1]


def _distance(one: Key, other: Key) -> int:
    """In doublings; a batch counts more than a cached length, and of two lengths equally near the longer is nearer."""
    batch = abs(one[0].bit_length() - other[0].bit_length())
    length = one[1].bit_length() - other[1].bit_length()
    return 8 * batch + 2 * abs(length) + (length < 0)
