"""One decoding step, the same lines for greedy and sampling, for one rank and for many.

A step drafts a token tree per sequence, cuts the trees to what pays, splits every tree over the ranks, evaluates this
rank's shards in one forward, gathers the results in the step's only collective, and walks the accepted path. There is
no prefill and no decode phase: a sequence has a pending chain of committed tokens whose K/V the rank lacks, and it is
longer or shorter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from lpr.config import TreeSizes
from lpr.core.accept import accept
from lpr.core.budget import Budget
from lpr.core.partition import Shard, partition
from lpr.core.state import SequenceState, TreeResult, has_nan_result
from lpr.core.tree import TokenTree
from lpr.engine.exchange import Exchange
from lpr.model.inputs import Row
from lpr.model.processors import ProcessorPath, Processors
from lpr.model.runner import TreeModel
from lpr.model.sampling import Selection


@dataclass
class Running:
    """A sequence that holds a cache slot."""

    state: SequenceState
    slot: int
    max_depth: int = 0
    """How deep a tree can still pay: tokens that may yet be emitted, minus the bonus token."""
    processors: Processors | None = None


@dataclass
class Outcome:
    """What one step did for one sequence."""

    tree: TokenTree
    path: list[int]
    shards: list[Shard]
    result: TreeResult
    emitted: list[int]
    num_entries: int
    """Tokens that this rank evaluated: pending chain and shard."""
    failure: int | None
    """Why the path ends without a bonus token (see lpr.core.accept)."""


PhaseTimer = Callable[[str], None]
"""Called with the name of a phase when that phase of a step has ended (lpr.cli.trace)."""


def untimed(phase: str) -> None:
    """Nobody times this step."""


def decode_step(
    batch: Sequence[Running],
    config: TreeSizes,
    model: TreeModel,
    exchange: Exchange,
    budget: Budget,
    message_length: int = 0,
    fills: Sequence[Row] = (),
    end_phase: PhaseTimer = untimed,
) -> tuple[list[Outcome], int]:
    """Advance every sequence of `batch` by its accepted path and a bonus token.

    `fills` are pieces of other sequences' pending chains that share the forward; a model whose rows are padded takes
    none, and a batch of neighbouring slots in order. An empty batch still takes part in the collective. Also returns
    the length of the message that rank 0 announces.
    """
    rank = exchange.comm.rank
    budget.begin(len(batch), *workload(batch))
    drafts = [run.state.build(run.max_depth, budget.request(run.state.acceptance)) for run in batch]
    histories = [run.state.acceptance for run in batch]
    budget.cut(drafts, histories)
    trees = [draft.tree for draft in drafts]
    shards = [split(run.state, tree, exchange) for run, tree in zip(batch, trees, strict=True)]
    rows = [shard_row(*each, rank) for each in zip(batch, trees, shards, strict=True)]
    end_phase("draft")
    chosen_by = selection(batch, rows)
    # Where no tree has a draft, nobody asks for the runners-up, and they would cost plain decoding 4 %.
    num_candidates = config.num_recycled if any(len(tree) > 1 for tree in trees) else 0
    local = model.evaluate([*rows, *fills], chosen_by, num_candidates) if rows else None
    end_phase("forward")
    digest = combine(run.state.sign_tree(tree) for run, tree in zip(batch, trees, strict=True))
    results, message_length = exchange.gather(local, trees, shards, digest, message_length)
    end_phase("gather")
    outcomes = []
    for run, tree, parts, row, result in zip(batch, trees, shards, rows, results, strict=True):
        path = accept(tree, result.next_tokens)
        commit(model, row, parts[rank], path, has_nan=has_nan_result(parts[rank], result))
        emitted = run.state.advance(tree, path, result, parts)
        bonus = result.next_tokens[path[-1]]
        failure = bonus if bonus < 0 else None
        outcomes.append(Outcome(tree, path, parts, result, emitted, len(row.tokens), failure))
    budget.observe(trees, [outcome.path for outcome in outcomes], histories)
    end_phase("commit")
    return outcomes, message_length


def fill_row(run: Running, count: int, rank: int) -> Row:
    """The first `count` tokens of the pending chain, of which nothing is chosen: each rank computes what it lacks.

    From here on they count as held. The row is empty on a rank that holds them already.
    """
    state = run.state
    held = state.num_computed_tokens[rank]
    state.num_computed_tokens = [min(other + count, len(state.tokens) - 1) for other in state.num_computed_tokens]
    tokens = state.tokens[held : state.num_computed_tokens[rank]]
    positions = list(range(held, held + len(tokens)))
    return Row(run.slot, held, tokens, list(range(-1, len(tokens) - 1)), positions, num_results=0)


def workload(batch: Sequence[Running]) -> tuple[int, int]:
    """What a step costs besides its nodes: the most pending tokens of a rank, and the longest cached length."""
    if not batch:
        return 0, 0
    states = [run.state for run in batch]
    pending = [
        sum(len(state.tokens) - 1 - state.num_computed_tokens[rank] for state in states)
        for rank in range(len(states[0].num_computed_tokens))
    ]
    return max(pending), max(len(state.tokens) for state in states)


def split(state: SequenceState, tree: TokenTree, exchange: Exchange) -> list[Shard]:
    """The shards of `tree`; ranks with a longer pending chain get fewer nodes."""
    pending = [len(state.tokens) - held - 1 for held in state.num_computed_tokens]
    return partition(tree, exchange.comm.size, pending, exchange.capacity)


def shard_row(run: Running, tree: TokenTree, shards: Sequence[Shard], rank: int) -> Row:
    """This rank's part of a step: its pending chain, which ends in the root, and its shard's nodes below it."""
    state = run.state
    held = state.num_computed_tokens[rank]
    chain = state.tokens[held:]
    above = len(chain) - 1
    nodes = shards[rank].nodes
    entry = {node: above + i for i, node in enumerate(nodes)}
    root_position = held + above
    return Row(
        slot=run.slot,
        num_cached=held,
        tokens=chain + [tree.tokens[node] for node in nodes[1:]],
        parents=list(range(-1, above)) + [entry[tree.parents[node]] for node in nodes[1:]],
        positions=list(range(held, root_position)) + [root_position + tree.depths[node] for node in nodes],
        num_results=len(nodes),
    )


def selection(batch: Sequence[Running], rows: Sequence[Row]) -> Selection:
    """How the next token after each result entry is chosen: by the request's parameters and the token's position."""
    positions = [[at + 1 for at in row.positions[-row.num_results :]] for row in rows]
    chosen = Selection.build([(run.state.params, each) for run, each in zip(batch, positions, strict=True)])
    start = 0
    for run, row in zip(batch, rows, strict=True):
        if run.processors is not None:
            above = len(row.tokens) - row.num_results
            parents = [parent - above for parent in row.parents[above:]]
            chosen.processor_paths.append(
                ProcessorPath(run.processors, run.state.tokens, start, row.tokens[above:], parents)
            )
        start += row.num_results
    return chosen


def commit(model: TreeModel, row: Row, shard: Shard, path: Sequence[int], has_nan: bool = False) -> None:
    """Keep the K/V of the pending chain and of the part of the path that this rank evaluated; nothing if NaN."""
    assert model.cache is not None
    if has_nan:
        model.cache.clear(row.slot, row.num_cached)
        return
    above = len(row.tokens) - len(shard.nodes)
    entry = {node: above + i for i, node in enumerate(shard.nodes)}
    entries = list(range(above))
    for node in path:
        if node not in entry:
            break
        entries.append(entry[node])
    model.cache.commit(row.slot, row.num_cached, entries)


def combine(digests: Iterable[int]) -> int:
    """One 64-bit digest of the sequences' digests, in order."""
    joined = b"".join([each.to_bytes(8, "little") for each in digests])
    return int.from_bytes(hashlib.blake2b(joined, digest_size=8).digest(), "little")
