"""The scheduler alone: slots without a gap, K/V that is where tables say, chunks, preemption, fairness."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import dataclass, field, replace
from operator import add
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lpr.sched import page_pool as module
from lpr.sched.block_tables import RankPages
from lpr.sched.limits import Limits
from lpr.sched.page_moves import PageClear, PageCopy, PageIn, PageMove, PageOut
from lpr.sched.page_pool import num_equal
from lpr.sched.placement import Placement
from lpr.sched.queue import SECONDS_PER_PRIORITY
from lpr.sched.scheduler import Schedule, Scheduler
from tests.fakes.paths import ROOT
from tests.fakes.sim_requests import Scheduled

NUM_RANKS = 3
ALL, ANY = 0, 99
AHEAD = 3
"""Rows for a tree; what a step adds is less."""
"""Home ranks of a request at most."""


@dataclass(eq=False)
class Fake(Scheduled):
    """A request; its K/V of token j is the tuple of its tokens up to j."""

    tokens: list[int]
    arrived: float = 0.0
    num_computed_tokens: list[int] = field(default_factory=lambda: [0] * NUM_RANKS)
    num_left: int = 1000

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens)


SIZE = 3
"""Tokens of a page."""


Rows = dict[tuple[int, int], tuple[int, ...]]


def carry_out(move: PageMove, rows: Rows, host: Rows) -> None:
    match move:
        case PageCopy():
            for place in range(move.num_rows):
                rows[move.target, place] = rows[move.source, place]
        case PageClear():
            for place in range(SIZE):
                rows.pop((move.page, place), None)
        case PageOut():
            for place in range(SIZE):
                host[move.host_page, place] = rows.get((move.page, place), ())
        case PageIn():
            for place in range(SIZE):
                rows[move.page, place] = host[move.host_page, place]


class Held:
    """What the pages of each rank hold, as moves and forwards leave them."""

    def __init__(self, scheduler: Scheduler[Fake]) -> None:
        self.scheduler = scheduler
        self.rows: list[Rows] = [{} for _ in range(NUM_RANKS)]
        self.host: list[Rows] = [{} for _ in range(NUM_RANKS)]

    def move(self, moves: list[list[PageMove]]) -> None:
        for rank, of_rank in enumerate(moves):
            for move in of_rank:
                carry_out(move, self.rows[rank], self.host[rank])

    def place(self, request: Fake, rank: int, row: int) -> tuple[int, int]:
        return self.scheduler.placement.tables(request)[rank][row // SIZE], row % SIZE

    def compute(self, request: Fake, rank: int, count: int, rejected: int = 0) -> None:
        """Compute `count` tokens, and write the rows of nodes that are rejected."""
        start = request.num_computed_tokens[rank]
        for j in range(start, start + count + rejected):
            self.rows[rank][self.place(request, rank, j)] = (
                tuple(request.tokens[: j + 1]) if j < start + count else (-1,)
            )
        request.num_computed_tokens[rank] = start + count

    def check(self, request: Fake) -> None:
        for rank, count in enumerate(request.num_computed_tokens):
            assert count == 0 or request.slots[rank] >= 0, f"rank {rank} holds K/V in no slot"
            for j in range(count):
                held = self.rows[rank].get(self.place(request, rank, j))
                assert held == tuple(request.tokens[: j + 1]), f"rank {rank}, row {j}: {held}"


def limits(num_slots: int, chunk: int = 5, packed: bool = True, **more: Any) -> Limits[Fake]:
    given = {"retains": True, "most_homes": ANY, "num_pages": 200, "page_size": SIZE, "num_ahead": AHEAD, **more}
    return Limits(num_slots, NUM_RANKS, chunk, 3, packed, **given)


def check_places(scheduler: Scheduler[Fake]) -> None:
    """Each rank's slots are those of the requests that it serves or will serve, without a gap."""
    for rank in range(NUM_RANKS):
        taken = sorted(request.slots[rank] for request in scheduler.running if request.slots[rank] >= 0)
        assert taken == list(range(len(taken))) and len(taken) <= scheduler.limits.num_slots
    for request in scheduler.running:
        assert request.homes and request.homes == sorted(set(request.homes)), "somebody serves it"
        assert all(request.slots[rank] >= 0 for rank in request.homes)
    if not scheduler.limits.is_elastic:
        for request in scheduler.running:
            assert len(set(request.slots)) == 1, "all ranks have the same tables"


