"""A head's guesses on a GPU: all depths are launched behind each other, and the host reads once, at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from lpr.config import SamplingParams
from lpr.model.adapter import Adapter
from lpr.model.graph_inputs import packed_inputs
from lpr.model.heads.head import DraftHead
from lpr.model.kv_cache import KVCache
from lpr.model.sampling.selection import Selection
from lpr.model.step_inputs import Row
from lpr.model.transfer import to_device

Ends = Sequence[tuple[int, int, SamplingParams]]
"""The ends of chains: slot, cached tokens with the chain's, and how the tokens behind are chosen."""
Choose = Callable[[Tensor, Selection, Tensor | None], tuple[Tensor, Tensor]]
MOST_ENTRIES = 64  # guesses of a chain that are followed: their ancestors are one word of bits
_NONE = 1 << 30  # in place of a guess that is not followed


def selections_of(ends: Ends, depths: int, width: int, device: torch.device) -> list[Selection]:
    """How tokens are chosen at each depth, behind one end of a chain and then `width`; by one copy to the device."""
    made = []
    for depth in range(depths):
        count = width if depth else 1
        made.append(Selection.build([(params, [cached + 1 + depth] * count) for _, cached, params in ends]))
    if not made[0].sampled:
        return made
    words = to_device(np.concatenate([each.words.numpy() for each in made]), device)
    parts = words.split([len(each.words) for each in made])
    return [replace(each, words=part) for each, part in zip(made, parts, strict=True)]


def guess_at_once(
    ends: Ends, states: Tensor, adapter: Adapter, head: DraftHead, embed: Any, lm_head: Any, cache: KVCache,
    choose: Choose, depths: int, num_guesses: int, width: int, least: float,
) -> list[tuple[list[Any], list[Any]]]:  # fmt: skip
    """Per depth and chain the tokens and probabilities after each followed guess, nested lists; some of them unused.

    `states` [chains, H] are the head's at `ends`. Of the guesses at each depth the `width` likeliest paths are
    followed whose probability times `num_guesses` is `least` or more, which `Guesser._follow` finds by the same float64
    products.
    """
    chains, size, device = len(ends), width * (depths - 1), states.device
    selections = selections_of(ends, depths, width, device)
    rows = [
        Row(slot, cached, [0] * size, [-1] * size, [cached + i // width for i in range(size)], 0)
        for slot, cached, _ in ends
    ]
    states, found = states[:, None], list[Tensor]()
    paths = torch.ones(chains, 1, dtype=torch.float64, device=device)
    bits = torch.zeros(chains, 1, dtype=torch.int64, device=device)
    if size:
        inputs = packed_inputs(rows, cache, device, adapter.node_bucket, adapter.kv_bucket)
        adapter.bind(inputs, cache)
        mask, first = inputs.blocks[0].tree_mask, inputs.tokens.shape[1] - chains * size
        assert mask is not None
        given = states.new_zeros(1, inputs.tokens.shape[1], states.shape[2])
        of_tokens = inputs.tokens[0, first:].view(chains, size)
        of_bits = mask.bits[0, first:].view(chains, size, -1)
        of_given = given[0, first:].view(chains, size, -1)
    for depth in range(depths):
        tokens, shares = choose(lm_head(states.flatten(0, 1)), selections[depth], head.vocabulary)
        tokens, shares = tokens.view(chains, -1), shares.float().view(chains, -1)
        found += [tokens.to(torch.int32), shares.contiguous().view(torch.int32)]
        if depth == depths - 1:
            break
        count, here = tokens.shape[1], slice(depth * width, (depth + 1) * width)
        behind = (paths[..., None] * shares.view(chains, paths.shape[1], -1).double()).flatten(1)
        behind = functional.pad(behind, (0, max(0, width - count)))
        best, order = behind.sort(dim=1, descending=True, stable=True)
        order = torch.where(best * num_guesses >= least, order, _NONE)[:, :width].sort(dim=1).values
        followed, order = order < _NONE, order.clamp_max(count - 1)
        parents = order // (count // paths.shape[1])
        paths = torch.where(followed, behind.gather(1, order), 0.0)
        bits = bits.gather(1, parents) | torch.ones_like(parents) << torch.arange(here.start, here.stop, device=device)
        of_tokens[:, here], of_bits[:, here, 0] = tokens.gather(1, order), bits
        of_given[:, here] = states.gather(1, parents[..., None].expand(-1, -1, states.shape[2]))
        again = replace(inputs, made={}, made_of_masks={}, cache_storages=set(), computed=-1)
        done = head.step(embed(inputs.tokens), given, again)
        states = done[0, first:].view(chains, size, -1)[:, here]
    sizes = [each.shape[1] for each in found]
    flat = np.array(torch.cat(found, 1).tolist(), np.int32)  # the one wait
    parts = np.split(flat, np.cumsum(sizes)[:-1], axis=1)
    num_each = sizes[0]  # after one entry
    nested = [part.reshape(chains, -1, num_each) for part in parts]
    return [(at.tolist(), odds.view(np.float32).tolist()) for at, odds in zip(nested[::2], nested[1::2], strict=True)]
