"""What a head guesses after a step: it follows the accepted paths, and expands a tree behind each of them.

The head's entry i holds K/V of (h[i], token i+1), in the cache row of token i. So pages, prefixes, hand-over and lost
ranks are those of the model's own K/V. In a step a rank adds the entries of what it has evaluated and keeps; those of
guesses lie behind them, and the next step writes over them. A prefix that other requests share keeps one entry of
another next token, at its end: a guess may suffer, never a result.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from lpr import native
from lpr.config import SamplingParams
from lpr.core.heads import PROBABILITY_STEPS, HeadDraft
from lpr.core.rows import WORD_BITS
from lpr.model.adapter import Adapter
from lpr.model.eager_forward import EagerForward
from lpr.model.graph_inputs import StaticShape, bucket_of, packed_inputs, packed_kv, power_of_two
from lpr.model.heads.head import DraftHead
from lpr.model.kv_cache import KVCache
from lpr.model.sampling import in_cpp
from lpr.model.sampling.selection import Selection
from lpr.model.sampling.specification import gumbel
from lpr.model.step_inputs import Row, Rows, StepInputs

NUM_GUESSES, MOST_GUESSES = 48, 128  # fewest and most guesses after a path, by the nodes of the tree (`num_guesses`)
DEPTH, WIDTH = 5, 12  # tokens ahead; guesses after one entry
FOLLOWED = 8  # one of so many guesses is followed, at each depth
LEAST = 0.4
"""A guess whose path probability times the most guesses is smaller is left out; below twice that it is not followed."""
FORWARD_MEMORY = 0.1  # weight of the latest time of a forward
FADING = 0.99  # what is left of that mean when a forward was not worth it: one slow forward is not believed for ever
LATE = 256  # entries of a slot that may wait while the head rests
_NONE = 1 << 30  # in place of a guess that is not followed
FEWEST, USUAL = 16, 8  # entries that a graph follows before it guesses: at least, and for each chain
NUM_NOISED = 256  # likeliest tokens among which the sampling noise chooses


def num_guesses(num_nodes: int) -> int:
    """Most guesses for a draft of `num_nodes` nodes: more than are drafted help none."""
    return min(MOST_GUESSES, max(NUM_GUESSES, num_nodes))


def num_entries(num_guesses: int) -> int:
    """Cache rows that guesses need behind a step's path: one for each that is followed."""
    return num_guesses // FOLLOWED * (DEPTH - 1)


@dataclass
class Chain:
    """What a rank keeps of a row, and what follows each entry."""

    row: Row
    entries: Sequence[int]  # of the row, in order
    tokens: Sequence[int]  # the token after each of `entries`
    params: SamplingParams | None  # those of the request; None keeps the entries without guessing


@dataclass
class _Late:
    """Entries that the head has not followed yet."""

    slot: int
    begin: int  # tokens before the first one
    tokens: list[int] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)  # [entries, H] each

    def row(self, num_results: int = 0) -> Row:
        return Row.chain(self.slot, self.begin, self.tokens, num_results)


@dataclass(frozen=True)
class GuessShape:
    """The constants of guesses on a GPU: those of equal shape are replays of one graph."""

    known: StaticShape  # entries that the head has not followed; its results are the ends of chains that guess
    grown: StaticShape  # guesses that the head may follow, in reversed order of chains; its results are their tokens
    depths: int
    num_guesses: int
    with_adapters = False

    @staticmethod
    @lru_cache(maxsize=1024)
    def of(chains: int, num_entries: int, num_kv: int, depths: int, num_guesses: int, sampled: bool) -> GuessShape:
        """Cached, so that the sizes of its parts are computed once."""
        how: Any = dict(num_kv=num_kv, num_candidates=0, filtered=False, tree_bits=True, by_table=True)
        size, results = num_guesses // FOLLOWED * (depths - 1), chains * depths
        known = StaticShape(0, chains, num_entries, num_keys=0, num_kept=chains, **how)
        grown = StaticShape(0, chains, chains * size, num_keys=results * sampled, num_kept=results, **how)
        return GuessShape(known, grown, depths, num_guesses)

    @property
    def begin(self) -> int:
        """The first word of `grown`, behind those of `known`; even, as its first words are read as 64-bit integers."""
        return self.known.num_words + self.known.num_words % 2


