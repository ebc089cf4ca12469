"""A rank that only drafts (EngineOptions.draft_ranks): it holds a low-bit copy of the model and no part of any tree.

While the other ranks verify its draft, it extends that draft by as many passes of the copy as fit into their step. The
step's one gather carries its guesses after the root of the step's tree; those after the emitted tokens are used
(lpr.core.heads). If the emitted tokens are the drafted ones, the rest of the draft remains valid; if not, drafting
restarts after them. So a late, wrong or missing draft costs time and changes no token, and no state here is replicated.

The first draft rank follows the copy's choices. The others follow likely second choices, which all ranks know from the
gather, so that the draft also has continuations where the model's choice differs from the copy's.

With tensor parallelism all ranks of a draft replica draft the same tokens; the first rank decides by its clock.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from lpr.config import TreeSizes
from lpr.core import wire
from lpr.core.heads import FROM_ROOT, PROBABILITY_STEPS, HeadDraft, block_words, read_ahead
from lpr.core.passes import size_of
from lpr.core.step_times import StepTimes
from lpr.dist.comm import Comm
from lpr.engine.exchange import Gathered, decide_as_first, worst_of_replica
from lpr.engine.line_states import LineStates
from lpr.engine.plan import StepPlan
from lpr.engine.request import Request
from lpr.model.runner import TreeModel
from lpr.model.sampling.processors import pure
from lpr.model.self_draft import NUM_GUESSES, NUM_ROWS, UNSURE, Ending, SelfDrafter
from lpr.model.step_inputs import Row
from lpr.native import Conclusion, Drafter
from lpr.protocol import RequestId

SHORT = 16  # tokens that a pass computes besides; of more a request's K/V is filled first
FIRST_PIECE, LARGEST_PIECE = 32, 512  # tokens of the first piece of a prompt, and of any
FEWEST_PASSES = 2  # a single pass in each step would extend no draft: the step's bonus token is what it finds
RETRY = 32  # steps after which passes are tried again that take longer than the others' step
MEMORY = 0.2  # weight of the latest time of a kind of step
MOST_SURPRISE = 3.0  # most by which a step counts for longer than those before
KEPT = NUM_GUESSES // 3  # guesses that a rank sends again, besides the path that it follows


@dataclass
class Line:
    """A slot of this rank's cache, and the request that has it."""

    slot: int
    owner: RequestId | None = None
    held: list[int] = field(default_factory=list)
    """Tokens whose K/V the slot has, in order: committed ones first, then drafted ones."""
    num_right: int = 0
    """Leading ones that are known to be the request's."""
    pages: list[int] = field(default_factory=list)
    last_used: int = 0
    known: HeadDraft = field(default_factory=lambda: HeadDraft(is_copy=True))
    """What the draft ranks have drafted behind the committed tokens."""
    num_tokens: int = 0
    """Committed tokens that `known` follows."""
    text: Drafter | None = None
    """Has the text behind the request's tokens."""
    num_observed: int = 0
    """Tokens that `text` has."""
    states: LineStates | None = None
    """Those of recurrent layers, if the model has any."""
    way: tuple[HeadDraft, int, int] = field(default_factory=lambda: (HeadDraft(), 0, -1))
    """The part of `known` that this rank extends in this step, the guess to go on from, and Ending.turn."""
    chain: list[int] = field(default_factory=list)
    """The tokens up to that guess, and behind it those that this step has drafted."""

    def text_of(self, request: Request, sizes: TreeSizes) -> Drafter:
        """`text` with all tokens of the request, which has this line."""
        if self.text is None:
            self.text, self.num_observed = Drafter(sizes, None, None, None), 0
        self.text.observe(request.tokens[self.num_observed :])
        self.num_observed = len(request.tokens)
        return self.text

    def follow(self, place: int) -> None:
        """Choose what the draft rank number `place` extends."""
        guess, turn = followed(self.known, place)
        draft, guess = along(self.known, guess)
        self.way, self.chain = (draft, guess, turn), [draft.tokens[each] for each in draft.path_to(guess)]

    def start(self, tokens: Sequence[int]) -> int:
        """The number of leading tokens, of the request's and the chain, behind which a pass can begin."""
        num_held, above = self.num_held(tokens, self.chain), len(tokens) - 1
        if self.states is None:
            return num_held
        return self.states.go_to(min(num_held, above + len(self.chain)), min(self.num_right, above))

    def num_held(self, tokens: Sequence[int], chain: Sequence[int] = ()) -> int:
        """How many leading ones of a request's tokens and a chain behind them have K/V."""
        known, place = len(tokens), self.num_right
        most = min(len(self.held), known + len(chain))
        while place < most and self.held[place] == (tokens[place] if place < known else chain[place - known]):
            place += 1
        self.num_right = min(place, known)
        return place


