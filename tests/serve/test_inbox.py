"""Waits of the service's streams: woken by chunks, ends and times, without a timer for each token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from lpr.protocol import Chunk
from lpr.serve.inbox import Alarm, Inbox


def timers_of(work: Coroutine[Any, Any, None]) -> int:
    """The number of timers that the event loop was asked for."""
    asked: list[float] = []

    async def counted() -> None:
        loop = asyncio.get_running_loop()
        original = loop.call_at

        def call_at(when: float, *rest: Any, **more: Any) -> asyncio.TimerHandle:
            asked.append(when)
            return original(when, *rest, **more)

        loop.call_at = call_at  # type: ignore[method-assign]
        await work

    asyncio.run(counted())
    return len(asked)


def test_chunks_come_in_order_without_a_timer_for_each() -> None:
    async def work() -> None:
        inbox, taken = Inbox(), list[int]()
        for number in range(50):
            asyncio.get_running_loop().call_soon(inbox.put, Chunk(number, [], ""))
            await inbox.wait(30.0)
            taken += [int(inbox.take().id) for _ in range(len(inbox))]
        inbox.close()
        assert taken == list(range(50))

    assert timers_of(work()) == 1


def test_a_wait_ends_by_itself_and_when_it_is_woken() -> None:
    async def work() -> None:
        inbox = Inbox()
        await asyncio.wait_for(inbox.wait(0.05), 10)
        await asyncio.wait_for(inbox.wait(0.0), 10)
        asyncio.get_running_loop().call_later(0.05, inbox.wake)
        await asyncio.wait_for(inbox.wait(60.0), 10)
        assert not len(inbox)
        asyncio.get_running_loop().call_later(0.05, inbox.put, Chunk(1, [], ""))
        await asyncio.wait_for(inbox.wait(60.0), 10)
        await asyncio.wait_for(inbox.wait(60.0), 10)  # what is there already ends it at once
        assert inbox.take().id == 1
        with pytest.raises(IndexError):
            inbox.take()
        inbox.close()

    asyncio.run(work())


def test_an_alarm_rings_at_the_time_that_was_set_last() -> None:
    async def work() -> None:
        rung: list[float] = []
        began = time.monotonic()
        alarm = Alarm(lambda: rung.append(time.monotonic() - began))
        alarm.set(0.1)
        alarm.set(0.3)  # later than before: the timer looks, and goes on
        while not rung:
            assert time.monotonic() - began < 10
            await asyncio.sleep(0.01)
        alarm.set(60.0)
        alarm.set(0.1)  # earlier
        while len(rung) < 2:
            assert time.monotonic() - began < 10
            await asyncio.sleep(0.01)
        alarm.set(0.05)
        alarm.at = None
        await asyncio.sleep(0.2)
        alarm.set(0.05)
        alarm.close()
        await asyncio.sleep(0.2)
        assert len(rung) == 2 and rung[0] >= 0.3

    asyncio.run(work())
