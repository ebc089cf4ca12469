"""Kills and stops ranks of a service at random, and compares every stream with the undisturbed one.

    python -m benchmarks.chaos --minutes 10 --ranks 3 --json

A service on loopback answers requests of all kinds (temperature 0 and 0.8, penalties, stop strings, log-probabilities,
grammars). Its answers before any loss are the reference. Then clients send requests continuously, while every few
seconds SIGKILL or SIGSTOP hits a random rank, the driver's included, or all ranks at once, or SIGKILL hits their
supervisor, and with it their store. Text, token ids, finish reason, offsets and usage of every stream must be equal,
log-probabilities within 1e-3. At the end no process, listening port, temporary file or shared memory may be left.

A *pause* is the longest time without any event of any client between one loss and the next. Where no rank was left and
the model was loaded again, it is not counted in `pause_with_survivors_...`. The exit code is 1 if a stream failed or
differed, or something is left. The last line of stdout is JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import random
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import psutil
from rich.console import Console

from benchmarks.common import Flag, Options, Whole, progress, run_main
from benchmarks.processes.leaks import Traces
from benchmarks.processes.services import running
from lpr.config import InputError

PROMPTS = (
    "def fibonacci(n):\n    ",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "import os\n\n\ndef read_lines(path):\n    ",
    "for i in range(10):\n    for j in range(10):\n        ",
    "def quicksort(values):\n    if len(values) < 2:\n        return values\n    ",
    '"""Tools for graphs."""\n\n\nclass Graph:\n    ',
)
REGEX = "[a-z]{2,9}( [a-z]{2,9}){30,60}"


@dataclass
class Output:
    """A stream as its client saw it, without step boundaries."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    finish: str | None = None
    offsets: list[int] = field(default_factory=list)  # Where the text of each token begins, from `logprobs`.
    logprobs: list[float] = field(default_factory=list)
    num_tokens: int = 0  # From usage.
    failed: str | None = None

    def exact(self) -> tuple[object, ...]:
        """Everything that must be equal: all but log-probabilities, whose last bits depend on the rows of a step."""
        return self.text, self.ids, self.finish, self.offsets, len(self.logprobs), self.num_tokens


def bodies(count: int, seed: int) -> list[dict[str, Any]]:
    """Requests at temperature 0 and 0.8, with penalties, stop strings, least lengths, log-probabilities, grammars."""
    dice = random.Random(seed)
    has_grammar = importlib.util.find_spec("llguidance") is not None
    made: list[dict[str, Any]] = []
    for index in range(count):
        body: dict[str, Any] = {
            "prompt": dice.choice(PROMPTS) + dice.choice(("", "x = ", "# note\n    ")),
            "max_tokens": dice.choice((60, 150, 300)),
            "temperature": (0, 0.8)[index % 2],
            "seed": index,
            "ignore_eos": True,
        }
        if dice.random() < 0.4:
            body |= {"presence_penalty": 0.4, "frequency_penalty": 0.2, "repetition_penalty": 1.1}
        if dice.random() < 0.3:
            body["stop"] = dice.choice((["\n\n\n", "return None"], ["self.items", "  # "], ["print("]))
        if dice.random() < 0.3:
            body |= {"top_p": 0.95, "top_k": 40}
        if dice.random() < 0.4:
            body["logprobs"] = 2
        if has_grammar and index % 8 == 5:
            body["response_format"] = {"type": "regex", "regex": REGEX}
            del body["ignore_eos"]
        if dice.random() < 0.2:
            body |= {"min_tokens": 20}
        made.append(body)
    return made