@dataclass
class _Growing:
    """The tree of one chain."""

    chain: Chain
    draft: HeadDraft = field(default_factory=HeadDraft)
    paths: list[float] = field(default_factory=lambda: [1.0])  # path probability of each guess
    begin: int = 1  # the first guess that is new
    entries: list[int] = field(default_factory=list)  # guesses that the head has followed, parents first
    states: list[Tensor] = field(default_factory=list)  # g [H] of the chain's end, then of `entries`

    @property
    def num_cached(self) -> int:
        return self.chain.row.num_cached + len(self.chain.tokens)

    def row(self) -> Row:
        place = {guess: index for index, guess in enumerate(self.entries)}
        parents = [place.get(self.draft.parents[guess], -1) for guess in self.entries]
        depths: list[int] = []
        for parent in parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        tokens = [self.draft.tokens[guess] for guess in self.entries]
        positions = [self.num_cached + depth for depth in depths]
        return Row(self.chain.row.slot, self.num_cached, tokens, parents, positions, num_results=0)

    def best(self, count: int) -> HeadDraft:
        """Its `count` likeliest guesses; no guess is likelier than the one that it follows."""
        if len(self.paths) <= count + 1:
            return self.draft
        kept = sorted(sorted(range(1, len(self.paths)), key=lambda guess: -self.paths[guess])[:count])
        draft, numbers = HeadDraft(), {0: 0}
        for guess in kept:
            parent = numbers[self.draft.parents[guess]]
            numbers[guess] = draft.add(parent, self.draft.tokens[guess], self.draft.steps[guess])
        return draft

    def inputs(self) -> Tensor:
        """The states [n, H] that go in beside the tokens of `row`: those of the parents."""
        place = {guess: 1 + index for index, guess in enumerate(self.entries)}
        return torch.stack([self.states[place.get(self.draft.parents[guess], 0)] for guess in self.entries])


