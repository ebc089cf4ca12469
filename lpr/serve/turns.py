"""Fair sharing of the few workers (threads or processes) between API keys."""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from lpr.protocol import ErrorCode
from lpr.serve import limits
from lpr.serve.errors import ApiError

R = TypeVar("R")


@dataclass(eq=False)
class _Task:
    key: str
    size: int
    work: Callable[[], Awaitable[Any]]
    done: asyncio.Future[Any]


class Turns:
    """Schedules tasks: the key with the least used time over its weight comes first.

    A started task runs to its end, even if its caller is gone. With several keys, no key gets all workers. For one
    event loop only.
    """

    def __init__(self, num_workers: int, weights: Mapping[str, float]) -> None:
        """Share `num_workers` among the keys of `weights`; without any, all tasks are of one key."""
        self._num_workers, self._weights = num_workers, weights
        self._waiting: list[_Task] = []
        self._running: dict[asyncio.Task[None], _Task] = {}
        self._used: defaultdict[str, float] = defaultdict(float)  # by key, seconds of workers over its weight

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running)

    async def run(self, key: str, size: int, work: Callable[[], Awaitable[R]]) -> R:
        """What `work` returns, a task of `size` bytes, once it has had its turn; raises ApiError if too much waits."""
        self._make_room(key, size)
        task = _Task(key, size, work, asyncio.get_running_loop().create_future())
        active = {each.key for each in self._tasks}
        if key not in active:  # idle time earns no credit
            self._used[key] = max(self._used[key], min((self._used[other] for other in active), default=0))
        self._waiting.append(task)
        self._begin()
        try:
            return await task.done
        finally:
            if task in self._waiting:
                self._waiting.remove(task)

    @property
    def _tasks(self) -> list[_Task]:
        return [*self._waiting, *self._running.values()]

    def _weight(self, key: str) -> float:
        return self._weights.get(key, 1.0)

    def _load(self, key: str | None, size: int = 0) -> float:
        """The used part of the room, by a key's or all tasks, plus one more task of `size` bytes if given."""
        sizes = [each.size for each in self._tasks if key is None or each.key == key]
        count, total = len(sizes) + bool(size), sum(sizes) + size
        by_bytes = total / limits.ASIDE_BYTES.most if len(sizes) else 0.0  # a single one may be larger than the room
        return max(count / max(1, limits.ASIDE.most), by_bytes) if limits.ASIDE.most else float("inf")

    def _make_room(self, key: str, size: int) -> None:
        """Make room for a task; raises ApiError if the key exceeds half of the room or uses most of a full one."""
        size = max(1, size)
        refused = ApiError(ErrorCode.OVERLOADED, "too many large requests wait to be checked", retry_after=1)
        if self._load(key, size) > (0.5 if len(self._weights) > 1 else 1.0):
            raise refused
        while self._load(None, size) > 1.0:
            greedy = max(self._waiting, key=lambda each: self._load(each.key) / self._weight(each.key), default=None)
            mine = self._load(key, size) / self._weight(key)
            if greedy is None or self._load(greedy.key) / self._weight(greedy.key) <= mine:
                raise refused
            last = next(each for each in reversed(self._waiting) if each.key == greedy.key)
            self._waiting.remove(last)
            if not last.done.done():
                last.done.set_exception(refused)

    def _begin(self) -> None:
        while len(self._running) < self._num_workers:
            held = Counter(each.key for each in self._running.values())
            most = max(1, self._num_workers - (len(self._weights) > 1))
            ready = [each for each in self._waiting if held[each.key] < most]
            if not ready:
                return
            task = min(ready, key=lambda each: self._used[each.key])  # of equal ones the first
            self._waiting.remove(task)
            running = asyncio.get_running_loop().create_task(self._work(task))
            self._running[running] = task

    async def _work(self, task: _Task) -> None:
        result, failure, began = None, None, time.monotonic()
        try:
            result = await task.work()
        except Exception as raised:
            failure = raised
        finally:
            self._used[task.key] += (time.monotonic() - began) / self._weight(task.key)
            self._running = {running: other for running, other in self._running.items() if other is not task}
            self._begin()
        if task.done.done():  # nobody waits for it
            return
        if failure is not None:
            task.done.set_exception(failure)
        else:
            task.done.set_result(result)
