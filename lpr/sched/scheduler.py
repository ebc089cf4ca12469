"""The scheduler: which requests run, and what each does in the next step.

Pure: no tensor, no clock, no world. Every rank runs it on the same replicated state, so all get the same schedule.
There is no prefill and no decode phase: a request has a pending chain, the tokens whose K/V some home rank lacks. A
chain longer than a tree is computed in chunks (chunked prefill); otherwise the request decodes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic

from lpr.sched.block_tables import GROWTH
from lpr.sched.limits import SHORTEST_CHUNK, Limits, R, Schedulable
from lpr.sched.page_moves import PageMove
from lpr.sched.placement import Placement
from lpr.sched.prefix_tree import Node
from lpr.sched.queue import Entry, Waiting
from lpr.sched.state_snapshots import border

MANY = 8
"""If more requests than this decode, a rank computes only an equal part of the waiting prompts per step. With fewer,
the later first token costs more than the decoding requests gain (dev/LOG.md)."""


Fill = tuple[R, list[int]]  # a request, and how many tokens of its pending chain each rank computes


@dataclass(frozen=True)
class Schedule(Generic[R]):
    """The work of the running requests in one step."""

    decoding: list[R]
    """Requests that draft, evaluate and accept a tree; in the order of their slots if all ranks serve them."""
    filling: list[Fill[R]]  # requests that compute a chunk; on other ranks they may decode in the same step
    preempted: list[R] = field(default_factory=list)  # requests that lost their pages and wait again

    @property
    def is_empty(self) -> bool:
        """True if the schedule contains no work."""
        return not self.decoding and not self.filling


@dataclass
class CacheCounts:
    """Counts of tokens and requests since the start."""

    queries: int = 0  # prompt tokens of admitted requests
    hits: int = 0  # prompt tokens taken from the prefix cache
    preemptions: int = 0  # number of preemptions
    recomputed: int = 0  # tokens of preempted requests whose K/V was computed again


class Scheduler(Generic[R]):
    """Waiting and running requests, and the pages of all ranks."""

    def __init__(self, limits: Limits[R]) -> None:
        self.limits = limits
        self.waiting: Waiting[R] = Waiting()  # requests without pages
        self.placement = Placement(limits)
        self.counts = CacheCounts()
        self._filled_last = False
        self._last: Schedule[R] | None = None
        """The last schedule, while all running requests decode and none has come or gone."""
        self._unsettled: dict[int, R] = {}
        """By admission, the running requests to look at in each step. The others decode, each on one rank."""
        self.looked_at: Sequence[R] = []
        """The requests that need no look before they are as long as `care_at`, from the last schedule on."""
        self._woken: dict[int, R] | None = None
        """By admission, further requests to look at in the next step (see `end_step`); None: all."""

    @property
    def running(self) -> list[R]:
        return self.placement.running

    @property
    def capacity(self) -> int:
        """Most requests that can run at once."""
        return self.limits.capacity

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running

    @property
    def retained(self) -> tuple[int, int]:
        """Number of pages that no running request holds, and of the tokens in the prefix cache."""
        return self.placement.retained

    def others(self, decoding: Sequence[R]) -> list[R]:
        """The running requests besides those that decode."""
        if len(decoding) == len(self.running):
            return []
        known = {request.admission for request in decoding}
        return [request for request in self.running if request.admission not in known]

    def take_moves(self) -> list[list[PageMove]]:
        """Per rank, the operations on pages and states since the last call, in order."""
        return self.placement.take_moves()

    def resume(
        self,
        running: Sequence[R],
        tables: Sequence[Sequence[list[int]]],
        waiting: Sequence[Entry[R]],
        num_arrivals: int,
    ) -> None:
        """Take over the requests of another rank's scheduler, in its order, and their pages per rank."""
        self._last = self._woken = None
        self.placement.resume(running, tables)
        self.waiting.resume(waiting, num_arrivals)

    def add(self, request: R) -> None:
        targets = self.limits.targets
        request.arrived_ms = targets.now if targets is not None else 0.0
        self.waiting.add(request)

    def withdraw(self, request: R) -> bool:
        """Remove a request from the queue; False if it is not queued."""
        return self.waiting.remove(request)

    def admit(self) -> tuple[R, list[int]] | None:
        """Admit the next waiting request on its home ranks; None if no rank has a slot and pages for it.

        Returns the request and, per rank, its number of cached leading tokens. Requests on several ranks give up some
        of them first. With latency targets it also waits while its admission would make others miss theirs.
        """
        targets = self.limits.targets
        if len(self.running) >= self.capacity:
            return None
        request = self.waiting.first(self._is_lost if targets is not None else None)
        if request is None:
            return None
        own, wanted = self.placement.plan(request)
        if targets is not None:  # all requests that share its ranks must meet their time per token
            others = [each for each, ranks in zip(self.running, wanted, strict=True) if not set(ranks).isdisjoint(own)]
            batch = 1 + max(sum(rank in ranks for ranks in wanted) for rank in own)
            if not targets.allow([request, *others], batch, len(own)):
                return None
        is_new = not request.admission
        computed = self.placement.admit(request, own, wanted)
        if computed is None:
            return None
        self._last, self._unsettled[request.admission] = None, request
        self.waiting.remove(request)
        self.waiting.shares.begin(request)
        found = min(computed[rank] for rank in request.homes)
        if is_new:
            request.num_cached_tokens = found
            self.counts.queries += len(request.tokens)
            self.counts.hits += found
        self.counts.recomputed += max(0, request.num_preempted_tokens - found)
        request.num_preempted_tokens = 0
        return request, computed

    def _is_lost(self, request: R) -> bool:
        """True if a waiting request misses its time to first token even with its cached prefix."""
        targets = self.limits.targets
        assert targets is not None
        return targets.is_lost(request) and targets.is_lost(request, self.placement.num_lacking(request))

    def schedule(self) -> Schedule[R]:
        """The work of the running requests in the next step.

        Chains longer than a tree share at most `prefill_chunk` tokens of a rank's step (see `rooms`), so that decoding
        requests are not delayed. The request admitted first is computed first; one that misses its time to first token
        anyway, last. A prompt that ends in this step shares it with other prompts only as far as larger chunks are
        cheaper per token, because all of them get their first tokens at the step's end. Without padding, the last chunk
        of a chain is evaluated together with the first tree, and may exceed the room a little (see `rest`). A prompt
        that shares a prefix with another one waits while the other computes it. Requests that decode, each on one rank,
        are not looked at before they have filled pages; while there are no others, the last schedule is reused.
        """
        limits, looked_at, preempted = self.limits, self._to_look_at(), list[R]()
        if looked_at is not None:
            self._follow(looked_at)
        if looked_at is None or not self._have_room(looked_at):
            self._last, looked_at = None, self.running
            self._follow(looked_at)
            preempted = self._reserve()
        if self._last is not None and not self._unsettled:
            self._woken, self.looked_at = None, looked_at
            return self._last
        num_others = len(self.running) - len(looked_at)
        room, spent = rooms(looked_at, limits, num_others), [0] * limits.num_ranks
        least = min(limits.prefill_chunk, max(SHORTEST_CHUNK, room[0])) // 2  # fewer cost more per token
        begun = set[tuple[int, Node, tuple[int, ...]]]()
        decoding: list[R] = []
        filling: list[Fill[R]] = []
        places = {request.admission: place for place, request in enumerate(self.running)}
        for request in sorted(looked_at, key=self._turn):
            wanted = self.placement.wanted[places[request.admission]]
            counts, most = [0] * limits.num_ranks, limits.prefill_chunk
            stop = border(request.num_prompt, limits.page_size) if limits.num_snapshots else 0
            # A chunk ends where a snapshot of the recurrent states is kept.
            stops = limits.longest_chain < stop > min(request.num_computed_tokens[rank] for rank in request.homes)
            pages = self.placement.next_pages(request) if request.num_pending - 1 > limits.longest_chain else []
            if not begun.isdisjoint(pages):
                continue
            begun.update(pages)
            if (request.num_pending - 1 <= limits.longest_chain and not stops) or (
                fill(request, request.homes, counts, room, most, stop) <= rest(request, counts, limits)
                and not stops
                and (limits.packed or self.placement.is_alone(request))  # it ends here, and a tree may follow
            ):
                decoding.append(request)
                if any(counts) and limits.packed:
                    least = min(least, limits.cheap_chunk()) if limits.cheap_chunk is not None else least
                    spent = [before + count for before, count in zip(spent, counts, strict=True)]
                    room = [min(left, max(0, least - count)) for left, count in zip(room, spent, strict=True)]
                counts, most = [0] * limits.num_ranks, limits.joining
            if len(request.homes) < len(wanted):
                fill(request, [rank for rank in wanted if rank not in request.homes], counts, room, most, stop)
            if any(counts):
                filling.append((request, counts))
        settled = decoding if limits.targets is None else []
        self.looked_at = [each for each in settled if len(each.slots) - each.slots.count(-1) == 1]
        lone = {request.admission for request in self.looked_at}
        self._unsettled = {each.admission: each for each in looked_at if each.admission not in lone}
        if num_others:
            away = self._unsettled.keys() - {request.admission for request in decoding}
            decoding = [each for each in self.running if each.admission not in away]
        else:
            decoding.sort(key=lambda request: places[request.admission])
        filling.sort(key=lambda each: places[each[0].admission])
        self._last = self._woken = None  # `end_step` sets it again. After an aborted step all are looked at.
        if filling and not limits.packed:
            schedule, self._filled_last = in_turn(decoding, filling, not self._filled_last)
            return Schedule(*schedule, preempted)
        self._filled_last = bool(filling)
        self._last = Schedule(decoding, []) if not self._unsettled else None
        return Schedule(decoding, filling, preempted)

    def _to_look_at(self) -> list[R] | None:
        """The requests that may not just go on, after a review of home ranks; None: all."""
        if self.limits.num_ranks > 1 and self.running:  # spare ranks may join requests
            self.placement.update()
        if self._woken is None or self.placement.take_changed():
            return None
        return list((self._unsettled | self._woken).values())

    def _follow(self, requests: Sequence[R]) -> None:
        for request in requests:
            if request.num_pending - 1 > self.limits.longest_chain:
                found = self.placement.follow(request)
                request.num_cached_tokens += found
                self.counts.hits += found

    def _have_room(self, requests: Sequence[R]) -> bool:
        """Reserve pages for the next step, in the order of `_reserve`; False if there are too few."""
        order = sorted(requests, key=lambda request: request.admission)
        return all(self._short_of(each) is None for each in order)

    def care_at(self, request: R) -> int:
        """The length at which a request on one rank needs attention: pages are full, or a tree lacks pages.

        Shorter requests need not be passed to `end_step`.
        """
        limits, num_computed = self.limits, request.num_computed_tokens[request.homes[0]]
        size, ahead = limits.page_size, 0
        if num_computed >= request.num_prompt:
            size, ahead = GROWTH * size, limits.num_ahead
        full = ((num_computed + ahead) // size + 1) * size - ahead + 1  # the last one is not computed
        return min(full, self.placement.room(request) - limits.num_ahead + 1)

    def _turn(self, request: R) -> tuple[bool, int]:
        """The sort key of requests whose prompts are to be filled."""
        targets = self.limits.targets
        return targets is not None and targets.is_lost(request, request.num_pending), request.admission

    def _reserve(self) -> list[R]:
        """Reserve pages for the next step, in the order of admission; returns the preempted requests.

        If a rank's pages run out, the last admitted request there that other ranks serve as well leaves the rank. If
        there is none, the last admitted request is preempted: it frees its pages on all ranks and waits, before all
        others.
        """
        preempted: list[R] = []
        order = sorted(self.running, key=lambda request: request.admission)
        for request in order:
            while request not in preempted:
                rank = self._short_of(request)
                if rank is None:
                    break
                there = [each for each in reversed(order) if each not in preempted and each.slots[rank] >= 0]
                if any(self.placement.withdraw(each, rank) for each in there):
                    continue
                victim = there[0]
                victim.num_preempted_tokens = len(victim.tokens) - victim.num_pending
                self.placement.remove(victim, keep=True)
                preempted.append(victim)
                self.counts.preemptions += 1
        self.waiting.put_back(preempted[::-1])
        return preempted

    def _short_of(self, request: R) -> int | None:
        """Reserve pages for a request's tokens and a tree, or its next chunk; returns a rank without room if any."""
        limits = self.limits
        most = limits.prefill_chunk + max(limits.longest_chain, limits.prefill_chunk // 8) + limits.num_ahead
        return self.placement.reserve(request, len(request.tokens) + limits.num_ahead, most)

    def end_step(self, woken: Sequence[R] | None = None) -> None:
        """Add newly computed pages to the prefix trees.

        `woken` are the decoded requests that are as long as their `care_at`; default: all.
        """
        self._woken = {request.admission: request for request in woken} if woken is not None else None
        self.placement.register(self.running if self._woken is None else list((self._unsettled | self._woken).values()))

    def finish(self, request: R, keep: bool = True) -> None:
        """Remove a running request; with `keep`, its pages stay in the prefix cache."""
        self.waiting.shares.end(request)
        self.placement.remove(request, keep)
        self._last = None
        for requests in (self._unsettled, self._woken or {}):
            requests.pop(request.admission, None)

    def begin_anew(self, requests: Sequence[R]) -> None:
        """Reset the queue, the running requests and all pages; then queue `requests` by arrival."""
        shares, num_arrivals = self.waiting.shares, self.waiting.num_arrivals
        self.placement, self.waiting, self._filled_last = Placement(self.limits), Waiting(), False
        self._last, self._unsettled, self._woken = None, {}, None
        self.waiting.shares, self.waiting.num_arrivals = shares, num_arrivals
        for request in requests:
            self.waiting.add(request)

    def regroup(self, kept: Sequence[int | None], drafting: Sequence[int] = ()) -> list[R]:
        """Change to other ranks: `kept` has each one's former number, None for a newcomer without K/V.

        `drafting` are the draft-only ranks. Returns the requests whose home ranks are all lost, which wait again.
        """
        self.limits.drafting = drafting
        self._filled_last, self._last, self._woken = False, None, None
        lost = self.placement.regroup(kept)
        self.waiting.put_back(lost)
        return lost

    def pass_step(self, schedule: Schedule[R], num_entries: Sequence[int]) -> None:
        """Advance the clock of the targets by a step in which rank r decoded with `num_entries[r]` tokens."""
        if self.limits.targets is None:
            return
        loads = list(num_entries)
        for _, counts in schedule.filling:
            loads = [load + count for load, count in zip(loads, counts, strict=True)]
        requests = [*schedule.decoding, *(request for request, _ in schedule.filling)]
        longest = max(len(request.tokens) for request in requests)
        self.limits.targets.pass_step(loads, len(requests) // self.limits.num_serving, longest)


def rooms(running: Sequence[R], limits: Limits[R], num_others: int = 0) -> list[int]:
    """Per rank, the tokens of long chains that it may compute in a step; `num_others` further requests decode.

    A step lasts as long as its busiest rank. So if many requests decode, a rank computes at most an equal part of all
    long chains, or a chunk that takes hardly longer than decoding. It also computes no more than lets decoding requests
    meet their time per token, even if one first token then comes too late.
    """
    most, targets = limits.prefill_chunk, limits.targets
    lacking = [len(each.tokens) - 1 - min(each.num_computed_tokens[rank] for rank in each.homes) for each in running]
    long = [count if count > limits.longest_chain else 0 for count in lacking]
    if any(long) and (num_others or not all(long)):
        if limits.calm_chunk is not None:
            most = min(most, limits.calm_chunk())
        if limits.is_elastic and long.count(0) + num_others > MANY:
            total = sum(count * len(request.homes) for count, request in zip(long, running, strict=True))
            most = min(most, max(limits.joining, total // limits.num_serving))
        if targets is not None:  # requests that decode on other ranks wait for the step too
            decoding = [request for request, count in zip(running, long, strict=True) if not count]
            cached = [min(each.num_computed_tokens[rank] for rank in each.homes)
                      for each, count in zip(running, long, strict=True) if count]  # fmt: skip
            most = targets.chunk(decoding, min(most, limits.joining, limits.page_size), most, max(cached))
    return [most] * limits.num_ranks


def fill(
    request: Schedulable, ranks: Sequence[int], counts: list[int], room: list[int], most: int, stop: int = 0
) -> int:
    """Schedule up to `most` tokens of the pending chain on `ranks`; returns the most tokens that a rank still lacks.

    No chunk extends beyond the first `stop` tokens of the request.
    """
    computed, above, left = request.num_computed_tokens, len(request.tokens) - 1, 0
    for rank in ranks:
        if request.slots[rank] < 0:
            continue
        lacking = above - computed[rank]
        counts[rank] = min(lacking, room[rank], most, stop - computed[rank] if computed[rank] < stop else lacking)
        room[rank] -= counts[rank]
        left = max(left, lacking - counts[rank])
    return left


def rest(request: Schedulable, counts: Sequence[int], limits: Limits[R]) -> int:
    """Tokens by which the last chunk of a chain may exceed the room, because another step for them would cost more."""
    return min(counts[rank] for rank in request.homes) // 8 if limits.packed else 0


def in_turn(
    decoding: Sequence[R], filling: Sequence[Fill[R]], fills_first: bool
) -> tuple[tuple[list[R], list[Fill[R]]], bool]:
    """Either the decoding or the filling requests of a step, in turns: with padding, a chunk would lengthen all rows.

    Returns the decoding requests, the fills, and the next `fills_first`.
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
