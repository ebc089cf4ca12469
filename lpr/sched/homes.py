"""Home ranks: which ranks serve which request, from all of them for one request to one rank for each of many.

Pure: no tensor, no clock, no world. Every rank chooses by the same replicated facts, so all choose the same homes.

Each request has a *base* rank, one of those that serve it already, and bases are spread evenly. So where requests are
as many as ranks or more, no work is done twice: that is plain data parallelism. A rank that is no request's base is
spare, and joins the request that gains most by it, those first that are slower than promised: with a single request
all ranks work on its tree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

WORTH_JOINING, WORTH_STAYING = 1.03, 1.01
"""A spare rank joins a request that it speeds up by at least the first factor, and stays down to the second. The second
also holds for a request that is about to begin, whose prompt it can fill while others do."""
WORTH_LEAVING = 1.1  # it leaves a request for one that it would speed up by this factor more
FILLS_PER_TOKEN = 32
"""A rank computes up to so many tokens of a request that it joins for each token that the request may still emit."""
FIRST_YIELD, FIRST_STEPS = 0.35, 8.0
"""Tokens a step gained by each doubling of a tree before any step: a prior that weighs as much as so many steps."""


class Seen(Protocol):
    """Counts of a request's decode steps so far."""

    @property
    def num_steps(self) -> int:
        """Decode steps."""

    @property
    def num_fill_steps(self) -> int:
        """Steps that computed a part of its prompt."""

    @property
    def num_tokens(self) -> int:
        """Tokens emitted."""

    @property
    def num_nodes(self) -> int:
        """Tree nodes evaluated, roots included."""


@dataclass(frozen=True)
class Candidate:
    """What the choice of its home ranks needs of a request."""

    serving: Sequence[int]  # ranks that serve it now, ascending; none if it is about to be admitted
    lacking: Callable[[int], int]  # tokens that a rank would have to compute before it could serve it
    num_left: int  # most tokens that it may still emit
    speedup: Callable[[int], float] = lambda width: math.inf
    """Factor by which one more rank than `width` speeds it up."""
    is_late: Callable[[int], bool] = lambda width: False  # True if it is slower than promised on `width` ranks


def choose(requests: Sequence[Candidate], num_ranks: int, most: int) -> list[list[int]]:
    """The home ranks that each request should have, ascending; no request gets more than `most`."""
    bases = base_ranks(requests, num_ranks)
    homes = [[rank] for rank in bases]
    spare = [rank for rank in range(num_ranks) if rank not in bases]
    while spare and (found := _widen(requests, homes, spare, most)) is not None:
        index, rank = found
        homes[index].append(rank)
        spare.remove(rank)
    return [sorted(each) for each in homes]


def base_ranks(requests: Sequence[Candidate], num_ranks: int) -> list[int]:
    """One rank per request, spread evenly over the ranks as far as moving pays; a request stays where it is if it can.

    Requests with the fewest ranks to choose from come first; new ones go where there is room then.
    """
    loads = [0] * num_ranks
    bases = [-1] * len(requests)
    order = sorted(range(len(requests)), key=lambda index: (not requests[index].serving, len(requests[index].serving)))
    for index in order:
        request = requests[index]
        rank = min(request.serving or _preferred(request, loads), key=lambda rank: (loads[rank], rank))
        bases[index] = rank
        loads[rank] += 1
    for _ in requests:
        if (move := _balance(requests, bases, loads)) is None:
            break
        index, rank = move
        loads[bases[index]] -= 1
        loads[rank] += 1
        bases[index] = rank
    return bases


def _preferred(request: Candidate, loads: Sequence[int]) -> list[int]:
    """The ranks that a new request may go to: the least busy ones that lack least, or one more busy that lacks half.

    `_balance` evens out what is more uneven than that.
    """
    least = min(loads)
    lacking = {rank: request.lacking(rank) for rank, load in enumerate(loads) if load <= least + 1}
    fewest_idle = min(count for rank, count in lacking.items() if loads[rank] == least)
    fewest = min(lacking.values())
    limit, most = (fewest, least + 1) if 2 * fewest < fewest_idle else (fewest_idle, least)
    return [rank for rank, count in lacking.items() if count <= limit and loads[rank] <= most]