def check_rows(scheduler: Scheduler[Fake], schedule: Schedule[Fake]) -> None:
    """No rank has more to fill than a chunk, and none has both kinds of rows where they are padded."""
    for rank in range(NUM_RANKS):
        fills = [counts[rank] for _, counts in schedule.filling if counts[rank]]
        decodes = [request for request in schedule.decoding if rank in request.homes]
        assert sum(fills) <= 5 and all(count > 0 for count in fills)
        assert scheduler.limits.packed or len(fills) <= (0 if decodes else 1)
    for request, counts in schedule.filling:
        for rank, count in enumerate(counts):
            assert request.num_computed_tokens[rank] + count < len(request.tokens), "the root is never filled"
            assert not count or request.slots[rank] >= 0
            if request in schedule.decoding:
                assert not count or rank not in request.homes, "a rank evaluates a request once"


def run_randomly(
    seed: int,
    num_slots: int,
    packed: bool,
    retains: bool,
    most_homes: int = ANY,
    join_chunk: int | None = 2,
    num_pages: int = 200,
    num_host_pages: int = 0,
) -> Scheduler[Fake]:
    """Arrivals, steps, ends and aborts at random; every row that counts as computed is looked at after every step."""
    choose = random.Random(seed)
    more = {"retains": retains, "most_homes": most_homes, "join_chunk": join_chunk, "num_pages": num_pages}
    more["num_host_pages"] = num_host_pages
    scheduler: Scheduler[Fake] = Scheduler(limits(num_slots, 5, packed, **more))
    slots, texts = Held(scheduler), [[choose.randrange(2) for _ in range(24)] for _ in range(3)]
    for _ in range(60):
        for _ in range(choose.choice([0, 0, 1, 2])):
            text = choose.choice(texts)[: choose.randrange(1, 20)]
            scheduler.add(Fake([*text, *(choose.randrange(2) for _ in range(choose.randrange(3)))]))
        while (admitted := scheduler.admit()) is not None:
            slots.move(scheduler.take_moves())
            request, computed = admitted
            request.num_computed_tokens = list(computed)
            assert max(request.num_computed_tokens) < len(request.tokens), "the root is evaluated in any case"
            slots.check(request)
        schedule = scheduler.schedule()
        slots.move(scheduler.take_moves())
        for request in scheduler.running:
            slots.check(request)
        check_places(scheduler)
        check_rows(scheduler, schedule)
        take_step(schedule, slots, choose)
        scheduler.end_step()
        for request in schedule.preempted:
            assert request not in scheduler.running
            request.num_computed_tokens = [0] * NUM_RANKS
        for request in list(scheduler.running):
            slots.check(request)
            if len(request.tokens) > 40:
                scheduler.finish(request)
                slots.move(scheduler.take_moves())
                continue
            if choose.random() < 0.2:
                scheduler.finish(request, keep=choose.random() < 0.9)
                slots.move(scheduler.take_moves())
        for request in scheduler.running:
            slots.check(request)
    return scheduler


def take_step(schedule: Schedule[Fake], slots: Held, choose: random.Random, chunk: int = 5) -> None:
    for request, counts in schedule.filling:
        for rank, count in enumerate(counts):
            slots.compute(request, rank, count)
    for request in schedule.decoding:
        assert request.num_pending - 1 <= chunk
        known = len(request.tokens)
        request.tokens += [choose.randrange(2) for _ in range(choose.randrange(1, 4))]
        for rank in request.homes:
            most = choose.choice([known, len(request.tokens) - 1])
            slots.compute(request, rank, most - request.num_computed_tokens[rank], choose.randrange(2))


