"""Choice of home ranks: all ranks for a single request, one rank per request for many.

Pure: no tensor, no clock, no world. The inputs are replicated, so every rank chooses the same home ranks.

Each request has a *base* rank, if possible one that serves it already, and bases are spread evenly. With at least as
many requests as ranks, this is plain data parallelism: no work is done twice. A rank that is no request's base is spare
and joins the request with the greatest speedup; requests that miss their time per token come first. So with a single
request all ranks work on its tree.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

WORTH_JOINING, WORTH_STAYING = 1.03, 1.01
"""A spare rank joins a request at a speedup of at least WORTH_JOINING and stays down to WORTH_STAYING. WORTH_STAYING
also suffices for a request that is about to begin: the rank computes the prompt in the same steps as the others."""
WORTH_LEAVING = 1.1  # a rank leaves a request for another one whose speedup is greater by this factor
FILLS_PER_TOKEN = 32
"""A rank joins a request only if it lacks at most this many tokens per token that the request may still emit."""
FIRST_YIELD, FIRST_STEPS = 0.35, 8.0
"""Prior of the tokens per step gained by each doubling of a tree, and its weight in steps."""


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


@dataclass(slots=True)
class Candidate:
    """A request, as the input of the choice of home ranks."""

    serving: Sequence[int]  # ranks that serve it now, ascending; none if it is about to be admitted
    lacking: Callable[[int], int]  # tokens that a rank would have to compute before it could serve it
    num_left: int  # most tokens that it may still emit
    speedup: Callable[[int], float] = lambda width: math.inf
    """Speedup of `width` + 1 ranks over `width` ranks."""
    is_late: Callable[[int], bool] = lambda width: False  # True if it misses its time per token on `width` ranks


def choose(requests: Sequence[Candidate], num_ranks: int, most: int) -> list[list[int]]:
    """The wanted home ranks of each request, ascending, at most `most` of them."""
    bases = base_ranks(requests, num_ranks)
    homes = [[rank] for rank in bases]
    spare = [rank for rank in range(num_ranks) if rank not in bases]
    while spare and (found := _widen(requests, homes, spare, most)) is not None:
        index, rank = found
        homes[index].append(rank)
        spare.remove(rank)
    return [sorted(each) for each in homes]


def base_ranks(requests: Sequence[Candidate], num_ranks: int) -> list[int]:
    """One rank per request, spread evenly as far as moves pay; a request keeps a rank that serves it if possible.

    Requests with the fewest ranks to choose from are placed first, new requests last.
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
        if (move := _balance(requests.__getitem__, bases, loads)) is None:
            break
        index, rank = move
        loads[bases[index]] -= 1
        loads[rank] += 1
        bases[index] = rank
    return bases


def rank_beside(loads: Sequence[int], new: Candidate) -> int | None:
    """The rank of a new request beside others, `loads` of them on each rank alone; None if a rank is left over.

    The others stay where they are: further requests may fill the gaps before the next review.
    """
    rank = min(_preferred(new, loads), key=lambda rank: (loads[rank], rank))
    return rank if all(load or each == rank for each, load in enumerate(loads)) else None


def stay(bases: Sequence[int], candidate: Callable[[int], Candidate], num_ranks: int) -> bool:
    """True if `choose` leaves requests that run on one of `bases` each where they are.

    `candidate` makes a request's candidate by its index, as few are needed.
    """
    loads = [bases.count(rank) for rank in range(num_ranks)]
    return min(loads) > 0 and _balance(candidate, bases, loads) is None


def _preferred(request: Candidate, loads: Sequence[int]) -> list[int]:
    """The ranks for a new request: the least loaded ones, or those with one request more that lack half the tokens.

    Of these, the ranks that lack the fewest tokens. `_balance` corrects greater differences of load.
    """
    least = min(loads)
    lacking = {rank: request.lacking(rank) for rank, load in enumerate(loads) if load <= least + 1}
    fewest_idle = min(count for rank, count in lacking.items() if loads[rank] == least)
    fewest = min(lacking.values())
    limit, most = (fewest, least + 1) if 2 * fewest < fewest_idle else (fewest_idle, least)
    return [rank for rank, count in lacking.items() if count <= limit and loads[rank] <= most]


def _balance(
    candidate: Callable[[int], Candidate], bases: Sequence[int], loads: Sequence[int]
) -> tuple[int, int] | None:
    """A request to move and its new rank, if one rank has at least two requests more than another and a move pays."""
    to = loads.index(min(loads))
    if max(loads) - loads[to] < 2:
        return None
    crowded = [index for index, rank in enumerate(bases) if loads[rank] - loads[to] >= 2]
    movable = [index for index in crowded if is_worth_filling(candidate(index), to)]
    if not movable:
        return None
    return min(movable, key=lambda index: (-loads[bases[index]], candidate(index).lacking(to), -index)), to


def is_worth_filling(request: Candidate, rank: int) -> bool:
    """True if the request may emit enough tokens to repay the rank's computation of its K/V."""
    return request.lacking(rank) <= FILLS_PER_TOKEN * request.num_left


def _widen(
    requests: Sequence[Candidate], homes: Sequence[Sequence[int]], spare: Sequence[int], most: int
) -> tuple[int, int] | None:
    """The request with the greatest speedup by one more rank, and the best rank of `spare`; None if none gains."""
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
    """Estimated speedup of `width` + 1 ranks over `width` ranks.

    `time(n)` is the milliseconds of a step in which a rank evaluates n tokens, up to `nodes_per_rank`. The tokens per
    step are modelled as linear in the logarithm of the tree's size, as measured for the Jacobi window, recycled
    candidates and the suffix index.
    """
    gain = yield_of(seen)
    return rate(width + 1, time, nodes_per_rank, gain) / rate(width, time, nodes_per_rank, gain)


def yield_of(seen: Seen) -> float:
    """Tokens per step gained by each doubling of a request's trees, estimated from its steps so far."""
    if not seen.num_steps:
        return FIRST_YIELD
    doublings = math.log2(max(2.0, seen.num_nodes / seen.num_steps))
    gained = max(0.0, seen.num_tokens / seen.num_steps - 1.0) / doublings
    return (FIRST_STEPS * FIRST_YIELD + seen.num_steps * gained) / (FIRST_STEPS + seen.num_steps)


def rate(width: int, time: Callable[[float], float], nodes_per_rank: int, gain: float, batch: int = 1) -> float:
    """Tokens per millisecond, with the best tree size, of a request on `width` ranks with `batch` requests on each.

    `gain` is the tokens per step that each doubling of its tree adds.
    """
    best, nodes = 0.0, 1
    while nodes <= max(1, nodes_per_rank * width):
        tokens = 1.0 + gain * math.log2(nodes)
        # Evaluated twice: accepted tokens of other ranks (in the next pending chain), and the ancestors of a shard.
        again = 2.0 * tokens * (width - 1) / width if nodes > 1 else 0.0
        best = max(best, tokens / time(batch * (max(1.0, nodes / width) + again)))
        nodes *= 2
    return best
