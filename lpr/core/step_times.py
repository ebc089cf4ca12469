"""t(n), the time of a decode step that evaluates n tokens: the base of every decision about a tree's size.

All ranks share rank 0's step times, in milliseconds, so that ranks with other clocks decide alike. They have a row per
measured batch size and cached length, and are linear between the rows and between the measured numbers of tokens.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lpr.config import InputError
from lpr.core.constants import KNOTS

SHORTEST_KV = 256  # cached tokens up to which attention counts as equally expensive
KV_GRAIN = 64  # cached lengths are rounded up to multiples of this
MOST_TOKENS = 1 << 20  # upper bound of `most_tokens`, reached if tokens cost nothing
SLACK = 1.5  # tolerance factor of the plausibility checks in `StepTimes.fault`

Key = tuple[int, int]  # batch size and cached length of a row


class StepTimes:
    """Step times. They never change: `StepTimesTracker` makes new ones from measured steps."""

    def __init__(self, rows: Mapping[Key, Sequence[float]]) -> None:
        """At least one row of times at `KNOTS`."""
        if not rows or any(len(row) != len(KNOTS) for row in rows.values()):
            raise ValueError(f"a cost table needs at least one row of {len(KNOTS)} times")
        self.rows = {key: _rising(row) for key, row in rows.items()}
        self._found: dict[Key, list[float]] = {}

    def row(self, batch: int, kv: int) -> list[float]:
        """Milliseconds at each of `KNOTS` for a batch of `batch` sequences with up to `kv` cached tokens."""
        key = batch, -(-max(kv, SHORTEST_KV) // KV_GRAIN) * KV_GRAIN
        found = self._found.get(key)
        if found is None:
            by_batch: dict[int, dict[int, Sequence[float]]] = {}
            for (size, length), row in self.rows.items():
                by_batch.setdefault(size, {})[length] = row
            lines = {size: _between(by_length, key[1]) for size, by_length in by_batch.items()}
            found = self._found[key] = _rising(_of_batch(lines, batch))
        return found

    def time(self, count: float, batch: int = 1, kv: int = SHORTEST_KV) -> float:
        """Milliseconds of a step that evaluates `count` tokens."""
        return interpolate(self.row(batch, kv), count)

    def longest(self, factor: float, batch: int = 1, kv: int = SHORTEST_KV) -> int:
        """The most tokens whose step takes at most `factor` times that of one token per sequence."""
        row = self.row(batch, kv)
        limit = factor * interpolate(row, batch)
        for low in range(len(KNOTS) - 1):
            if row[low + 1] > limit:
                part = max(0.0, limit - row[low]) / (row[low + 1] - row[low])
                return max(batch, int(KNOTS[low] + part * (KNOTS[low + 1] - KNOTS[low])))
        return KNOTS[-1]

    def most_tokens(self, milliseconds: float, batch: int = 1, kv: int = SHORTEST_KV) -> int:
        """The most tokens whose step takes at most `milliseconds`, at least 1; extrapolates beyond KNOTS."""
        row = self.row(batch, kv)
        fits = [knot for knot, ms in zip(KNOTS, row, strict=True) if ms <= milliseconds]
        if not fits:
            return 1
        low = min(len(fits), len(KNOTS) - 1) - 1
        slope = (row[low + 1] - row[low]) / (KNOTS[low + 1] - KNOTS[low])
        return MOST_TOKENS if slope <= 0 else min(MOST_TOKENS, int(KNOTS[low] + (milliseconds - row[low]) / slope))

    def cheap_tokens(self, part: float, batch: int = 1, kv: int = SHORTEST_KV) -> int:
        """The smallest of KNOTS at which the time per token exceeds that at the last knot by at most `part`."""
        row = self.row(batch, kv)
        limit = (1 + part) * row[-1] / KNOTS[-1]
        return next(count for count, ms in zip(KNOTS, row, strict=True) if ms <= limit * count)

    def critical_length(self, batch: int = 1, kv: int = SHORTEST_KV) -> int:
        """The *critical decoding length* (Zhao et al. 2024, section 4.1): the most tokens that cost little time.

        Their step takes at most 1.25 times one without drafts.
        """
        return self.longest(1.25, batch, kv)

    def fault(self) -> str | None:
        """A message if the measurement was disturbed: the times break a rule that true ones keep; else None.

        A step takes at most as long as several smaller steps with as many tokens in total. A batch takes at least as
        long as one sequence with as many tokens, and at most as long as its sequences one after the other.
        """
        for (batch, kv), row in self.rows.items():
            for fewer, count, before, ms in zip(KNOTS, KNOTS[1:], row, row[1:], strict=False):
                if ms > SLACK * -(-count // fewer) * before:
                    return f"{count} tokens take {ms:.3g} ms and {fewer} take {before:.3g}"
            alone, ms = self.row(1, kv), interpolate(row, batch)
            least, most = interpolate(alone, batch), batch * alone[0]
            if not least / SLACK <= ms <= SLACK * most:
                return f"{batch} sequences take {ms:.3g} ms, one {least:.3g} with as many tokens and {most:.3g} in turn"
        return None

    def differs(self, other: StepTimes, part: float) -> bool:
        """True if the shape of any row differs by more than `part`. A common factor does not count: it changes no
        decision."""
        for key, row in self.rows.items():
            their_row = other.row(*key)
            level = row[0] / their_row[0]
            if any(abs(mine - level * theirs) > part * mine for mine, theirs in zip(row, their_row, strict=True)):
                return True
        return False

    def to_json(self) -> dict[str, Any]:
        """The form that `from_json` reads: `{"nodes": [...], "rows": [{"batch": 1, "kv": 256, "ms": [...]}]}`."""
        rows = [
            {"batch": batch, "kv": kv, "ms": [round(ms, 4) for ms in row]} for (batch, kv), row in self.rows.items()
        ]
        return {"nodes": list(KNOTS), "rows": rows}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> StepTimes:
        """Step times from `to_json`, or from measurements at other numbers of nodes; raises ValueError."""
        try:
            nodes = [float(count) for count in record["nodes"]]
            rows = {(int(row["batch"]), int(row["kv"])): [float(ms) for ms in row["ms"]] for row in record["rows"]}
        except (KeyError, TypeError, IndexError) as failure:
            raise ValueError(f"not a table of step times: {type(failure).__name__} {failure}") from failure
        if not rows or len(nodes) < 2 or nodes != sorted(set(nodes)) or not 1 <= nodes[0] <= nodes[-1] < math.inf:
            raise ValueError("a table of step times needs two or more ascending numbers of nodes and a row")
        for (batch, kv), row in rows.items():
            if len(row) != len(nodes) or not all(0 < ms < math.inf for ms in row) or batch < 1 or kv < 0:
                raise ValueError("each row of step times needs a batch, cached tokens and a positive time per nodes")
        return cls({key: at_knots(nodes, row) for key, row in rows.items()})


# Times measured at the start have the right shape of t(n), but exclude the host's work and the gather, and the load of
# the machine changes. So log(actual / measured) is modelled as a drifting level plus a small deviation per knot that is
# correlated between neighbours: a Gaussian process, tracked by a Kalman filter. Sizes that were never used keep their
# measured ratio to the others. (With one moving average per knot the slope flattened within 500 steps, until trees of
# 40 nodes were estimated at half of their time: dev/LOG.md.)
LEVEL_SPREAD = 0.5  # standard deviation of the initial level; all values here are natural logarithms: 0.1 is about 10 %
LEVEL_DRIFT = 0.01  # standard deviation of the level's change per step
SHAPE_SPREAD = 0.2  # standard deviation of a knot's deviation
SHAPE_REACH = 4.0  # correlation length in knots: exp(-distance / reach)
STEP_NOISE = 0.1  # standard deviation of single steps
MOST_SURPRISE = 0.3  # limit of a step's innovation: a larger one is caused by other programs


class StepTimesTracker:
    """Follows the time of steps, per batch size (rounded up to powers of two)."""

    def __init__(self, measured: StepTimes) -> None:
        """A tracker that corrects the `measured` times."""
        self._measured = measured
        self._corrections: dict[int, _Correction] = {}

    def observe(self, count: int, batch: int, kv: int, milliseconds: float) -> None:
        """Count the time of a step that evaluated `count` tokens of `batch` sequences, after `kv` cached ones."""
        size = 1 << (max(batch, 1) - 1).bit_length()
        if size not in self._corrections:
            self._corrections[size] = _Correction(self._nearest(size).state[0] if self._corrections else 0.0)
        expected = interpolate(self._measured.row(batch, kv), count)
        self._corrections[size].observe(count, math.log(milliseconds / expected))

    def table(self) -> StepTimes:
        """The measured step times, corrected by the nearest batch size that was seen."""
        if not self._corrections:
            return self._measured
        rows = {}
        lengths = sorted({length for _, length in self._measured.rows})
        for size in sorted({size for size, _ in self._measured.rows} | self._corrections.keys()):
            state = self._nearest(size).state
            for length in lengths:
                rows[size, length] = (np.exp(state[0] + state[1:]) * self._measured.row(size, length)).tolist()
        return StepTimes(rows)

    def _nearest(self, size: int) -> _Correction:
        return self._corrections[min(self._corrections, key=lambda seen: abs(math.log2(seen / size)))]


class _Correction:
    """The Kalman filter of one batch size; `state` [1 + knots] is the level and each knot's deviation."""

    def __init__(self, level: float) -> None:
        places = np.arange(len(KNOTS))
        self.state = np.zeros(1 + len(KNOTS))
        self.state[0] = level
        self._covariance = np.zeros((1 + len(KNOTS), 1 + len(KNOTS)))
        self._covariance[0, 0] = LEVEL_SPREAD**2
        self._covariance[1:, 1:] = SHAPE_SPREAD**2 * np.exp(-abs(places[:, None] - places) / SHAPE_REACH)

    def observe(self, count: int, off: float) -> None:
        """Count a step of `count` tokens that took exp(`off`) times its measured time."""
        high = min(max(bisect_left(KNOTS, count), 1), len(KNOTS) - 1)
        near = min(max((count - KNOTS[high - 1]) / (KNOTS[high] - KNOTS[high - 1]), 0.0), 1.0)
        state, covariance = self.state, self._covariance
        covariance[0, 0] += LEVEL_DRIFT**2
        shared = covariance[0] + (1.0 - near) * covariance[high] + near * covariance[1 + high]
        variance = shared[0] + (1.0 - near) * shared[high] + near * shared[1 + high] + STEP_NOISE**2
        surprise = off - (state[0] + (1.0 - near) * state[high] + near * state[1 + high])
        gain = shared / variance
        state += gain * min(max(surprise, -MOST_SURPRISE), MOST_SURPRISE)
        covariance -= np.outer(gain, shared)