@given(
    st.integers(0, 2**32), st.integers(1, 5), st.booleans(), st.booleans(), st.sampled_from([ALL, 1, 2, ANY]),
    st.integers(18, 60), st.sampled_from([0, 1, 5, 100]),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_what_counts_as_computed_is_in_the_pages(
    seed: int, num_slots: int, packed: bool, retains: bool, most_homes: int, num_pages: int, num_host_pages: int
) -> None:
    sizes = {"num_pages": num_pages, "num_host_pages": num_host_pages}
    scheduler = run_randomly(seed, num_slots, packed, retains, most_homes, **sizes)
    assert retains or scheduler.counts.hits == 0


def test_requests_are_preempted_where_pages_run_out() -> None:
    runs = [run_randomly(seed, 5, True, True, ALL, num_pages=24) for seed in range(10)]
    assert sum(scheduler.counts.preemptions for scheduler in runs) > 10
    again = [run_randomly(seed, 5, True, True, ALL, num_pages=24, num_host_pages=40) for seed in range(10)]
    assert sum(scheduler.placement.swapped[2] for scheduler in again) > 10, "pages come back from host memory"
    lost, kept = (sum(scheduler.counts.recomputed for scheduler in each) for each in (runs, again))
    assert kept < lost / 2


def settle(scheduler: Scheduler[Fake], num_steps: int = 40) -> None:
    """Take steps until whoever should serve does."""
    choose, slots = random.Random(0), Held(scheduler)
    for _ in range(num_steps):
        while (admitted := scheduler.admit()) is not None:
            admitted[0].num_computed_tokens = list(admitted[1])
        take_step(scheduler.schedule(), slots, choose, scheduler.limits.prefill_chunk)  # who serves whom is looked at
        scheduler.end_step()


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("count", "widths"), [(1, [3]), (2, [1, 2]), (3, [1, 1, 1]), (4, [1, 1, 1, 1]), (9, [1] * 6), (0, [])]
)
def test_ranks_are_spread_over_the_requests(count: int, widths: list[int], packed: bool) -> None:
    scheduler: Scheduler[Fake] = Scheduler(limits(2, 5, packed))
    for number in range(count):
        scheduler.add(Fake([number + 1] * (3 + number)))
    settle(scheduler)
    assert sorted(len(request.homes) for request in scheduler.running) == widths
    loads = [sum(rank in request.homes for request in scheduler.running) for rank in range(NUM_RANKS)]
    assert not count or max(loads) - min(loads) <= 1
    assert len(scheduler.waiting) == max(0, count - 6)


def test_from_all_ranks_to_one_each_and_back() -> None:
    scheduler: Scheduler[Fake] = Scheduler(limits(1, 20, True))
    first = Fake([1] * 20)
    scheduler.add(first)
    settle(scheduler)
    assert first.homes == [0, 1, 2]
    others = [Fake([2] * 9), Fake([3] * 9)]
    for other in others:
        scheduler.add(other)
    settle(scheduler, 1)
    assert len(first.homes) == 1, "it makes room at once"
    settle(scheduler)
    assert sorted(home for request in (first, *others) for home in request.homes) == [0, 1, 2]
    for other in others:
        scheduler.finish(other)
    settle(scheduler, 1)
    assert len(first.homes) == 1, "those that join must fill first"
    settle(scheduler)
    assert first.homes == [0, 1, 2]


def test_a_prefix_draws_its_request() -> None:
    scheduler: Scheduler[Fake] = Scheduler(limits(2, 50, most_homes=1))
    texts = [[number] * 40 for number in range(3)]
    for text in texts:
        scheduler.add(Fake(list(text)))
    settle(scheduler, 3)
    before = {request.tokens[0]: request.homes for request in scheduler.running}
    for request in list(scheduler.running):
        scheduler.finish(request)
    for text in reversed(texts):
        scheduler.add(Fake([*text, 7, 7]))
    settle(scheduler, 1)
    assert {request.tokens[0]: request.homes for request in scheduler.running} == before
    assert scheduler.counts.hits >= 120


