"""One decoding step, the same code for greedy and sampling, and for one rank and many.

A step drafts a token tree per sequence that this rank serves, cuts the trees to the nodes that pay, splits every tree
over its home ranks, evaluates this rank's shards in one forward, gathers the results in the step's only collective, and
walks the accepted path of every tree. There is no prefill and no decode phase: a sequence has a pending chain of
committed tokens whose K/V the rank lacks, of any length from 1.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lpr.core import wire
from lpr.core.budgets import Budgets
from lpr.engine.ahead import Ahead, look_ahead
from lpr.engine.exchange import Exchange, Gathered
from lpr.engine.hooks import StepHooks
from lpr.engine.outcomes import Outcomes
from lpr.engine.overlap import Overlap
from lpr.engine.plan import GREEDY, StepPlan, selection
from lpr.engine.request import Request
from lpr.model.runner import TreeModel
from lpr.model.step_inputs import Row, Rows
from lpr.model.threads import drafting_threads
from lpr.native import Concluded, Conclusion, StepDraft, draft_step

SHORTEST_WAIT = 5e-5  # seconds of a wait for the device, in a step that was begun early, from which on it is timed


@dataclass(frozen=True)
class Begun:
    """A step that the device evaluates."""

    plan: StepPlan
    draft: StepDraft
    rows: Rows
    fills: Sequence[Row]  # prompt chunks
    results: torch.Tensor | None  # of this rank's rows, on the device; None without rows
    gathering: Callable[[], Gathered] | None  # waits for the gather, if that is begun, too
    began: float  # on the clock of steps
    captures: bool  # True if it has captured a graph, which takes longer
    is_early: bool  # True if it was begun in the call before


@dataclass(frozen=True)
class StepResult:
    """The result of one step."""

    outcomes: Outcomes  # per decoding request
    gathered: Gathered
    ms: float | None  # milliseconds that it took; None if they are not known or not usual

    @property
    def replica_ms(self) -> float:
        """Milliseconds that this replica's first rank spent before the gather."""
        return wire.microseconds(self.gathered.of_replicas[self.gathered.draft.rank]) / 1e3


def begin_step(
    plan: StepPlan,
    model: TreeModel,
    exchange: Exchange,
    budgets: Budgets,
    overlap: Overlap,
    hooks: StepHooks,
    is_early: bool = False,
) -> Begun:
    """Draft the trees of `plan` and launch their forward; if it `is_early`, the gather begins, too."""
    began, captures = model.adapter.clock(), model.num_captures
    exchange.begin_step()
    num_threads = drafting_threads(model.device, exchange.comm.num_sharing)
    draft = draft_trees(plan, exchange, budgets, min(plan.sizes.num_recycled, model.vocab_size), num_threads)
    rows = Rows(plan.batch.slots(draft.rank), draft.columns, draft.entries, draft.totals)
    hooks.end_phase("draft")
    fills = [
        fill_row(request, counts[draft.rank], draft.rank) for request, counts in plan.filling if counts[draft.rank]
    ]
    results, gathering = overlap.take(plan, rows), None
    if results is None:
        results = forward(plan, model, draft, rows, fills)
    following = overlap.next_rows(plan, rows) if results is not None else None
    if following is not None or (is_early and plan.decoding and plan.batch.num_logprobs is None):
        gathering = exchange.begin_gather(draft, results)
    if following is not None and results is not None:
        overlap.launch(plan, following, results)
    captured = captures != model.num_captures
    return Begun(plan, draft, rows, fills, results, gathering, began, captured, is_early)


def end_step(begun: Begun, model: TreeModel, exchange: Exchange, budgets: Budgets, hooks: StepHooks) -> StepResult:
    """Gather the results of a step, and advance its requests; a rank without work still takes part in the gather."""
    plan, draft, rows, fills = begun.plan, begun.draft, begun.rows, begun.fills
    hooks.while_busy()
    ahead = look_ahead(plan, model, draft, rows, fills, begun.results)
    hooks.end_phase("forward")
    how, came = (plan.batch.num_logprobs, ahead.blocks), time.perf_counter()
    gathered = begun.gathering() if begun.gathering is not None else exchange.gather(draft, begun.results, *how)
    # A device that the host waits for hardly at all may have been done before the host came.
    is_timed = not begun.captures and not (begun.is_early and time.perf_counter() - came < SHORTEST_WAIT)
    hooks.end_phase("gather")
    # If a rank was lost, the step is dropped: up to here no state has changed.
    concluded, moves = gathered.conclude(budgets)
    if plan.drafting is not None:
        plan.drafting.follow(plan, gathered, concluded)
    again = commit(model, rows, draft.mine, concluded, moves, ahead, draft.rank)
    if model.cache is not None and model.cache.has_states:
        found = [(plan.decoding[i], concluded[i]) for i in draft.mine]
        advance_states(model, rows, found, fills, again, draft.rank)
    else:
        for row in again.values():
            model.fill([row])
    for request, counts in plan.filling:
        count_filled(request, counts)
    outcomes = Outcomes(concluded, draft.num_entries, gathered.logprobs(concluded), plan.batch.one_by_one)
    hooks.end_phase("commit")
    return StepResult(outcomes, gathered, (model.adapter.clock() - begun.began) * 1e3 if is_timed else None)


