"""One decoding step, the same lines for greedy and sampling, for one rank and for many.

A step drafts a token tree per sequence that this rank serves, cuts the trees to what pays, splits every tree over its
home ranks, evaluates this rank's shards in one forward, gathers the results in the step's only collective, and walks
the accepted path of every tree. There is no prefill and no decode phase: a sequence has a pending chain of committed
tokens whose K/V the rank lacks, and it is longer or shorter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lpr.config import TreeSizes, result_words
from lpr.core.budgets import Budgets
from lpr.engine.exchange import DesyncError, Exchange, read_logprobs
from lpr.engine.hooks import StepHooks
from lpr.engine.request import Outcome, Request
from lpr.model.inputs import Row
from lpr.model.runner import TreeModel
from lpr.model.sampling.processors import ProcessorPath
from lpr.model.sampling.selection import Selection
from lpr.native import Conclusion, StepDraft, cache_moves, draft_step

GREEDY = Selection.build([])
"""The selection of a step without sampled requests and without logits processors."""


@dataclass(frozen=True)
class StepPlan:
    """What one step does."""

    decoding: list[Request]
    """Requests that draft, evaluate and accept a tree."""
    filling: list[tuple[Request, list[int]]]
    """Requests of which so many tokens of the pending chain are computed, per rank."""
    digest: int
    """Of what else must agree on all ranks, such as the home ranks."""
    num_command_bytes: int
    """On the driver: length of the commands that follow the step."""
    sizes: TreeSizes


@dataclass(frozen=True)
class StepResult:
    """What one step did."""

    outcomes: list[Outcome]
    """Per decoding request."""
    num_command_bytes: int
    """Length of the driver's commands that follow."""


def decode_step(plan: StepPlan, model: TreeModel, exchange: Exchange, budgets: Budgets, hooks: StepHooks) -> StepResult:
    """Advance every decoding request by its accepted path and a bonus token, and fill pieces of pending chains.

    On a rank whose rows are padded there are either rows of decoding requests or one that fills. A rank without work
    still takes part in the collective, whose header announces the driver's commands.
    """
    batch, filling, sizes = plan.decoding, plan.filling, plan.sizes
    comm = exchange.comm
    fills = [fill_row(request, counts[comm.rank], comm.rank) for request, counts in filling if counts[comm.rank]]
    depths = [request.longest - len(request.tokens) - 1 for request in batch]
    draft = draft_step(
        [request.running for request in batch],
        *(depths, budgets, comm.size, exchange.capacity, comm.rank, served_by(batch, comm.size)),
    )
    mine, rows = draft.mine, shard_rows(batch, draft, comm.rank)
    hooks.end_phase("draft")
    # Where no tree has a draft, nobody asks for the runners-up, and they would cost plain decoding 4 %.
    num_candidates = min(sizes.num_recycled, model.vocab_size) if draft.has_nodes else 0
    together = [*rows, *fills] if model.packed else without_gaps(rows)
    chosen = selection([batch[index] for index in mine], rows)
    asked = [request.params.logprobs for request in batch if request.params.logprobs is not None]
    if chosen.num_logprobs is not None:
        chosen.num_logprobs = max(asked)  # of all ranks' requests
    local = model.evaluate(together, chosen, num_candidates) if rows else None
    if fills and not rows:
        model.fill(fills)
    hooks.while_busy()
    hooks.end_phase("forward")
    digest = 0
    if comm.size * comm.tp_size > 1:
        digest = combine(
            [*(each.running.digest for each in batch), *(each.running.digest for each, _ in filling), plan.digest]
        )
    own = local if chosen.num_logprobs is None or local is None else local[:, : result_words(num_candidates)]
    gathered = exchange.gather(own, draft, digest, num_candidates, plan.num_command_bytes)
    if asked:
        behind = local[:, own.shape[1] :] if local is not None and own is not None and own is not local else None
        said = exchange.gather_logprobs(behind, draft, max(asked))
    hooks.end_phase("gather")
    # Only now: had a rank been lost before, the step would be dropped, and nothing of it may have happened.
    for request, counts in filling:
        count_filled(request, counts)
    try:
        concluded = draft.conclude(gathered.values, gathered.headers, budgets)
    except ValueError as failure:
        raise DesyncError(f"what the ranks have sent in a step does not fit together: {failure}") from failure
    commit(model, rows, [concluded[index] for index in mine])
    logprobs = read_logprobs(said, draft) if asked else [None] * len(batch)
    hooks.end_phase("commit")
    outcomes = [Outcome(each, draft.num_entries, said) for each, said in zip(concluded, logprobs, strict=True)]
    return StepResult(outcomes, gathered.num_command_bytes)