class DraftRank:
    """Drafts for all requests of a step, with K/V of its own."""

    def __init__(self, model: TreeModel, comm: Comm) -> None:
        """The ranks of `comm` that only draft, seen from one of them; `model` has a copy and an empty cache."""
        assert model.cache is not None
        self.model, self.comm = model, comm
        states, count = model.cache.states, model.cache.num_slots
        self._lines = [Line(slot) for slot in range(count)]
        for line in self._lines if model.cache.has_states else ():
            line.states = LineStates(states, line.slot, count + line.slot)
        self._free = list(range(-worst_of_replica(comm, -model.cache.num_pages)))[::-1]
        self._step = self._last_try = 0
        self._kind = (0, 0)
        self._step_ms: dict[tuple[int, int], float] = {}
        """Milliseconds that the others took for a step, by what was known of it before."""
        self._piece, self._token_ms = FIRST_PIECE, 0.0
        """Tokens of the last piece of a prompt, and milliseconds of each."""
        self.drafter.prepare()

    @property
    def drafter(self) -> SelfDrafter:
        """The copy."""
        assert self.model.self_drafter is not None
        return self.model.self_drafter

    def forget(self) -> None:
        """Forget all K/V, as the weights have changed."""
        for line in self._lines:
            line.owner, line.num_right = None, 0
            line.held.clear()

    def draft(self, plan: StepPlan, times: StepTimes | None) -> np.ndarray:
        """Draft while the others evaluate the step of `plan`; a block for each decoding request."""
        began, num_guesses = time.perf_counter(), plan.sizes.num_guesses
        blocks = np.zeros((len(plan.decoding), block_words(num_guesses)), np.int32)
        if not num_guesses:
            return blocks
        self._step += 1
        requests = list(plan.decoding) + [each for each, _ in plan.filling if each not in plan.decoding]
        running = {each.id for each in requests}
        found = [(each, self._line_of(each, running)) for each in requests]
        lines = [(request, line) for request, line in found if line is not None]
        for _, line in lines:
            line.follow(self.comm.drafting.index(self.comm.rank))
        limit = began + self._expected_ms(plan, lines, times) / 1e3
        self._fill(lines, (began + limit) / 2, running)
        endings = [(line, self._ending(request, line, running, plan.sizes)) for request, line in lines]
        active = [(line, each) for line, each in endings if each is not None and each.is_open]
        if active and self._begins([each for _, each in active], (limit - began) * 1e3):
            for line, each in active:
                if line.states is not None:
                    line.states.begin(each.num_right)
            self._pass([each for _, each in active], began, limit)
            for (request, line), (_, ending) in zip(lines, endings, strict=True):
                if ending is not None and ending.num_kept:
                    line.held[line.num_right :] = [*request.tokens[line.num_right :], *ending.chain][:-1]
                    line.known = ending.draft
            for line, each in active:
                if line.states is not None:
                    line.states.end(len(line.held) if each.num_kept else 0, not each.num_right)
        self._fill(lines, limit, running, least=0)
        drafts = {request.id: line.known for request, line in lines if line.num_tokens == len(request.tokens)}
        for block, request in zip(blocks, plan.decoding, strict=True):
            if request.id in drafts:
                block[:] = drafts[request.id].pack(FROM_ROOT, 0, num_guesses)
        return blocks

    def follow(self, plan: StepPlan, gathered: Gathered, concluded: Sequence[Conclusion]) -> None:
        """Keep what the draft ranks have behind the tokens that a step has emitted."""
        others = [rank for rank in range(self.comm.size) if rank not in self.comm.drafting]
        ms = max([wire.microseconds(gathered.of_replicas[rank]) for rank in others]) / 1e3
        before = self._step_ms.get(self._kind, ms)
        self._step_ms[self._kind] = before + MEMORY * (min(ms, MOST_SURPRISE * before) - before)
        if not gathered.num_guesses:
            return
        by_owner = {line.owner: line for line in self._lines}
        blocks = gathered.blocks()
        for index, (request, each) in enumerate(zip(plan.decoding, concluded, strict=True)):
            if (line := by_owner.get(request.id)) is not None:
                draft = read_ahead([blocks[rank, index] for rank in self.comm.drafting], each.emitted)
                line.known = draft or HeadDraft(is_copy=True)
                line.num_tokens = len(request.tokens)

    def _agreed(self, decision: int, *seen: object) -> int:
        return decide_as_first(self.comm, [decision], *seen)[0]

    # Slots and pages.

    def _line_of(self, request: Request, running: set[RequestId]) -> Line | None:
        """The line of a request, perhaps that of an ended one whose tokens it shares; None if all are in use."""
        free = [line for line in self._lines if line.owner not in running or line.owner == request.id]
        line = next((line for line in free if line.owner == request.id), None)
        if line is None and free:
            line = max(free, key=lambda each: (_num_shared(each.held, request.tokens), -each.last_used))
            line.owner, line.num_right = request.id, 0
            line.num_tokens, line.text = 0, None
        if line is not None:
            line.last_used = self._step
            if line.num_tokens != len(request.tokens):
                line.known, line.num_tokens = HeadDraft(is_copy=True), len(request.tokens)
        return line

    def _reserve(self, line: Line, num_rows: int, running: set[RequestId]) -> bool:
        """Give a line pages for so many rows, perhaps those of lines without a request; False if there are none."""
        cache = self.model.cache
        assert cache is not None
        count = -(-min(num_rows, cache.rows_per_slot) // cache.page_size) - len(line.pages)
        idle = sorted([each for each in self._lines if each.owner not in running], key=lambda each: -each.last_used)
        while len(self._free) < count and idle:
            taken = idle.pop()
            self._free += taken.pages
            taken.pages, taken.held, taken.num_right = [], [], 0
        if len(self._free) < count:
            return False
        if count > 0:
            line.pages += [self._free.pop() for _ in range(count)]
            cache.assign(line.slot, line.pages)
        return True

    # Work.

    def _fill(
        self, lines: Sequence[tuple[Request, Line]], until: float, running: set[RequestId], least: int = SHORT
    ) -> None:
        """Compute K/V of requests that lack much of it, up to a time, and `least` tokens of each call in any case."""
        cache, is_fixed = self.model.cache, self.drafter.passes.is_fixed
        assert cache is not None
        for request, line in lines:
            above = len(request.tokens) - 1
            num_held = line.start(request.tokens)
            while above - num_held > SHORT and self._reserve(line, above + NUM_ROWS, running):
                room = (until - time.perf_counter()) * 1e3
                most = min(2 * self._piece, LARGEST_PIECE)
                count = most if is_fixed or not self._token_ms else int(min(most, room / self._token_ms))
                count = self._agreed(min(max(count, least), above - num_held), request.id, num_held)
                if count < 1:
                    return
                began = time.perf_counter()
                if line.states is not None:
                    line.states.tip = 0
                self.drafter.fill(Row.chain(line.slot, num_held, request.tokens[num_held : num_held + count], 0), cache)
                self._piece, self._token_ms = max(count, SHORT), (time.perf_counter() - began) * 1e3 / count
                line.held[num_held:] = request.tokens[num_held : num_held + count]
                num_held, line.num_right = num_held + count, num_held + count
                if line.states is not None:
                    line.states.tip = num_held
                if self._agreed(not is_fixed and time.perf_counter() >= until):
                    return

    def _ending(self, request: Request, line: Line, running: set[RequestId], sizes: TreeSizes) -> Ending | None:
        """The end of what this rank follows of a request; None if it lacks too much of the request's K/V."""
        ends, chain, (draft, guess, turn) = request.text_stream.stop_ids, line.chain, line.way
        num_held, above = line.start(request.tokens), len(request.tokens) - 1 + len(chain)
        if above - num_held > SHORT + len(chain) or not self._reserve(line, above + NUM_ROWS, running):
            return None
        del line.held[line.num_held(request.tokens, chain) :]
        num_held = min(num_held, above)  # the last one is evaluated for its choice
        processors = pure(request.processors)
        return Ending(
            *(line.slot, len(request.tokens) - 1, request.tokens[-1], request.params),
            most=request.longest - len(request.tokens) - 1,
            ends=ends,
            processors=processors,
            tokens=request.tokens if processors is not None else (),
            state=line.text_of(request, sizes) if processors is None else None,
            draft=draft,
            chain=chain,
            before=[*request.tokens[num_held:], *chain[max(0, num_held - len(request.tokens)) :]][:-1],
            num_right=max(0, len(request.tokens) - 1 - num_held) if line.states is not None else 0,
            turn=turn,
            parent=guess,
        )

    def _begins(self, active: Sequence[Ending], limit_ms: float) -> bool:
        """False if a pass takes longer than the others' step, which would wait for it."""
        passes = self.drafter.passes
        for each in active:
            each.look(passes)
        rows = [each.row() for each in active]
        if passes.is_fixed or self._step - self._last_try >= RETRY:
            self._last_try = self._step
            return True
        begins = passes.pass_time(sum([row.num_entries for row in rows])) <= limit_ms
        seen = [(row.slot, row.num_cached, row.tokens.tolist()) for row in rows]
        return bool(self._agreed(begins, seen))

    def _pass(self, active: Sequence[Ending], began: float, limit: float) -> None:
        cache, passes = self.model.cache, self.drafter.passes
        assert cache is not None

        def pays(going: Sequence[Ending], num_made: int) -> bool:
            for each in going:
                each.look(passes)
            if passes.is_fixed:
                more = passes.worth(num_made, [1.0] * len(going), len(going))
            else:
                took = passes.pass_time(sum([each.row().num_entries for each in going]) or 1) / 1e3
                more = num_made < FEWEST_PASSES or time.perf_counter() + took / 2 <= limit
            return bool(self._agreed(more, [each.chain for each in active]))

        self.drafter.draft(active, cache, pays)

    def _expected_ms(self, plan: StepPlan, lines: Sequence[tuple[Request, Line]], times: StepTimes | None) -> float:
        """Milliseconds that the others are likely to take for the step of `plan`."""
        trees = sum([len(line.known.path_to(len(line.known.tokens) - 1)) for _, line in lines])
        fills = max([0, *(max(counts) for _, counts in plan.filling)])
        self._kind = size_of(len(plan.decoding) + trees + 1), size_of(fills + 1)
        if self._kind in self._step_ms:
            return self._step_ms[self._kind]
        count = max(1, len(plan.decoding) + trees + fills)
        if times is not None:
            longest = max([len(request.tokens) for request, _ in lines], default=1)
            return times.time(count, max(1, len(plan.decoding)), longest)
        return self.drafter.first_ms[1] * (3 + count / 4)


def followed(known: HeadDraft, place: int) -> tuple[int, int]:
    """The guess that the draft rank number `place` goes on from, and the unsure place where it leaves the copy's way.

    The first rank follows the likeliest guess after each. The others follow, in turn, the guesses without any behind
    them that are likeliest; if there are too few, they leave the first rank's way later (Ending.turn).
    """
    paths, best = [1.0], {0: 0}
    for guess in range(1, len(known.tokens)):
        parent = known.parents[guess]
        paths.append(paths[parent] * known.steps[guess] / PROBABILITY_STEPS)
        if best[parent] == parent or known.steps[guess] > known.steps[best[parent]]:
            best[parent] = guess
        best[guess] = guess
    tip = 0
    while best[tip] != tip:
        tip = best[tip]
    if place == 0:
        return tip, -1
    others = [guess for guess in range(1, len(paths)) if best[guess] == guess != tip and paths[guess] >= UNSURE / 2]
    others.sort(key=lambda guess: -paths[guess])
    return (others[place - 1], -1) if place <= len(others) else (tip, place - 1 - len(others))


def along(known: HeadDraft, guess: int) -> tuple[HeadDraft, int]:
    """The path to a guess and up to KEPT other guesses, the first ones, and the number of the guess in that draft."""
    path = {0, *known.path_to(guess)}
    draft, numbers, room = HeadDraft(is_copy=True), {0: 0}, KEPT
    for each in range(1, len(known.tokens)):
        parent = numbers.get(known.parents[each], -1)
        if parent < 0 or (each not in path and room <= 0):
            continue
        room -= each not in path
        numbers[each] = draft.add(parent, known.tokens[each], known.steps[each])
    return draft, numbers[guess]


def _num_shared(held: Sequence[int], tokens: Sequence[int]) -> int:
    """How many leading tokens are the same."""
    most = min(len(held), len(tokens))
    if list(held[:most]) == list(tokens[:most]):
        return most
    return next(place for place in range(most) if held[place] != tokens[place])
