"""Ranks of a service are killed and stopped at random, and every stream is compared with the undisturbed one.

    python -m benchmarks.chaos --minutes 10 --ranks 3 --json

A service is started on loopback and answers requests of all kinds (temperature 0 and 0.8, penalties, stop strings,
log-probabilities, grammars). What it says while nothing is lost is the measure. Then clients ask on and on, while every
few seconds SIGKILL or SIGSTOP hits a rank at random, the driver's included, or all ranks at once, or SIGKILL their
supervisor, and with it the store through which they speak. Text, token ids, end, offsets and usage of every stream must
be equal, log-probabilities within 1e-3. At the end nothing may be left: no process, listening port, temporary file or
shared memory.

A *pause* is the longest silence of all clients together between one loss and the next. Where no rank was left and the
model had to be loaded again, it is not counted in `pause_with_survivors_...`. The exit code is 1 if a stream failed or
was different, or something is left. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import re
import signal
import socket
import sys
import tempfile
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import psutil
from rich.console import Console

from benchmarks.chaos_streams import Clients, bodies, pauses
from benchmarks.common import OneLineParser, finish, make_parser, progress, table, whole
from benchmarks.processes.leaks import Traces
from benchmarks.processes.services import running
from lpr.config import InputError

RANK = "lpr.serve.ranks.rank"
"""What the command of a rank names; that of a launcher names more."""
SUPERVISOR = "lpr.dist.supervisor"
LAUNCHERS = ("torch.distributed.run", SUPERVISOR)
LOGPROB_TOLERANCE = 1e-3
"""The height of a step's products decides the last bits in float32."""
READY_SECONDS = 300.0
"""Time for a service to be ready again, on a machine that does other things too."""
NUM_BODIES = 24


@dataclass
class Losses:
    """What was done to the ranks, and when (time.monotonic)."""

    times: list[float] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    """Of each: the signal, and how many ranks got it of how many."""
    num_restarts: list[int] = field(default_factory=list)
    """Before each: how often the service had started all ranks again."""
    num_kills: int = 0
    """Processes that got SIGKILL."""
    num_stops: int = 0
    """Processes that got SIGSTOP."""
    num_all: int = 0
    """Times that all ranks were hit at once."""
    problem: str | None = None
    """Why no more could be done."""


async def disturb(
    traces: Traces, http: httpx.AsyncClient, dice: random.Random, every: float, end: float, losses: Losses
) -> None:
    """Kill or stop ranks until `end`, each time about `every` seconds after the service was ready."""
    while time.monotonic() < end:
        if not await ready(http):
            losses.problem = f"the service was not ready again within {READY_SECONDS:.0f} s"
            return
        await asyncio.sleep(max(0.2, min(4 * every, dice.expovariate(1 / every), end - time.monotonic())))
        if time.monotonic() > end or not await is_ready(http):  # what the last loss did may show only now
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
    """Does the service say that it is ready? A front that does not answer is not."""
    try:
        return (await http.get("/readyz")).status_code == 200
    except httpx.HTTPError:
        return False


def is_rank(process: psutil.Process) -> bool:
    """Is it a rank, and neither a launcher nor one that was hit before and still has to be ended?"""
    try:
        words = process.cmdline()
        stands = process.status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False
    return RANK in words and not stands and not any(part in word for word in words for part in LAUNCHERS)


def is_supervisor(process: psutil.Process) -> bool:
    """Is it the process that starts the ranks and holds their store?"""
    try:
        return SUPERVISOR in process.cmdline()
    except psutil.Error:
        return False


async def run(url: str, traces: Traces, options: argparse.Namespace, console: Console) -> dict[str, Any]:
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
            [round(at - began, 1), kind, "others go on" if is_short else "all begin again", round(pause, 3)]
            for at, kind, is_short, pause in zip(losses.times, losses.kinds, survived, found, strict=True)
        ],
        "problems": [each[:600] for each in (*failed, *clients.different)][:10],
    }


def quantile(ordered: list[float], share: float) -> float | None:
    """The nearest rank, in seconds; None of nothing."""
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3) if ordered else None