class Clients:
    """Clients that send the next request as soon as they are answered."""

    def __init__(self, url: str, asked: list[dict[str, Any]]) -> None:
        """Send the requests `asked` repeatedly."""
        self.asked = asked
        self.wanted: list[Output] = []  # the undisturbed answers
        self.events: list[float] = []  # times of all events of all clients (time.monotonic)
        self.num_streams = 0
        self.failed: list[str] = []
        self.different: list[str] = []
        self.largest_difference = 0.0  # between log-probabilities
        self._http = httpx.AsyncClient(base_url=url, timeout=900, limits=httpx.Limits(max_connections=None))

    async def close(self) -> None:
        """Disconnect."""
        await self._http.aclose()

    async def undisturbed(self, num_clients: int) -> None:
        """Record the answers before any loss."""
        gate = asyncio.Semaphore(num_clients)

        async def one(body: dict[str, Any]) -> Output:
            async with gate:
                return await self.ask(body, stream=True)

        self.wanted = list(await asyncio.gather(*(one(body) for body in self.asked)))

    async def work(self, seed: str, ending: asyncio.Event) -> None:
        """Send random requests until `ending`, and compare."""
        dice = random.Random(seed)
        while not ending.is_set():
            index = dice.randrange(len(self.asked))
            stream = dice.random() < 0.9
            found = await self.ask(self.asked[index], stream)
            self.num_streams += 1
            self.compare(self.asked[index], found, self.wanted[index])

    def compare(self, body: dict[str, Any], found: Output, wanted: Output) -> None:
        """Record a failure or a difference of an answer."""
        if found.failed is not None:
            self.failed.append(found.failed)
            return
        if found.exact() != wanted.exact():
            self.different.append(f"{json.dumps(body)}: {found.exact()!r} is not {wanted.exact()!r}")
        for one, other in zip(found.logprobs, wanted.logprobs, strict=False):
            self.largest_difference = max(self.largest_difference, abs(one - other))

    async def ask(self, body: dict[str, Any], stream: bool) -> Output:
        """One request to its end; a failure is in `failed`."""
        output = Output()
        more: dict[str, Any] = {"return_token_ids": True}
        if stream:
            more |= {"stream": True, "stream_options": {"include_usage": True}}
        try:
            async with self._http.stream("POST", "/v1/completions", json={**body, **more}) as response:
                if response.status_code != 200:
                    output.failed = f"HTTP {response.status_code}: {(await response.aread()).decode()[:300]}"
                elif not stream:
                    self._take(json.loads(await response.aread()), output)
                else:
                    await self._read(response, output)
        except httpx.HTTPError as failure:
            output.failed = f"{type(failure).__name__}: {failure}"
        return output

    async def _read(self, response: httpx.Response, output: Output) -> None:
        done = False
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                self._take(json.loads(line[6:]), output)
                self.events.append(time.monotonic())
            done = done or line == "data: [DONE]"
        if not done and output.failed is None:
            output.failed = "the stream ended without [DONE]"

    def _take(self, data: dict[str, Any], output: Output) -> None:
        if "error" in data:
            output.failed = data["error"]["message"]
        for choice in data.get("choices") or ():
            output.text += choice["text"]
            output.ids += choice["token_ids"]
            output.finish = choice["finish_reason"] or output.finish
            if choice["logprobs"] is not None:
                output.offsets += choice["logprobs"]["text_offset"]
                output.logprobs += choice["logprobs"]["token_logprobs"]
        if data.get("usage"):
            output.num_tokens = data["usage"]["completion_tokens"]


def pauses(events: list[float], losses: list[float], end: float) -> Iterator[float]:
    """Per loss, the longest time in seconds without any event until the next loss (or `end`).

    `events`, `losses` and `end` are times on one clock, `events` and `losses` in order.
    """
    for index, loss in enumerate(losses):
        until = losses[index + 1] if index + 1 < len(losses) else end
        within = [loss, *(event for event in events if loss < event < until)]
        yield max(after - before for before, after in zip(within, [*within[1:], until], strict=True))


RANK = "lpr.serve.ranks.rank"  # a word in the command of a rank; a launcher's command has more
SUPERVISOR = "lpr.dist.supervisor"
LAUNCHERS = ("torch.distributed.run", SUPERVISOR)
LOGPROB_TOLERANCE = 1e-3  # the number of rows in a step's matrix products decides the last bits in float32
READY_SECONDS = 300.0  # time for a service to be ready again, on a busy machine
NUM_BODIES = 24


@dataclass(frozen=True, kw_only=True)
class ChaosOptions(Options):
    """Kill ranks of a service at random, and compare streams."""

    threads: Whole = 1  # CPU threads of each rank.
    minutes: float = 10.0  # Duration of the losses.
    ranks: Whole = 3  # Replicas.
    every: float = 4.0  # Seconds from ready to the next loss.
    clients: Whole = 4  # Streams at a time.
    batch: Whole = 4  # Slots of the service.
    kv_tokens: Whole = 0
    """Tokens of each rank's KV cache, fewer than the streams need for requests to be preempted; 0: room for all."""
    seed: Whole = 0  # Seed of requests and losses.
    model: str | None = None  # Folder or hub id; the bundled model if none is given.
    device: str | None = None  # cpu, cuda or cuda:N; a GPU if there is one.
    dtype: str = "float32"  # Type of the weights; other types round by the number of rows.
    exact: Flag = False  # Exact mode: the same bits for every shape of a step.


