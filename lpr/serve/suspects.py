"""Finds the request that kills the ranks.

A request that had a slot when all ranks died, twice in a row and without a token in between, is a suspect. Suspects are
tried one at a time: nothing else begins until the suspect has shown a token. A request on which alone the ranks die
twice in a row is the poison, and fails. The others go on. Twice, because ranks also die for other reasons just after
they were started. A request that makes progress never fails.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

SUSPECT_DEATHS = 2
"""Deaths of all ranks in a row, without a token in between, that make a request a suspect."""
LONE_DEATHS = 2
"""Deaths in a row, without a token in between, while the ranks worked on one request alone, that convict it."""


class Blamed(Protocol):
    """The deaths of a request. `acquit` sets both to 0."""

    deaths: int
    """Deaths of all ranks in a row while they worked on it."""
    lone_deaths: int
    """Those of them, in a row, in which they worked on nothing else."""


R = TypeVar("R", bound=Blamed)


def blame(running: Sequence[R], everything: Iterable[R]) -> R | None:
    """Note that all ranks died as they worked on `running`; returns the request that caused it, if that is certain.

    Then the earlier deaths are explained, and `everything` else is acquitted.
    """
    for request in running:
        request.deaths += 1
        request.lone_deaths = request.lone_deaths + 1 if len(running) == 1 else 0
    if len(running) != 1 or running[0].lone_deaths < LONE_DEATHS:
        return None
    for request in everything:
        if request is not running[0]:
            acquit(request)
    return running[0]


def acquit(request: Blamed) -> None:
    """A token of the request has come, or the deaths are explained."""
    request.deaths = request.lone_deaths = 0


def most_suspect(requests: Iterable[R]) -> R | None:
    """The suspect that is on trial or is next; None if there is none."""
    return max((each for each in requests if each.deaths >= SUSPECT_DEATHS), key=lambda each: each.deaths, default=None)
