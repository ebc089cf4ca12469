"""A driver without a model, for tests of the front: it answers with tokens that follow from prompt and seed."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
from tokenizers import Tokenizer

from lpr.serve.front import Front
from lpr.serve.messages import (
    PROTOCOL,
    Abort,
    Chunk,
    Facts,
    FrameReader,
    Hello,
    Load,
    Pulse,
    Stepped,
    Stop,
    Submit,
    TokenLogprobs,
    Usage,
    frame,
    read_to_driver,
)
from lpr.serve.options import ServeArgs

TOKENIZER = Path(__file__).parent.parent / "lpr" / "assets" / "bundled" / "tokenizer.json"
QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}</{{ message['role'] }}>"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tokenizer_json(added: tuple[str, ...] = ()) -> str:
    """The bundled tokenizer with further special tokens."""
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    tokenizer.add_special_tokens(list(added))
    return str(tokenizer.to_str())


def facts(**changes: Any) -> Facts:
    """Facts of a model that fills in the middle and chats."""
    tokenizer = changes.pop("tokenizer", None) or tokenizer_json(QWEN)
    values: dict[str, Any] = {
        "model": "fake",
        "vocab_size": 4096 + len(QWEN),
        "max_length": 512,
        "max_batch_size": 4,
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

    def __init__(self, path: Path, said: Facts, text: str = "return x + 1\n", per_step: int = 2) -> None:
        self.facts = said
        self.text = text
        self.per_step = per_step
        self.pause = 0.0
        self.pulses = True
        self.hold = False
        """Take requests and answer none."""
        self.submitted: list[Submit] = []
        self.aborted: list[int] = []
        self.stopped = False
        self._path = path
        self._tokenizer = Tokenizer.from_str(said.tokenizer)
        self._running: dict[int, tuple[Submit, int]] = {}
        self._writer: asyncio.StreamWriter | None = None

    async def run(self) -> None:
        """Connect and serve until the front says Stop."""
        while not self._path.exists():
            await asyncio.sleep(0.005)
        reader, self._writer = await asyncio.open_unix_connection(str(self._path))
        self._writer.write(frame(Hello(PROTOCOL, 1)) + frame(self.facts))
        stepping = asyncio.create_task(self._steps())
        frames = FrameReader()
        while not self.stopped and (data := await reader.read(1 << 16)):
            for body in frames.feed(data):
                message = read_to_driver(body)
                if isinstance(message, Submit):
                    self.submitted.append(message)
                    self._running[message.id] = (message, 0)
                elif isinstance(message, Abort):
                    self.aborted.append(message.id)
                    self._running.pop(message.id, None)
                elif isinstance(message, Stop):
                    self.stopped = True
        stepping.cancel()
        self._writer.close()

    def vanish(self) -> None:
        """Hang up in the middle."""
        assert self._writer is not None
        self._writer.transport.abort()

    def say(self, chunk: Chunk) -> None:
        """Send a chunk of the test's own."""
        assert self._writer is not None
        self._writer.write(frame(Stepped([chunk], Load())))

    async def _steps(self) -> None:
        assert self._writer is not None
        beat = time.monotonic()
        while True:
            await asyncio.sleep(self.pause or 0.001)
            if self.pulses and time.monotonic() - beat > 0.2:
                beat = time.monotonic()
                self._writer.write(frame(Pulse(Load(num_running=len(self._running)))))
            if self.hold or not self._running:
                continue
            chunks = [self._chunk(id) for id in list(self._running)[: self.facts.max_batch_size]]
            self._writer.write(frame(Stepped(chunks, Load(len(self._running), 0, 0.5, 1))))

    def _chunk(self, id: int) -> Chunk:
        request, done = self._running[id]
        ids = self._tokenizer.encode(self.text).ids
        most = request.params.max_new_tokens
        taken = ids[done : done + self.per_step][: most - done]
        done += len(taken)
        finish = "stop" if done == len(ids) else "length" if done == most else None
        logprobs = None
        if getattr(request.params, "logprobs", None) is not None:
            logprobs = [TokenLogprobs(-0.5, [(token, -0.5), (5, -1.5)]) for token in taken]
        usage = None
        if finish is not None:
            del self._running[id]
            usage = Usage(done // self.per_step or 1, 0, 3, 10, 5, [3, 2], {"trie": (8, 4), "window": (2, 1)})
        else:
            self._running[id] = (request, done)
        text = self._tokenizer.decode(taken)
        sources = ["trie"] * (len(taken) - 1) + ["model"] if request.details else None
        return Chunk(id, taken, text, finish, None, logprobs, sources, usage)


@contextlib.contextmanager
def served(said: Facts | None = None, **flags: Any) -> Iterator[SimpleNamespace]:
    """A front on a free port with a fake driver behind it: `client`, `driver`, `front`, `url`, `code()`."""
    from tempfile import TemporaryDirectory

    said = said if said is not None else facts()
    flags = {"port": 0, "served_model_name": ("fake", "other"), "access_log": False, **flags}
    connect = flags.pop("connect", True)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "driver.sock"
        result: dict[str, Any] = {}
        started = threading.Event()

        def serve() -> None:
            async def main() -> int:
                front = Front(ServeArgs(**flags), [], attached=path)
                driver = FakeDriver(path, said)
                result.update(front=front, driver=driver, loop=asyncio.get_running_loop())
                tasks = [asyncio.create_task(driver.run())] if connect else []
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
        assert started.wait(20)
        if "failure" in result:
            thread.join()
            raise result["failure"]
        front, loop = result["front"], result["loop"]
        url = f"http://127.0.0.1:{front.port}"

        def ended(timeout: float = 20) -> int:
            thread.join(timeout)
            assert not thread.is_alive(), "the front did not end"
            if "failure" in result:
                raise result["failure"]
            return int(result["code"])

        def call(function: Any) -> None:
            loop.call_soon_threadsafe(function)

        with httpx.Client(base_url=url, timeout=20) as client:
            if connect:
                for _ in range(1000):
                    if client.get("/readyz").status_code == 200:
                        break
                    time.sleep(0.005)
            try:
                yield SimpleNamespace(
                    client=client, driver=result["driver"], front=front, url=url, ended=ended, call=call
                )
            finally:
                if thread.is_alive():
                    call(front.stop)
                    call(front.stop)
                    ended()