@dataclass
class Losses:
    """Losses of ranks, with times (time.monotonic)."""

    times: list[float] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)  # Of each loss: the signal, and the number of ranks that got it.
    num_restarts: list[int] = field(default_factory=list)
    """Before each loss: how often the service had restarted all ranks."""
    num_kills: int = 0  # Processes that got SIGKILL.
    num_stops: int = 0  # Processes that got SIGSTOP.
    num_all: int = 0  # Times that all ranks were hit at once.
    problem: str | None = None  # Why the losses stopped early.


async def disturb(
    traces: Traces, http: httpx.AsyncClient, dice: random.Random, every: float, end: float, losses: Losses
) -> None:
    """Kill or stop ranks until `end`, each time about `every` seconds after the service was ready."""
    while time.monotonic() < end:
        if not await ready(http):
            losses.problem = f"the service was not ready again within {READY_SECONDS:.0f} s"
            return
        await asyncio.sleep(max(0.2, min(4 * every, dice.expovariate(1 / every), end - time.monotonic())))
        if time.monotonic() > end or not await is_ready(http):  # the last loss may show only now
            continue
        family = traces.family()
        ranks = [each for each in family if is_rank(each)]
        supervisors = [each for each in family if is_supervisor(each)]
        if not ranks:
            continue
        losses.num_restarts.append(metrics((await http.get("/metrics")).text)["restart"])
        chance, kind = dice.random(), signal.SIGKILL if dice.random() < 0.7 else signal.SIGSTOP
        hit = ranks if chance < 0.1 else [dice.choice(ranks)]
        losses.times.append(time.monotonic())
        if chance > 0.95 and supervisors:
            hit, kind = supervisors, signal.SIGKILL
            losses.kinds.append("SIGKILL supervisor")
        else:
            losses.kinds.append(f"{kind.name} {len(hit)} of {len(ranks)}")
        losses.num_all += hit == supervisors or len(hit) == len(ranks)
        for process in hit:
            with contextlib.suppress(psutil.Error):
                process.send_signal(kind)
                losses.num_kills += kind == signal.SIGKILL
                losses.num_stops += kind == signal.SIGSTOP


async def ready(http: httpx.AsyncClient) -> bool:
    """Wait until the service is ready; False if it takes too long."""
    end = time.monotonic() + READY_SECONDS
    while time.monotonic() < end:
        if await is_ready(http):
            return True
        await asyncio.sleep(0.05)
    return False


async def is_ready(http: httpx.AsyncClient) -> bool:
    """True if the service answers that it is ready."""
    try:
        return (await http.get("/readyz")).status_code == 200
    except httpx.HTTPError:
        return False


def is_rank(process: psutil.Process) -> bool:
    """True for a rank, except a stopped one that still has to be ended."""
    try:
        words = process.cmdline()
        stands = process.status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False
    return RANK in words and not stands and not any(part in word for word in words for part in LAUNCHERS)


def is_supervisor(process: psutil.Process) -> bool:
    """True for the process that starts the ranks and holds their store."""
    try:
        return SUPERVISOR in process.cmdline()
    except psutil.Error:
        return False


