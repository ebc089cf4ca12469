"""A model drafts for itself: a low-bit copy of its weights chooses the next tokens, a forward (a *pass*) for each.

A pass reads the model's own K/V of committed tokens, in the same rows, and writes K/V of drafted tokens to the rows
behind them. The next step writes over these: it evaluates the last committed token and every drafted one with the
model itself, and only what it evaluates is ever committed. The copy chooses as the model does, with the noise,
penalties, processors and grammar of the request at each position; so it seldom chooses another token. Where the text
has a likely continuation a pass evaluates that too, and drafts as much of it as the copy would choose.

Recurrent layers have one state of a sequence instead of rows. A pass reads scratch states, which begin as the model's
own at the end of the sequence and advance by what each pass has evaluated of the draft; the model's stay as they are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lpr import native
from lpr.config import SamplingParams
from lpr.core.heads import PROBABILITY_STEPS, HeadDraft
from lpr.core.passes import Passes
from lpr.model.adapter import Adapter
from lpr.model.eager_forward import EagerForward
from lpr.model.heads.guesses import likeliest
from lpr.model.kv_cache import KVCache
from lpr.model.low_bit.direct import LONGEST, Direct
from lpr.model.pass_graphs import MOST_ENTRIES, PassGraphs
from lpr.model.sampling import in_cpp
from lpr.model.sampling.choice import pick
from lpr.model.sampling.processors import Processors
from lpr.model.sampling.selection import Selection, choice_of
from lpr.model.step_inputs import Row

LONGEST_STEP = 128
"""Tokens of a step at most: more have come to another request in the slot."""
LONGEST_TEXT = 7
"""Most tokens of the text that a pass evaluates."""
SIBLINGS = 2
"""Most runners-up that are guessed beside each of the copy's choices."""
NUM_LIKELY = 4
"""Likeliest tokens that are looked at."""
LEAST = 0.02
"""Runners-up with a smaller share are left out."""
UNSURE = 0.1
"""Where a runner-up has this share or more, a rank that follows other ways may follow it."""
NUM_TIMED = 8
"""Passes of one sequence that are timed at start; the shortest counts."""
TIMED_TOGETHER = (4, 16)
"""Numbers of sequences for which passes are timed as well, twice each: few processors take as long for 4 as for one."""
NUM_GUESSES = LONGEST * (1 + SIBLINGS)
NUM_ROWS = LONGEST + LONGEST_TEXT
"""Rows of the cache that passes write behind a sequence."""


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
    state: native.SequenceState | native.Drafter | None = None
    """Has the text behind the sequence (`continuation`)."""
    emitted: Sequence[int] = ()
    """Tokens of the sequence that the state does not have yet."""
    draft: HeadDraft = field(default_factory=lambda: HeadDraft(is_copy=True))
    chain: list[int] = field(default_factory=list)
    """The copy's choices."""
    shares: list[float] = field(default_factory=list)
    """How sure the copy was of each, from 1/2 up: one half of the share of its squared odds, and one half."""
    text: list[int] = field(default_factory=list)
    """What the text has behind the chain, as far as the next pass evaluates it."""
    text_shares: list[float] = field(default_factory=list)
    gain: float = 0.0
    """The probability that the chain is right and the next pass finds more than the text has."""
    run: float = 0.0
    """Tokens that the text is expected to bring behind the sequence, without a pass."""
    num_together: int = 1  # sequences of the step
    ms: float = 0.0  # this sequence's part of the time of the passes that were made
    before: list[int] = field(default_factory=list)
    """Tokens in front of the last one whose K/V the next pass computes, too."""
    num_right: int = 0  # leading ones of the next pass behind which the slot's own states are wanted
    num_kept: int = 0  # leading entries of the last pass that are of the chain or before it; 0 if it has failed
    turn: int = -1
    """Places with a likely runner-up at which the copy's choice is followed before the runner-up is; -1: at all."""
    parent: int = 0
    """The guess of the last choice."""

    @property
    def is_open(self) -> bool:
        """True if the copy may choose a further token."""
        return len(self.chain) < min(self.most, LONGEST) and (not self.chain or self.chain[-1] not in self.ends)

    def look(self, passes: Passes) -> None:
        """Find what the next pass evaluates besides the last token of the chain."""
        room = min(self.most, LONGEST) - len(self.chain) - 1
        limit = min(LONGEST_TEXT, room) if self.processors is None else 0
        state = self.state if limit > 0 else None
        text, shares = state.continuation([*self.emitted, *self.chain], limit) if state is not None else ([], [])
        count, path = passes.likely_text(shares)
        self.text, self.text_shares = list(text[:count]), list(shares[:count])
        if not self.chain:
            self.run = sum(accumulate(shares, mul))
        self.gain = passes.path(self.shares) * (1.0 - path if count == limit > 0 else 1.0)

    def row(self) -> Row:
        """The entries of the next pass: those before the last token of the chain, this one, and the text."""
        tokens = [*self.before, self.chain[-1] if self.chain else self.token, *self.text]
        num_held = self.num_cached + len(self.chain) - len(self.before)
        return Row.chain(self.slot, num_held, tokens, 1 + len(self.text))

    def positions(self) -> list[int]:
        """The places of the tokens that the next pass chooses."""
        first = self.num_cached + len(self.chain) + 1
        return list(range(first, first + len(self.text) + 1))

    def take(self, chosen: Sequence[int], tokens: Sequence[Sequence[int]], odds: Sequence[Sequence[float]]) -> bool:
        """Add the choices of a pass up to the first that the text has not, each with the likeliest tokens and odds.

        False if the last one is no token.
        """
        for place, choice in enumerate(chosen):
            if choice < 0:
                return False
            self._add(choice, tokens[place], odds[place])
            if not self.is_open or place == len(self.text) or self.chain[-1] != self.text[place]:
                return True
        return True

    def _add(self, chosen: int, tokens: Sequence[int], odds: Sequence[float]) -> None:
        squares = [each * each for each in odds]
        whole = sum(squares) or 1.0
        shares = {token: square / whole for token, square in zip(tokens, squares, strict=True)}
        above, share = self.parent, 0.5 + shares.pop(chosen, 0.0) / 2
        self.parent = self.draft.add(above, chosen, min(int(share * PROBABILITY_STEPS), PROBABILITY_STEPS - 1))
        others = [pair for pair in shares.items() if pair[1] >= LEAST][:SIBLINGS]
        numbers = [self.draft.add(above, token, int(other / 2 * PROBABILITY_STEPS)) for token, other in others]
        if self.turn >= 0 and others and others[0][1] >= UNSURE:
            if self.turn == 0:
                chosen, share, self.parent = others[0][0], others[0][1] / 2, numbers[0]
            self.turn -= 1
        self.chain.append(chosen)
        self.shares.append(share)


