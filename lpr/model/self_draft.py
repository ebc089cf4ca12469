"""A model drafts for itself: a low-bit copy of its weights chooses the next tokens, one forward (a *pass*) after another.

A pass reads the model's own K/V of committed tokens, in the same rows, and writes K/V of drafted tokens to the rows
behind them. The next step writes over these: it evaluates the last committed token and every drafted one with the
model itself, and only what it evaluates is ever committed. The copy chooses as the model does, with the noise,
penalties, processors and grammar of the request at each position; so it seldom chooses another token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lpr.config import SamplingParams
from lpr.core.heads import PROBABILITY_STEPS, HeadDraft
from lpr.core.passes import MOST_PASSES, Passes
from lpr.model.adapter import Adapter
from lpr.model.heads.guesses import likeliest
from lpr.model.kv_cache import KVCache
from lpr.model.sampling.choice import pick
from lpr.model.sampling.grammar import Grammar
from lpr.model.sampling.processors import Processors, is_row_by_row
from lpr.model.sampling.selection import Selection
from lpr.model.step_inputs import Row

SIBLINGS = 2
"""Most runners-up that are guessed beside each of the copy's choices."""
LEAST = 0.02
"""Runners-up with a smaller share are left out."""
NUM_GUESSES = MOST_PASSES * (1 + SIBLINGS)


@dataclass
class Ending:
    """The end of a sequence, behind which the copy drafts."""

    slot: int
    num_cached: int
    """Tokens whose K/V the model has computed: all but the last."""
    token: int
    """The last one."""
    params: SamplingParams
    most: int
    """Most tokens that may follow it and be drafted."""
    ends: frozenset[int] = frozenset()
    """Tokens behind which nothing is drafted."""
    processors: Processors | None = None
    tokens: Sequence[int] = ()
    """The sequence, if there are processors."""
    draft: HeadDraft = field(default_factory=lambda: HeadDraft(is_copy=True))
    chain: list[int] = field(default_factory=list)
    """The copy's choices."""
    shares: list[float] = field(default_factory=list)
    """How sure the copy was of each: its share of the squared odds among the likeliest tokens."""

    def row(self) -> Row:
        """The entry of the next pass: the last token of the chain."""
        tokens = [self.chain[-1] if self.chain else self.token]
        return Row.chain(self.slot, self.num_cached + len(self.chain), tokens, 1)

    def add(self, chosen: int, tokens: Sequence[int], odds: Sequence[float]) -> bool:
        """Add a choice and its runners-up, the likeliest `tokens`; False if nothing can follow it."""
        if chosen < 0:
            return False
        squares = [each * each for each in odds]
        whole = sum(squares) or 1.0
        shares = {token: square / whole for token, square in zip(tokens, squares, strict=True)}
        parent, share = len(self.draft.tokens) - 1 - self._beside, shares.pop(chosen, 0.5)
        self.draft.add(parent, chosen, min(int(share * PROBABILITY_STEPS), PROBABILITY_STEPS - 1))
        others = [pair for pair in shares.items() if pair[1] >= LEAST][:SIBLINGS]
        for token, other in others:
            self.draft.add(parent, token, int(other * PROBABILITY_STEPS))
        self._beside = len(others)
        self.chain.append(chosen)
        self.shares.append(share)
        return len(self.chain) < self.most and chosen not in self.ends

    _beside: int = 0
    """Guesses behind the last choice: its runners-up."""


class SelfDrafter:
    """Runs a copy with the adapter, cache and sampling of its model."""

    def __init__(self, adapter: Adapter, copy: Callable[..., Any], passes: Passes | None = None) -> None:
        """Draft with `copy`, which is called as the model of `adapter` is."""
        self.adapter, self.copy = adapter, copy
        self.passes = passes or Passes()
        """Decides how many passes pay."""
        self._last: dict[int, Ending] = {}
        """What was drafted last, by slot."""

    def begin(self, endings: Sequence[Ending]) -> bool:
        """True if a first pass behind `endings` pays."""
        self._last = {each.slot: each for each in endings}
        able = [each for each in endings if each.most > 0]
        return bool(able) and self.passes.worth([each.shares for each in able])

    def learn(self, slot: int, num_tokens: int, emitted: Sequence[int]) -> None:
        """Count the choices behind a sequence of `num_tokens` tokens by what the model has emitted there."""
        drafted = self._last.get(slot)
        if drafted is not None and drafted.num_cached + 1 == num_tokens:
            self.passes.count_choices(drafted.shares, drafted.chain, emitted)

    @torch.no_grad()
    def draft(self, endings: Sequence[Ending], cache: KVCache) -> None:
        """Let drafts follow `endings`, a pass and further ones while they pay."""
        active = [each for each in endings if each.most > 0]
        while active and (not active[0].chain or self.passes.worth([each.shares for each in active])):
            began = time.perf_counter()
            rows = [each.row() for each in active]
            logits = self._logits(rows, cache)
            chosen, tokens, odds = self._choose(logits, active)
            for row, token in zip(rows, chosen, strict=True):
                if token < 0:
                    cache.clear_entries(row)  # no row of a page may hold NaN
            found = zip(active, chosen, tokens, odds, strict=True)
            active = [each for each, *choice in found if each.add(*choice)]
            self.passes.count_pass(len(rows), (time.perf_counter() - began) * 1e3)

    def _logits(self, rows: Sequence[Row], cache: KVCache) -> Tensor:
        """The copy's logits [rows, V] after the entry of each row."""
        if len(rows) > 1 and not self.adapter.packed:
            return torch.cat([self._logits([row], cache) for row in rows])
        return self.adapter.forward(self.adapter.step_inputs(rows, cache), cache, model=self.copy)

    def _choose(self, logits: Tensor, active: Sequence[Ending]) -> tuple[list[int], list[list[int]], list[list[float]]]:
        """For each ending the choice of the request, or a code below 0, and the likeliest tokens and their odds."""
        if any(each.processors is not None for each in active):
            logits = logits.float()
            for row, each in zip(logits.split(1), active, strict=True):
                if each.processors is not None:
                    ids = torch.from_numpy(np.array([[*each.tokens, *each.chain]], np.int64)).to(logits.device)
                    scores = each.processors(ids, row.clone())
                    row.copy_(scores if scores is not None else torch.full_like(row, torch.nan))
        places = [(each.params, [each.num_cached + len(each.chain) + 1]) for each in active]
        selection = Selection.build(places, logits.device)
        chosen = pick(logits, selection)
        tokens, odds = likeliest(logits, selection)
        return chosen.tolist(), tokens.tolist(), odds.tolist()


def pure(processors: Processors | None) -> Processors | None:
    """Those of `processors` that keep no state of calls, in a set of their own: drafts may call them ahead of time."""
    known = [each for each in processors.functions if isinstance(each, Grammar) or is_row_by_row(each)] if processors else []
    return Processors(known) if known else None
