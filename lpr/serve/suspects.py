"""Which request kills the ranks.

A request that the ranks were working on when all of them died, twice in a row and without a token in between, is a
suspect. Suspects are tried one at a time: nothing else begins until the one on trial has shown a token. The one on
which the ranks die alone is the poison, and fails; the others go on. A request that gets on is never failed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

SUSPECT_DEATHS = 2
"""Deaths of all ranks in a row, without a token in between, that make a request a suspect."""


class Blamed(Protocol):
    """What must be known of a request."""

    deaths: int
    """Deaths of all ranks in a row while they worked on it; whoever delivers a token of it sets this to 0."""


R = TypeVar("R", bound=Blamed)


def blame(running: Sequence[R], everything: Iterable[R]) -> R | None:
    """Note that all ranks died as they worked on `running`; returns the request that did it, where that is certain.

    The deaths before are explained then, and `everything` else is no suspect any more.
    """
    for request in running:
        request.deaths += 1
    if len(running) != 1 or running[0].deaths < SUSPECT_DEATHS:
        return None
    for request in everything:
        if request is not running[0]:
            request.deaths = 0
    return running[0]


def most_suspect(requests: Iterable[R]) -> R | None:
    """The suspect that is on trial, or has to be next; None if there is none."""
    return max((each for each in requests if each.deaths >= SUSPECT_DEATHS), key=lambda each: each.deaths, default=None)