def draft_trees(
    plan: StepPlan, exchange: Exchange, budgets: Budgets, num_candidates: int, num_threads: int
) -> StepDraft:
    """Draft this rank's trees; ranks that share a tree draft it identically."""
    comm, digests = exchange.comm, None
    if comm.size * comm.tp_size > 1:
        complete = exchange.carries_trees or all([len(request.homes) == comm.size for request in plan.decoding])
        assert complete, "a rank that is not home would need a tree that does not travel"
        digests = [*(request.running.digest for request, _ in plan.filling), plan.digest]
    return draft_step(
        *(plan.batch.states, budgets, comm.rank, plan.batch.served, exchange.capacity),
        *(num_candidates, plan.num_command_bytes, digests, num_threads),
    )


def forward(
    plan: StepPlan, model: TreeModel, draft: StepDraft, rows: Rows, fills: Sequence[Row]
) -> torch.Tensor | None:
    """Evaluate this rank's rows and prompt chunks; returns the results of the rows, None without rows.

    A row is the pending chain of a request, which ends in the root, and the nodes of this rank's shard.
    """
    if not rows:
        if fills:
            model.fill(fills)
        return None
    together: Sequence[Row] = rows
    if not model.packed:
        together = without_gaps(rows)
    elif fills:
        together = [*rows, *fills]
    chosen = GREEDY if plan.batch.is_plain else selection([plan.decoding[index] for index in draft.mine], rows)
    if chosen.num_logprobs is not None:
        chosen.num_logprobs = plan.batch.num_logprobs
    return model.evaluate(together, chosen, draft.num_candidates)


def without_gaps(rows: Rows) -> Sequence[Row]:
    """`rows` of a padded batch, with empty rows inserted for unused slots.

    The batch begins with slot 0, as in captured graphs.
    """
    if rows.slots[-1] == len(rows) - 1:  # they ascend
        return rows
    by_slot = {row.slot: row for row in rows}
    slots = range(max(by_slot, default=-1) + 1)
    return [by_slot.get(slot) or Row(slot, 0, [], [], [], num_results=0) for slot in slots]


def fill_row(request: Request, count: int, rank: int) -> Row:
    """A row of the first `count` tokens of a rank's pending chain, without results."""
    state = request.running
    computed = state.num_computed_tokens[rank]
    tokens = state.tokens[computed : computed + count]
    positions = list(range(computed, computed + count))
    return Row(request.slots[rank], computed, tokens, list(range(-1, count - 1)), positions, num_results=0)


def count_filled(request: Request, counts: Sequence[int]) -> None:
    """Count the tokens of `fill_row` as computed, on every rank."""
    state = request.running
    state.num_computed_tokens = [held + count for held, count in zip(state.num_computed_tokens, counts, strict=True)]


def commit(
    model: TreeModel,
    rows: Rows,
    mine: Sequence[int],
    concluded: Concluded,
    moves: np.ndarray,
    ahead: Ahead,
    rank: int,
) -> dict[int, Row]:
    """Keep the K/V of each row's pending chain and of its part of the accepted path; none of a row with NaN.

    `mine` are the sequences of the rows. `moves` are int64 [3, n] (StepDraft.conclude): row, source entry and target
    entry. Returns, by the place of its row, what must be computed again: a path whose entries `ahead` has overwritten.
    """
    cache = model.cache
    assert cache is not None
    if concluded.with_nan:
        for row, index in zip(rows, mine, strict=True):
            if concluded[index].has_nan:
                cache.clear_entries(row)
    cache.commit_moves(rows, ahead.left(moves))
    again = dict[int, Row]()
    for place, moved in ahead.moved.items():
        kept = accepted_entries(row := rows[place], concluded[mine[place]], rank)
        if kept != moved[: len(kept)]:
            again[place] = Row.chain(row.slot, row.num_cached, row.tokens[kept].tolist(), 0)
    return again


def advance_states(
    model: TreeModel,
    rows: Sequence[Row],
    concluded: Sequence[tuple[Request, Conclusion]],
    fills: Sequence[Row],
    again: Mapping[int, Row],
    rank: int,
) -> None:
    """Advance the states of recurrent layers by the accepted entries of `rows`, and by all entries of `fills`.

    Those of `rows` at places of `again` advance when the entries given there are computed. If the rank that owns the
    root met NaN, the root is excluded: it is evaluated again.
    """
    assert model.cache is not None
    states = model.cache.states
    kept = [
        accepted_entries(row, each, rank)[: request.running.num_computed_tokens[rank] - row.num_cached]
        for row, (request, each) in zip(rows, concluded, strict=True)
    ]
    counts = {place: len(kept[place]) for place in again}
    accepted = [() if place in again else entries for place, entries in enumerate(kept)]
    states.advance([*rows, *fills], [*accepted, *(range(row.num_entries) for row in fills)])
    for place, row in again.items():  # these forwards replace the contributions of the last one
        model.fill([row])
        states.advance([row], [range(counts[place])])


def accepted_entries(row: Row, concluded: Conclusion, rank: int) -> list[int]:
    """The kept entries of a rank's row: its pending chain, and the evaluated part of the path."""
    nodes = concluded.shards[rank].nodes
    if concluded.has_nan or not nodes:
        return []
    above = row.num_entries - len(nodes)
    entry = {node: above + index for index, node in enumerate(nodes)}
    return [*range(above), *(entry[node] for node in itertools.takewhile(entry.__contains__, concluded.path))]
