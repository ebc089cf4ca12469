"""Derives a replica's tree sizes, scheduler limits and KV-cache pool from its configuration."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lpr.config import DecodeConfig, InputError, TreeSizes
from lpr.core.step_times import StepTimes
from lpr.dist.comm import Comm
from lpr.engine.kv_pool import PoolNeeds, PoolSize, common_host_pages, common_size, given_size
from lpr.engine.options import EngineOptions
from lpr.engine.prepare import longest_sequence, may_draft_itself
from lpr.engine.request import Request
from lpr.engine.sizing import resolve_sizes
from lpr.model.heads.guesses import num_entries, num_guesses
from lpr.model.kv_cache import KVCache
from lpr.model.loader import Loaded
from lpr.model.runner import TreeModel
from lpr.model.self_draft import NUM_GUESSES, NUM_ROWS
from lpr.sched.limits import ANY_NUMBER, Limits
from lpr.sched.state_snapshots import SNAPSHOTS_PER_SLOT


@dataclass(frozen=True)
class Parts:
    """The inputs of a replica that no Configure command changes."""

    loaded: Loaded
    options: EngineOptions
    model: TreeModel
    like: KVCache
    """A template of the K/V cache."""


def tree_sizes(parts: Parts, decode: DecodeConfig, comm: Comm, times: StepTimes | None) -> TreeSizes:
    """The sizes of `decode`, with room for the guesses of a head or a copy; raises InputError for a missing head."""
    # Sizes of the full mesh, also after a loss: lost ranks come back, and until then the budget cuts trees.
    sizes = resolve_sizes(decode, times, comm.num_replicas - comm.num_drafting)
    guesser = parts.model.guesser
    if decode.draft_heads == "on" and guesser is None:
        raise InputError("draft_heads='on', but this engine has no prediction head that works")
    # With automatic sizes, heads did not reduce the time where measured (docs/results.md).
    with_head = decode.draft_heads == "on" or (decode.draft_heads == "auto" and not decode.adaptive)
    if guesser is not None:
        guesser.num_guesses = 0  # and no memory for them
    if guesser is not None and with_head and sizes.trie_nodes:
        # Automatic sizes rarely reach their limit, and each followed guess takes time.
        most = num_guesses(0 if decode.adaptive else sizes.trie_nodes)
        sizes, guesser.num_guesses = replace(sizes, num_guesses=most), most
    if sizes.trie_nodes and may_draft_itself(parts.options, decode, comm):
        sizes = replace(sizes, num_guesses=NUM_GUESSES)
    return sizes


@dataclass(frozen=True)
class Built:
    """The limits of a scheduler, with its K/V cache allocated."""

    limits: Limits[Request]
    max_length: int
    memory: str | None
    """The use of a GPU's memory, as one line."""


def allocate(
    parts: Parts, decode: DecodeConfig, sizes: TreeSizes, times: StepTimes | None, comm: Comm, met: Comm,
    given: PoolSize | None,
) -> Built:  # fmt: skip
    """Allocate the K/V cache of a mesh `comm`; raises InputError on all ranks of `met` if one has no room.

    `given` is the pool's size in a running mesh, for a rank that joins.
    """
    model, like, options = parts.model, parts.like, parts.options
    most_homes = ANY_NUMBER if decode.home_ranks == "auto" else decode.home_ranks
    how = model.packed, options.prefix_reuse, most_homes
    # A mesh that can shrink may leave whole trees to one rank; its K/V cache must not be reallocated then.
    num_ahead = sizes.evaluated_capacity(comm.num_serving if comm.membership is None else 1)
    if sizes.num_guesses:
        num_ahead += max(num_entries(sizes.num_guesses), NUM_ROWS)
    needs = PoolNeeds.of(model, like, decode, options, longest_sequence(parts.loaded, decode), num_ahead, comm)
    num_snapshots = SNAPSHOTS_PER_SLOT * decode.max_batch_size if options.prefix_reuse else 0
    if needs.free is not None:
        places = decode.max_batch_size * (1 if like.states.scratch is None else 2) + num_snapshots
        needs = replace(needs, free=max(0, needs.free - places * like.states.bytes_per_place))
    size = common_size(needs, met) if given is None else given_size(needs, given.num_pages)
    num_slots = min(decode.max_batch_size, size.num_pages)
    chunk = model.prompt_chunk(decode.prefill_chunk, num_slots * num_ahead)
    limits = Limits[Request](num_slots, comm.size, chunk, sizes.num_nodes, *how)
    limits = replace(limits, num_pages=size.num_pages, num_ahead=num_ahead, drafting=comm.drafting)
    limits.num_snapshots = num_snapshots if like.has_states else None
    pages = num_slots, size.num_pages
    if not comm.serves:  # own pages, with slots for all requests (lpr.engine.draft_rank)
        pages = limits.capacity, max(needs.num_pages(), size.max_length // needs.page_size + 1)
        num_snapshots = limits.capacity  # the marks of lpr.engine.line_states
    model.allocate(pages[0], size.max_length, num_ahead, like, pages[1], num_snapshots)
    if given is not None:
        limits.num_host_pages = given.num_host_pages
    else:
        limits.num_host_pages = common_host_pages(model, needs, options, times, met)
    if limits.num_host_pages and model.cache is not None and comm.rank not in comm.drafting:
        model.cache.host_pages.take(limits.num_host_pages)
    return Built(limits, size.max_length, needs.describe(size.num_pages) if needs.told else None)
