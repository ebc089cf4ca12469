"""Drafting for the next step before the gather: by a prediction head, or by a low-bit copy of the model.

Both draft after the path that the rank predicts to be accepted from its own results (lpr.engine.guesses), and the
step's one gather carries their guesses. The copy reads the model's own K/V, so the rank first moves the path's entries
to their places, and the copy's scratch states begin as the model's behind that path. If the owners' results give
another path, which only rounding can cause, the rank computes the entries of that path again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from lpr.core.heads import block_words
from lpr.core.step_times import StepTimes
from lpr.engine.guesses import Followed, follow_all, guess
from lpr.engine.outcomes import Outcome
from lpr.engine.plan import StepPlan
from lpr.engine.request import Request
from lpr.model.runner import TreeModel
from lpr.model.sampling.processors import pure
from lpr.model.self_draft import Ending
from lpr.model.step_inputs import Row
from lpr.native import StepDraft


@dataclass(frozen=True)
class Ahead:
    """A rank's guesses for the next step, and the K/V that it has moved for them."""

    blocks: np.ndarray | None = None
    """int32 [own trees, words] (lpr.core.heads); None without a head and a copy."""
    moved: dict[int, list[int]] = field(default_factory=dict)
    """By row, the entries whose K/V was moved to its place already, in order."""

    def left(self, moves: np.ndarray) -> np.ndarray:
        """The remaining ones of `moves`, int64 [3, n] (StepDraft.conclude)."""
        return moves[:, ~np.isin(moves[0], [*self.moved])] if self.moved else moves


def look_ahead(
    plan: StepPlan,
    model: TreeModel,
    draft: StepDraft,
    rows: Sequence[Row],
    fills: Sequence[Row],
    results: torch.Tensor | None,
) -> Ahead:
    """Draft after this rank's evaluated entries: its `rows` and `fills`, and the `results` of `rows`."""
    if plan.drafting is not None:
        return Ahead(plan.drafting.draft(plan, plan.times))
    num_guesses = plan.sizes.num_guesses
    if model.self_drafter is None and model.guesser is None:
        return Ahead()
    if model.self_drafter is None or not num_guesses:
        return Ahead(guess(model, plan.decoding, plan.filling, draft, rows, fills, results, num_guesses))
    blocks = np.zeros((len(draft.mine), block_words(num_guesses)), np.int32)
    endings: list[tuple[Followed, Ending]] = []
    own_ms = model.self_drafter.passes.step_time(sum([row.num_results for row in rows]), len(rows)) if rows else 0.0
    for each in follow_all(draft, rows, results):
        row, request = rows[each.place], plan.decoding[each.index]
        above = row.num_entries - row.num_results
        emitted = [*row.tokens[each.entries[above + 1 :]].tolist(), each.bonus]
        model.self_drafter.learn(row.slot, len(request.tokens), emitted, own_ms / len(rows))
        if each.is_end and len(request.tokens) > request.num_prompt:  # passes do not hold up a first token
            endings.append((each, ending_of(request, row, each, emitted)))
    begun = {ending.slot for ending in model.self_drafter.begin([ending for _, ending in endings])}
    endings = [(each, ending) for each, ending in endings if ending.slot in begun]
    if not endings:
        return Ahead(blocks)
    moves = [
        (each.place, entry, place) for each, _ in endings for place, entry in enumerate(each.entries) if entry != place
    ]
    cache = model.cache
    assert cache is not None
    cache.commit_moves(rows, np.array(moves, np.int64).reshape(-1, 3).T)
    if cache.has_states:
        paths = [each.entries for each, _ in endings]
        cache.states.advance([rows[each.place] for each, _ in endings], paths, into=cache.states.scratch)
    model.draft([ending for _, ending in endings])
    for each, ending in endings:
        blocks[each.place] = ending.draft.pack(each.end, each.bonus, num_guesses)
    return Ahead(blocks, {each.place: each.entries for each, _ in endings})


def ending_of(request: Request, row: Row, followed: Followed, emitted: list[int]) -> Ending:
    """The end of a request's sequence after a step that emits these tokens."""
    ends = request.text_stream.stop_ids
    # The bonus token after the draft is the model's own.
    most = 0 if ends.intersection(emitted) else request.longest - len(request.tokens) - len(emitted) - 1
    processors = pure(request.processors)
    tokens = [*request.tokens, *emitted] if processors is not None else []
    num_cached = row.num_cached + len(followed.entries)
    known = row.slot, num_cached, followed.bonus, request.params, most, ends, processors, tokens
    return Ending(*known, request.running, emitted)


def begin_passes(model: TreeModel, batch: Sequence[Request], times: StepTimes | None) -> None:
    """Tell a low-bit copy that the step of `batch` begins."""
    if model.self_drafter is not None and batch:
        model.self_drafter.passes.begin_step(times, max([len(request.tokens) for request in batch]))


def passes_ms(model: TreeModel) -> float:
    """Milliseconds of the copy's passes for the coming step."""
    return model.self_drafter.spent_ms if model.self_drafter is not None else 0.0


def count_passes(model: TreeModel, outcomes: Sequence[Outcome], ms: float, longest_tree: int) -> None:
    """Count a step that took `ms` milliseconds without its passes; one that evaluated a prompt does not count."""
    entries = max(outcomes[0].num_entries)
    if model.self_drafter is not None and entries <= len(outcomes) * longest_tree:
        model.self_drafter.passes.count_step(entries, len(outcomes), ms)