def test_ranks_that_look_for_work_more_often_choose_alike() -> None:
    """A driver without work asks for a schedule again and again; its workers wait."""
    often, seldom = (Scheduler[Fake](limits(1, 50, True)) for _ in range(2))
    for _ in range(5):
        assert often.schedule().is_empty
    seen = []
    for scheduler in (often, seldom):
        for tokens in ([1] * 9, [2] * 9):
            scheduler.add(Fake(tokens))
        settle(scheduler, 1)
        scheduler.finish(scheduler.running[0])
        seen.append([])
        for _ in range(5):
            settle(scheduler, 1)
            seen[-1].append([list(request.homes) for request in scheduler.running] + [scheduler.placement.digest])
    assert seen[0] == seen[1]


def test_a_rank_that_does_not_speed_up_stays_away() -> None:
    scheduler: Scheduler[Fake] = Scheduler(limits(1, 50, True))
    scheduler.limits.speedup = lambda request, width: 1.5 if width == 1 else 1.005
    scheduler.add(Fake([1] * 9))
    settle(scheduler)
    assert len(scheduler.running[0].homes) == 2
    scheduler.limits.speedup = lambda request, width: 0.9
    settle(scheduler)
    assert len(scheduler.running[0].homes) == 1


@given(st.integers(0, 2**32), st.integers(1, 3), st.booleans())
@settings(max_examples=25, deadline=None)
def test_ranks_come_and_go(seed: int, num_slots: int, packed: bool) -> None:
    """Who has lost all home ranks waits again, before all others; the rest goes on with what is left."""
    choose = random.Random(seed)
    scheduler = run_randomly(seed, num_slots, packed, True)
    kept = [rank for rank in range(NUM_RANKS) if choose.random() < 0.6] or [1]
    kept += [None] * (NUM_RANKS - len(kept))  # type: ignore[list-item]
    before = {id(request): [request.num_computed_tokens[rank] if rank is not None else 0 for rank in kept]
              for request in scheduler.running}  # fmt: skip
    running, waiting = list(scheduler.running), [request for _, _, request in scheduler.waiting]
    lost = scheduler.regroup(kept)
    assert [request for _, _, request in scheduler.waiting] == lost + waiting
    assert set(map(id, scheduler.running)) == set(map(id, running)) - set(map(id, lost))
    for request in scheduler.running:
        assert request.num_computed_tokens == before[id(request)]
    settle(scheduler)
    check_places(scheduler)


def test_prefixes_are_found() -> None:
    assert sum(run_randomly(seed, 3, True, True).counts.hits for seed in range(20)) > 300


def without_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PageCopy", lambda *args: PageCopy(*args[:2], 0))


def too_long_a_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "num_equal", lambda first, second: min(num_equal(first, second) + 1, len(second)))


def drafted_tokens_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    finish = Scheduler.finish

    def keeps_too_much(self, request, keep=True):  # type: ignore[no-untyped-def]
        request.num_computed_tokens = [len(request.tokens) if slot >= 0 else 0 for slot in request.slots]
        return finish(self, request, keep)

    monkeypatch.setattr(Scheduler, "finish", keeps_too_much)


def a_row_too_few_is_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    enter = RankPages.enter

    def short(self, request):  # type: ignore[no-untyped-def]
        held = enter(self, request)
        self.pool.moves = [
            replace(move, num_rows=max(0, move.num_rows - 1)) if isinstance(move, PageCopy) else move
            for move in self.pool.moves
        ]
        return held

    monkeypatch.setattr(RankPages, "enter", short)


def serves_before_it_has_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    enter = RankPages.enter

    def boasts(self, request):  # type: ignore[no-untyped-def]
        enter(self, request)
        return len(request.tokens) - 1

    monkeypatch.setattr(RankPages, "enter", boasts)


def counts_what_a_rank_held_that_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    leave = Placement.leave

    def remembers(self):  # type: ignore[no-untyped-def]
        before = [list(request.num_computed_tokens) for request in self.running]
        leave(self)
        for request, counts in zip(self.running, before, strict=True):
            request.num_computed_tokens = counts

    monkeypatch.setattr(Placement, "leave", remembers)


@pytest.mark.parametrize(
    "fault",
    [
        without_copies,
        too_long_a_prefix,
        drafted_tokens_kept,
        a_row_too_few_is_moved,
        serves_before_it_has_filled,
        counts_what_a_rank_held_that_has_left,
    ],
)
def test_mutants(monkeypatch: pytest.MonkeyPatch, fault) -> None:  # type: ignore[no-untyped-def]
    fault(monkeypatch)
    with pytest.raises((AssertionError, KeyError, IndexError)):
        for seed in range(40):
            run_randomly(seed, 3, True, True)


