"""Faults in what ranks send each other, and in what arrives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from lpr.core.wire import tables_of
from lpr.engine.exchange import Exchange, Gathered
from lpr.native import StepDraft


def change_received(patch: pytest.MonkeyPatch, change: Callable[[Exchange, StepDraft, np.ndarray], None]) -> None:
    """Let `change` alter the results that arrive, int32 [world ranks, trees, capacity, words], before they are read."""
    gather = Exchange.gather

    def mutant(self: Exchange, draft: StepDraft, *args: Any) -> Gathered:
        gathered = gather(self, draft, *args)
        payloads = gathered.payloads.copy()
        change(self, draft, tables_of(payloads, draft.capacity, gathered.width, gathered.num_guesses))
        return replace(gathered, payloads=payloads)

    patch.setattr(Exchange, "gather", mutant)


def change_sent(exchanges: Any, change: Callable[[StepDraft, torch.Tensor], torch.Tensor]) -> None:
    """Let `change` alter the results that one exchange sends, or those of the class."""
    gather = exchanges.gather

    def mutant(*args: Any) -> Gathered:
        *begin, draft, local, num_logprobs, guesses = args
        return gather(*begin, draft, None if local is None else change(draft, local), num_logprobs, guesses)

    exchanges.gather = mutant