class Guesser:
    """Runs a head with the model's embeddings, output head, attention and cache."""

    least: float = 0.0
    """Guesses are followed while their path probabilities sum up to this; each depth is a forward of its own."""
    num_guesses: int = NUM_GUESSES  # most guesses after a path
    forward_ms: float = 0.0  # Milliseconds of such a forward, the mean of recent ones

    def __init__(self, adapter: Adapter, head: DraftHead) -> None:
        self.adapter, self.head = adapter, head
        self.embed: Any = adapter.model.get_input_embeddings()
        self.lm_head: Any = head.lm_head or adapter.model.get_output_embeddings()
        self._late: dict[int, _Late] = {}
        self._depths = DEPTH  # as deep as `_grow_at_once` goes next

    @torch.no_grad()
    def check(self, like: KVCache) -> None:
        """Guess after a few tokens in `like`, which gets the head's K/V; raises ValueError for what is no number."""
        like.add_fixed(self.head.layer)
        rows = [Row.chain(0, 0, [1, 2, 3, 4], 0)]
        states = torch.randn(4, self.embed.weight.shape[1], generator=torch.Generator().manual_seed(5))
        found = self._run(rows, [states.to(self.embed.weight)], like)[0]
        if not self.lm_head(found).isfinite().all():
            raise ValueError("its logits are not numbers")

    @torch.no_grad()
    def rest(self, chains: Sequence[Chain], hidden: dict[int, Tensor], cache: KVCache) -> None:
        """Keep `chains`, to follow many entries in one forward: one of few takes as long."""
        late = [self._join(chain, hidden) for chain in chains]
        self._late |= {each.slot: each for each in late}
        if full := [each for each in late if len(each.tokens) >= LATE]:
            self._run([each.row() for each in full], [torch.cat(each.states) for each in full], cache)
            for each in full:
                del self._late[each.slot]

    def _join(self, chain: Chain, hidden: dict[int, Tensor], waits: bool = True) -> _Late:
        """The entries of `chain` behind those of its slot that wait, if it goes on where they end.

        An ended request's may end there by chance: guesses suffer from it, no result does.
        """
        row = chain.row
        late = self._late.pop(row.slot, None)
        if late is None or late.begin + len(late.tokens) != row.num_cached:
            late = _Late(row.slot, row.num_cached)
        late.tokens += chain.tokens
        states, entries, is_run = hidden[row.slot], chain.entries, chain.entries[-1] == len(chain.entries) - 1
        parts = [states[: len(entries)]] if is_run else [states[entry : entry + 1] for entry in entries]
        late.states += [torch.cat(parts)] if waits else parts  # a copy: the next replay writes over them
        return late

    @torch.no_grad()
    def guess(self, chains: Sequence[Chain], forward: EagerForward) -> list[HeadDraft]:
        """Follow `chains` by the last hidden states of the step's rows; a draft for each chain."""
        growing = [_Growing(chain) for chain in chains]
        late = [self._join(chain, forward.hidden, waits=False) for chain in chains]
        active = [each for each in growing if each.chain.params is not None]
        if active and self._packs:
            self._grow_at_once(active, late, forward)
        else:
            states = self._run([each.row() for each in late], [torch.cat(each.states) for each in late], forward.cache)
            for each, state in zip(growing, states, strict=True):
                each.states = [state[-1]]
            self._grow(active, forward.cache)
        return [each.best(self.num_guesses) for each in growing]

    @property
    def _packs(self) -> bool:
        """True on a GPU with packed attention, where `_grow` would make the host wait at each depth."""
        adapter = self.adapter
        return adapter.device.type == "cuda" and adapter.packed and adapter.packs_bits

    def _grow(self, active: list[_Growing], cache: KVCache) -> None:
        """Expand the trees, depth by depth."""
        ends = {id(each): [0] for each in active}
        began = 0.0
        for depth in range(DEPTH):
            if not active:
                break
            last = [state for each in active for state in each.states[-len(ends[id(each)]) :]]
            params = [(each.chain.params, [each.num_cached + 1 + depth] * len(ends[id(each)])) for each in active]
            selection = Selection.build([(p, q) for p, q in params if p], self.adapter.device)
            tokens, shares = likeliest(self.lm_head(torch.stack(last)), selection, self.head.vocabulary)
            pairs = iter(tokens.tolist()), iter(shares.tolist())
            for each in active:
                self._add(each, ends[id(each)], *pairs)
            if depth:
                self._count_time(began)
            if depth == DEPTH - 1:
                break
            ends = {id(each): self._follow(each) for each in active}
            active = [each for each in active if ends[id(each)]]
            if not active:
                break
            if sum(each.paths[end] for each in active for end in ends[id(each)]) < self.least:
                self.forward_ms *= FADING
                break
            began = self.adapter.clock()
            states = self._run([each.row() for each in active], [each.inputs() for each in active], cache)
            for each, state in zip(active, states, strict=True):
                each.states = [each.states[0], *state]

    def _grow_at_once(self, active: Sequence[_Growing], late: Sequence[_Late], forward: EagerForward) -> None:
        """As `_grow`, on a GPU: a depth that paid last time is launched, and the host reads all depths once."""
        began, depths, captures = self.adapter.clock(), self._depths, forward.num_captures
        found = self._launch(active, late, forward, depths)
        ends, self._depths = {id(each): [0] for each in active}, 1
        for depth, (tokens, shares) in enumerate(found):
            for number, each in enumerate(active):
                mine = ends[id(each)]
                self._add(each, mine, tokens[number, : len(mine)].tolist(), shares[number, : len(mine)].tolist())
            ends = {id(each): self._follow(each) for each in active}
            is_worth = sum(each.paths[end] for each in active for end in ends[id(each)]) >= self.least
            if is_worth and self._depths == depth + 1 < DEPTH:
                self._depths += 1
        if depths > 1 and forward.num_captures == captures:
            self._count_time(began, depths - 1)
        if self._depths < DEPTH:
            self.forward_ms *= FADING

    def _launch(
        self, active: Sequence[_Growing], late: Sequence[_Late], forward: EagerForward, depths: int
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Per depth the tokens and probabilities [chains, ends, WIDTH] after the followed guesses of each chain.

        The values after guesses that are not followed are arbitrary.
        """
        cache, width, slots = forward.cache, self.num_guesses // FOLLOWED, {each.chain.row.slot for each in active}
        rows, size = Rows.of([each.row(int(each.slot in slots)) for each in late]), width * (depths - 1)
        assert size <= WORD_BITS, "the ancestors of a guess are one word"
        unknown = np.array([[0] * size, [-1] * size, np.arange(size) // width], np.int32)
        known = [(each.chain.row.slot, each.num_cached) for each in reversed(active)]
        guessed = [Row.of(slot, at, unknown + np.array([[0], [0], [at]], np.int32), 0) for slot, at in known]
        asked = [(each.chain.params, np.arange(depths) + each.num_cached + 1) for each in active]
        selection = Selection.build([(params, positions) for params, positions in asked if params])
        chains = power_of_two(len(rows))
        usual, most = max(FEWEST, USUAL * chains), cache.rows_per_slot
        num_kv = min(bucket_of(rows.longest + size, packed_kv(chains, usual, most)), most)
        sizes = chains, max(rows.num_entries, usual), num_kv, depths, self.num_guesses, selection.sampled
        shape = GuessShape.of(*sizes)
        words = np.zeros(shape.begin + shape.grown.num_words, np.int32)
        shape.known.place(words[: shape.known.num_words], rows, Selection.build([]), cache)
        shape.grown.place(words[shape.begin :], guessed, selection, cache)
        cache.device_tables(self.adapter.device)  # with what has changed since the step
        states = [state for each in late for state in each.states]
        states.insert(0, states[0].new_zeros(shape.known.num_entries - rows.num_entries, states[0].shape[1]))
        program = partial(self._follow_and_guess, shape, cache)
        found = forward.run_program(shape if rows.num_entries <= usual else None, program, words, states)
        tokens, odds = found.cpu().numpy()[:, ::-1][:, : len(active)]  # the one wait
        shares, begins = odds.view(np.float32), [0, *range(1, 2 + size, width)]
        return [(tokens[:, a:b], shares[:, a:b]) for a, b in pairwise(begins)]

    def _follow_and_guess(self, shape: GuessShape, cache: KVCache, words: Tensor, given: Tensor) -> Tensor:
        """Int32 [2, chains, ends, WIDTH]: tokens after the end of each chain and after followed guesses, depth by
        depth, and the bits of their probabilities; chains are in reversed order.

        A program without the host, for `words` and the states `given` [entries, H]. Each depth follows the best
        guesses; `_follow` selects the same ones by the same float64 products.
        """
        width, device = shape.num_guesses // FOLLOWED, words.device
        chains, size = shape.grown.batch, width * (shape.depths - 1)
        inputs, _ = shape.known.read(words, cache)
        self.adapter.bind(inputs, cache)
        done, wanted = self.head.step(self.embed(inputs.tokens), given[None], inputs), inputs.logits_to_keep
        assert isinstance(wanted, Tensor)
        # Rows lie at the end of a packed step, and results at the beginning.
        states, found = done[0].index_select(0, wanted.flip(0))[:, None], list[tuple[Tensor, Tensor]]()
        paths = torch.ones(chains, 1, dtype=torch.float64, device=device)
        bits = torch.zeros(chains, 1, dtype=torch.int64, device=device)
        inputs, selection = shape.grown.read(words[shape.begin :], cache)
        self.adapter.bind(inputs, cache)
        noise = selection.noise
        given, mask = given.new_zeros(chains, size, given.shape[1]), inputs.blocks[0].tree_mask
        assert mask is not None
        of_tokens, of_bits = inputs.tokens.view(chains, size), mask.bits.view(chains, size, mask.bits.shape[2])
        for depth in range(shape.depths):
            known = None
            if noise is not None:
                parts = [each.view(chains, -1).flip(0)[:, depth, None] for each in noise]
                known = parts[0].expand(states.shape[:2]).flatten(), parts[1].expand(states.shape[:2]).flatten()
            tokens, shares = likeliest_of(self.lm_head(states.flatten(0, 1)), known, self.head.vocabulary)
            tokens, shares = (each.view(chains, -1, each.shape[1]) for each in (tokens, shares.float()))
            found.append((tokens.to(torch.int32), shares.view(torch.int32)))
            if depth == shape.depths - 1:
                break
            count, here = tokens[0].numel(), slice(depth * width, (depth + 1) * width)
            behind = (paths[..., None] * shares.double()).flatten(1)
            behind = functional.pad(behind, (0, max(0, width - count)))
            best, order = behind.sort(dim=1, descending=True, stable=True)
            order = torch.where(best * shape.num_guesses >= 2 * LEAST, order, _NONE)[:, :width].sort(dim=1).values
            followed, order = order < _NONE, order.clamp_max(count - 1)
            parents = order // tokens.shape[2]
            paths = torch.where(followed, behind.gather(1, order), 0.0)
            own = torch.ones_like(parents) << torch.arange(here.start, here.stop, device=device)
            bits = bits.gather(1, parents) | own
            of_tokens[:, here], of_bits[:, here, 0] = tokens.flatten(1).gather(1, order), bits
            given[:, here] = states.gather(1, parents[..., None].expand(-1, -1, states.shape[2]))
            again = replace(inputs, made={}, made_of_masks={}, cache_storages=set(), computed=-1)
            done = self.head.step(self.embed(inputs.tokens), given.view(1, chains * size, -1), again)
            states = done[0].view(chains, size, -1)[:, here]
        return torch.stack([torch.cat(each, 1) for each in zip(*found, strict=True)])

    def _count_time(self, began: float, forwards: int = 1) -> None:
        took = (self.adapter.clock() - began) * 1e3 / forwards
        self.forward_ms += (FORWARD_MEMORY if self.forward_ms else 1.0) * (took - self.forward_ms)

    def _run(self, rows: Sequence[Row], hidden: Sequence[Tensor], cache: KVCache) -> list[Tensor]:
        """g [entries, H] of each row."""
        if not self.adapter.packed and len(rows) > 1:
            return [self._run([row], [states], cache)[0] for row, states in zip(rows, hidden, strict=True)]
        inputs = self._inputs(rows, cache)
        batch, length = inputs.tokens.shape
        given = hidden[0].new_zeros(batch, length, hidden[0].shape[-1])
        places = inputs.places()
        for (index, begin), states in zip(places, hidden, strict=True):
            given[index, begin : begin + len(states)] = states
        self.adapter.bind(inputs, cache)
        found = self.head.step(self.embed(inputs.tokens), given, inputs)
        return [found[index, begin : begin + row.num_entries] for (index, begin), row in zip(places, rows, strict=True)]

    def _inputs(self, rows: Sequence[Row], cache: KVCache) -> StepInputs:
        if self._packs:
            return packed_inputs(rows, cache, self.adapter.device, self.adapter.node_bucket, self.adapter.kv_bucket)
        return self.adapter.step_inputs(rows, cache)

    def _add(self, each: _Growing, ends: Sequence[int], tokens: Iterable[Any], shares: Iterable[Any]) -> None:
        """Add the likeliest tokens after each end, by a row of tokens and one of probabilities for it."""
        for end, *rows in zip(ends, tokens, shares, strict=False):
            for token, share in zip(*rows, strict=True):
                path = each.paths[end] * share
                if not path * self.num_guesses >= LEAST:  # or it is no number
                    break  # they are in order
                each.draft.add(end, token, int(share * PROBABILITY_STEPS))
                each.paths.append(path)

    def _follow(self, each: _Growing) -> list[int]:
        """Of the guesses that are new those that the head follows, the best ones."""
        new, each.begin = range(each.begin, len(each.paths)), len(each.paths)
        likely = [guess for guess in new if each.paths[guess] * self.num_guesses >= 2 * LEAST]
        chosen = sorted(sorted(likely, key=lambda guess: -each.paths[guess])[: self.num_guesses // FOLLOWED])
        each.entries += chosen
        return chosen


def likeliest(logits: Tensor, selection: Selection, vocabulary: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The WIDTH likeliest next tokens [n, WIDTH] of `logits` [n, V], and the probability of each to be chosen.

    Place i of the logits is that of token `vocabulary[i]`, by default of token i.
    The sampling noise is known: where q is a token's probability and E its exponential noise, the odds of being chosen
    are about q / E, among all tokens' (lpr.core.noise_keys).
    """
    if native.guess_rows is not None and logits.device.type == "cpu":
        return in_cpp.guesses(logits, selection, vocabulary, NUM_NOISED, WIDTH)
    return likeliest_of(logits, selection.noise, vocabulary)


def likeliest_of(
    logits: Tensor, noise: tuple[Tensor, Tensor] | None, vocabulary: Tensor | None
) -> tuple[Tensor, Tensor]:
    """As `likeliest`, by operators; `noise` are the temperature and the noise key of each row, None of greedy ones."""
    scores = logits.float().nan_to_num()
    if noise is None:
        top, tokens = scores.topk(min(WIDTH, scores.shape[1]))
        tokens = tokens if vocabulary is None else vocabulary[tokens]
        return tokens, (top - scores.logsumexp(-1, keepdim=True)).exp()
    top, tokens = scores.topk(min(NUM_NOISED, scores.shape[1]))
    tokens = tokens if vocabulary is None else vocabulary[tokens]
    warm, keys = noise[0][:, None], noise[1][:, None]
    noised = torch.where(warm > 0, top / torch.where(warm > 0, warm, 1.0) + gumbel(keys, tokens), top)
    best, places = noised.softmax(-1).topk(min(WIDTH, noised.shape[1]))
    return tokens.gather(1, places), best
