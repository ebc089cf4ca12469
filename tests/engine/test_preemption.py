"""A pool that is too small: requests are preempted all the time, and every text is that of plain decoding."""

from __future__ import annotations

import mmap
import random
import sys
from collections import Counter
from functools import cache
from typing import Any

import psutil
import pytest
import torch
from transformers import PreTrainedModel

from lpr import DecodeConfig, Engine, InputError, SamplingParams
from lpr.core.step_times import StepTimes
from lpr.engine.kv_pool import is_swap_faster, num_host_pages
from lpr.engine.request import Request
from lpr.model.host_pages import swap_ms
from tests.fakes.models import tiny_model
from tests.fakes.worlds import ThreadComm, ThreadWorld, run_ranks

DECODE = {"window_size": 3, "guess_set_size": 2, "trie_nodes": 16, "prefill_chunk": 48, "max_batch_size": 8}
POOL = 350
"""Tokens of the pool; the longest request needs 260."""


@cache
def model() -> PreTrainedModel:
    return tiny_model(seed=1, spread=0.1)


@cache
def cases() -> list[tuple[list[int], SamplingParams]]:
    """Requests of many lengths, most of which begin alike."""
    dice = random.Random(3)
    beginnings = [[dice.randrange(97) for _ in range(110)] for _ in range(3)]
    made = []
    for seed in range(24):
        prompt = dice.choice(beginnings)[: dice.choice((1, 17, 40, 96, 110))] + [dice.randrange(97) for _ in range(5)]
        sampled = {"temperature": 0.8, "seed": seed} if seed % 3 == 0 else {}
        made.append((prompt, SamplingParams(max_new_tokens=dice.choice((3, 20, 60, 120)), **sampled)))
    return made


@cache
def plain() -> list[list[int]]:
    """One token after the other, in a pool that holds them all."""
    engine = Engine.from_model(model(), decode=DecodeConfig.autoregressive())
    return [done.token_ids for done in engine.generate(*map(list, zip(*cases(), strict=True)))]


def soak(engine: Engine, seed: int, num_requests: int) -> Counter[str]:
    """Submit requests at random, and abort some; each of the others has its plain text."""
    dice, counts = random.Random(seed), Counter[str]()
    running: dict[Request, int] = {}
    while running or counts["asked"] < num_requests:
        while counts["asked"] < num_requests and len(running) < 12 and dice.random() < 0.6:
            number = dice.randrange(len(cases()))
            prompt, params = cases()[number]
            tenant = dice.choice(("", "", "other"))
            request = engine.submit(prompt, params, tenant=tenant, share=tenant, priority=dice.choice((0, 0, 3, -3)))
            running[request] = number
            counts["asked"] += 1
        if running and dice.random() < 0.01:
            engine.abort(dice.choice(list(running)))
        engine.step()
        for request in [each for each in running if each.finish_reason is not None]:
            wanted = plain()[running.pop(request)]
            counts[request.finish_reason] += 1
            if request.finish_reason == "abort":
                assert request.token_ids == wanted[: request.num_output]
            else:
                assert request.token_ids == wanted
    assert engine.is_idle
    return counts


@pytest.mark.parametrize("swap_space", [0, 50e3 / 2**30])
@pytest.mark.slow(first=1)
def test_texts_are_those_of_plain_decoding(swap_space: float | None) -> None:
    engine = Engine.from_model(model(), decode=DecodeConfig(**DECODE, kv_tokens=POOL), swap_space=swap_space)
    counts = soak(engine, 0, 60)
    assert counts["length"] + counts["abort"] == 60
    scheduler = engine.scheduler
    assert scheduler.counts.preemptions > 10
    now, out, back = scheduler.placement.swapped
    if swap_space == 0:
        assert now == out == back == 0 and scheduler.counts.recomputed > 100
    else:
        assert back > 30 and 0 < now <= min(out, scheduler.limits.num_host_pages)
        assert scheduler.counts.recomputed < 100


@pytest.mark.parametrize("home_ranks", ["auto"])
def test_on_several_ranks(home_ranks: Any) -> None:
    shared = model()  # two threads that make it at once would draw from one generator

    def program(comm: ThreadComm) -> int:
        decode = DecodeConfig(**DECODE, kv_tokens=POOL, home_ranks=home_ranks)
        engine = Engine.from_model(shared, decode=decode, comm=comm)
        if comm.rank:
            engine.work()
        else:
            soak(engine, 5, 24)
            engine.close()
        return engine.scheduler.counts.preemptions

    preempted = run_ranks(ThreadWorld(2), program)
    assert preempted[0] == preempted[1] > 0


def test_what_can_never_fit_is_refused() -> None:
    """At the start a pool too small for one step; later a request, with the number of tokens that would fit."""
    with pytest.raises(InputError, match=r"^there is K/V for 32 tokens .* 2 tokens and a tree of 36 nodes need 38$"):
        Engine.from_model(model(), decode=DecodeConfig(**DECODE, kv_tokens=32))
    engine = Engine.from_model(model(), decode=DecodeConfig(**DECODE, kv_tokens=160))
    assert engine.max_length == 160 - 36
    with pytest.raises(InputError, match=r"100 tokens and max_new_tokens=25 exceed the context of 124 tokens$"):
        engine.submit(list(range(90)) + [1] * 10, SamplingParams(max_new_tokens=25))
    [done] = engine.generate([list(range(90)) + [1] * 10], SamplingParams(max_new_tokens=24))
    assert len(done.token_ids) == 24 and done.stats.num_steps > 1


@pytest.mark.parametrize(
    ("swap_space", "why"),
    [(-1.0, "0 or more"), (float("nan"), "0 or more"), (float("inf"), "0 or more"), (1e9, "of host memory are free")],
)
def test_swap_space_is_checked(swap_space: float, why: str) -> None:
    with pytest.raises(InputError, match=rf"swap_space=.*{why}"):
        Engine.from_model(model(), decode=DecodeConfig(**DECODE), swap_space=swap_space)


def test_pages_are_swapped_where_that_is_faster() -> None:
    times = StepTimes.from_json({"nodes": [1, 512], "rows": [{"batch": 1, "kv": 256, "ms": [1.0, 512.0]}]})
    assert is_swap_faster(15.0, times, 16, 512) and not is_swap_faster(17.0, times, 16, 512)
    assert is_swap_faster(1e9, None, 16, 512)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_timing_a_swap_takes_no_memory_for_the_cache() -> None:
    """A start that touched pages of 60 arrays waited for a second until the system had cleared them."""
    area = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area.madvise(mmap.MADV_DONTFORK)  # so that the kernel does not join it with its neighbours
    pool = torch.frombuffer(area, dtype=torch.float32).view(8, -1, 4, 64)

    def resident() -> int:
        spans = ((each.addr.split("-"), each.rss) for each in psutil.Process().memory_maps(grouped=False))
        return sum(rss for (begin, end), rss in spans if int(begin, 16) <= pool.data_ptr() < int(end, 16))

    assert 0 < swap_ms([pool], 16) < 1000 and resident() == 0
    pool[0, 0] = 1.0
    assert resident() > 0


def test_room_for_swapped_pages() -> None:
    gib = 2**30
    assert num_host_pages(None, 100 * gib, gib) == num_host_pages(None, None, gib) == 4
    assert num_host_pages(None, 8 * gib, gib) == 2 and num_host_pages(0, gib, 1) == 0
    assert num_host_pages(6, 8 * gib, gib) == 6