def at_knots(nodes: Sequence[float], milliseconds: Sequence[float]) -> list[float]:
    """A row from times measured at other numbers of nodes, two or more in ascending order.

    Beyond the last number, the slope is that of the last doubling: the slope of the last two measurements could be 0 by
    noise, and all larger trees would be free.
    """
    rising = _rising(milliseconds)
    last = nodes[-1]
    half = max(nodes[0], last / 2)
    slope = (rising[-1] - interpolate(rising, half, nodes)) / (last - half)
    return [interpolate(rising, knot, nodes) if knot <= last else rising[-1] + slope * (knot - last) for knot in KNOTS]


def interpolate(row: Sequence[float], count: float, knots: Sequence[float] = KNOTS) -> float:
    """The time of `count` tokens by a row of times at `knots`, linear between them and beyond the last."""
    if count <= knots[0] or len(knots) == 1:
        return row[0]
    high = min(max(bisect_left(knots, count), 1), len(knots) - 1)
    low = high - 1
    slope = (row[high] - row[low]) / (knots[high] - knots[low])
    return row[low] + slope * (count - knots[low])


def times_at(counts: np.ndarray, row: Sequence[float] | np.ndarray) -> np.ndarray:
    """`interpolate` for many numbers of tokens, by a row of times at `KNOTS`."""
    return np.interp(counts, KNOTS, row) + np.maximum(counts - KNOTS[-1], 0) * last_slope(row)


