"""Keys share the slots and the queue: by weight, whatever one of them sends. With a pretended clock, and over HTTP."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pytest

from lpr.config import InputError
from lpr.sched import queue as waiting
from lpr.sched.fair_shares import Shares
from lpr.sched.limits import Limits
from lpr.sched.queue import MOST_PRIORITY, SECONDS_PER_PRIORITY
from lpr.sched.scheduler import Scheduler
from lpr.serve.api.middleware import MOST_WEIGHT, Keys
from tests.fakes.fake_driver import served

STEP = 0.05
"""Seconds of a step."""


@dataclass(eq=False)
class Asked:
    """A request of a key that takes `length` steps."""

    share: str
    arrived: float
    length: int = 20
    weight: float = 1.0
    priority: int = 0
    tenant: str = ""
    charged: float = 0.0
    num_steps: int = 0
    num_fill_steps: int = 0
    tokens: list[int] = field(default_factory=lambda: [1, 2])
    slots: list[int] = field(default_factory=list)
    homes: list[int] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=lambda: [0])
    num_left: int = 1000
    arrived_ms: float = 0.0
    admission: int = 0
    num_cached_tokens: int = 0
    num_preempted_tokens: int = 0
    begun: float | None = None
    ended: float | None = None

    @property
    def num_pending(self) -> int:
        return 1

    @property
    def stats(self) -> Asked:
        return self

    @property
    def waited(self) -> float:
        assert self.begun is not None
        return self.begun - self.arrived


def play(requests: Iterable[Asked], num_slots: int, until: float) -> dict[str, float]:
    """Run a scheduler over requests that come at their times; the slot-seconds of each share."""
    scheduler: Scheduler[Asked] = Scheduler(Limits(num_slots, 1, 8, 3, True))
    coming = sorted(requests, key=lambda each: each.arrived)
    used: Counter[str] = Counter()
    now = 0.0
    while now < until and (coming or not scheduler.is_idle):
        while coming and coming[0].arrived <= now:
            scheduler.add(coming.pop(0))
        while (admitted := scheduler.admit()) is not None:
            admitted[0].begun = now
        for request in list(scheduler.running):
            request.num_steps += 1
            used[request.share] += STEP
            if request.num_steps == request.length:
                request.ended = now + STEP
                scheduler.finish(request)
        now += STEP
    return used


def flood(share: str, count: int, **changes: object) -> list[Asked]:
    return [Asked(share, 0.0, **changes) for _ in range(count)]  # type: ignore[arg-type]


def slow_waits(other: list[Asked], **changes: object) -> list[float]:
    """How long each request of key B waits that sends one a second while `other` requests come."""
    mine = [Asked("B", second + 0.01, **changes) for second in range(1, 30)]  # type: ignore[arg-type]
    play([*other, *mine], 4, 1000.0)
    return [each.waited for each in mine]


@pytest.mark.parametrize("priority", [0, -MOST_PRIORITY, -(2**62)])
def test_a_flood_of_one_key_does_not_keep_another_out(priority: int) -> None:
    """Whatever its priority: the other waits for one service time of the slots, about."""
    waits = slow_waits(flood("A", 200, priority=priority))
    assert max(waits) <= 20 * STEP + STEP
    assert max(slow_waits([])) <= STEP


def test_a_flood_of_long_requests_does_not_either() -> None:
    waits = slow_waits(flood("A", 200, length=200))
    assert max(waits) <= 200 * STEP + 20 * STEP  # until a slot is free, and one service time
    assert sorted(waits)[len(waits) // 2] <= 20 * STEP + STEP


@pytest.mark.parametrize("num_slots", [1, 2, 4, 8])
@pytest.mark.parametrize("lengths", [(20, 20), (5, 60)])
def test_weights_are_the_ratio_of_slot_time_under_saturation(num_slots: int, lengths: tuple[int, int]) -> None:
    dice = random.Random(0)

    def requests(share: str, weight: float, length: int) -> list[Asked]:
        count = 1500 * num_slots // length
        return [Asked(share, 0.0, dice.randint(1, 2 * length - 1), weight) for _ in range(count)]

    used = play(requests("A", 3.0, lengths[0]) + requests("B", 1.0, lengths[1]), num_slots, 1500 * STEP)
    assert abs(used["A"] / used["B"] - 3.0) <= 0.3


def test_slots_are_shared_at_all_times_not_in_turns() -> None:
    requests = [*flood("A", 100), *flood("B", 100)]
    play(requests, 8, 1000.0)
    for request in requests:
        assert request.begun is not None
        beside = [each for each in requests if each.begun is not None and each.begun <= request.begun < each.ended]  # type: ignore[operator]
        assert Counter(each.share for each in beside) == {"A": 4, "B": 4}


def test_alone_a_key_gets_everything_and_saves_nothing_up() -> None:
    alone = flood("A", 40)
    assert play(alone, 4, 1000.0) == {"A": pytest.approx(40 * 20 * STEP)}
    assert max(each.ended or 0.0 for each in alone) == pytest.approx(10 * 20 * STEP)
    # B comes late, with a flood of its own: both get half from then on.
    later = [Asked("B", 20.0) for _ in range(400)]
    used = play([*flood("A", 400), *later], 4, 60.0)
    assert used["A"] == pytest.approx(4 * 20.0 + 4 * 20.0, rel=0.05)


def test_without_keys_the_order_is_that_of_arrival_and_priority() -> None:
    requests = [Asked("", 0.1 * number, priority=number % 3) for number in range(30)]
    play(requests, 1, 1000.0)
    begun = sorted(requests, key=lambda each: each.begun or 0.0)
    assert begun[0] is requests[0]
    assert begun[1:] == sorted(requests[1:], key=lambda each: each.arrived + SECONDS_PER_PRIORITY * each.priority)


def test_none_starves_under_a_flood_of_the_best_priority() -> None:
    """Of one key or without keys: a request is passed for 20 priorities' seconds at most."""
    patient = Asked("", 0.0, priority=2**62)
    urgent = [Asked("", 0.5 * number, priority=-(2**62)) for number in range(2000)]
    play([patient, *urgent], 1, 1000.0)
    assert patient.begun is not None
    assert patient.waited <= 2 * MOST_PRIORITY * SECONDS_PER_PRIORITY + 2 * 20 * STEP * 200


