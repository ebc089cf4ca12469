"""All probes by name: each is a way to do harm, and the answers that a service may give."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.hostile.client import Answer, Client

BUSY = frozenset(("429", "503"))
"""Answers of a service with too much to do, which are always right."""


@dataclass(frozen=True)
class Probe:
    """One way to do harm."""

    name: str
    item: str
    """The number of the attack that it repeats; empty for others."""
    what: str
    run: Callable[[Client], Answer | Counter[str]]
    """Does it once; returns what the client has seen: statuses, or how connections ended, and how often."""
    expected: frozenset[str]
    """What the client may see besides BUSY; empty: anything but a 5xx."""
    is_keyless: bool
    """True if the service under test must have no keys."""
    flags: tuple[str, ...]
    """Flags of the service under test, where it knows them."""

    def once(self, client: Client) -> tuple[Counter[str], str]:
        """Run it; returns what the client has seen, and what is wrong about it or an empty text."""
        client.text = ""
        client.notes.clear()
        try:
            found = self.run(client)
        except ConnectionRefusedError:
            found = Counter(("refused",))
        except OSError:
            found = Counter(("closed",))
        seen = found.counted() if isinstance(found, Answer) else found
        if self.expected:
            wrong = set(seen) - self.expected - BUSY
        else:
            wrong = {each for each in set(seen) - BUSY if each.startswith("5") or each in ("refused", "time-out")}
        return seen, f"{self.name}: {', '.join(sorted(wrong))} {client.text[:200]}".strip() if wrong else ""


PROBES: dict[str, Probe] = {}
Run = Callable[[Client], Answer | Counter[str]]


def probe(item: str = "", *expected: str, keyless: bool = False, flags: tuple[str, ...] = ()) -> Callable[[Run], Run]:
    """Register a function as a probe; its name is the function's, and its description the docstring's first line."""

    def register(run: Run) -> Run:
        what = (run.__doc__ or "").splitlines()[0]
        PROBES[run.__name__] = Probe(run.__name__, item, what, run, frozenset(expected), keyless, flags)
        return run

    return register
