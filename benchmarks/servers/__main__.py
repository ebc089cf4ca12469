"""lpr's server beside vLLM's and llama.cpp's: `python -m benchmarks.servers --model FOLDER --vllm DIR --llama DIR`.

Every server of one type of weights is started, then each load is put to each of them in turn: the same prompts, in the
model's chat template and as token ids, to the OpenAI API, streamed. A load is a data set, a temperature and a number of
clients, each of which asks again as soon as it is answered. Its prompts are asked twice: cold, when the server has not
seen them, and warm. A server that does not start or that ends is a row that says so; every wait has a limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from os.path import commonprefix
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from benchmarks.common import (
    RESULTS,
    Flag,
    Options,
    Whole,
    attempt,
    progress,
    read_json,
    read_options,
    run_main,
    write_json,
)  # fmt: skip
from benchmarks.data import load_prompts
from benchmarks.processes.services import Server, ServerEndedError, free_port, started
from benchmarks.report.parts import renew
from benchmarks.report.tables import summary
from benchmarks.servers.client import Answer, Load, acceptance, ask_all, counts_of
from benchmarks.servers.configurations import CONFIGURATIONS, HOW_TO_INSTALL, Places, command_of
from lpr.config import InputError

DOCS = Path(__file__).parents[2] / "docs" / "results.md"
MARKS = "<!-- made by python -m benchmarks.servers --table -->", "<!-- end -->"
PASSES: tuple[Literal["cold", "warm"], ...] = ("cold", "warm")
PLAIN = "lpr-plain"
"""Its texts are those that other plain servers are compared with."""
Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ServersOptions(Options):
    """Compare lpr's server with vLLM's and llama.cpp's on one machine, in one run."""

    model: Path | None = None  # Model folder.
    sets: tuple[str, ...] = ("hub:classeval", "hub:humaneval", "hub:gsm8k", "hub:mt_bench")
    """Data sets: files of JSON lines, or hub:NAME."""
    peers: tuple[str, ...] = tuple(CONFIGURATIONS)  # Servers and settings.
    clients: tuple[int, ...] = (1, 4, 16)  # Numbers of clients.
    temperatures: tuple[float, ...] = (0.0, 0.8)  # Temperatures.
    dtypes: tuple[str, ...] = ("float32", "bfloat16")  # Types of weights.
    passes: tuple[Literal["cold", "warm"], ...] = PASSES
    """Whether prompts are asked for the first time, or that and once more."""
    prompts: Whole = 12  # Prompts of each load; each load has its own.
    tokens: Whole = 128  # Most tokens of an answer.
    vllm: Path | None = None  # Environment with vLLM.
    llama: Path | None = None  # Folder with llama-server, float32.gguf and bfloat16.gguf.
    urls: tuple[str, ...] = ()  # Servers that run already, as NAME=URL; they take the place of --peers.
    start_seconds: float = 600.0  # Limit of a server's start.
    request_seconds: float = 300.0  # Limit of a request.
    add: Flag = False  # Keep the other rows of --output.
    table: Flag = False  # Measure nothing: draw the tables in docs/results.md from benchmarks/results/servers*.json.


@dataclass(frozen=True)
class Case:
    """A load, and the prompts that only it has."""

    data: str
    temperature: float
    clients: int
    prompts: Sequence[Sequence[int]]


def cases_of(options: ServersOptions) -> list[Case]:
    """Every load; raises InputError if a data set has too few prompts for all of them."""
    assert options.model is not None
    kinds = [(temperature, clients) for temperature in options.temperatures for clients in options.clients]
    number = options.prompts
    found = []
    for data in options.sets:
        texts = load_prompts(data, number * len(kinds), options.model)
        if len(texts) < number * len(kinds):
            most = len(texts) // len(kinds)
            raise InputError(f"{data} has {len(texts)} prompts, so its {len(kinds)} loads have at most {most} each")
        ids = token_ids(options.model, texts)
        name = Path(data.removeprefix("hub:")).stem
        found += [Case(name, *kind, ids[at * number : (at + 1) * number]) for at, kind in enumerate(kinds)]
    return found