class SelfDrafter:
    """Runs a copy with the adapter, cache and sampling of its model."""

    def __init__(
        self,
        adapter: Adapter,
        make_copy: Callable[[], Callable[..., Any]],
        decide: Callable[..., list[int]] = lambda decisions, *seen: decisions,
    ) -> None:
        """Draft with a copy, which is called as the model of `adapter` is.

        The tp ranks of a replica make the same passes, as they count the same times: `decide` returns the first rank's
        microseconds, and compares what the ranks have drafted.
        """
        self.adapter, self._make_copy, self._decide = adapter, make_copy, decide
        self.copy = make_copy()
        self.direct: Direct | None = None
        """The copy in one call, if it can be called so."""
        self.graphs: PassGraphs | None = None
        """Passes as graphs, in the cache of the model's steps."""
        self.graph_reason: str | None = None
        """The reason why passes are no graphs, if the capture of one has failed."""
        self.passes = Passes()
        """Decides how many passes pay."""
        self.first_ms: dict[int, float] = {}
        """Milliseconds of a pass of so many sequences, a token each, as measured at start."""
        self.spent_ms = 0.0
        """Milliseconds of the passes since `begin`, as passes of late take them."""
        self._last: dict[int, Ending] = {}
        """What was drafted last, by slot."""
        self._ended: dict[int, tuple[Ending, float]] = {}
        """What was drafted for the step before, and the milliseconds of drafts and step."""

    def renew(self) -> None:
        """Make the copy anew, as the model's weights have changed."""
        self.copy = self._make_copy()
        if self.graphs is not None:
            self.graphs.forget()
        if self.direct is not None:
            self.direct = self._find_direct()

    def attach(self, forward: EagerForward | None) -> None:
        """Launch passes in the cache of `forward` beside its steps; None drops their graphs."""
        self.graphs = None
        if forward is not None and PassGraphs.fits(self.adapter) and self.graph_reason is None:
            self.graphs = PassGraphs(forward)

    def most_results(self, batch: int) -> int:
        """Results of the largest pass of `batch` sequences with a graph; 0 if passes have none."""
        return min(MOST_ENTRIES, batch * (1 + LONGEST_TEXT)) if PassGraphs.fits(self.adapter) else 0

    def prepare(self) -> None:
        """Capture common passes before the first request."""
        if self.graphs is not None:
            self.graphs.prepare(self.copy, 1 + LONGEST_TEXT)

    def _find_direct(self) -> Direct | None:
        model = getattr(self.copy, "model", None)
        return Direct.of(model, self.adapter.layer_rules) if model is not None and self.adapter.reads_pages else None

    @torch.no_grad()
    def go_direct(self, like: KVCache) -> None:
        """Call the copy's parts in place of its forward from now on, if they give its logits in `like`."""
        rows = [Row.chain(0, 0, [1, 2, 3], 3)]
        expected, direct = self._logits(rows, like), self._find_direct()
        if direct is not None and torch.allclose(direct.logits(rows, like), expected, rtol=1e-3, atol=1e-3):
            self.direct = direct

    def measure(self, like: KVCache, max_batch_size: int, strategy: Callable[[KVCache], EagerForward]) -> None:
        """Time passes of a batch's sizes in a small cache like `like`, beside steps of such a strategy.

        The first of a size may be captured as a graph; the shortest is a replay.
        """
        together = [each for each in TIMED_TOGETHER if each <= 2 * max_batch_size]
        cache = like.resized(max([1, *together]), 4 + NUM_ROWS)
        forward = strategy(cache)
        self.attach(forward)
        for count, repeats in ((1, NUM_TIMED), *((many, 2) for many in together)):
            took = list[float]()
            for _ in range(repeats):
                began = self.adapter.clock()
                self.draft([Ending(slot, 3, 1, SamplingParams(), 1) for slot in range(count)], cache)
                took.append((self.adapter.clock() - began) * 1e3)
            self.first_ms[count] = self._agreed([min(took)])[0]
        self.graph_reason = forward.reason  # steps, of another strategy, keep their graphs
        self.attach(None)

    def learn(self, slot: int, num_tokens: int, emitted: Sequence[int], ms: float) -> None:
        """Count what was drafted behind a sequence of `num_tokens` tokens by what the model has emitted there.

        `ms` is the sequence's part of the time of the step that did.
        """
        self._expect(emitted)
        if (before := self._ended.pop(slot, None)) is not None:  # what other ranks have of a path is known by now
            drafted, took = before
            num_new = num_tokens - drafted.num_cached - 1
            if 0 < num_new <= LONGEST_STEP:
                self.passes.count_tokens(drafted.num_together, drafted.run, bool(drafted.chain), num_new, took)
        last = self._last.pop(slot, None)
        if last is not None and last.num_cached + 1 == num_tokens:
            self.passes.copy.count(last.shares, last.chain, emitted)
            self._ended[slot] = last, ms + last.ms

    def begin(self, endings: Sequence[Ending]) -> list[Ending]:
        """Those of `endings` that a first pass drafts behind; none if it does not pay."""
        active, self.spent_ms = [each for each in endings if each.is_open], 0.0
        for each in active:
            each.look(self.passes)
            each.num_together = len(active)
        self._last.update({each.slot: each for each in active})
        if not active:
            return []
        num_entries = sum([1 + len(each.text) for each in active])
        return active if self.passes.begins([each.run for each in active], num_entries) else []

    def _pays(self, active: Sequence[Ending], num_made: int) -> bool:
        for each in active:
            each.look(self.passes)
        num_entries = sum([1 + len(each.text) for each in active])
        return bool(active) and self.passes.worth(num_made, [each.gain for each in active], num_entries)

    def _expect(self, tokens: Sequence[int]) -> None:
        if self.direct is not None and tokens:
            self.direct.likely.learn(tokens)

    @torch.no_grad()
    def fill(self, row: Row, cache: KVCache) -> None:
        """Compute the copy's own K/V of a row's entries, and advance its states by them; nothing is chosen."""
        self._expect(row.tokens.tolist())
        if (scratch := cache.states.scratch) is not None:
            scratch.splits = True
        self.adapter.forward(self.adapter.step_inputs([row], cache), cache, model=self.copy)
        if scratch is not None:
            scratch.advance([row], [range(row.num_entries)])

    @torch.no_grad()
    def draft(
        self, endings: Sequence[Ending], cache: KVCache, pays: Callable[[Sequence[Ending], int], bool] | None = None
    ) -> None:
        """Let drafts follow `endings`, by a pass and further ones while they pay, after so many passes."""
        if self.direct is not None and len(endings) == 1 and pays is None and endings[0].processors is None:
            self._draft_alone(self.direct, endings[0], cache)
            return
        active, made = list(endings), list[tuple[Sequence[Ending], int, float]]()
        while active:
            began = self.adapter.clock()
            for each in active:
                self._expect([*each.before, *each.text])
            num_entries = sum([len(each.before) + 1 + len(each.text) for each in active])
            groups = [[each] for each in active] if cache.has_states and not self.adapter.packed else [active]
            going = [each for group in groups for each in self._pass(group, cache)]
            took = self.adapter.clock() - began - (self.graphs.lost if self.graphs is not None else 0.0)
            made.append((active, num_entries, took * 1e3))
            active = going if (pays or self._pays)(going, len(made)) else []
        times = self._agreed([ms for *_, ms in made], [each.chain for each in endings])
        for (begun, num_entries, _), ms in zip(made, times, strict=True):
            self._count(begun, num_entries, ms)

    def _agreed(self, times: Sequence[float], *seen: object) -> list[float]:
        """The first rank's milliseconds."""
        return [each / 1e3 for each in self._decide([round(ms * 1e3) for ms in times], *seen)]

    def _pass(self, active: Sequence[Ending], cache: KVCache) -> list[Ending]:
        """Add the choices of one pass to each draft; returns those that may go on."""
        rows = [each.row() for each in active]
        positions = [each.positions() for each in active]
        of_all = any([each.processors is not None for each in active])  # which may ask for any token
        if (scratch := cache.states.scratch) is not None:
            scratch.splits = not any([each.num_right for each in active])
        asked = [(each.params, mine) for each, mine in zip(active, positions, strict=True)]
        found = self.graphs.choices(self.copy, rows, asked) if self.graphs is not None and not of_all else None
        chosen, tokens, odds = found or self._choose(self._logits(rows, cache, of_all), active, positions)
        going, ends = [], accumulate([row.num_results for row in rows])
        for each, row, end in zip(active, rows, ends, strict=True):
            mine = slice(end - row.num_results, end)
            if self._take(each, chosen[mine], tokens[mine], odds[mine], cache):
                going.append(each)
        if scratch is not None:
            scratch.advance(rows, [range(each.num_right if each.num_kept else 0) for each in active], into=cache.states)
            scratch.advance(rows, [range(each.num_kept) for each in active])
            for each in active:
                each.num_right *= not each.num_kept
        return going

    def _draft_alone(self, direct: Direct, each: Ending, cache: KVCache) -> None:
        """Draft for one sequence, all passes in one call."""
        began = self.adapter.clock()
        self._expect(each.text)
        place = each.slot, each.num_cached, min(each.most, LONGEST), each.token
        text = each.state, [*each.emitted], [*each.ends], each.text, each.text_shares
        rules = *self.passes.rules(1 + LONGEST_TEXT), NUM_LIKELY
        made = direct.make_passes(cache, place, text, choice_of(each.params), rules)
        took = (self.adapter.clock() - began) * 1e3
        within = sum([ms for *_, ms in made])
        for known, shares, tokens, odds, ms in made:
            each.text, each.text_shares = known, shares
            self._expect(known)
            self._take(each, [first for first, *_ in tokens], tokens, odds, cache)
            self._count([each], 1 + len(known), ms * took / within)

    def _take(
        self, each: Ending, chosen: list[int], tokens: list[list[int]], odds: list[list[float]], cache: KVCache
    ) -> bool:
        """Append the choices of a pass to a draft; False if no further token may follow."""
        row, num_before = each.row(), len(each.before) - len(each.chain)
        self.passes.text.count(each.text_shares, each.text, chosen)
        if not each.take(chosen, tokens, odds):
            cache.clear_entries(row)  # no row of a page may hold NaN
            each.num_kept = 0
            return False
        each.before, each.num_kept = [], num_before + len(each.chain)
        return each.is_open

    def _count(self, active: Sequence[Ending], num_entries: int, ms: float) -> None:
        self.passes.count_pass(num_entries, ms)
        took = self.passes.pass_time(num_entries)
        self.spent_ms += took
        for each in active:
            each.ms += took / len(active)

    def _logits(self, rows: Sequence[Row], cache: KVCache, of_all: bool = True) -> Tensor:
        """The copy's logits [results, V] after the last entries of each row, of which results are wanted.

        Unless `of_all`, those of tokens that are not likely may be -inf.
        """
        if self.direct is not None:
            logits = self.direct.logits(rows, cache, of_all)
            if all([row.num_results == row.num_entries for row in rows]):
                return logits
            ends = accumulate([row.num_entries for row in rows])
            return torch.cat([logits[end - row.num_results : end] for end, row in zip(ends, rows, strict=True)])
        if self.graphs is not None and (found := self.graphs.logits(self.copy, rows)) is not None:
            return found
        if len(rows) > 1 and not self.adapter.packed:
            return torch.cat([self._logits([row], cache) for row in rows])
        return self.adapter.forward(self.adapter.step_inputs(rows, cache), cache, model=self.copy)

    def _choose(
        self, logits: Tensor, active: Sequence[Ending], positions: Sequence[list[int]]
    ) -> tuple[list[int], list[list[int]], list[list[float]]]:
        """After each entry the choice of the request, or a code below 0, and the likeliest tokens and their odds."""
        if any(each.processors is not None for each in active):
            logits, start = logits.float(), 0
            for each, mine in zip(active, positions, strict=True):
                if each.processors is not None:
                    ids = torch.from_numpy(np.array([[*each.tokens, *each.chain]], np.int64)).to(logits.device)
                    scores = each.processors(ids, logits[start : start + 1].clone())
                    logits[start] = scores[0] if scores is not None else torch.nan
                start += len(mine)
        selection = Selection.build([(each.params, mine) for each, mine in zip(active, positions, strict=True)])
        if native.draft_rows is not None and logits.device.type == "cpu":
            drafted, odds = in_cpp.drafts(logits, selection, NUM_LIKELY)
            return drafted[:, 0].tolist(), drafted.tolist(), odds.tolist()
        selection = selection.to(logits.device)
        chosen = pick(logits, selection)
        tokens, odds = likeliest(logits, selection)
        return chosen.tolist(), tokens.tolist(), odds.tolist()
