"""Targets: who is admitted, how prompts are filled, and the goodput that comes of it."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from lpr import DecodeConfig, Engine, SamplingParams
from lpr.config import InputError
from lpr.core.step_times import KNOTS, StepTimes
from lpr.sched.limits import SHORTEST_CHUNK, Limits, Targets
from lpr.sched.queue import MOST_OVERTAKEN, Waiting
from lpr.sched.scheduler import Scheduler, rooms
from tests.fakes.models import tiny_model
from tests.fakes.sim_requests import SimRequest, serve_on_one_rank

TIMES = StepTimes({(1, 256): [2.0 + 0.05 * n for n in KNOTS]})
"""A step takes 2 ms, and 0.05 ms for each token."""
FIRST_MS, TOKEN_MS = 400, 4


def request(arrived: float = 0.0, prompt: int = 100, output: int = 60) -> SimRequest:
    return SimRequest(arrived, prompt, output, tokens=[7] * prompt)


def targets(first: float = math.inf, token: float = math.inf, now: float = 0.0) -> Targets[SimRequest]:
    return Targets(lambda: TIMES, 1, first, token, now)


def running(prompt: int, computed: int, arrived_ms: float = 0.0) -> SimRequest:
    found = request(prompt=prompt)
    found.homes, found.slots, found.num_computed_tokens, found.arrived_ms = [0], [0], [computed], arrived_ms
    return found


def test_the_clock_is_the_tables() -> None:
    asked = targets()
    asked.pass_step([10, 60], 2, 300)
    asked.pass_step([0, 0], 0, 300)
    assert asked.now == pytest.approx(2.0 + 3.0 + 2.05)


def test_a_request_is_lost_when_its_prompt_cannot_be_evaluated_in_time() -> None:
    late = request(prompt=100)  # takes 7 ms
    late.arrived_ms = 50.0
    assert not targets(first=20.0, now=62.9).is_lost(late)
    assert targets(first=20.0, now=63.1).is_lost(late)


def test_those_that_can_be_in_time_come_before_those_that_cannot_but_not_for_ever() -> None:
    queue: Waiting[SimRequest] = Waiting()
    lost = request()
    queue.add(lost)
    for _ in range(MOST_OVERTAKEN):
        later = request()
        queue.add(later)
        assert queue.first(lambda each: each is lost) is later
        queue.remove(later)
    queue.add(later := request())
    assert queue.first(lambda each: each is lost) is lost and later is not lost
    assert queue.first() is lost


def test_as_many_run_beside_each_other_as_keep_their_time_per_token() -> None:
    """Without drafts a rank's step takes 2 ms and 0.05 ms per request: 8 of them take 2.4 ms a token, 9 take 2.45."""
    asked = targets(token=2.42)
    several = [request() for _ in range(9)]
    assert asked.token_ms(several[0], 8, 1) == pytest.approx(2.4)
    assert asked.allow(several[:8], 8, 1) and not asked.allow(several, 9, 1)
    assert targets(token=0.1).allow(several[:1], 1, 1), "somebody must run"


def test_prompts_are_filled_in_pieces_that_leave_others_their_time_per_token() -> None:
    limits = Limits[SimRequest](
        num_slots=1, num_ranks=1, longest_chain=8, join_chunk=16, prefill_chunk=512, packed=True
    )
    both = [running(300, 299), running(600, 0)]
    assert rooms(both, limits) == [512]
    [room] = rooms(both, replace(limits, targets=targets(token=10.0)))
    assert 64 <= room < 160 and TIMES.time(1 + room, 1, 300) <= 10.0
    assert rooms(both, replace(limits, targets=targets(token=0.1))) == [16], "never so small that it takes for ever"
    assert rooms(both[1:], replace(limits, targets=targets(token=10.0))) == [512], "nobody waits for it"


def test_texts_stand_still_for_half_a_second_at_most() -> None:
    """Prompts of several requests share a step, but while others decode only as much as takes no longer than that."""
    both = [running(300, 299), running(6000, 0)]
    for slope, most in ((0.1, 2048), (0.4, 1245), (4.0, 512)):
        times = StepTimes({(1, 256): [2.0 + slope * n for n in KNOTS]})
        limits = Limits[SimRequest](1, 1, 2048, 8, True)
        limits.decide_by(lambda times=times: times, 1, math.inf, math.inf)  # type: ignore[misc]
        assert rooms(both, limits) == [most]
        assert rooms(both[1:], limits) == [2048], "nobody decodes"
    assert most == SHORTEST_CHUNK, "the last one takes 2 s: fewer tokens would hardly come further"


def test_prompts_share_a_step_only_where_that_makes_them_cheaper() -> None:
    """Four prompts come at once. All that share a step have their first tokens at its end."""
    for rest, most in ((1.0, 32), (40.0, 512), (0.0, 1)):
        times = StepTimes({(1, 256): [rest + 1.0 * n for n in KNOTS]})
        assert times.cheap_tokens(0.05) == most
    for rest, first in ((1.0, [100]), (6.0, [100, 28]), (100.0, [100] * 4)):
        times = StepTimes({(1, 256): [rest + 1.0 * n for n in KNOTS]})
        limits = Limits[SimRequest](4, 1, 2048, 8, True)
        limits.decide_by(lambda times=times: times, 1, math.inf, math.inf)  # type: ignore[misc]
        scheduler: Scheduler[SimRequest] = Scheduler(limits)
        for number in range(4):
            scheduler.add(SimRequest(number, 101, 4, tokens=[number] * 101))
            admitted = scheduler.admit()
            assert admitted is not None
            admitted[0].num_computed_tokens = admitted[1]
        schedule = scheduler.schedule()
        found = [each.num_pending - 1 for each in schedule.decoding]
        assert found + [counts[0] for _, counts in schedule.filling] == first


