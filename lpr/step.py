"""One decoding step, the same lines for greedy and sampling, for one rank and for many.

A step drafts a token tree per sequence, splits every tree over the ranks, evaluates this rank's shards in one forward,
gathers the results in the step's only collective, and walks the accepted path. There is no prefill and no
decode phase: a sequence has a pending chain of committed tokens whose K/V the rank lacks, and it is longer or shorter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from lpr.config import DecodeConfig
from lpr.core.accept import accept
from lpr.core.partition import Shard, partition
from lpr.core.state import SequenceState, TreeResult
from lpr.core.tree import TokenTree
from lpr.dist.comm import Comm
from lpr.exchange import Exchange
from lpr.model.inputs import Row
from lpr.model.runner import TreeModel
from lpr.sampling import Selection


@dataclass
class Running:
    """A sequence that holds a cache slot."""

    state: SequenceState
    slot: int
    max_depth: int = 0
    """How deep a tree can still pay: tokens that may yet be emitted, minus the bonus token."""


@dataclass
class Outcome:
    """What one step did for one sequence."""

    tree: TokenTree
    path: list[int]
    shards: list[Shard]
    result: TreeResult
    emitted: list[int]


Lap = Callable[[str], None]
"""Called with the name of a phase when that phase of a step has ended (lpr.trace)."""


def no_lap(phase: str) -> None:
    """Nobody times this step."""


def decode_step(
    batch: Sequence[Running],
    config: DecodeConfig,
    model: TreeModel,
    exchange: Exchange,
    message_length: int = 0,
    lap: Lap = no_lap,
) -> tuple[list[Outcome], int]:
    """Advance every sequence of `batch` (neighbouring slots, in order) by its accepted path and a bonus token.

    An empty batch still takes part in the collective. Also returns the length of the message that rank 0 announces.
    """
    rank = exchange.comm.rank
    trees = [run.state.build(run.max_depth) for run in batch]
    shards = [split(run.state, tree, exchange) for run, tree in zip(batch, trees, strict=True)]
    rows = [shard_row(*each, rank) for each in zip(batch, trees, shards, strict=True)]
    lap("draft")
    local = model.evaluate(rows, selection(batch, rows, model.device), config.num_recycled) if rows else None
    lap("forward")
    digest = combine(run.state.digest for run in batch)
    results, message_length = exchange.gather(local, trees, shards, digest, message_length)
    lap("gather")
    outcomes = []
    for run, tree, parts, row, result in zip(batch, trees, shards, rows, results, strict=True):
        path = accept(tree, result.next_tokens)
        commit(model, row, parts[rank], path)
        emitted = run.state.advance(tree, path, result, parts)
        outcomes.append(Outcome(tree, path, parts, result, emitted))
    lap("commit")
    return outcomes, message_length


def fill_step(run: Running, count: int, model: TreeModel, comm: Comm) -> None:
    """Evaluate the first `count` tokens of the pending chain: each rank its own, nothing is gathered."""
    state = run.state
    held = state.held[comm.rank]
    state.held = [min(other + count, len(state.tokens) - 1) for other in state.held]
    tokens = state.tokens[held : state.held[comm.rank]]
    if tokens:
        positions = list(range(held, held + len(tokens)))
        model.fill(Row(run.slot, held, tokens, list(range(-1, len(tokens) - 1)), positions, num_results=0))


def split(state: SequenceState, tree: TokenTree, exchange: Exchange) -> list[Shard]:
    """The shards of `tree`; ranks with a longer pending chain get fewer nodes."""
    pending = [len(state.tokens) - held - 1 for held in state.held]
    return partition(tree, exchange.comm.size, pending, exchange.capacity)


def shard_row(run: Running, tree: TokenTree, shards: Sequence[Shard], rank: int) -> Row:
    """This rank's part of a step: its pending chain, which ends in the root, and its shard's nodes below it."""
    state = run.state
    held = state.held[rank]
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


def selection(batch: Sequence[Running], rows: Sequence[Row], device: torch.device) -> Selection:
    """How the next token after each result entry is chosen: by the request's parameters and the token's position."""
    positions = [[at + 1 for at in row.positions[-row.num_results :]] for row in rows]
    return Selection.build([(run.state.params, each) for run, each in zip(batch, positions, strict=True)], device)


def commit(model: TreeModel, row: Row, shard: Shard, path: Sequence[int]) -> None:
    """Keep the K/V of the pending chain and of the part of the path that this rank evaluated."""
    above = len(row.tokens) - len(shard.nodes)
    entry = {node: above + i for i, node in enumerate(shard.nodes)}
    entries = list(range(above))
    for node in path:
        if node not in entry:
            break
        entries.append(entry[node])
    assert model.cache is not None
    model.cache.commit(row.slot, row.num_cached, entries)


def combine(digests: Iterable[int]) -> int:
    """One 64-bit digest of the sequences' digests, in order."""
    joined = b"".join([each.to_bytes(8, "little") for each in digests])
    return int.from_bytes(hashlib.blake2b(joined, digest_size=8).digest(), "little")
