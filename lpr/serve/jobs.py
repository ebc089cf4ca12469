"""The open requests of a service, those given to the driver, and the detection of a request that kills the ranks.

A request that had a slot when all ranks died, twice in a row without a token in between, is a suspect. Suspects are
tried one at a time: no other request starts until the suspect has emitted a token. A request that ran alone when the
ranks died, twice in a row, fails as the cause; the others continue. Two deaths are needed because ranks also die for
other reasons shortly after a start. A request that makes progress never fails.
"""

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from lpr.protocol import Submit
from lpr.serve.inbox import Inbox

SUSPECT_DEATHS = 2  # deaths of all ranks in a row, without a token in between, that make a request a suspect
LONE_DEATHS = 2
"""Deaths in a row, without a token in between, while the ranks worked on one request alone, that convict it."""


@dataclass(eq=False)
class Job:
    """One prompt on its way to one text. Times are those of time.monotonic."""

    id: int
    submit: Submit  # what the driver gets, then with the output so far
    inbox: Inbox
    arrived: float = field(default_factory=time.monotonic)
    was_given: bool = False
    """True after a driver got it. From then on the ranks may hold it, also after that driver was lost."""
    begun: float | None = None  # when it got a slot for the first time
    first: float | None = None  # when its first token came
    latest: float | None = None
    ended: float | None = None
    token_ids: list[int] = field(default_factory=list)
    """Output ids so far. With the prompt they suffice for restarted ranks to continue."""
    num_delivered: int = 0  # number of these that another service has delivered
    num_characters: int | None = 0
    """Characters of text so far. None until the driver reports the number of characters of another service's part."""
    deaths: int = 0  # consecutive deaths of all ranks while they worked on this, without a token in between
    predicted: tuple[int, int] = (0, 0)
    """Tokens drafted from the prediction, and the accepted ones of them (lpr.protocol.Submit)."""
    lone_deaths: int = 0  # consecutive deaths while they worked on nothing else
    is_complete: bool = False  # True if its text is complete and only the usage is missing

    @property
    def num_to_fill(self) -> int:
        """Number of tokens to compute before its next token."""
        return self.submit.num_prompt + len(self.token_ids)

    @property
    def is_scoring(self) -> bool:
        """True if the output is known and only its log-probabilities are asked for."""
        return bool(self.submit.params.forced_ids)


class Jobs:
    """All open jobs. The driver gets all ready ones, except while a suspect is tried."""

    def __init__(self) -> None:
        self._open: dict[int, Job] = {}
        self.held: dict[int, Job] = {}  # jobs that are ready and not given, in the order in which they are given
        self.given: dict[int, Job] = {}  # jobs that the driver has, in the order in which it got them

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Job]:
        """All of them; they may end meanwhile."""
        return iter(list(self._open.values()))

    def __contains__(self, job: Job) -> bool:
        return job.id in self._open

    def get(self, id: int) -> Job | None:
        return self._open.get(id)

    def add(self, job: Job, ready: bool = True) -> None:
        """Open a job. One that is not ready is not given before `release`."""
        self._open[job.id] = job
        if ready:
            self.release(job)

    def release(self, job: Job) -> None:
        self.held[job.id] = job

    def give(self) -> Job | None:
        """Mark the next job as given to the driver and return it; None if there is none that the driver may get.

        While a job is suspected, no other job starts until it has emitted a token, so that another death of the ranks
        identifies the job.
        """
        suspect = most_suspect([*self.given.values(), *self.held.values()])
        job = suspect if suspect is not None else next(iter(self.held.values()), None)
        if job is None or job.id not in self.held:
            return None
        self.given[job.id] = self.held.pop(job.id)
        job.was_given = True
        return job

    def take_back(self) -> None:
        """After the driver was lost: hold all jobs again, started ones first."""
        jobs = [*self.given.values(), *self.held.values()]
        jobs.sort(key=lambda job: math.inf if job.begun is None else job.begun)
        self.held, self.given = {job.id: job for job in jobs}, {}

    def remove(self, job: Job) -> None:
        for jobs in (self._open, self.given, self.held):
            jobs.pop(job.id, None)


def blame(running: Sequence[Job], everything: Iterable[Job]) -> Job | None:
    """Count a death of all ranks as they worked on `running`. Returns its cause, if certain, and acquits all others."""
    for job in running:
        job.deaths += 1
        job.lone_deaths = job.lone_deaths + 1 if len(running) == 1 else 0
    if len(running) != 1 or running[0].lone_deaths < LONE_DEATHS:
        return None
    for job in everything:
        if job is not running[0]:
            acquit(job)
    return running[0]


def acquit(job: Job) -> None:
    """Reset a job's death counts, after a token or if the cause was found."""
    job.deaths = job.lone_deaths = 0


def most_suspect(jobs: Iterable[Job]) -> Job | None:
    """The suspect that is being tried or is next; None if there is none."""
    return max((job for job in jobs if job.deaths >= SUSPECT_DEATHS), key=lambda job: job.deaths, default=None)