def token_ids(model: Path, texts: Sequence[str]) -> list[list[int]]:
    """The texts, which have their special tokens, as ids."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return [list(tokenizer.encode(text, add_special_tokens=False)) for text in texts]


def figures(answers: Sequence[Answer], seconds: float) -> Json:
    """The figures of one load; raises RuntimeError with the first reason if a request failed."""
    if failed := [answer.failed for answer in answers if answer.failed]:
        raise RuntimeError(f"{len(failed)} of {len(answers)} requests failed: {failed[0]}")
    tokens = sum(answer.num_tokens for answer in answers)
    first = sorted(answer.first for answer in answers if answer.first is not None)
    each = [answer.seconds_per_token for answer in answers if answer.seconds_per_token is not None]
    return {
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(tokens / seconds, 1),
        "first_token_ms": round(1e3 * statistics.median(first), 1) if first else None,
        "slowest_first_token_ms": round(1e3 * first[-1], 1) if first else None,
        "token_ms": round(1e3 * statistics.median(each), 2) if each else None,
    }


def agreement(texts: Sequence[str], others: Sequence[str]) -> Json:
    """How many texts are equal, and the mean part of a text before the first difference."""
    pairs = [(text, other, len(commonprefix([text, other]))) for text, other in zip(texts, others, strict=True)]  # noqa: RUF071
    parts = [begin / max(len(text), len(other), 1) for text, other, begin in pairs]
    equal = sum(text == other for text, other in zip(texts, others, strict=True))
    same = [1.0 if text == other else part for text, other, part in zip(texts, others, parts, strict=True)]
    return {"equal_texts": equal, "equal_part": round(statistics.mean(same), 3)}


def plain_of(name: str) -> str:
    """The configuration whose texts are compared with those of `name`: plain decoding of the same server, or lpr's."""
    mine = f"{CONFIGURATIONS[name].peer}-plain"
    return PLAIN if mine == name else mine


class Comparison:
    """The servers of one type of weights, and their texts."""

    def __init__(self, dtype: str, options: ServersOptions) -> None:
        self.dtype, self._options = dtype, options
        self.servers: dict[str, Server | str] = {}
        """By name, a running server or why there is none."""
        self._texts: dict[tuple[str, str], list[str]] = {}

    def start(self, stack: contextlib.ExitStack, folder: Path) -> list[Json]:
        """Start the servers one after another; returns a row for each."""
        rows = []
        for each in self._options.urls:
            name, _, url = each.partition("=")
            self.servers[name] = Server(name, url)
        for name in () if self._options.urls else self._options.peers:
            row: Json = {"name": name, "case": f"{self.dtype}, start"}
            try:
                self.servers[name] = server = stack.enter_context(self._started(name, folder))
                row["ready_seconds"] = server.ready_seconds
            except ServerEndedError as failure:
                self.servers[name] = row["failed"] = str(failure)
            rows.append(row)
        return rows

    def _started(self, name: str, folder: Path) -> contextlib.AbstractContextManager[Server]:
        options, port = self._options, free_port()
        assert options.model is not None
        slots = max(options.clients)
        places = Places(options.model.absolute(), options.vllm, options.llama, options.threads, slots)
        command, environment = command_of(name, self.dtype, port, places)
        log = folder / f"{name}-{self.dtype}.log"
        ready = "/readyz" if CONFIGURATIONS[name].peer == "lpr" else "/health"
        return started(name, command, environment, port, ready, log, options.start_seconds)

    def put(self, case: Case, turn: int) -> list[Json]:
        """Put a load to each server, the first of them by `turn`; returns a row for each server and pass."""
        rows, names = [], list(self.servers)
        first = turn % len(names)
        for number in self._options.passes:
            for name in names[first:] + names[:first]:
                row: Json = {
                    "name": name, "dtype": self.dtype, "data": case.data, "temperature": case.temperature,
                    "clients": case.clients, "prompts": len(case.prompts), "pass": number,
                    "case": f"{self.dtype}, {case.data}, {case.temperature:g}, {case.clients} clients, {number}",
                }  # fmt: skip
                rows.append(row | attempt(partial(self._ask, name, case, row["case"])))
        for row in rows:
            other = self._texts.get((plain_of(row["name"]), row["case"]))
            mine = self._texts.get((row["name"], row["case"]))
            if mine is not None and other is not None and mine is not other:
                row |= agreement(mine, other)
        return rows

    def _ask(self, name: str, case: Case, place: str) -> Json:
        server = self.servers[name]
        if isinstance(server, str):
            raise ServerEndedError(server)
        server.check()
        options = self._options
        is_vllm = CONFIGURATIONS[name].peer == "vllm"
        # With a seed, vLLM 0.32 on a CPU ends at a prompt of two steps: a generator has no offset there.
        load = Load(case.clients, case.temperature, options.tokens, options.request_seconds, seeded=not is_vllm)
        before = counts_of(server.url) if is_vllm else {}
        answers, seconds = asyncio.run(ask_all(server.url, served_name(server.url), case.prompts, load))
        server.check()
        found = figures(answers, seconds)
        self._texts[name, place] = [answer.text for answer in answers]
        return found | (acceptance(before, counts_of(server.url)) if is_vllm else {})


