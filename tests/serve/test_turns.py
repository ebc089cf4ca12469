"""Turns at a few workers: shares of keys, room, and tasks whose callers have gone."""

import asyncio
from types import SimpleNamespace

import pytest

from lpr.serve import limits, turns
from lpr.serve.errors import ApiError
from lpr.serve.turns import Turns

TWO = {"a": 1.0, "b": 1.0}


@pytest.fixture
def clock(monkeypatch):
    """Time that passes by `clock.now += seconds` alone."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(turns, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


class Work:
    """Tasks that end when they are told to, and the order in which they began."""

    def __init__(self, num_workers, weights):
        self.turns = Turns(num_workers, weights)
        self.begun = []
        self.ends = {}

    def ask(self, name, key="a", size=1):
        async def work():
            self.begun.append(name)
            self.ends[name] = asyncio.Event()
            await self.ends[name].wait()
            return name

        return asyncio.create_task(self.turns.run(key, size, work))

    async def end(self, name):
        self.ends[name].set()
        await settle()


async def settle():
    for _ in range(10):
        await asyncio.sleep(0)


def test_the_key_that_has_used_least_for_its_weight_goes_first(clock):
    async def main():
        work = Work(1, {"a": 3.0, "b": 1.0})
        for number in range(8):
            work.ask(f"a{number}", "a")
            work.ask(f"b{number}", "b")
        await settle()
        for _ in range(8):
            clock.now += 1
            await work.end(work.begun[-1])
        assert sum(name[0] == "a" for name in work.begun[:8]) == 6, work.begun

    asyncio.run(main())


def test_a_key_that_comes_later_has_no_claim_to_the_time_before(clock):
    async def main():
        work = Work(1, TWO)
        for number in range(4):
            work.ask(f"a{number}", "a")
            await settle()
            clock.now += 1
            await work.end(f"a{number}")
        work.ask("a4", "a"), work.ask("a5", "a"), work.ask("b0", "b"), work.ask("b1", "b")
        await settle()
        for _ in range(3):
            clock.now += 1
            await work.end(work.begun[-1])
        assert work.begun[4:] == ["a4", "b0", "a5", "b1"]

    asyncio.run(main())


@pytest.mark.parametrize("weights, most", [(TWO, 2), ({}, 3)])
def test_of_several_keys_none_has_all_workers(weights, most):
    async def main():
        work = Work(3, weights)
        for number in range(5):
            work.ask(number, "a")
        await settle()
        assert work.begun == list(range(most))
        work.ask("b", "b" if weights else "a")
        await settle()
        assert ("b" in work.begun) == bool(weights)

    asyncio.run(main())


def test_a_task_that_has_begun_keeps_its_turn_and_one_that_waits_leaves():
    async def main():
        work = Work(1, {})
        first, second, third = (work.ask(number) for number in range(3))
        await settle()
        first.cancel(), second.cancel()
        await settle()
        assert work.begun == [0] and len(work.turns) == 2
        await work.end(0)
        assert work.begun == [0, 2] and first.cancelled() and second.cancelled()
        await work.end(2)
        assert await third == 2 and len(work.turns) == 0

    asyncio.run(main())


async def refusal(task):
    with pytest.raises(ApiError) as caught:
        await asyncio.wait_for(task, 1)
    assert caught.value.status == 429 and caught.value.retry_after
    return True


@pytest.mark.parametrize("size", [1, limits.ASIDE_BYTES.most // 8])
def test_only_the_greedy_key_is_refused(size):
    """A key has half of the room; if two others fill it, the newest of the greedier one makes room for a third."""

    async def main():
        work = Work(1, {"a": 1.0, "b": 1.0, "c": 1.0})
        most = min(limits.ASIDE.most, 8 if size > 1 else 1 << 30)
        a = [work.ask(f"a{number}", "a", size) for number in range(most // 2)]
        await settle()
        assert await refusal(work.ask("a", "a", size)), "half of the room is left"
        b = [work.ask(f"b{number}", "b", size) for number in range(most // 2)]
        await settle()
        assert await refusal(work.ask("a", "a", size)) and await refusal(work.ask("b", "b", size))
        c = work.ask("c", "c", size)
        await settle()
        assert not c.done() and await refusal(b[-1] if b[-1].done() else a[-1])
        assert sum(each.done() for each in (*a, *b)) == 1

    asyncio.run(main())


def test_a_task_that_is_larger_than_the_room_is_taken_alone():
    async def main():
        work, size = Work(1, TWO), 2 * limits.ASIDE_BYTES.most
        first = work.ask("first", "a", size)
        await settle()
        assert await refusal(work.ask("second", "a", 1)) and not first.done()
        await work.end("first")
        assert await first == "first"

    asyncio.run(main())


def test_what_a_task_raises_reaches_its_caller_alone():
    async def main():
        turns = Turns(1, {})

        async def fail():
            raise KeyError("a bug")

        async def succeed():
            return 1

        with pytest.raises(KeyError):
            await turns.run("", 1, fail)
        assert await turns.run("", 1, succeed) == 1

    asyncio.run(main())