def _balance(requests: Sequence[Candidate], bases: Sequence[int], loads: Sequence[int]) -> tuple[int, int] | None:
    """A request to move and its new rank, if some rank has two more than another and one of them is worth moving."""
    to = loads.index(min(loads))
    crowded = [index for index, rank in enumerate(bases) if loads[rank] - loads[to] >= 2]
    movable = [index for index in crowded if is_worth_filling(requests[index], to)]
    if not movable:
        return None
    return min(movable, key=lambda index: (-loads[bases[index]], requests[index].lacking(to), -index)), to


def is_worth_filling(request: Candidate, rank: int) -> bool:
    """True if a rank that joins would still serve the request for long enough."""
    return request.lacking(rank) <= FILLS_PER_TOKEN * request.num_left


def _widen(
    requests: Sequence[Candidate], homes: Sequence[Sequence[int]], spare: Sequence[int], most: int
) -> tuple[int, int] | None:
    """The request that gains most by one more rank, and the rank of `spare` that suits it best; None if none gains."""
    gains: list[tuple[tuple[bool, float, int, bool], tuple[int, int]]] = []
    for index, request in enumerate(requests):
        width = len(homes[index])
        gain = request.speedup(width) if width < most else 0.0
        here = [rank for rank in spare if rank in request.serving]
        if gain < (WORTH_STAYING if here or not request.serving else WORTH_JOINING):
            continue
        rank = here[0] if here else min(spare, key=lambda rank: (request.lacking(rank), rank))
        if not here and request.serving and not is_worth_filling(request, rank):
            continue
        value = request.is_late(width), gain * (WORTH_LEAVING if here else 1.0), -width, bool(here)
        gains.append((value, (index, rank)))
    return max(gains, key=lambda each: each[0])[1] if gains else None


def speedup(width: int, time: Callable[[float], float], nodes_per_rank: int, seen: Seen) -> float:
    """Expected factor by which one more rank than `width` speeds a request up: a rough guess, by the log of nodes.

    `time(n)` is that of a step in which a rank evaluates n tokens, up to `nodes_per_rank`. Every doubling of a tree is
    assumed to gain the same number of tokens (measured so for the Jacobi window, recycled candidates and the suffix
    index).
    """
    gain = yield_of(seen)
    return rate(width + 1, time, nodes_per_rank, gain) / rate(width, time, nodes_per_rank, gain)


def yield_of(seen: Seen) -> float:
    """Tokens a step gained by each doubling of a request's trees, from its steps so far."""
    if not seen.num_steps:
        return FIRST_YIELD
    doublings = math.log2(max(2.0, seen.num_nodes / seen.num_steps))
    gained = max(0.0, seen.num_tokens / seen.num_steps - 1.0) / doublings
    return (FIRST_STEPS * FIRST_YIELD + seen.num_steps * gained) / (FIRST_STEPS + seen.num_steps)


def rate(width: int, time: Callable[[float], float], nodes_per_rank: int, gain: float, batch: int = 1) -> float:
    """Most tokens per millisecond of a request that `width` ranks serve, with `batch` such requests on each of them.

    `gain` is the tokens a step that each doubling of its tree gains.
    """
    best, nodes = 0.0, 1
    while nodes <= max(1, nodes_per_rank * width):
        tokens = 1.0 + gain * math.log2(nodes)
        # What other ranks accepted comes with the next pending chain, and a shard needs its nodes' ancestors.
        again = 2.0 * tokens * (width - 1) / width if nodes > 1 else 0.0
        best = max(best, tokens / time(batch * (max(1.0, nodes / width) + again)))
        nodes *= 2
    return best