def test_lost_ranks_leave_the_clocks() -> None:
    """A request whose ranks are lost is not charged twice, and waits before all shares."""
    scheduler: Scheduler[Asked] = Scheduler(Limits(1, 2, 8, 3, True, most_homes=1))
    first, second = flood("A", 2, num_computed_tokens=[0, 0])
    for request in (first, second, *flood("B", 3)):
        scheduler.add(request)
    while (admitted := scheduler.admit()) is not None:
        admitted[0].num_computed_tokens = [1, 1]
    before = scheduler.waiting.shares.state
    lost = scheduler.regroup([1])
    assert len(lost) == 1 and scheduler.waiting.first() is lost[0]
    scheduler.placement.take_moves()
    assert scheduler.waiting.shares.state == before
    other: Shares[Asked] = Shares()
    other.resume(before)
    assert other.state == before


def no_charge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shares, "begin", lambda self, request: None)


def no_settlement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shares, "end", lambda self, request: None)


def saves_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shares, "enter", lambda self, request: None)


def no_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting.Waiting, "_in_order", lambda self: [*self])


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        (no_charge, test_slots_are_shared_at_all_times_not_in_turns),
        (no_settlement, lambda: test_weights_are_the_ratio_of_slot_time_under_saturation(4, (5, 60))),
        (saves_up, test_alone_a_key_gets_everything_and_saves_nothing_up),
        (no_shares, lambda: test_a_flood_of_one_key_does_not_keep_another_out(0)),
    ],
)
def test_mutants(monkeypatch: pytest.MonkeyPatch, fault: Callable[..., None], check: Callable[[], None]) -> None:
    fault(monkeypatch)
    with pytest.raises((AssertionError, ZeroDivisionError)):
        check()


# Over HTTP.


def test_a_weight_is_a_third_word(tmp_path):  # type: ignore[no-untyped-def]
    path, most = tmp_path / "keys", MOST_WEIGHT
    path.write_text(f"a sk-a {most}\nb sk-b {1 / most}\nb sk-c\n")
    assert Keys.read(None, path).weights == {"a": most, "b": 1 / most}
    for bad in (f"a k {most * 2}", "a k 0", "a k -1", "a k nan", "a k inf", "a k x", "a k 1 1", "a k 1\na j 2"):
        path.write_text(bad)
        with pytest.raises(InputError, match=r"line \d: "):
            Keys.read(None, path)


def ask(service, key: str, **body: object):  # type: ignore[no-untyped-def]
    body = {"prompt": "p", "max_tokens": 4, **body}
    return service.client.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})


def test_the_driver_learns_key_and_weight(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "keys"
    path.write_text("big sk-a 3\nbig sk-old\nsmall sk-b\n")
    with served(api_key_file=path, share_drafts="all") as service:
        for key, share in (("sk-a", ("big", 3.0)), ("sk-old", ("big", 3.0)), ("sk-b", ("small", 1.0))):
            assert ask(service, key, priority=-(2**62)).status_code == 200
            sent = service.driver.submitted[-1]
            assert (sent.share, sent.weight, sent.tenant, sent.priority) == (*share, "", -MOST_PRIORITY)
    with served() as service:
        assert service.client.post("/v1/completions", json={"prompt": "p"}).status_code == 200
        assert (service.driver.submitted[-1].share, service.driver.submitted[-1].weight) == ("", 1.0)
