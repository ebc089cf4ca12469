"""All probes by name: each is a way to do harm, and the answers that a service may give."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from tests.fakes.hostile.client import Answer, Client

BUSY = frozenset(("429", "503"))
"""Answers of a service with too much to do, which are always right."""
Run = Callable[[Client], Answer | Counter[str]]
"""Does it once; returns what the client has seen: statuses, or how connections ended, and how often."""


@dataclass(frozen=True)
class Probe:
    """One way to do harm."""

    name: str
    run: Run
    expected: frozenset[str]
    """What the client may see besides BUSY; empty: anything but a 5xx."""
    is_keyless: bool
    """True if the service under test must have no keys."""

    def once(self, client: Client) -> tuple[Counter[str], str]:
        """Run it; returns what the client has seen, and what is wrong about it or an empty text."""
        client.text = ""
        try:
            found = self.run(client)
        except ConnectionRefusedError:
            found = Counter(("refused",))
        except OSError:
            found = Counter(("closed",))
        seen = Counter((found.status,)) if isinstance(found, Answer) else found
        if self.expected:
            wrong = set(seen) - self.expected - BUSY
        else:
            wrong = {each for each in set(seen) - BUSY if each.startswith("5") or each in ("refused", "time-out")}
        return seen, f"{self.name}: {', '.join(sorted(wrong))} {client.text[:200]}".strip() if wrong else ""


PROBES: dict[str, Probe] = {}


def probe(*expected: str, name: str = "", keyless: bool = False) -> Callable[[Run], Run]:
    """Register a function as a probe; its name is the function's if none is given."""

    def register(run: Run) -> Run:
        known = name or run.__name__
        PROBES[known] = Probe(known, run, frozenset(expected), keyless)
        return run

    return register
