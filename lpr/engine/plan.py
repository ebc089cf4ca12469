"""The plan of one step: what is done for which requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lpr.config import TreeSizes
from lpr.engine.request import Request


@dataclass(frozen=True)
class StepPlan:
    """What one step does, the same on all ranks."""

    decoding: Sequence[Request]  # they advance by their accepted path and a bonus token
    filling: Sequence[tuple[Request, Sequence[int]]]
    """They compute the K/V of so many tokens of their pending chain, per rank. A rank whose rows are padded has either
    rows of `decoding` or one of these."""
    sizes: TreeSizes
    digest: int = 0  # of other state that must agree on all ranks, such as home ranks
    num_command_bytes: int = 0  # length of the commands that the driver broadcasts after the step; 0 on other ranks
