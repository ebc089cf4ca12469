"""Every probe by itself: what its client sees, and what it costs the service's other clients.

    python -m benchmarks.hostile --service ../lpr-before . --output hostile.json

Starts a service from each checkout and runs one probe after another against it, each for --seconds, while a process
asks /livez every 20 ms (benchmarks.hostile.livez). A row has the answers, the stall of /livez (median, 99th percentile
and longest time in ms, idle before and during the probe), the growth of the front's memory in MB, and the exit code if
the service died. A service that died or has grown is started anew for the next probe. With --output, FILE.md gets the
same as a table. `--url` attacks a service that runs already, whose memory is not known.

The front's address space is limited to --memory-gb more than it has at first, so that no probe takes the machine's
memory. Hostile clients run at nice 10.
"""

from __future__ import annotations

import contextlib
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common import Options, Whole, git, progress, run_main
from benchmarks.hostile.attack import Attack, Plan, Seen, chosen
from benchmarks.hostile.livez import Livez, summary
from benchmarks.hostile.probes import Probe
from benchmarks.hostile.under_test import KEYS, Memory, at_rest, attacked
from benchmarks.processes.services import Running
from benchmarks.report.parts import markdown
from benchmarks.report.services import hostile as tables_of
from lpr import bundled_model
from lpr.config import InputError

ROOT = Path(__file__).parents[2]
LIVEZ_EVERY = 0.02
GROWN_MB = 30.0
"""Growth of the front after which it is started anew for the next probe."""


@dataclass(frozen=True, kw_only=True)
class HostileOptions(Options):
    """Every probe by itself: what its client sees, and what it costs the service's other clients."""

    service: tuple[Path, ...] = (ROOT,)
    """Folders of checkouts of lpr whose service is attacked."""
    url: str | None = None
    """Attack a running service instead."""
    keys: tuple[str, ...] = ()
    """Keys of the service at --url: the attacker's, and a neighbour's."""
    probes: tuple[str, ...] = ("all",)
    """Names of probes, or all; an unknown name lists them."""
    model: str | None = None
    """Folder or hub id; the bundled model if none is given."""
    seconds: float = 5.0
    """Time of a probe; it runs once at least."""
    idle: float = 2.0
    """Seconds before each probe in which nothing but /livez is asked."""
    limit: float = 180.0
    """Seconds after which a probe is told to end."""
    hold: float = 5.0
    """Seconds that idle connections stay open."""
    links: Whole = 1100
    """The number of idle connections."""
    memory_gb: float = 4.0
    """Address space in GB that a probe may make the front take."""
    flags: str = ""
    """Further flags of lpr.serve, in one word: --flags="--tp 2"."""


def measure(options: HostileOptions, console: Console) -> dict[str, Any]:
    """Run all probes against all services."""
    probes = chosen(options.probes)
    runs: list[dict[str, Any]] = []
    with progress(console, len(probes) * (1 if options.url else len(options.service)), "probing") as advance:
        for name, checkout in [("", ROOT)] if options.url else named(options.service):
            with Services(checkout, options) as services:
                for probe in probes:
                    advance(0, f"{name} {probe.name}")
                    runs.append({"service": name, **one(probe, services, options)})
                    advance()
                    console.print(f"{name} {line_of(runs[-1])}", markup=False, highlight=False, soft_wrap=True)
    result = {"runs": runs, "num_failed": sum(bool(run["problem"] or run["died"] is not None) for run in runs)}
    if options.output:
        page = "\n\n".join(f"## {part.table.title}\n\n{markdown(part.table)}" for part in tables_of(result))
        Path(options.output).with_suffix(".md").write_text(page + "\n", encoding="utf-8")
    return result


def named(checkouts: Sequence[Path]) -> list[tuple[str, Path]]:
    """Commits and folders of checkouts; raises InputError for what is none."""
    for path in checkouts:
        if not (path / "lpr" / "serve").is_dir():
            raise InputError(f"--service: {path} is no checkout of lpr")
    return [(git(path, "rev-parse", "--short", "HEAD") or path.resolve().name, path.resolve()) for path in checkouts]


class Services:
    """Services of one checkout, started when a probe needs another one than that which runs."""

    def __init__(self, checkout: Path, options: HostileOptions) -> None:
        """None runs yet."""
        self._checkout, self._options = checkout, options
        self._kind: tuple[bool, Sequence[str]] | None = None
        self._stack = contextlib.ExitStack()
        self.running: Running | None = None
        """None for a service that runs elsewhere."""

    def __enter__(self) -> Services:
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()

    def drop(self) -> None:
        """End the service that runs."""
        self._stack.close()
        self._kind = self.running = None

    def url_for(self, probe: Probe) -> str:
        """The address of a service as `probe` needs it."""
        options = self._options
        if options.url:
            return options.url.rstrip("/")
        kind = (probe.is_keyless, probe.flags)
        if self.running is None or self._kind != kind:
            self.drop()
            folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
            flags = ["--model", options.model or bundled_model(), "--max-batch-size", "4", *shlex.split(options.flags)]
            service = attacked(
                folder, flags, checkout=self._checkout, keyless=probe.is_keyless, threads=options.threads,
                memory_gb=options.memory_gb, optional=probe.flags,
            )  # fmt: skip
            self.running, self._kind = self._stack.enter_context(service), kind
        return self.running.url


def one(probe: Probe, services: Services, options: HostileOptions) -> dict[str, Any]:
    """One probe against one service."""
    url = services.url_for(probe)
    service = services.running
    key, other = (*options.keys, "", "")[:2] if service is None else KEYS
    at_rest(url)
    memory = None if service is None else Memory(service.process.pid)
    livez = Livez(url, LIVEZ_EVERY)
    time.sleep(options.idle + 1.0)  # it starts within a second
    began = time.monotonic()
    plan = Plan(
        url=url, key="" if probe.is_keyless else key, other=other, probes=[probe.name], seed=probe.name,
        seconds=options.seconds, hold=options.hold, links=options.links,
    )  # fmt: skip
    seen = Attack(plan).wait(options.limit)
    time.sleep(0.5)
    ended = time.monotonic()
    asked = livez.asked()
    died = None if service is None else service.process.poll()
    rests = died is None and at_rest(url)
    grown = (0.0, 0.0) if memory is None else memory.growth()
    if died is not None or not rests or grown[0] > GROWN_MB:
        services.drop()
    return {
        "probe": probe.name, "item": probe.item, "what": probe.what, "times": seen.times.get(probe.name, 0),
        "seen": seen.seen.get(probe.name, {}), **seen.notes, "livez_idle": summary(asked, until=began),
        "livez": summary(asked, began, ended), "seconds": round(ended - began, 1), "front_mb": grown[0],
        "all_mb": grown[1], "died": died, "rests": rests, "problem": problem_of(seen, rests),
    }  # fmt: skip


def problem_of(seen: Seen, rests: bool) -> str:
    """The first thing that the client should not have seen, or what the service has left undone."""
    return seen.problems[0] if seen.problems else "" if rests else "the service does not come to rest"


def line_of(run: dict[str, Any]) -> str:
    """A row in one line."""
    seen = ", ".join(f"{what} x {count}" for what, count in run["seen"].items())
    died = f", died with code {run['died']}" if run["died"] is not None else ""
    stall = run["livez"].get("max_ms", "?")
    return f"{run['probe']}: {seen}; /livez stalls {stall} ms, front +{run['front_mb']} MB{died} {run['problem'][:100]}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return run_main("hostile", HostileOptions, measure, arguments)


if __name__ == "__main__":
    sys.exit(main())