def served_by(batch: Sequence[Request], num_ranks: int) -> list[list[int]] | None:
    """Per rank, which requests it serves, in the order of its slots; None for a single rank, which serves all."""
    if num_ranks == 1:
        return None
    return [
        sorted(
            [index for index, request in enumerate(batch) if rank in request.homes],
            key=lambda index: batch[index].slots[rank],
        )
        for rank in range(num_ranks)
    ]


def without_gaps(rows: Sequence[Row]) -> list[Row]:
    """`rows` of a padded batch, with empty ones for the other slots up to the last: padding makes one block of all.

    It begins with slot 0, as captured graphs do.
    """
    if all([row.slot == slot for slot, row in enumerate(rows)]):
        return list(rows)
    by_slot = {row.slot: row for row in rows}
    slots = range(max(by_slot, default=-1) + 1)
    return [by_slot.get(slot) or Row(slot, 0, [], [], [], num_results=0) for slot in slots]


def fill_row(request: Request, count: int, rank: int) -> Row:
    """The first `count` tokens of a rank's pending chain, after which nothing is chosen."""
    state = request.running
    computed = state.num_computed_tokens[rank]
    tokens = state.tokens[computed : computed + count]
    positions = list(range(computed, computed + count))
    return Row(request.slots[rank], computed, tokens, list(range(-1, count - 1)), positions, num_results=0)


def count_filled(request: Request, counts: Sequence[int]) -> None:
    """Count the tokens of `fill_row` as computed, on every rank."""
    state = request.running
    state.num_computed_tokens = [held + count for held, count in zip(state.num_computed_tokens, counts, strict=True)]


def shard_rows(batch: Sequence[Request], draft: StepDraft, rank: int) -> list[Row]:
    """This rank's part of a step: of each request that it serves its pending chain and its shard's nodes.

    The chain ends in the root; rows are in the order of slots.
    """
    return [
        Row.of(batch[index].slots[rank], num_cached, entries, num_results)
        for index, (num_cached, num_results, entries) in zip(draft.mine, draft.rows(), strict=True)
    ]


def selection(batch: Sequence[Request], rows: Sequence[Row]) -> Selection:
    """How the next token after each result entry is chosen: by the request's parameters and the token's position."""
    if all([request.is_plain for request in batch]):
        return GREEDY
    positions = [row.positions[row.num_entries - row.num_results :] + 1 for row in rows]
    chosen = Selection.build([(request.params, each) for request, each in zip(batch, positions, strict=True)])
    asked = [request.params.logprobs for request in batch if request.params.logprobs is not None]
    chosen.num_logprobs = max(asked) if asked else None
    start = 0
    for request, row in zip(batch, rows, strict=True):
        if request.processors is not None:
            above = len(row.tokens) - row.num_results
            tokens = [int(token) for token in row.tokens[above:]]
            parents = [int(parent) - above for parent in row.parents[above:]]
            chosen.processor_paths.append(ProcessorPath(request.processors, request.tokens, start, tokens, parents))
        start += row.num_results
    return chosen


def commit(model: TreeModel, rows: Sequence[Row], concluded: Sequence[Conclusion]) -> None:
    """Keep the K/V of each row's pending chain and of what it evaluated of the accepted path; none if there is NaN."""
    cache = model.cache
    assert cache is not None
    for row, each in zip(rows, concluded, strict=True):
        if each.is_spoilt:
            cache.clear(row.slot, row.num_cached)
    cache.move(cache_moves(concluded, cache.first_rows(rows)))


def combine(digests: Iterable[int]) -> int:
    """One 64-bit digest of the sequences' digests, in order."""
    joined = b"".join([each.to_bytes(8, "little") for each in digests])
    return int.from_bytes(hashlib.blake2b(joined, digest_size=8).digest(), "little")