def metrics(text: str) -> dict[str, int]:
    """What befell the ranks, as the service counts it."""
    found = re.findall(r'^lpr:rank_events_total\{.*?event="(\w+)".*?\} ([\d.e+]+)$', text, re.M)
    return {name: int(float(value)) for name, value in found}


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Start a service, disturb it, stop it, and look for what is left; raises InputError."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chaos-", dir=options.folder) as folder:
        keeps = Path(folder) / "files"
        keeps.mkdir()
        # torch makes itself a cache among the temporary files of whoever imports it, and leaves it there.
        environment = {"TMPDIR": str(keeps), "TORCHINDUCTOR_CACHE_DIR": str(Path(folder) / "torch")}
        flags = ["--no-access-log", "--lp", str(options.lp), "--dtype", options.dtype]
        flags += ["--max-batch-size", str(options.batch), "--request-timeout", "900", "--shutdown-timeout", "50"]
        flags += ["--exact"] if options.exact else []
        for name in ("model", "device"):
            flags += [f"--{name}", getattr(options, name)] if getattr(options, name) else []
        with running(flags, options.threads, more=environment) as service:
            traces = Traces(psutil.Process(service.process.pid), keeps)
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
        for each in traces.seen:  # what leaked is told, and not left to the machine
            with contextlib.suppress(psutil.Error):
                each.kill()
    return {
        "benchmark": "chaos", "ranks": options.lp, "minutes": options.minutes, "seed": options.seed,
        "clients": options.clients, "exit_code": code, **result, "leaks": left,
        "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip


def show(result: dict[str, Any], console: Console) -> None:
    """The result as a small table, and what went wrong."""
    rows = [[name, str(result[name])] for name in ("kills", "stops", "all_at_once", "streams", "failed", "different")]
    rows += [["pause p50 [s]", str(result["pause_p50_s"])], ["pause p99 [s]", str(result["pause_p99_s"])]]
    rows += [["pause with survivors p99 [s]", str(result["pause_with_survivors_p99_s"])]]
    rows += [[name.replace("_", " "), str(count)] for name, count in result["events"].items()]
    rows += [[f"leaked {name.replace('_', ' ')}", str(count)] for name, count in result["leaks"].items()]
    console.print(table(f"{result['ranks']} ranks, {result['minutes']:g} minutes", ("what", "count"), rows))
    for problem in result["problems"]:
        console.print(problem, markup=False, highlight=False, soft_wrap=True)


def is_sound(result: dict[str, Any]) -> bool:
    """Was every stream what it had to be, and is nothing left?"""
    wrong = result["failed"] or result["different"] or any(result["leaks"].values()) or result["exit_code"]
    return not wrong and result["logprob_difference"] <= LOGPROB_TOLERANCE


def make_chaos_parser() -> OneLineParser:
    """The command line."""
    parser = make_parser("chaos", "Ranks of a service are killed at random, and streams compared.", threads=1)
    parser.add_argument("--minutes", type=float, default=10.0, metavar="M", help="how long ranks are killed (10)")
    parser.add_argument("--ranks", dest="lp", type=whole, default=3, metavar="N", help="replicas (3)")
    parser.add_argument("--every", type=float, default=4.0, metavar="S", help="seconds from ready to the next loss (4)")
    parser.add_argument("--clients", type=whole, default=4, metavar="N", help="streams at a time (4)")
    parser.add_argument("--batch", type=whole, default=4, metavar="N", help="slots of the service (4)")
    parser.add_argument("--seed", type=whole, default=0, metavar="N", help="of requests and losses (0)")
    parser.add_argument("--quick", action="store_true", help="half a minute, to see that it works")
    parser.add_argument("--model", metavar="M", help="folder or hub id (default: the bundled model)")
    parser.add_argument("--device", metavar="D", help="cpu, cuda or cuda:N (default: a GPU if there is one)")
    parser.add_argument("--dtype", default="float32", help="float32 (default): others round by a product's height")
    parser.add_argument("--exact", action="store_true", help="the same bits for every shape of a step (exact mode)")
    parser.add_argument("--folder", metavar="DIR", help="where the run keeps temporary files (default: the system's)")
    return parser


def main() -> int:
    """Run from the command line: 0, 1 if something went wrong, 2 for bad input."""
    parser = make_chaos_parser()
    options = parser.parse_args()
    if options.quick:
        options.minutes = 0.5
    if options.minutes <= 0 or options.every <= 0 or options.lp < 1 or options.clients < 1:
        parser.error("--minutes, --every, --ranks and --clients must be above 0")
    console = Console(stderr=True, quiet=options.json)
    try:
        result = measure(options, console)
    except InputError as failure:
        print(f"{parser.prog}: {failure}", file=sys.stderr)
        return 2
    show(result, console)
    finish(result, options.output)
    return 0 if is_sound(result) else 1


if __name__ == "__main__":
    sys.exit(main())
