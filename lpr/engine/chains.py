"""Pending chains that are longer than a tree: how much of them each rank computes in a step. Pure, as the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from lpr.engine.limits import Limits
from lpr.engine.schedulable import Schedulable

MANY = 8
"""With more requests than this decoding, prompts are filled in parts. With fewer, the request that waits for its parts
loses more than the others save: parts only save where several ranks fill in the same step (dev/LOG.md)."""

R = TypeVar("R", bound=Schedulable)
Fill = tuple[R, list[int]]
"""A request, and how many tokens of its chain each rank computes."""


def rooms(running: Sequence[R], limits: Limits[R]) -> list[int]:
    """Tokens of long chains that each rank may compute in a step.

    A step lasts as long as its busiest rank. So where many others wait for it, a rank fills no more than an equal part
    of all long chains, or what takes hardly longer than decoding. It also fills no more than leaves decoding requests
    their time per token, even if a first token then comes too late: that is one request, and they are several.
    """
    most, targets = limits.prefill_chunk, limits.targets
    if not limits.is_elastic and targets is None:
        return [most] * limits.num_ranks
    lacking = [len(each.tokens) - 1 - min(each.num_computed_tokens[rank] for rank in each.homes) for each in running]
    long = [count if count > limits.longest_chain else 0 for count in lacking]
    if not any(long) or all(long):
        return [most] * limits.num_ranks
    if limits.is_elastic and long.count(0) > MANY:
        total = sum(count * len(request.homes) for count, request in zip(long, running, strict=True))
        most = min(most, max(limits.joining, total // limits.num_ranks))
    if targets is not None:  # the step is as long for those that decode on other ranks
        decoding = [request for request, count in zip(running, long, strict=True) if not count]
        most = targets.chunk(decoding, min(most, limits.joining), most)
    return [most] * limits.num_ranks


def fill(request: Schedulable, ranks: Sequence[int], counts: list[int], room: list[int], most: int) -> int:
    """Take room for up to `most` tokens of the pending chain on some ranks; returns what the worst still lacks."""
    computed, above, left = request.num_computed_tokens, len(request.tokens) - 1, 0
    for rank in ranks:
        if request.slots[rank] < 0:
            continue
        lacking = above - computed[rank]
        counts[rank] = min(lacking, room[rank], most)
        room[rank] -= counts[rank]
        left = max(left, lacking - counts[rank])
    return left


def in_turn(
    decoding: Sequence[R], filling: Sequence[Fill[R]], fills_first: bool
) -> tuple[tuple[list[R], list[Fill[R]]], bool]:
    """The part of a step's work that comes first where rows are padded, as a chunk would lengthen all rows of a rank.

    Returns what decodes and what fills in this step, and whether fills came first, which they do in turn.
    """
    decode_at = {rank for request in decoding for rank in request.homes}
    conflicts = any(count and rank in decode_at for _, counts in filling for rank, count in enumerate(counts))
    fills = fills_first or not conflicts
    taken = set() if fills else decode_at
    first: list[Fill[R]] = []
    for request, counts in filling:
        mine = [0 if rank in taken else count for rank, count in enumerate(counts)]
        taken |= {rank for rank, count in enumerate(mine) if count}
        if any(mine):
            first.append((request, mine))
    fill_at = {rank for _, counts in first for rank, count in enumerate(counts) if count}
    return ([request for request in decoding if fill_at.isdisjoint(request.homes)], first), fills