def served_name(url: str) -> str:
    """The name under which a server offers its model."""
    import httpx

    return str(httpx.get(url + "/v1/models", timeout=30).json()["data"][0]["id"])


def check(options: ServersOptions) -> None:
    """Raise InputError for options that contradict each other."""
    if options.model is None or not (options.model / "config.json").exists():
        raise InputError("--model must be a model folder")
    if unknown := [name for name in options.peers if name not in CONFIGURATIONS]:
        raise InputError(f"--peers {unknown[0]!r} is none of {', '.join(CONFIGURATIONS)}")
    if bad := [each for each in options.urls if each.partition("=")[0] not in CONFIGURATIONS or "=http" not in each]:
        raise InputError(f"--urls {bad[0]!r} is not NAME=URL, where NAME is one of {', '.join(CONFIGURATIONS)}")
    if not options.prompts or not options.tokens or min(options.clients, default=0) < 1:
        raise InputError("--prompts, --tokens and --clients must be at least 1")
    if options.urls and len(options.dtypes) != 1:
        raise InputError("--urls needs one of --dtypes, the type that these servers run in")
    if options.passes not in (PASSES, PASSES[:1]):
        raise InputError("--passes must be cold, or cold and warm")
    if options.add and not options.output:
        raise InputError("--add needs --output")
    for name in () if options.urls else options.peers:  # a missing peer is told before anything starts
        command_of(name, options.dtypes[0], 0, Places(options.model, options.vllm, options.llama))


def measure(options: ServersOptions, console: Console) -> Json:
    """Every load against every server; the result file is renewed load by load, so that a run cut short has rows."""
    check(options)
    cases = cases_of(options)
    before = read_json(str(options.output))["runs"] if options.add and Path(str(options.output)).exists() else []
    runs: list[Json] = []
    for dtype in options.dtypes:
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            comparison = Comparison(dtype, options)
            runs += comparison.start(stack, folder)
            advance = stack.enter_context(progress(console, len(cases), "asking"))
            for turn, case in enumerate(cases):
                runs += comparison.put(case, turn)
                if options.output:
                    write_json(Path(options.output), {"benchmark": "servers", **result_of(options, before, runs)})
                advance(1, f"{dtype}, {case.data}")
    return result_of(options, before, runs)


def result_of(options: ServersOptions, before: Sequence[Json], runs: Sequence[Json]) -> Json:
    """The result: `runs`, and those rows of an earlier result that they do not replace."""
    assert options.model is not None
    new = {(run["name"], run["case"]) for run in runs}
    kept = [run for run in before if (run["name"], run["case"]) not in new]
    return {"model": options.model.name, "max_new_tokens": options.tokens, "runs": [*kept, *runs]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    if {"-h", "--help"} & set(words):
        print(HOW_TO_INSTALL.read_text(encoding="utf-8"))
    try:
        options = read_options("servers", ServersOptions, arguments)
        if options.table:
            results = [read_json(path) for path in sorted(RESULTS.glob("servers*.json"))]
            renew(DOCS, MARKS, [table for result in results for table in summary(result)])
            return 0
    except InputError as error:
        print(f"benchmarks.servers: {error}", file=sys.stderr)
        return 2
    return run_main("servers", ServersOptions, measure, arguments)


if __name__ == "__main__":
    sys.exit(main())
