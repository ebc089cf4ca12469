"""The front's view of the driver and its ranks: readiness, served model, load."""

import asyncio
import time
from collections.abc import Callable

from lpr.serve.messages import Facts, Load, Loading

STALE_PULSE = 5.0  # seconds without a pulse (sent every second) after which the driver counts as stopped


class MeshState:
    """The ranks, over all their starts and drivers."""

    def __init__(self, step_seconds: float, tell: Callable[[str, int], None]) -> None:
        """Begin without a driver. A step longer than `step_seconds` counts as hung.

        `tell` is called with events and their counts: "rank_lost", "reform", "takeover", "restart".
        """
        self.facts: Facts | None = None
        """The facts of the served model, also while the ranks are down. None until they were ready once."""
        self.ready = asyncio.Event()  # set while a driver takes requests
        self.outage = ""  # why no driver does, after one did
        self.loading: Loading | None = None
        self.refused: str | None = None  # why the ranks could not start the last time
        self.load = Load()
        self.pid: int | None = None  # the driver's process
        self.num_wanted = 0  # ranks of the whole mesh; 0 until they were ready once
        self.num_slots = 0  # requests that the present ranks can run at once
        self.heard = time.monotonic()  # when the driver last sent anything
        self.welcomed: float | None = None  # when a driver last began to take requests
        self._step_seconds = step_seconds
        self._tell = tell
        self._present = 0
        self._is_other = False  # True if the ranks came back with another model than before
        self._restarted = False
        """True if the next driver comes from a new start; else it takes over from the previous one."""

    @property
    def up(self) -> bool:
        """True while a driver takes requests."""
        return self.ready.is_set()

    @property
    def num_ranks(self) -> int:
        """Ranks at the last gather; 0 while there is no driver."""
        return self._present if self.up else 0

    @property
    def num_replicas(self) -> int:
        return self.num_ranks // self.facts.tp if self.facts is not None else 0

    @property
    def progress(self) -> str:
        if self.loading is None:
            return "the ranks are starting"
        return f"{self.loading.stage} ({self.loading.done} of {self.loading.total})"

    @property
    def awaits_takeover(self) -> bool:
        """True if the driver was lost, and not all ranks."""
        return self.facts is not None and not self.up and not self._restarted

    @property
    def is_hopeless(self) -> bool:
        """True if the ranks can never serve. After a success, a refusal may be temporary (e.g. a full disk)."""
        return self.refused is not None and (self.facts is None or self._is_other)

    def live_reason(self) -> str | None:
        """The reason why the ranks count as stopped; None if they live, start or are restarted."""
        silent = time.monotonic() - self.heard
        if self.up and silent > STALE_PULSE:
            return f"the driver has said nothing for {silent:.0f} s"
        if self.up and self.load.running and self.load.last_step > self._step_seconds:
            return f"no step has ended for {self.load.last_step:.0f} s"
        return None

    def ready_reason(self) -> str | None:
        """The reason why no request is processed now; None if requests are processed."""
        if not self.up:
            return f"{self.outage}: {self.progress}" if self.outage else self.progress
        return self.live_reason()

    def welcome(self, facts: Facts) -> bool:
        """Handle a driver that is ready for requests; False if its facts differ from the previous driver's."""
        if self.facts is not None:
            if others := _others(facts, self.facts):
                self.refused = f"the ranks came back with another {' and '.join(others)}, so no output can go on"
                self._is_other = True
                return False
            self._tell("restart" if self._restarted else "takeover", 1)
        self.facts = facts
        self.num_wanted = self.num_wanted or facts.lp * facts.tp
        self._restarted, self.outage = False, ""
        self.welcomed, self.num_slots = time.monotonic(), facts.max_batch_size
        self._note_ranks(facts.lp * facts.tp)
        self.ready.set()
        return True

    def take(self, load: Load) -> None:
        if load.epoch > self.load.epoch:
            self._tell("reform", load.epoch - self.load.epoch)
        self.load = load
        if self.up:
            self.num_slots = load.num_slots or self.num_slots
            if load.num_ranks:
                self._note_ranks(load.num_ranks)

    def lost(self) -> None:
        if self.up:
            self.outage = "the driver was lost; another rank takes over, or all begin again"
        self.ready.clear()
        self.load = Load(epoch=self.load.epoch)
        self.loading = None

    def died(self) -> None:
        if self.facts is not None:
            self.outage = "all ranks were lost and are started again"
        self._restarted = True
        self.pid = None
        self._note_ranks(0)

    def _note_ranks(self, present: int) -> None:
        if present < self._present:
            self._tell("rank_lost", self._present - present)
        self._present = present


def _others(facts: Facts, before: Facts) -> list[str]:
    """Names of changed facts that must not change, because outputs could not continue. The mesh's size may change."""
    # The number of replicas decides the slots, and the free memory the pages and the longest sequence.
    may = {"lp", "tp", "device", "max_batch_size", "num_pages", "max_length"}
    names = [each for each in facts.__struct_fields__ if each not in may]
    return [name.replace("_", " ") for name in names if getattr(facts, name) != getattr(before, name)]