def least_slopes(counts: np.ndarray, row: Sequence[float] | np.ndarray) -> np.ndarray:
    """Per number of `counts`: the least average cost of further tokens, over all numbers of them.

    t(n) is linear between knots, so the minimum is at a knot, or far beyond the last one.
    """
    ahead = np.array(KNOTS) - counts[:, None]
    slopes = np.where(ahead > 1e-9, (row - times_at(counts, row)[:, None]) / np.maximum(ahead, 1e-9), np.inf)
    return np.minimum(slopes.min(1), last_slope(row))


def last_slope(row: Sequence[float] | np.ndarray) -> float:
    """Milliseconds per token beyond the last of `KNOTS`."""
    return (row[-1] - row[-2]) / (KNOTS[-1] - KNOTS[-2])


def read_step_times(values: Any, name: str) -> StepTimes:
    """Step times from the JSON that `StepTimes.to_json` makes; raises InputError that begins with `name`."""
    try:
        return StepTimes.from_json(values)
    except ValueError as failure:
        raise InputError(f"{name}: {failure}") from failure


def _rising(row: Sequence[float]) -> list[float]:
    """The row made non-decreasing: a time above that of a larger number of tokens is noise and is lowered."""
    rising, lowest = [], math.inf
    for ms in reversed(row):
        lowest = min(lowest, ms)
        rising.append(lowest)
    return rising[::-1]


def _of_batch(rows: Mapping[int, Sequence[float]], batch: int) -> Sequence[float]:
    """The row of a batch size, interpolated between those of `rows` or extrapolated.

    The cost of one more sequence does not depend on the number of tokens, so beyond the largest batch all times rise by
    the same amount. Extrapolating each time separately would amplify measurement noise.
    """
    fewest, most = min(rows), max(rows)
    if batch <= most or fewest == most:
        return _between(rows, batch)
    apart = [up - low for knot, low, up in zip(KNOTS, rows[fewest], rows[most], strict=True) if knot >= most]
    each = max(0.0, statistics.median(apart or [rows[most][-1] - rows[fewest][-1]])) / (most - fewest)
    return [ms + (batch - most) * each for ms in rows[most]]


def _between(rows: Mapping[int, Sequence[float]], at: int) -> Sequence[float]:
    """The row at `at`, interpolated between those of `rows` or extrapolated, with times that do not fall."""
    places = sorted(rows)
    if len(places) == 1 or at <= places[0]:
        return rows[places[0]]
    high = min(max(bisect_left(places, at), 1), len(places) - 1)
    before, after = places[high - 1], places[high]
    part = (at - before) / (after - before)
    return [low + part * max(0.0, up - low) for low, up in zip(rows[before], rows[after], strict=True)]
