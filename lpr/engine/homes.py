"""Home ranks: which ranks serve which request, from all of them for one request to one rank for each of many.

Pure: no tensor, no clock, no world. Every rank chooses by the same replicated facts and comes to the same homes.

A request has an *anchor*, one rank among those that serve it already, and anchors are spread evenly. So nobody works
twice where requests are as many as ranks or more: that is plain data parallelism. Ranks that are nobody's anchor are
spare, and each widens the request that gains most by it, those first that are slower than promised: with a single
request all ranks work on its tree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

WORTH_JOINING, WORTH_STAYING = 1.03, 1.01
"""A spare rank joins a request that it speeds up by at least the first factor, and stays down to the second, as it does
with one that is about to begin, whose prompt it can fill while others do."""
WORTH_LEAVING = 1.1
"""It leaves a request for one that it would speed up by this factor more."""
FILLS_PER_TOKEN = 32
"""A rank computes up to so many tokens of a request that it joins for each token that the request may still emit."""
FIRST_YIELD, FIRST_STEPS = 0.35, 8.0
"""Tokens a step that each doubling of a tree earns, before steps have told: believed like so many steps."""


@dataclass(frozen=True)
class Candidate:
    """A request as the choice of its home ranks sees it."""

    serving: Sequence[int]
    """Ranks that serve it now, ascending; none if it is about to be admitted."""
    lacking: Callable[[int], int]
    """Tokens that a rank would have to compute before it could serve it."""
    num_left: int
    """Most tokens that it may still emit."""
    speedup: Callable[[int], float] = lambda width: math.inf
    """By what factor a further rank speeds it up that has so many."""
    is_late: Callable[[int], bool] = lambda width: False
    """Is it slower than promised with so many?"""


def choose(requests: Sequence[Candidate], num_ranks: int, most: int) -> list[list[int]]:
    """The home ranks that each request should have, ascending; no request gets more than `most`."""
    anchors = anchor(requests, num_ranks)
    homes = [[rank] for rank in anchors]
    spare = [rank for rank in range(num_ranks) if rank not in anchors]
    while spare:
        index, rank = _widen(requests, homes, spare, most)
        if index is None:
            break
        homes[index].append(rank)
        spare.remove(rank)
    return [sorted(each) for each in homes]


def anchor(requests: Sequence[Candidate], num_ranks: int) -> list[int]:
    """One rank per request, spread evenly over the ranks as far as moving pays; where a request is, it rather stays."""
    loads = [0] * num_ranks
    anchors = [-1] * len(requests)
    # Those with the fewest ranks to choose from come first; what is new goes where there is room then.
    order = sorted(range(len(requests)), key=lambda index: (not requests[index].serving, len(requests[index].serving)))
    for index in order:
        request = requests[index]
        if request.serving:
            rank = min(request.serving, key=lambda rank: (loads[rank], rank))
        else:
            rank = min(_preferred(request, loads), key=lambda rank: (loads[rank], rank))
        anchors[index] = rank
        loads[rank] += 1
    for _ in requests:
        move = _balance(requests, anchors, loads)
        if move is None:
            break
        index, rank = move
        loads[anchors[index]] -= 1
        loads[rank] += 1
        anchors[index] = rank
    return anchors


def _preferred(request: Candidate, loads: Sequence[int]) -> list[int]:
    """The ranks that a new request may go to: those with least to do that lack least, or one more busy that lacks half.

    What is more uneven than that is evened out afterwards.
    """
    least = min(loads)
    lacking = {rank: request.lacking(rank) for rank, load in enumerate(loads) if load <= least + 1}
    fewest_idle = min(count for rank, count in lacking.items() if loads[rank] == least)
    fewest = min(lacking.values())
    limit, most = (fewest, least + 1) if 2 * fewest < fewest_idle else (fewest_idle, least)
    return [rank for rank, count in lacking.items() if count <= limit and loads[rank] <= most]


def _balance(requests: Sequence[Candidate], anchors: Sequence[int], loads: Sequence[int]) -> tuple[int, int] | None:
    """A request to move and where to, if some rank has two more than another and one of them is worth moving."""
    to = loads.index(min(loads))
    movable = [
        index
        for index, rank in enumerate(anchors)
        if loads[rank] - loads[to] >= 2 and is_worth_filling(requests[index], to)
    ]
    if not movable:
        return None
    return min(movable, key=lambda index: (-loads[anchors[index]], requests[index].lacking(to), -index)), to


def is_worth_filling(request: Candidate, rank: int) -> bool:
    """Would a rank that joins still serve the request for long enough?"""
    return request.lacking(rank) <= FILLS_PER_TOKEN * request.num_left


def _widen(
    requests: Sequence[Candidate], homes: Sequence[Sequence[int]], spare: Sequence[int], most: int
) -> tuple[int | None, int]:
    """The request that gains most by a further rank, and the one of `spare` that suits it best; None if nobody does."""
    best: tuple[bool, float, int, bool] | None = None
    found: tuple[int | None, int] = None, 0
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
        if best is None or value > best:
            best, found = value, (index, rank)
    return found


def speedup(
    width: int,
    time: Callable[[float], float],
    nodes_per_rank: int,
    num_steps: int,
    num_tokens: int,
    num_nodes: int,
) -> float:
    """By what factor one more rank than `width` is expected to speed a request up; a rough guess, by the log of nodes.

    `time(n)` is that of a step in which a rank evaluates n tokens, up to `nodes_per_rank`; the request has emitted
    `num_tokens` in `num_steps` steps of `num_nodes` nodes altogether. What a tree of n nodes yields is taken to grow by
    the same with every doubling (measured so for the Jacobi window, recycled candidates and the trie).
    """
    grown = yield_of(num_steps, num_tokens, num_nodes)
    return rate(width + 1, time, nodes_per_rank, grown) / rate(width, time, nodes_per_rank, grown)


def yield_of(num_steps: int, num_tokens: int, num_nodes: int) -> float:
    """Tokens a step that each doubling of a request's trees earns, by what its steps have told."""
    if not num_steps:
        return FIRST_YIELD
    doublings = math.log2(max(2.0, num_nodes / num_steps))
    seen = max(0.0, num_tokens / num_steps - 1.0) / doublings
    return (FIRST_STEPS * FIRST_YIELD + num_steps * seen) / (FIRST_STEPS + num_steps)


def rate(width: int, time: Callable[[float], float], nodes_per_rank: int, grown: float, batch: int = 1) -> float:
    """Most tokens per millisecond of a request that `width` ranks serve, with `batch` such requests on each of them."""
    best, nodes = 0.0, 1
    while nodes <= max(1, nodes_per_rank * width):
        tokens = 1.0 + grown * math.log2(nodes)
        # What others have accepted comes with the next pending chain, and a run of nodes needs its ancestors.
        again = 2.0 * tokens * (width - 1) / width if nodes > 1 else 0.0
        best = max(best, tokens / time(batch * (max(1.0, nodes / width) + again)))
        nodes *= 2
    return best
