"""The plan of one step: its requests and their work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lpr.config import TreeSizes
from lpr.core.step_times import StepTimes
from lpr.engine.request import Request

if TYPE_CHECKING:
    from lpr.engine.draft_rank import DraftRank


@dataclass(frozen=True)
class StepPlan:
    """The work of one step, the same on all ranks."""

    decoding: Sequence[Request]  # requests that advance by their accepted path and a bonus token
    filling: Sequence[tuple[Request, Sequence[int]]]
    """Requests with the number of tokens of their pending chain to compute, per rank. With padding, a rank has either
    rows of `decoding` or one of these."""
    sizes: TreeSizes
    times: StepTimes | None = None
    """The replicated step times; None if sizes are fixed."""
    digest: int = 0  # of other state that must agree on all ranks, such as home ranks
    drafting: DraftRank | None = None
    """The drafter of a draft-only rank; None on other ranks."""
    num_command_bytes: int = 0  # length of the commands that the driver broadcasts after the step; 0 on other ranks
