"""The scheduler alone: slots without a gap, K/V that is what it is said to be, chunks, fairness."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lpr.engine import scheduler as module
from lpr.engine.scheduler import MOST_OVERTAKEN, Admission, Scheduler, SlotMove, num_shared

NUM_RANKS = 2


@dataclass(eq=False)
class Fake:
    """A request; its K/V of token j is the tuple of its tokens up to j."""

    tokens: list[int]
    priority: int = 0
    tenant: str = ""
    slot: int = -1
    num_computed_tokens: list[int] = field(default_factory=lambda: [0] * NUM_RANKS)

    @property
    def num_pending(self) -> int:
        return len(self.tokens) - min(self.num_computed_tokens)


class Slots:
    """What the cache of each rank holds, as moves and forwards leave it."""

    def __init__(self, num_slots: int) -> None:
        self.rows: list[list[dict[int, tuple[int, ...]]]] = [[{} for _ in range(num_slots)] for _ in range(NUM_RANKS)]

    def move(self, moves: list[SlotMove]) -> None:
        for move in moves:
            for rank, slots in enumerate(self.rows):
                count = move.num_rows[rank]
                source = {j: slots[move.source][j] for j in range(count) if j in slots[move.source]}
                target = {j: slots[move.target][j] for j in range(count) if j in slots[move.target]}
                slots[move.target].update(source)
                if move.exchange:
                    slots[move.source].update(target)

    def compute(self, request: Fake, rank: int, count: int) -> None:
        start = request.num_computed_tokens[rank]
        for j in range(start, start + count):
            self.rows[rank][request.slot][j] = tuple(request.tokens[: j + 1])
        request.num_computed_tokens[rank] = start + count

    def check(self, request: Fake) -> None:
        for rank, count in enumerate(request.num_computed_tokens):
            for j in range(count):
                held = self.rows[rank][request.slot].get(j)
                assert held == tuple(request.tokens[: j + 1]), f"rank {rank}, slot {request.slot}, row {j}: {held}"


def run_randomly(seed: int, num_slots: int, packed: bool, retains: bool) -> Scheduler[Fake]:
    """Arrivals, steps, ends and aborts at random; every row that counts as computed is looked at after every step."""
    choose = random.Random(seed)
    scheduler: Scheduler[Fake] = Scheduler(num_slots, NUM_RANKS, 5, 3, packed, retains)
    slots, texts = Slots(num_slots), [[choose.randrange(2) for _ in range(24)] for _ in range(3)]
    for _ in range(60):
        for _ in range(choose.choice([0, 0, 1, 2])):
            text = choose.choice(texts)[: choose.randrange(1, 20)]
            scheduler.add(Fake([*text, *(choose.randrange(2) for _ in range(choose.randrange(3)))]))
        while (admission := scheduler.admit()) is not None:
            slots.move(admission.moves)
            request = admission.request
            request.num_computed_tokens = list(admission.num_computed_tokens)
            assert max(request.num_computed_tokens) < len(request.tokens), "the root is evaluated in any case"
            slots.check(request)
        assert [request.slot for request in scheduler.running] == list(range(len(scheduler.running)))
        schedule = scheduler.schedule()
        assert sum(count for _, count in schedule.filling) <= 5
        for request, count in schedule.filling:
            assert 0 < count < request.num_pending
            for rank in range(NUM_RANKS):
                slots.compute(request, rank, min(count, len(request.tokens) - 1 - request.num_computed_tokens[rank]))
        for request in schedule.decoding:
            assert request.num_pending - 1 <= 5
            known = len(request.tokens)
            request.tokens += [choose.randrange(2) for _ in range(choose.randrange(1, 4))]
            for rank in range(NUM_RANKS):
                most = choose.choice([known, len(request.tokens) - 1])
                slots.compute(request, rank, most - request.num_computed_tokens[rank])
        for request in list(scheduler.running):
            slots.check(request)
            if choose.random() < 0.2:
                slots.move(scheduler.finish(request, keep=choose.random() < 0.9))
        for request in scheduler.running:
            slots.check(request)
    return scheduler


@given(st.integers(0, 2**32), st.integers(1, 5), st.booleans(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_what_counts_as_computed_is_in_the_slot(seed: int, num_slots: int, packed: bool, retains: bool) -> None:
    scheduler = run_randomly(seed, num_slots, packed, retains)
    assert retains or scheduler.num_hits == 0


def test_prefixes_are_found() -> None:
    assert sum(run_randomly(seed, 3, True, True).num_hits for seed in range(20)) > 300


def without_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SlotMove", lambda *args, exchange=False: SlotMove(*args))


def too_long_a_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "num_shared", lambda first, second: min(num_shared(first, second) + 1, len(second)))


def drafted_tokens_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    finish = Scheduler.finish

    def keeps_too_much(self, request, keep=True):  # type: ignore[no-untyped-def]
        request.num_computed_tokens = [len(request.tokens)] * NUM_RANKS
        return finish(self, request, keep)

    monkeypatch.setattr(Scheduler, "finish", keeps_too_much)


def a_row_too_few_is_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    admit = Scheduler._admit

    def short(self, request):  # type: ignore[no-untyped-def]
        found = admit(self, request)
        moves = [replace(move, num_rows=tuple(max(0, count - 1) for count in move.num_rows)) for move in found.moves]
        return Admission(found.request, found.num_computed_tokens, moves)

    monkeypatch.setattr(Scheduler, "_admit", short)


@pytest.mark.parametrize("fault", [without_exchange, too_long_a_prefix, drafted_tokens_kept, a_row_too_few_is_moved])
def test_mutants(monkeypatch: pytest.MonkeyPatch, fault) -> None:  # type: ignore[no-untyped-def]
    fault(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        for seed in range(40):
            run_randomly(seed, 3, True, True)


def test_nobody_waits_for_ever() -> None:
    """A request of low priority is overtaken by a bounded number of urgent ones."""
    scheduler: Scheduler[Fake] = Scheduler(1, NUM_RANKS, 8, 3, True)
    patient = Fake([1, 2], priority=2)
    scheduler.add(patient)
    num_overtaking = 0
    while num_overtaking < 1000:
        scheduler.add(Fake([1, 3]))
        admission = scheduler.admit()
        assert admission is not None
        if admission.request is patient:
            break
        scheduler.finish(admission.request)
        num_overtaking += 1
    assert num_overtaking == 2 * MOST_OVERTAKEN - 1


def test_the_least_recently_used_prefix_goes_first() -> None:
    scheduler: Scheduler[Fake] = Scheduler(3, NUM_RANKS, 8, 3, True)

    def complete(tokens: list[int]) -> int:
        scheduler.add(Fake(list(tokens)))
        admission = scheduler.admit()
        assert admission is not None
        admission.request.num_computed_tokens = [len(tokens)] * NUM_RANKS
        scheduler.finish(admission.request)
        return min(admission.num_computed_tokens)

    first, second, third = [1] * 8, [2] * 8, [3] * 8
    assert [complete(each) for each in (first, second, third)] == [0, 0, 0]
    assert complete([*first, 9]) == 8, "all three are retained"
    assert complete([4] * 8) == 0, "takes the slot of the second, unused for longest"
    assert [complete([*each, 9]) for each in (third, first)] == [8, 8]
    assert complete([*second, 9]) == 0


def test_a_long_prompt_takes_turns_where_rows_are_padded() -> None:
    scheduler: Scheduler[Fake] = Scheduler(2, NUM_RANKS, 4, 3, packed=False)
    for tokens in ([1, 2], list(range(30))):
        scheduler.add(Fake(tokens))
        scheduler.admit()
    kinds = []
    for _ in range(6):
        schedule = scheduler.schedule()
        kinds.append((len(schedule.decoding), [count for _, count in schedule.filling]))
        for request, count in schedule.filling:
            request.num_computed_tokens = [count + each for each in request.num_computed_tokens]
    assert kinds == [(0, [4]), (1, []), (0, [4]), (1, []), (0, [4]), (1, [])]


def test_withdrawn_requests_are_gone() -> None:
    scheduler: Scheduler[Fake] = Scheduler(1, NUM_RANKS, 8, 3, True)
    requests = [Fake([1, number]) for number in range(5)]
    for request in requests:
        scheduler.add(request)
    assert scheduler.withdraw(requests[2]) and not scheduler.withdraw(requests[2])
    order = []
    while (admission := scheduler.admit()) is not None:
        order.append(admission.request)
        scheduler.finish(admission.request)
    assert order == [requests[0], requests[1], requests[3], requests[4]] and scheduler.is_idle


@given(st.lists(st.integers(0, 1), max_size=12), st.lists(st.integers(0, 1), max_size=12))
def test_shared_prefix(first: list[int], second: list[int]) -> None:
    length = num_shared(first, second)
    assert first[:length] == second[:length]
    assert length == min(len(first), len(second)) or first[length] != second[length]


def test_loads_without_torch() -> None:
    code = (
        "import sys, importlib.util as u; spec = u.spec_from_file_location('s', 'lpr/engine/scheduler.py');"
        "m = u.module_from_spec(spec); sys.modules['s'] = m; spec.loader.exec_module(m);"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent, check=True, timeout=60)