def test_a_prompt_in_the_prefix_cache_can_still_be_in_time() -> None:
    """Of two late requests of equal length, the one whose pages are known goes first."""
    limits: Limits[SimRequest] = Limits(
        1, 1, 512, 8, True, targets=targets(first=TIMES.time(400, 1, 400) - 1), num_ahead=8
    )
    scheduler: Scheduler[SimRequest] = Scheduler(limits)
    texts = [[number] * 400 for number in (1, 2)]
    for text in (texts[1], texts[0], texts[1]):
        scheduler.add(SimRequest(0, 400, 4, tokens=list(text)))
    assert limits.targets is not None and limits.targets.is_lost(request(prompt=400))
    found = []
    for _ in range(2):
        admitted = scheduler.admit()
        assert admitted is not None
        first, computed = admitted
        found.append(first.tokens[0])
        first.num_computed_tokens = [399]
        scheduler.schedule()
        scheduler.end_step()
        scheduler.finish(first)
    assert found == [2, 2]


def test_pieces_are_shorter_far_into_a_long_prompt() -> None:
    """512 tokens take 10 ms after few tokens and 170 ms after 32k; another request has 30 ms per token."""
    nodes = {"nodes": [1, 512], "rows": [{"batch": 1, "kv": kv, "ms": [2.0, ms]} for kv, ms in ((256, 10), (1024, 14))]}
    times = StepTimes.from_json(nodes)
    found: Targets[SimRequest] = Targets(lambda: times, 1, per_token_ms=30.0)
    other = request()
    assert found.chunk([other], 16, 512) == 512
    assert found.chunk([other], 16, 512, 32_000) == 64 < found.chunk([other], 16, 512, 4096)
    assert found.chunk([other], 128, 512, 10**6) == 128, "it goes on in any case"
    limits: Limits[SimRequest] = Limits(4, 1, 512, 8, True, targets=found)
    assert (
        rooms([running(100, 99), running(32_768, 31_000)], limits)[0]
        < rooms([running(100, 99), running(2000, 0)], limits)[0]
    )


def goodput(scheduler: Scheduler[SimRequest], seed: int = 1) -> tuple[float, int]:
    """Requests within both targets, as a part, of those that come in bursts faster than a mesh can serve them."""
    dice = random.Random(seed)
    arrivals, now = [], 0.0
    for _ in range(260):
        arrivals.append(request(now, prompt=dice.choice((40, 400))))
        now += dice.expovariate(38.0)
    serve_on_one_rank(arrivals, TIMES, scheduler)
    done = [each for each in arrivals if each.num_left == 0]
    good = [each for each in done if 1e3 * each.first_seconds <= FIRST_MS and 1e3 * each.token_seconds <= TOKEN_MS]
    return len(good) / len(arrivals), len(done)


@pytest.mark.slow
def test_targets_raise_goodput() -> None:
    """The scheduler's own code, with its clock from the table."""

    limits = Limits[SimRequest](32, 1, 512, 4, packed=True, retains=False, join_chunk=8)
    plain, _ = goodput(Scheduler(limits))
    asked = Scheduler(replace(limits, targets=targets(FIRST_MS, TOKEN_MS)))
    kept, served = goodput(asked)
    assert served == 260, "nobody waits for ever"
    assert kept > 1.5 * plain, (kept, plain)


def test_targets_need_step_times() -> None:
    assert DecodeConfig(first_token_ms=200, per_token_ms=8).per_token_ms == 8
    with pytest.raises(InputError, match="go by step times, which only automatic sizes have"):
        DecodeConfig(window_size=0, trie_nodes=8, per_token_ms=8)
    with pytest.raises(InputError, match="first_token_ms=-1"):
        DecodeConfig(first_token_ms=-1)


def test_an_engine_admits_by_the_time_per_token() -> None:
    """Steps of two sequences are too slow by the table: they are decoded one after the other, to the same text."""
    model = tiny_model()
    slow_together = StepTimes({(1, 256): [2.0] * len(KNOTS), (4, 256): [90.0] * len(KNOTS)})
    prompts, params = [[3, 4, 5 + i, 6] for i in range(4)], SamplingParams(max_new_tokens=8)
    found = []
    for per_token_ms in (0, 4):
        decode = DecodeConfig(max_batch_size=4, max_nodes=8, per_token_ms=per_token_ms)
        engine = Engine.from_model(model, decode=decode, costs=slow_together)
        requests, together = [engine.submit(prompt, params) for prompt in prompts], 0
        while not engine.is_idle:
            engine.step()
            together = max(together, len(engine.scheduler.running))
        found.append((together > 1, [request.completion().token_ids for request in requests]))
    assert found == [(True, found[0][1]), (False, found[0][1])]
