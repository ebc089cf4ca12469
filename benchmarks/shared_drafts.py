"""Drafts shared between replicas: how fast and how much one gains by what another wrote, and what a lost store costs.

    python -m benchmarks.shared_drafts --output benchmarks/results/shared_drafts.json

Services on loopback, each of one rank, with a redis-server of their own (Debian's) between the first two:

    first, second   share drafts
    alone           learns from its own requests only
    cold            learns from no request

*Drafting.* The first completes a prompt; as soon as the second has learnt it (its /metrics say so, once a second), the
second gets a request like it: the same prompt, the same one sampled, or the prompt as it is once the next line was
typed. Alone gets both requests, cold only the like one. Tokens per step are counted, so other load changes nothing.
Sizes of trees are fixed (--nodes).

*Stream.* So many entries (--entries) of random tokens go through the stream to the second service, which meanwhile
answers; the resident memory of its rank is noted all along.

*Restart.* Clients ask the first two, and the server is killed and started again in the middle.

Every output is compared with the one of the cold service, token by token.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import statistics
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from rich.console import Console

from benchmarks.common import OneLineParser, make_parser, progress, run_main, whole
from benchmarks.processes.redis_server import RedisServer, redis_server
from benchmarks.processes.services import Running, running
from lpr.config import InputError

MODULES = (
    "argparse", "ast", "base64", "bdb", "calendar", "cmd", "codecs", "configparser", "contextlib", "csv",
    "dataclasses", "decimal", "difflib", "dis", "doctest", "enum", "filecmp", "fileinput", "fractions", "ftplib",
    "functools", "getopt", "gettext", "glob", "gzip", "hashlib", "heapq", "imaplib", "inspect", "ipaddress",
    "linecache", "locale", "mailbox", "mimetypes", "netrc", "optparse",
)  # fmt: skip
"""Modules of Python's standard library whose sources are the prompts."""
KINDS: dict[str, dict[str, Any]] = {
    "the same prompt": {"temperature": 0},
    "the same prompt, sampled": {"temperature": 0.8},
    "a line typed on": {"temperature": 0},
}
SOON = 2.0
"""Seconds within which the second service should know what the first has finished."""
AHEAD = 2000
"""Entries that the writer may be ahead of the reader: the stream keeps 10,000, and none should be lost here."""
CLIENTS = 4


@dataclass
class Service:
    """A service, its rank's process and what was asked of it."""

    running: Running
    client: httpx.Client

    def ask(self, prompt: str, num_tokens: int, **more: Any) -> tuple[list[int], int]:
        """Ids of a completion, and the steps that it took; raises httpx.HTTPError."""
        body = {"prompt": prompt, "max_tokens": num_tokens, "return_token_ids": True, "return_sources": True, **more}
        answer = self.client.post("/v1/completions", json={"seed": 1, "ignore_eos": True, **body})
        answer.raise_for_status()
        found = answer.json()
        return found["choices"][0]["token_ids"], found["lpr"]["num_steps"]

    def metric(self, name: str, label: str = "") -> float:
        """A metric's value."""
        found = re.search(rf"^{name}{{[^}}]*{label}[^}}]*}} (\S+)$", self.client.get("/metrics").text, re.M)
        return float(found[1]) if found else 0.0

    @property
    def learnt(self) -> float:
        """Outputs of others that it has learnt."""
        return self.metric("lpr:shared_drafts_total", 'event="learnt"')

    def await_learnt(self, count: float) -> float:
        """Seconds until it has learnt so many; raises RuntimeError if that takes too long."""
        return wait(lambda: self.learnt >= count, 300, f"{count:.0f} outputs are learnt")

    def memory(self) -> float:
        """MB that its largest process holds: its rank."""
        processes = psutil.Process(self.running.process.pid).children(recursive=True)
        return max(each.memory_info().rss for each in processes) / 2**20


def wait(is_so: Callable[[], object], seconds: float, what: str) -> float:
    """Seconds until `is_so`; raises RuntimeError if that takes too long."""
    began = time.monotonic()
    while not is_so():
        if time.monotonic() - began > seconds:
            raise RuntimeError(f"not within {seconds:g} s: {what}")
        time.sleep(0.01)
    return time.monotonic() - began