def steps_of(seed: int, is_lazy: bool, num_ranks: int = 1) -> list[Any]:
    """What each step does and which pages each request has; with `is_lazy` only those that need care are looked at."""
    dice, seen, made = random.Random(seed), list[Any](), list[Fake]()
    limits = Limits[Fake](4, num_ranks, 8, 4, True, num_pages=40, page_size=SIZE, num_ahead=AHEAD, most_homes=ANY)
    scheduler, care = Scheduler(limits), dict[int, int]()
    for _ in range(120):
        if dice.random() < 0.2 * num_ranks:
            tokens = [dice.randrange(2) for _ in range(dice.randint(1, 20))]
            made.append(Fake(tokens=tokens, arrived=float(len(made)), num_computed_tokens=[0] * num_ranks))
            scheduler.add(made[-1])
        while (admitted := scheduler.admit()) is not None:
            admitted[0].num_computed_tokens = list(admitted[1])
        schedule = scheduler.schedule()
        care |= {id(each): scheduler.care_at(each) for each in scheduler.looked_at}
        tables = [scheduler.placement.tables(each) for each in scheduler.running]
        what = [made.index(each) for each in schedule.decoding], [(made.index(each), n) for each, n in schedule.filling]
        seen.append((what, tables, scheduler.take_moves(), [made.index(each) for each in schedule.preempted]))
        for request, counts in schedule.filling:
            request.num_computed_tokens = list(map(add, request.num_computed_tokens, counts))
        for request in schedule.decoding:
            request.tokens += [dice.randrange(2) for _ in range(dice.randint(1, AHEAD))]
            length, computed = len(request.tokens) - 1, request.num_computed_tokens
            request.num_computed_tokens = [length if r in request.homes else n for r, n in enumerate(computed)]
        ended = [each for each in schedule.decoding if dice.random() < 0.04]
        woken = [each for each in schedule.decoding if each in ended or len(each.tokens) >= care.get(id(each), 0)]
        scheduler.end_step(woken if is_lazy else None)
        for request in ended:
            scheduler.finish(request)
    return seen


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("seed", range(8))
def test_the_last_schedule_stays_while_nothing_changes(seed: int, num_ranks: int) -> None:
    """Steps, pages, shared prefixes and preemptions are those of a scheduler that looks at all requests."""
    expected = steps_of(seed, False, num_ranks)
    assert any(preempted for *_, preempted in expected)
    assert steps_of(seed, True, num_ranks) == expected


def test_a_step_that_breaks_off_leaves_no_request_of_an_earlier_one() -> None:
    """After a second interrupt the last schedule stood, with requests that had needed care before the first."""
    scheduler = Scheduler(Limits[Fake](4, 1, 8, 4, True, num_pages=40, page_size=SIZE, num_ahead=AHEAD))
    before, after = [Fake(tokens=[number], num_computed_tokens=[0]) for number in range(2)]
    scheduler.add(before)
    assert scheduler.admit() is not None and scheduler.schedule().decoding == [before]
    scheduler.end_step([before])
    scheduler.begin_anew([after])
    assert scheduler.admit() is not None
    for _ in range(2):  # the first step breaks off
        assert scheduler.schedule().decoding == scheduler.looked_at == [after]


def test_requests_that_get_no_care_run_out_of_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "care_at", lambda *_: 1 << 30)
    with pytest.raises(IndexError):
        steps_of(1, True)


def test_requests_that_have_moved_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [steps_of(seed, False, 3) for seed in range(8)]
    monkeypatch.setattr(Placement, "take_changed", lambda _: False)
    with pytest.raises((AssertionError, IndexError, ValueError)):
        assert [steps_of(seed, True, 3) for seed in range(8)] == expected


