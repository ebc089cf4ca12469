"""The plan of one step: what is done for which requests."""

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
    """What one step does, the same on all ranks."""

    decoding: Sequence[Request]  # they advance by their accepted path and a bonus token
    filling: Sequence[tuple[Request, Sequence[int]]]
    """They compute the K/V of so many tokens of their pending chain, per rank. A rank whose rows are padded has either
    rows of `decoding` or one of these."""
    sizes: TreeSizes
    times: StepTimes | None = None
    """Step times that all ranks decide by; None where sizes are fixed."""
    digest: int = 0  # of other state that must agree on all ranks, such as home ranks
    drafting: DraftRank | None = None
    """On a rank that only drafts, what it drafts by."""
    num_command_bytes: int = 0  # length of the commands that the driver broadcasts after the step; 0 on other ranks