def prompts(count: int) -> list[tuple[str, str]]:
    """`count` beginnings of source files, each with the same one line further on; raises InputError."""
    found = []
    for module in MODULES[:count]:
        path = Path(sysconfig.get_paths()["stdlib"]) / f"{module}.py"
        try:
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        except OSError as failure:
            raise InputError(f"cannot read {path}: {failure.strerror}") from failure
        end = next(index for index in range(len(lines)) if index > len(lines) // 3 and lines[index].startswith("    "))
        beginning = "".join(lines[max(0, end - 30) : end])
        found.append((beginning, beginning + lines[end]))
    return found


# Drafting.


def drafting(services: dict[str, Service], options: argparse.Namespace, advance: Callable[..., None]) -> dict[str, Any]:
    """What the second service gains by what the first has just finished."""
    texts = prompts(options.prompts * len(KINDS))
    runs, delays, different = [], [], 0
    for number, (kind, more) in enumerate(KINDS.items()):
        steps = dict.fromkeys(("cold", "second", "alone"), 0)
        tokens = 0
        for index, (text, further) in enumerate(texts[number :: len(KINDS)]):
            like = further if "typed" in kind else text
            before = services["second"].learnt
            services["first"].ask(text, options.max_new_tokens, temperature=0)
            delays.append(services["second"].await_learnt(before + 1))
            services["alone"].ask(text, options.max_new_tokens, temperature=0)
            asked = {name: services[name].ask(like, options.max_new_tokens, **more, seed=index) for name in steps}
            tokens += len(asked["cold"][0])
            different += sum(ids != asked["cold"][0] for ids, _ in asked.values())
            for name, (_, count) in asked.items():
                steps[name] += count
            advance(1, kind)
        rates = {f"{name}_tokens_per_step": round(tokens / count, 3) for name, count in steps.items()}
        runs.append({"case": kind, "requests": options.prompts, "tokens": tokens, **rates})
    return {
        "runs": runs, "different": different, "learnt_after_s_median": round(statistics.median(delays), 3),
        "learnt_after_s_max": round(max(delays), 3), "late": sum(delay > SOON for delay in delays),
    }  # fmt: skip


# The stream.


def stream(service: Service, reference: Service, server: RedisServer, options: argparse.Namespace,
           advance: Callable[..., None]) -> dict[str, Any]:  # fmt: skip
    """Many entries through one stream: the memory of who reads them."""
    from lpr.fleet.entries import FIELD, encode

    client, generator = server.client(), np.random.default_rng(0)
    key = next(iter(client.scan_iter("lpr:drafts:*"))).decode()
    text = prompts(1)[0][0]
    wanted = reference.ask(text, options.max_new_tokens, temperature=0)[0]
    began, first, different = time.monotonic(), service.learnt, 0
    memory: list[dict[str, float]] = []
    every = max(1, options.entries // 20)
    sent = 0
    while sent < options.entries:
        pipeline = client.pipeline(transaction=False)
        for _ in range(min(200, options.entries - sent)):
            tokens = generator.integers(0, 4096, int(generator.integers(64, 192))).tolist()
            number = sent.to_bytes(8, "little")
            pipeline.xadd(key, {FIELD: encode(b"benchmrk", number, [], tokens)[0]}, maxlen=10_000, approximate=True)
            sent += 1
        pipeline.execute()
        if sent % every < 200:
            memory.append({"entries": sent, "mb": round(service.memory(), 1)})
            different += service.ask(text, options.max_new_tokens, temperature=0)[0] != wanted
            advance(0, f"{sent} entries")
        service.await_learnt(first + sent - AHEAD)
    service.await_learnt(first + sent)
    memory.append({"entries": sent, "mb": round(service.memory(), 1)})
    # By a third of the way the trie is full, and forgets as much as it learns.
    full = [each["mb"] for each in memory if each["entries"] >= options.entries / 3]
    advance()
    return {
        "entries": sent, "learnt": int(service.learnt - first), "seconds": round(time.monotonic() - began, 1),
        "memory": memory, "different": different, "growth_mb": round(full[-1] - full[0], 1),
        "highest_above_lowest_mb": round(max(full) - min(full), 1),
    }  # fmt: skip


# The restart.


@dataclass
class Clients:
    """Requests of several threads, compared with what is known."""

    known: Sequence[tuple[str, dict[str, Any], list[int]]]
    num_tokens: int
    over: threading.Event = field(default_factory=threading.Event)
    failed: list[str] = field(default_factory=list)
    different: int = 0
    times: list[float] = field(default_factory=list)
    """When each was answered (time.monotonic)."""
    slowest: float = 0.0

    def work(self, services: Sequence[Service], number: int) -> None:
        """Ask one service after the other until it is over."""
        while not self.over.is_set():
            text, more, wanted = self.known[number % len(self.known)]
            began = time.monotonic()
            try:
                found = services[number % len(services)].ask(text, self.num_tokens, **more)[0]
            except (httpx.HTTPError, KeyError, ValueError) as failure:
                self.failed.append(f"{type(failure).__name__}: {failure}"[:300])
            else:
                self.different += found != wanted
                self.times.append(time.monotonic())
            self.slowest = max(self.slowest, time.monotonic() - began)
            number += 1


def restart(services: dict[str, Service], server: RedisServer, options: argparse.Namespace,
            advance: Callable[..., None]) -> dict[str, Any]:  # fmt: skip
    """Requests while the store is there, is killed, is away and is there again."""
    sharing = [services["first"], services["second"]]
    known = []
    for index, (text, _) in enumerate(prompts(12)):
        more = {"temperature": 0.8 * (index % 2), "seed": index}
        known.append((text, more, services["cold"].ask(text, options.max_new_tokens, **more)[0]))
    clients = Clients(known, options.max_new_tokens)
    threads = [threading.Thread(target=clients.work, args=(sharing, each)) for each in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        time.sleep(options.seconds)
        server.kill()
        killed = time.monotonic()
        time.sleep(options.seconds)
        before = [each.learnt for each in sharing]
        server.start()
        started = time.monotonic()
        back = wait(lambda: all(each.learnt > was for each, was in zip(sharing, before, strict=True)), 60, "it is back")
        time.sleep(options.seconds)
    finally:
        clients.over.set()
        for thread in threads:
            thread.join()
    advance()
    return {
        "requests": len(clients.times) + len(clients.failed), "failed_requests": len(clients.failed),
        "different": clients.different, "while_away": sum(killed < each < started for each in clients.times),
        "slowest_s": round(clients.slowest, 2), "shared_again_after_s": round(back, 2),
        "unsent": int(sum(each.metric("lpr:shared_drafts_total", 'event="unsent"') for each in sharing)),
        "problems": clients.failed[:5],
    }  # fmt: skip


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Start everything, and measure; raises InputError."""
    sizes = ("--window-size", "0", "--trie-nodes", str(options.nodes), "--dtype", "float32", "--no-access-log")
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(redis_server())
        shared = ("--draft-store", server.url)
        flags = {"cold": ("--share-drafts", "none"), "alone": (), "first": shared, "second": shared}
        services = {}
        for name, more in flags.items():
            started = stack.enter_context(running((*sizes, *more), options.threads))
            client = stack.enter_context(httpx.Client(base_url=started.url, timeout=600))
            services[name] = Service(started, client)
        with progress(console, options.prompts * len(KINDS) + 2) as advance:
            found = {
                "drafting": drafting(services, options, advance),
                "restart": restart(services, server, options, advance),
                "stream": stream(services["second"], services["cold"], server, options, advance),
            }
    wrong = sum(part["different"] for part in found.values()) + found["restart"]["failed_requests"]
    wrong += found["stream"]["learnt"] != found["stream"]["entries"]
    return {"benchmark": "shared_drafts", "nodes": options.nodes, "max_new_tokens": options.max_new_tokens,
            **found, "num_failed": int(wrong)}  # fmt: skip


def make_shared_parser() -> OneLineParser:
    """The command line."""
    parser = make_parser("shared_drafts", "Replicas that share drafts through a redis-server.", threads=1)
    parser.add_argument("--prompts", type=whole, default=12, metavar="N", help="requests of each kind (12)")
    parser.add_argument("--max-new-tokens", type=whole, default=64, metavar="N", help="tokens of each (64)")
    parser.add_argument("--nodes", type=whole, default=32, metavar="N", help="nodes of a tree (32)")
    parser.add_argument("--entries", type=whole, default=100_000, metavar="N", help="through the stream (100,000)")
    parser.add_argument("--seconds", type=float, default=15.0, metavar="S", help="before, without and after the store")
    return parser


def main() -> int:
    """Run from the command line: 0, 1 if an output was another one or failed, 2 for bad input."""
    return run_main(make_shared_parser(), measure)


if __name__ == "__main__":
    sys.exit(main())
