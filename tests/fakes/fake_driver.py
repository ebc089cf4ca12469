"""A driver without a model, for tests of the front: it answers with tokens that follow from prompt and seed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import httpx
from tokenizers import Tokenizer

from lpr.protocol import Abort, Chunk, Stop, Submit, TokenLogprobs, Usage
from lpr.serve.api.context import Context
from lpr.serve.front import Front
from lpr.serve.messages import (
    PROTOCOL,
    Facts,
    Finish,
    FrameReader,
    Hello,
    Load,
    Pulse,
    Resume,
    Stepped,
    ToDriver,
    frame,
)
from lpr.serve.options import ServeArgs
from tests.fakes.paths import ROOT

TOKENIZER = ROOT / "lpr" / "assets" / "bundled" / "tokenizer.json"
QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}</{{ message['role'] }}>"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@cache
def tokenizer_json(added: tuple[str, ...] = ()) -> str:
    """The bundled tokenizer with these special tokens behind its vocabulary, instead of its own for holes."""
    written = json.loads(TOKENIZER.read_text())
    written["added_tokens"] = [each for each in written["added_tokens"] if each["content"] in written["model"]["vocab"]]
    tokenizer = Tokenizer.from_str(json.dumps(written))
    tokenizer.add_special_tokens(list(added))
    return str(tokenizer.to_str())


tokenizer_of = cache(Tokenizer.from_str)
"""Tokenizers of the drivers, which do not change them; each takes 10 ms."""


def facts(**changes: Any) -> Facts:
    """Facts of a model that fills in the middle and chats."""
    tokenizer = changes.pop("tokenizer", None) or tokenizer_json(QWEN)
    values: dict[str, Any] = {
        "model": "fake",
        "vocab_size": 4096 + len(QWEN),
        "max_length": 512,
        "max_batch_size": 4,
        "page_size": 16,
        "num_pages": 128,
        "lp": 1,
        "tp": 1,
        "device": "cpu",
        "dtype": "float32",
        "eos_token_ids": [0],
        "tokenizer": tokenizer,
        "special_tokens": {"eos_token": "<|endoftext|>"},
        "chat_templates": {"default": TEMPLATE},
    }
    return Facts(**{**values, **changes})


class FakeDriver:
    """Answers each request with the ids of `text`, `per_step` at a time, one step every `pause` seconds."""

    def __init__(
        self, path: Path, said: Facts, epoch: int = 0, held: dict[int, tuple[Submit, int]] | None = None
    ) -> None:
        """`held`: the requests of the driver whose place this one takes, and how many ids of each the ranks have."""
        self.facts = said
        self.text = "return x + 1\n"
        self.per_step = 2
        self.pause = 0.0
        self.pulses = True
        self.hold = False
        """Take requests and answer none."""
        self.end_apart = False
        """Say that a request has ended in a chunk of its own."""
        self.before_step: Callable[[list[Submit]], None] = lambda running: None
        """Called with what is in slots before each step."""
        self.resumed: list[int] | None = None
        self.submitted: list[Submit] = []
        self.begun: list[int] = []
        """Ids in the order in which they got a slot."""
        self._slots: list[int] = []
        self.aborted: list[int] = []
        self.finished: list[int] = []
        self.stopped = False
        self.running: dict[int, tuple[Submit, int]] = {}
        self._held = held
        self._epoch = epoch
        self._path = path
        self._tokenizer = tokenizer_of(said.tokenizer)
        self._writer: asyncio.StreamWriter | None = None

    async def run(self) -> None:
        """Connect and serve until the front says Stop."""
        while not self._path.exists():
            await asyncio.sleep(0.005)
        reader, self._writer = await asyncio.open_unix_connection(str(self._path))
        self._writer.write(frame(Hello(PROTOCOL, 1, self._epoch, self._held is not None)) + frame(self.facts))
        stepping = asyncio.create_task(self._steps())
        frames = FrameReader(ToDriver)
        with contextlib.suppress(ConnectionError):
            while not self.stopped and (data := await reader.read(1 << 16)):
                for message in frames.feed(data):
                    self._obey(message)
        stepping.cancel()
        self._writer.close()

    def in_slots(self) -> list[int]:
        """Ids of the requests with a slot; free slots go by priority and arrival."""
        self._slots = [id for id in self._slots if id in self.running]
        waiting = [submit for id, (submit, _) in self.running.items() if id not in self._slots]
        waiting.sort(key=lambda each: each.arrived + 10 * each.priority)
        new = [int(submit.id) for submit in waiting[: self.facts.max_batch_size - len(self._slots)]]
        self._slots += new
        self.begun += new
        return list(self._slots)

    def _load(self) -> Load:
        return Load(self.in_slots(), 0.5, 1)

    def _obey(self, message: Any) -> None:
        assert self._writer is not None
        if isinstance(message, Submit):
            self.submitted.append(message)
            delivered = len(message.token_ids) - message.num_prompt
            self.running[message.id] = (message, delivered)
            self._writer.write(frame(Pulse(self._load())))
            held = (self._held or {}).get(message.id)
            if held is not None and held[1] > delivered:
                self._write([self._chunk(message.id, held[1] - delivered)])
        elif isinstance(message, Abort):
            self.aborted.append(message.id)
            self.running.pop(message.id, None)
        elif isinstance(message, Finish):
            self.finished.append(message.id)
            if not self.hold and self.running.pop(message.id, None) is not None:
                self._write([Chunk(message.id, [], "", "stop", usage=Usage(2, 0, 3, 4, 2, [2], {"trie": (4, 2)}, 4))])
        elif isinstance(message, Resume):
            self.resumed = message.ids
        elif isinstance(message, Stop):
            self.stopped = True

    def vanish(self) -> None:
        """Hang up in the middle."""
        assert self._writer is not None
        self._writer.transport.abort()

    def say(self, chunk: Chunk) -> None:
        """Send a chunk of the test's own."""
        self._write([chunk])

    def _write(self, chunks: list[Chunk]) -> None:
        assert self._writer is not None
        self._writer.write(frame(Stepped(chunks, self._load())))

    async def _steps(self) -> None:
        assert self._writer is not None
        beat = time.monotonic()
        while True:
            await asyncio.sleep(self.pause or 0.001)
            if self.pulses and time.monotonic() - beat > 0.2:
                beat = time.monotonic()
                self._writer.write(frame(Pulse(self._load())))
            if self.hold or not self.running:
                continue
            in_slots = self.in_slots()
            self._writer.write(frame(Pulse(self._load())))
            self.before_step([self.running[id][0] for id in in_slots])
            self._write([self._chunk(id, self.per_step) for id in in_slots])

    def _chunk(self, id: int, count: int) -> Chunk:
        request, done = self.running[id]
        start, before = done, self._said(done)
        ids = self._tokenizer.encode(self.text).ids
        most = request.params.max_new_tokens
        taken = ids[done : done + count][: most - done]
        done += len(taken)
        finish = "stop" if done == len(ids) else "length" if done == most else None
        if taken and self.end_apart:
            finish = None
        logprobs = None
        if getattr(request.params, "logprobs", None) is not None:
            logprobs = [TokenLogprobs(-0.5, [(token, -0.5), (5, -1.5)]) for token in taken]
        usage = None
        if finish is not None:
            del self.running[id]
            sources = {"trie": (8, 4), "window": (2, 1)}
            usage = Usage(done // self.per_step or 1, 0, 3, 10, 5, [3, 2], sources, done)
        else:
            self.running[id] = (request, done)
        text = self._said(done)[len(before) :]
        named = ["trie"] * (len(taken) - 1) + ["model"] if request.details else None
        chunk = Chunk(id, taken, text, finish, None, logprobs, named, usage, start=start, start_character=len(before))
        if request.prediction:  # of two tokens from it one is right
            new = done - (len(request.token_ids) - request.num_prompt)
            chunk.predicted = request.predicted[0] + 2 * new, request.predicted[1] + new
        return chunk

    def _said(self, count: int) -> str:
        """The text of the first `count` ids."""
        return str(self._tokenizer.decode(self._tokenizer.encode(self.text).ids[:count]))


class FakeRanks:
    """One start of ranks, as the front's keeper knows them: their driver is a FakeDriver."""

    def __init__(self, path: Path, said: Facts, prepare: Callable[[FakeDriver], None]) -> None:
        """Drivers connect to `path` and say `said`; each is given to `prepare` before it does."""
        self.drivers: list[FakeDriver] = []
        self.code: int | None = None
        """How the ranks have ended, once they have."""
        self._path = path
        self._said = said
        self._prepare = prepare
        self._ended = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """As Ranks.start."""
        self._add(FakeDriver(self._path, self._said))

    async def wait(self) -> int:
        """As Ranks.wait."""
        await self._ended.wait()
        assert self.code is not None
        return self.code

    async def stop(self, patience: float) -> None:
        """As Ranks.stop."""
        if self.code is None and patience and self._tasks:
            await asyncio.wait(self._tasks, timeout=patience)
        self.end(0 if all(driver.stopped for driver in self.drivers) else -9)

    def end(self, code: int) -> None:
        """All ranks end now."""
        if self.code is None:
            self.code = code
            self._ended.set()
            for task in self._tasks:
                task.cancel()
            for driver in self.drivers:
                with contextlib.suppress(AssertionError):
                    driver.vanish()

    def take_over(self, ahead: int = 0, keep: bool = False) -> None:
        """Another rank becomes the driver; the ranks have `ahead` ids more (or fewer) of each request than was said.

        With `keep` the driver before lives on, as one that was only slow.
        """
        old = self.drivers[-1]
        held = {id: (submit, max(0, done + ahead)) for id, (submit, done) in old.running.items()}
        if not keep:
            old.vanish()
        self._add(FakeDriver(self._path, self._said, len(self.drivers), held))

    def _add(self, driver: FakeDriver) -> None:
        self._prepare(driver)
        self.drivers.append(driver)
        self._tasks.append(asyncio.create_task(driver.run()))


PATIENCE = 120.0
"""Seconds for what takes less than one, as processes that start do on a machine with other work take 20."""


def wait_for(condition: Callable[[], Any], seconds: float = PATIENCE) -> None:
    """Wait until `condition` holds, and fail after so many seconds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.005)


@contextlib.contextmanager
def served(
    said: Facts | None = None,
    prepare: Callable[[FakeDriver], None] | None = None,
    processes: bool = False,
    **flags: Any,
) -> Iterator[SimpleNamespace]:
    """A front on a free port with a fake driver behind it: `client`, `driver`, `front`, `url`, `ended()`.

    With `prepare` the front starts the ranks itself, again and again: `starts` are its FakeRanks, and every driver is
    given to `prepare` before it connects. With `processes` the front starts those beside it at once, as it does for
    users; else the first task that needs one does, as three of them take longer to start than most tests.
    """
    from tempfile import TemporaryDirectory

    said = said if said is not None else facts()
    flags = {"port": 0, "served_model_name": ("fake", "other"), "access_log": False, **flags}
    connect = flags.pop("connect", True)
    at_start = Context._starts if processes else lambda self, work: work.close()
    with TemporaryDirectory() as folder, mock.patch.object(Context, "_starts", at_start):
        path = Path(folder) / "driver.sock"
        result: dict[str, Any] = {}
        starts: list[FakeRanks] = []
        started = threading.Event()

        def serve() -> None:
            async def main() -> int:
                if prepare is not None:

                    def make(path: Path) -> FakeRanks:
                        starts.append(FakeRanks(path, said, prepare))
                        return starts[-1]

                    front = Front(ServeArgs(**flags), [], make_ranks=make)
                else:
                    front = Front(ServeArgs(**flags), [], attached=path)
                driver = FakeDriver(path, said)
                result.update(front=front, driver=driver, loop=asyncio.get_running_loop())
                tasks = [asyncio.create_task(driver.run())] if connect and prepare is None else []
                started.set()
                code = await front.run()
                for task in tasks:
                    task.cancel()
                return code

            try:
                result["code"] = asyncio.run(main())
            except BaseException as failure:
                result["failure"] = failure
            finally:
                started.set()

        thread = threading.Thread(target=serve)
        thread.start()
        assert started.wait(PATIENCE)
        if "failure" in result:
            thread.join()
            raise result["failure"]
        front, loop = result["front"], result["loop"]
        url = f"http://127.0.0.1:{front.port}"

        def ended(timeout: float = PATIENCE) -> int:
            thread.join(timeout)
            assert not thread.is_alive(), "the front did not end"
            if "failure" in result:
                raise result["failure"]
            return int(result["code"])

        def call(function: Any) -> None:
            loop.call_soon_threadsafe(function)

        with httpx.Client(base_url=url, timeout=PATIENCE) as client:
            wait_for(lambda: front._routes is not None or not thread.is_alive())  # `run` has begun
            if connect:
                for _ in range(1000):
                    if client.get("/readyz").status_code == 200:
                        break
                    time.sleep(0.005)
            try:
                yield SimpleNamespace(
                    client=client, driver=result["driver"], front=front, url=url, ended=ended, call=call, starts=starts
                )
            finally:
                if thread.is_alive():
                    call(front.stop)
                    call(front.stop)
                    ended()