def test_nobody_waits_for_ever() -> None:
    """A request of low priority is overtaken by urgent ones for a bounded time."""
    scheduler: Scheduler[Fake] = Scheduler(limits(1, 8, most_homes=ALL))
    patient = Fake([1, 2], priority=2)
    scheduler.add(patient)
    num_overtaking = 0
    while num_overtaking < 1000:
        scheduler.add(Fake([1, 3], arrived=float(num_overtaking)))
        admitted = scheduler.admit()
        assert admitted is not None
        if admitted[0] is patient:
            break
        scheduler.finish(admitted[0])
        num_overtaking += 1
    assert num_overtaking == 2 * SECONDS_PER_PRIORITY


def test_a_long_prompt_takes_turns_where_rows_are_padded() -> None:
    scheduler: Scheduler[Fake] = Scheduler(limits(2, 4, packed=False, most_homes=ALL))
    for tokens in ([1, 2], list(range(30))):
        scheduler.add(Fake(tokens))
        scheduler.admit()
    kinds = []
    for _ in range(6):
        schedule = scheduler.schedule()
        kinds.append((len(schedule.decoding), [counts[0] for _, counts in schedule.filling]))
        for request, counts in schedule.filling:
            assert len(set(counts)) == 1
            request.num_computed_tokens = [counts[0] + each for each in request.num_computed_tokens]
    assert kinds == [(0, [4]), (1, []), (0, [4]), (1, []), (0, [4]), (1, [])]


def pieces(prompts: list[int], chunk: int, packed: bool = True) -> list[list[tuple[int, int]]]:
    """Per step, the rows of each prompt by its number: fills as they are, and chains that end with their root."""
    scheduler: Scheduler[Fake] = Scheduler(limits(len(prompts), chunk, packed, most_homes=ALL))
    requests = [Fake([number, *range(1000 * number, 1000 * number + size - 1)]) for number, size in enumerate(prompts)]
    for request in requests:
        scheduler.add(request)
        assert scheduler.admit()
    scheduler.running.reverse()  # slots of requests that have ended are taken again, in any order
    scheduler.placement.wanted.reverse()
    steps: list[list[tuple[int, int]]] = []
    while any(request.num_pending > 1 for request in requests):
        schedule, step = scheduler.schedule(), []
        done = [(request, request.num_pending - 1) for request in schedule.decoding]
        for request, count in [*done, *((request, counts[0]) for request, counts in schedule.filling)]:
            step += [(requests.index(request), count)] if count else []
            request.num_computed_tokens = [count + each for each in request.num_computed_tokens]
        steps.append(sorted(step))
    return steps


def test_prompts_are_filled_in_order_and_do_not_wait_for_others() -> None:
    assert pieces([31, 31, 41], 20) == [[(0, 20)], [(0, 10)], [(1, 20)], [(1, 10)], [(2, 20)], [(2, 20)]]
    assert pieces([3, 31], 20) == [[(0, 2), (1, 20)], [(1, 10)]], "a chain as short as a tree takes no room"
    assert pieces([6, 31], 20) == [[(0, 5), (1, 5)], [(1, 20)], [(1, 5)]]
    assert pieces([5, 6, 31], 24) == [[(0, 4), (1, 5), (2, 3)], [(2, 27)]], "half is filled anyway"
    assert pieces([23, 9], 20) == [[(0, 22)], [(1, 8)]], "no step for the last few tokens"


def test_withdrawn_requests_are_gone() -> None:
    scheduler: Scheduler[Fake] = Scheduler(limits(1, 8, most_homes=ALL))
    requests = [Fake([1, number]) for number in range(5)]
    for request in requests:
        scheduler.add(request)
    assert scheduler.withdraw(requests[2]) and not scheduler.withdraw(requests[2])
    order = []
    while (admitted := scheduler.admit()) is not None:
        order.append(admitted[0])
        scheduler.finish(admitted[0])
    assert order == [requests[0], requests[1], requests[3], requests[4]] and scheduler.is_idle


def test_loads_without_torch() -> None:
    code = (
        "import sys, importlib.util as u; spec = u.spec_from_file_location('s', 'lpr/sched/scheduler.py');"
        "m = u.module_from_spec(spec); sys.modules['s'] = m; spec.loader.exec_module(m);"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=300)
