"""One decoding step, the same lines for greedy and sampling, for one rank and for many.

A step drafts a token tree per sequence, cuts the trees to what pays, splits every tree over the ranks, evaluates this
rank's shards in one forward, gathers the results in the step's only collective, and walks the accepted path. There is
no prefill and no decode phase: a sequence has a pending chain of committed tokens whose K/V the rank lacks, and it is
longer or shorter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence

from lpr.config import TreeSizes
from lpr.core.budget import Budget
from lpr.core.state import TokenLogprobs
from lpr.engine.exchange import Exchange
from lpr.engine.request import Outcome, Request
from lpr.model.inputs import Row
from lpr.model.processors import ProcessorPath
from lpr.model.runner import TreeModel
from lpr.model.sampling import Selection
from lpr.native import Shard, TokenTree, accept, conclude, draft_step, row_entries

GREEDY = Selection.build([])
"""The selection of a step without sampled requests and without logits processors."""
PhaseTimer = Callable[[str], None]
"""Called with the name of a phase when that phase of a step has ended (lpr.cli.trace)."""


def untimed(phase: str) -> None:
    """Nobody times this step."""


def nothing() -> None:
    """No work waits for the device to be busy."""


def decode_step(
    batch: Sequence[Request],
    filling: Sequence[tuple[Request, int]],
    sizes: TreeSizes,
    model: TreeModel,
    exchange: Exchange,
    budget: Budget,
    num_command_bytes: int = 0,
    end_phase: PhaseTimer = untimed,
    while_busy: Callable[[], None] = nothing,
) -> tuple[list[Outcome], int]:
    """Advance every request of `batch` by its accepted path and a bonus token, and fill pieces of pending chains.

    `filling` holds other requests and numbers of tokens; a model whose rows are padded takes either a batch, of
    neighbouring slots in order, or these. A step without a batch still takes part in the collective, whose header
    announces the driver's commands. `while_busy` is called as soon as the device has work. Also returns the length of
    the commands in bytes.
    """
    rank = exchange.comm.rank
    states = [request.running for request in batch]
    fills = [fill_row(request, count, rank) for request, count in filling]
    fills = [row for row in fills if len(row.tokens)]
    depths = [left_to_emit(request) - 1 for request in batch]
    trees, shards = draft_step(states, depths, budget, exchange.comm.size, exchange.capacity)
    rows = [shard_row(*each, rank) for each in zip(batch, trees, shards, strict=True)]
    end_phase("draft")
    # Where no tree has a draft, nobody asks for the runners-up, and they would cost plain decoding 4 %.
    num_candidates = sizes.num_recycled if any(len(tree) > 1 for tree in trees) else 0
    together = [*rows, *fills] if model.packed else without_gaps(rows)
    chosen = selection(batch, rows)
    local = model.evaluate(together, chosen, num_candidates) if rows else None
    if fills and not rows:
        model.fill(fills)
    while_busy()
    end_phase("forward")
    digest = combine(
        [*(state.sign_tree(tree) for state, tree in zip(states, trees, strict=True)),
         *(request.running.digest for request, _ in filling)]
    )  # fmt: skip
    own = local if chosen.num_logprobs is None or local is None else local[:, : -(1 + 2 * chosen.num_logprobs)]
    results, num_command_bytes = exchange.gather(own, trees, shards, digest, num_command_bytes)
    logprobs: Sequence[list[TokenLogprobs] | None] = [None] * len(trees)
    if local is not None and own is not None and own is not local:
        logprobs = exchange.gather_logprobs(local[:, own.shape[1] :], trees, shards)
    end_phase("gather")
    # Only now: had a rank been lost before, the step would be dropped, and nothing of it may have happened.
    for request, count in filling:
        count_filled(request, count)
    outcomes, kept = [], []
    for request, tree, parts, row, result, found in zip(batch, trees, shards, rows, results, logprobs, strict=True):
        path = accept(tree, result.next_tokens)
        emitted, entries, failure = conclude(request.running, tree, path, result, parts, rank)
        kept.append((row, entries))
        outcomes.append(Outcome(tree, path, parts, result, emitted, len(row.tokens), failure, found))
    commit(model, kept)
    budget.observe(trees, [outcome.path for outcome in outcomes], [state.acceptance for state in states])
    end_phase("commit")
    return outcomes, num_command_bytes


def without_gaps(rows: Sequence[Row]) -> list[Row]:
    """`rows` of a padded batch, with empty ones for the other slots up to the last: padding makes one block of all.

    It begins with slot 0, as captured graphs do.
    """
    by_slot = {row.slot: row for row in rows}
    slots = range(max(by_slot, default=-1) + 1)
    return [by_slot.get(slot) or Row(slot, 0, [], [], [], num_results=0) for slot in slots]


def left_to_emit(request: Request) -> int:
    """Tokens that a request may still emit: no tree pays that is deeper than these without the bonus token."""
    return request.params.max_new_tokens - request.num_output


def fill_row(request: Request, count: int, rank: int) -> Row:
    """The first `count` tokens of a pending chain, after which nothing is chosen: each rank computes what it lacks.

    The row is empty on a rank that has them already.
    """
    state = request.running
    computed = state.num_computed_tokens[rank]
    tokens = state.tokens[computed : min(computed + count, len(state.tokens) - 1)]
    positions = list(range(computed, computed + len(tokens)))
    return Row(request.slot, computed, tokens, list(range(-1, len(tokens) - 1)), positions, num_results=0)


def count_filled(request: Request, count: int) -> None:
    """Count the tokens of `fill_row` as computed, on every rank."""
    state = request.running
    state.num_computed_tokens = [min(other + count, len(state.tokens) - 1) for other in state.num_computed_tokens]


def shard_row(request: Request, tree: TokenTree, shards: Sequence[Shard], rank: int) -> Row:
    """This rank's part of a step: its pending chain, which ends in the root, and its shard's nodes below it."""
    state, shard = request.running, shards[rank]
    entries = row_entries(state, tree, shard, rank)
    return Row.of(request.slot, state.num_computed_tokens[rank], entries, len(shard.nodes))


def is_plain(request: Request) -> bool:
    """Is each next token the likeliest one, and nothing else asked for?"""
    return request.params.temperature == 0 and request.processors is None and request.params.logprobs is None


def selection(batch: Sequence[Request], rows: Sequence[Row]) -> Selection:
    """How the next token after each result entry is chosen: by the request's parameters and the token's position."""
    if all(is_plain(request) for request in batch):
        return GREEDY
    positions = [(row.positions[-row.num_results :] + 1).tolist() for row in rows]
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


def commit(model: TreeModel, kept: Sequence[tuple[Row, list[int] | None]]) -> None:
    """Keep the K/V of these entries of each row, its pending chain and what it evaluated of the path; none if NaN."""
    assert model.cache is not None
    for row, entries in kept:
        if entries is None:
            model.cache.clear(row.slot, row.num_cached)
    model.cache.commit_all([(row.slot, row.num_cached, entries) for row, entries in kept if entries is not None])


def combine(digests: Iterable[int]) -> int:
    """One 64-bit digest of the sequences' digests, in order."""
    joined = b"".join([each.to_bytes(8, "little") for each in digests])
    return int.from_bytes(hashlib.blake2b(joined, digest_size=8).digest(), "little")