async def run(url: str, traces: Traces, options: ChaosOptions, console: Console) -> dict[str, Any]:
    """One run against the service at `url`."""
    asked = bodies(NUM_BODIES, options.seed)
    clients, losses, ending = Clients(url, asked), Losses(), asyncio.Event()
    seconds = 60 * options.minutes
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        await clients.undisturbed(options.clients)
        if problem := next((each.failed for each in clients.wanted if each.failed), None):
            raise InputError(f"a request failed before anything was lost: {problem}")
        began = time.monotonic()
        dice = random.Random(f"{options.seed} losses")
        disturbing = asyncio.create_task(disturb(traces, http, dice, options.every, began + seconds, losses))
        working = [
            asyncio.create_task(clients.work(f"{options.seed} {number}", ending)) for number in range(options.clients)
        ]
        try:
            with progress(console, round(seconds), "killing ranks") as advance:
                shown = 0
                while not disturbing.done():
                    await asyncio.wait({disturbing}, timeout=1.0)
                    traces.look()
                    passed = min(round(seconds), round(time.monotonic() - began))
                    advance(passed - shown, f"{len(losses.times)} losses, {clients.num_streams} streams")
                    shown = passed
            await disturbing
            ending.set()
            _, late = await asyncio.wait(working, timeout=READY_SECONDS)
            ended = time.monotonic()
            if losses.problem is None:
                await ready(http)
            counts = metrics((await http.get("/metrics")).text) if losses.problem is None else {}
        finally:
            for task in (disturbing, *working):
                task.cancel()
            await clients.close()
    found = list(pauses(clients.events, losses.times, ended))
    restarts = [*losses.num_restarts, counts.get("restart", 0)]
    survived = [before == after for before, after in pairwise(restarts)]
    silences = sorted(found)
    short = sorted(pause for pause, is_short in zip(found, survived, strict=True) if is_short)
    failed = [*clients.failed, *(["a stream did not end"] * len(late)), *([losses.problem] if losses.problem else [])]
    return {
        "kills": losses.num_kills,
        "stops": losses.num_stops,
        "all_at_once": losses.num_all,
        "streams": clients.num_streams,
        "failed": len(failed),
        "different": len(clients.different),
        "pause_p50_s": quantile(silences, 0.5),
        "pause_p99_s": quantile(silences, 0.99),
        "pause_with_survivors_p50_s": quantile(short, 0.5),
        "pause_with_survivors_p99_s": quantile(short, 0.99),
        "logprob_difference": clients.largest_difference,
        "events": counts,
        "losses": [
            [round(at - began, 1), kind, "others continue" if is_short else "all restart", round(pause, 3)]
            for at, kind, is_short, pause in zip(losses.times, losses.kinds, survived, found, strict=True)
        ],
        "problems": [each[:600] for each in (*failed, *clients.different)][:10],
    }


def quantile(ordered: list[float], share: float) -> float | None:
    """The nearest rank, in seconds; None of nothing."""
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3) if ordered else None


def metrics(text: str) -> dict[str, int]:
    """Events of the ranks, as the service counts them, and preemptions since all ranks began."""
    found = re.findall(r'^lpr:rank_events_total\{.*?event="(\w+)".*?\} ([\d.e+]+)$', text, re.M)
    found += re.findall(r"^vllm:num_(preemptions)_total\{.*?\} ([\d.e+]+)$", text, re.M)
    return {name: int(float(value)) for name, value in found}


def measure(options: ChaosOptions, console: Console) -> dict[str, Any]:
    """Start a service, disturb it, stop it, and count leaks; raises InputError."""
    if options.minutes <= 0 or options.every <= 0 or options.ranks < 1 or options.clients < 1:
        raise InputError("--minutes, --every, --ranks and --clients must be above 0")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        keeps = Path(folder) / "files"
        keeps.mkdir()
        # torch leaves a cache among the temporary files.
        environment = {"TMPDIR": str(keeps), "TORCHINDUCTOR_CACHE_DIR": str(Path(folder) / "torch")}
        flags = ["--no-access-log", "--lp", str(options.ranks), "--dtype", options.dtype]
        flags += ["--max-batch-size", str(options.batch), "--request-timeout", "900", "--shutdown-timeout", "50"]
        flags += ["--exact"] if options.exact else []
        flags += ["--kv-tokens", str(options.kv_tokens)] if options.kv_tokens else []
        for name in ("model", "device"):
            flags += [f"--{name}", getattr(options, name)] if getattr(options, name) else []
        with running(flags, options.threads, more=environment) as service:
            traces = Traces(psutil.Process(service.pid), keeps)
            traces.look()
            result = asyncio.run(run(service.url, traces, options, console))
            traces.look()
            code = service.stop()
        time.sleep(1.0)
        left = traces.left()
        result["problems"] += [f"left behind: {each.name}" for each in traces.folder.rglob("*")]
        port = int(service.url.rpartition(":")[2])
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            left["ports"] += 1
        for each in traces.seen:  # leaked processes are reported, and ended
            with contextlib.suppress(psutil.Error):
                each.kill()
    wrong = result["failed"] or result["different"] or any(left.values()) or code
    return {
        "ranks": options.ranks, "minutes": options.minutes, "seed": options.seed,
        "clients": options.clients, "exit_code": code, **result, "leaks": left,
        "seconds": round(time.monotonic() - began, 1),
        "num_failed": int(bool(wrong) or result["logprob_difference"] > LOGPROB_TOLERANCE),
    }  # fmt: skip


def main() -> int:
    """Run the command line; returns the exit code."""
    return run_main("chaos", ChaosOptions, measure)


if __name__ == "__main__":
    sys.exit(main())
