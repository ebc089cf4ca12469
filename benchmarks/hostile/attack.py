"""Hostile clients in processes of their own: `Attack` starts one, and this module is its program."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lpr.config import InputError

# Each registers its probes.
from tests.fakes.hostile import connections, requests  # noqa: F401
from tests.fakes.hostile.client import Client
from tests.fakes.hostile.probes import PROBES, Probe

MOST_PROBLEMS = 50
END_SECONDS = 150.0  # time for a client to end what it has begun


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a hostile client does."""

    url: str
    key: str = ""
    other: str = ""  # A neighbour's key.
    probes: Sequence[str]  # It picks among them at random.
    seed: str = ""
    pause: float = 0.0  # Mean seconds between two of them.
    hold: float = 3.0  # Seconds that idle connections stay open.


@dataclass
class Seen:
    """What it has seen."""

    seen: dict[str, dict[str, int]] = field(default_factory=dict)  # By probe, how often each status or end.
    problems: list[str] = field(default_factory=list)  # What should not have been seen.


def chosen(names: Sequence[str]) -> list[Probe]:
    """The probes of these names, or all; raises InputError."""
    if unknown := set(names) - set(PROBES) - {"all"}:
        raise InputError(f"--probes: unknown {', '.join(sorted(unknown))}; known are all, {', '.join(sorted(PROBES))}")
    return [probe for probe in PROBES.values() if "all" in names or probe.name in names]


def attack(plan: Plan, stop: threading.Event) -> Seen:
    """Do what `plan` says until `stop` is set."""
    found = Seen()
    dice = random.Random(plan.seed)
    client = Client(plan.url, plan.key, plan.other, seed=plan.seed, hold=plan.hold, stop=stop)
    while not stop.is_set():
        name = dice.choice(plan.probes)
        seen, problem = PROBES[name].once(client)
        if stop.is_set() and problem:
            break  # the service may be stopping
        kept = found.seen.setdefault(name, {})
        for what, count in seen.items():
            kept[what] = kept.get(what, 0) + count
        if problem and len(found.problems) < MOST_PROBLEMS:
            found.problems.append(problem[:500])
        stop.wait(dice.expovariate(1 / plan.pause) if plan.pause else 0.2 * ("refused" in seen))
    return found


class Attack:
    """A process that attacks: started on construction."""

    def __init__(self, plan: Plan) -> None:
        """Start to do what `plan` says."""
        command = [sys.executable, "-m", "benchmarks.hostile.attack"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(plan)) + "\n")
        self._process.stdin.flush()

    def tell(self) -> None:
        """Tell it to begin no further probe."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write("\n")
            self._process.stdin.flush()

    def stop(self) -> Seen:
        """Let it end; what it has seen."""
        self.tell()
        try:
            written, _ = self._process.communicate(timeout=END_SECONDS)
            return Seen(**json.loads(written))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            return Seen(problems=[f"a hostile client did not end within {END_SECONDS:g} s"])
        except ValueError:
            return Seen(problems=[f"a hostile client ended with code {self._process.returncode}"])


def main() -> None:
    """Read a plan from the first line of stdin, do it until a second line or the end, and print what was seen."""
    os.nice(10)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    given: dict[str, Any] = json.loads(sys.stdin.readline())
    stop = threading.Event()

    def watch() -> None:
        sys.stdin.readline()
        stop.set()

    threading.Thread(target=watch, daemon=True).start()
    print(json.dumps(asdict(attack(Plan(**given), stop))), flush=True)
    os._exit(0)  # the thread still reads stdin


if __name__ == "__main__":
    main()
