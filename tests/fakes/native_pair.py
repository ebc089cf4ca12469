"""Both drafting cores under the same names, and a run of steps that records all that can be seen of them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules
from types import SimpleNamespace
from typing import Any

import numpy as np

import lpr.core
import lpr.native
from lpr.config import SamplingParams, TreeSizes
from lpr.core.constants import KNOTS
from lpr.core.heads import FROM_ROOT, PROBABILITY_STEPS, HeadDraft
from lpr.core.step_times import StepTimes
from lpr.core.wire import NUM_HEADER, NUM_TREE_HEADER, blocks_of, node_width, payload_words, result_words, tables_of

HOMES = [import_module(f"lpr.core.{each.name}") for each in iter_modules(lpr.core.__path__)]
NAMES = [name for name in lpr.native.__all__ if name not in ("is_native", "missing")]
PURE = SimpleNamespace(**{name: getattr(home, name) for name in NAMES for home in HOMES if hasattr(home, name)})


def native_core() -> Any:
    """The extension, with the specification's numbers."""
    from lpr import _native

    _native.set_constants(lpr.native.numbers())
    return _native


@dataclass(frozen=True)
class Plan:
    """What a run does; everything else follows from `seed`."""

    seed: int
    sizes: TreeSizes
    num_steps: int = 30
    num_sequences: int = 2
    num_ranks: int = 1
    num_drafting: int = 0
    """The last ones of them, which only draft."""
    leaves_out: bool = False  # True if nobody reads what they have drafted
    vocabulary: int = 20
    shares: bool = True
    adaptive: bool = False
    fails: bool = False
    """Do answers hold failures and guesses now and then?"""
    homes_change: bool = False
    """Do sequences have fewer home ranks than there are ranks, and now and then others?"""
    repeats: float = 0.7
    """How often the text goes on as it did after an earlier equal token."""
    num_threads: int = 1

    @property
    def num_serving(self) -> int:
        return self.num_ranks - self.num_drafting


def step_times(random_: random.Random) -> StepTimes:
    """Rows of step times, with flat spots and steep ones."""
    rows = {}
    for key in ((1, 256), (4, 256), (1, 1024)):
        row, ms = [], random_.uniform(1.0, 10.0)
        for _ in KNOTS:
            row.append(ms)
            ms += random_.choice([0.0, 0.001, 0.1, 1.0]) * random_.random()
        rows[key] = row
    return StepTimes(rows)


def next_token(text: list[int], plan: Plan) -> int:
    """The model of a run: a function of the text alone."""
    random_ = random.Random(hash((plan.seed, tuple(text[-6:]))))
    if random_.random() < plan.repeats:
        places = [i for i in range(len(text) - 1) if text[i] == text[-1]]
        if places:
            return text[places[-1] + 1]
    return random_.randrange(plan.vocabulary)


def new_state(core: Any, plan: Plan, random_: random.Random, shared: Any) -> Any:
    tokens = [random_.randrange(plan.vocabulary) for _ in range(random_.randint(1, 40))]
    params = SamplingParams(seed=random_.randrange(-5, 1000), temperature=random_.choice([0.0, 0.8]))
    computed = [random_.randrange(len(tokens)) for _ in range(plan.num_ranks)] if random_.random() < 0.5 else None
    stop_ids = frozenset(random_.randrange(plan.vocabulary) for _ in range(random_.random() < 0.2))
    prediction, num_prompt = list(tokens), random_.randint(1, len(tokens))
    for _ in range(random_.choice([0, 0, 60])):  # what the model writes, with other tokens in between
        prediction.append(
            next_token(prediction, plan) if random_.random() < 0.9 else random_.randrange(plan.vocabulary)
        )
    prediction = prediction[len(tokens) - random_.choice([0, 3]) :] if len(prediction) > len(tokens) else []
    known = tokens, params, plan.sizes, plan.num_ranks, shared, computed, len(tokens) + 150, stop_ids
    state_ = core.SequenceState(*known, prediction, num_prompt)
    state_.homes = list(range(plan.num_serving))
    return state_


def see_tree(tree_: Any) -> list[Any]:
    return [list(each) for each in (tree_.tokens, tree_.parents, tree_.depths, tree_.sources)]


def answers(plan: Plan, random_: random.Random, text: list[int], tree_: Any) -> np.ndarray:
    """The text's next token after each node, with failures and guesses, candidates and scores: int32 [nodes, words]."""
    k, paths = plan.sizes.num_recycled, list[list[int]]()
    rows = np.zeros((len(tree_), result_words(k)), np.int32)
    for row, token, parent in zip(rows, list(tree_.tokens), list(tree_.parents), strict=True):
        paths.append([*paths[parent], token] if parent >= 0 else [])
        code = next_token([*text, *paths[-1]], plan)
        if plan.fails and random_.random() < 0.05:
            code = random_.choice([-1, -2, -3 - code])
        row[: 1 + k] = [code, *(random_.randrange(plan.vocabulary) for _ in range(k))]
        row[1 + k :].view(np.uint8)[:k] = sorted(random_.randrange(256) for _ in range(k))
    return rows


class Ranks:
    """All ranks of a run: each has states, budgets and a shared suffix index of its own."""

    def __init__(self, core: Any, plan: Plan) -> None:
        self.core, self.plan = core, plan
        self.random = random.Random(plan.seed)
        times = step_times(self.random).row(1, 1) if plan.adaptive else None
        self.shared = [
            core.SuffixIndex(plan.sizes.trie_capacity) if plan.shares else None for _ in range(plan.num_ranks)
        ]
        self.budgets = [core.Budgets(plan.sizes, plan.num_serving, times) for _ in range(plan.num_ranks)]
        self.states = [self.begin() for _ in range(plan.num_sequences)]
        """Per sequence, its state on each rank."""
        self.capacity = plan.sizes.owned_capacity(plan.num_serving)
        self.width = node_width(plan.sizes, True)

    @property
    def drafting(self) -> list[int]:
        return list(range(self.plan.num_serving, self.plan.num_ranks))

    def begin(self) -> list[Any]:
        """A new sequence, on every rank."""
        setting, states = self.random.getstate(), []
        for shared in self.shared:
            self.random.setstate(setting)
            states.append(new_state(self.core, self.plan, self.random, shared))
        return states

    def end(self, index: int) -> None:
        """A sequence has ended; all ranks learn its text, and another one begins."""
        for shared, state_ in zip(self.shared, self.states[index], strict=True):
            if shared is not None:
                shared.extend(state_.tokens)
                shared.end_document()
        self.states[index] = self.begin()

    def choose_homes(self) -> list[list[int]]:
        """Other home ranks for some sequences, on all ranks; which of them each serves, in an order of its own."""
        num_ranks = self.plan.num_ranks
        for states in self.states if self.plan.homes_change else ():
            if self.random.random() < 0.3:
                serving = self.plan.num_serving
                homes = sorted(self.random.sample(range(serving), self.random.randint(1, serving)))
                for each in states:
                    each.homes = homes
        served = [[i for i, each in enumerate(self.states) if rank in each[0].homes] for rank in range(num_ranks)]
        for each in served if self.plan.homes_change else ():
            self.random.shuffle(each)
        return served

    def price(self, served: list[list[int]]) -> None:
        """What nodes cost in the coming step, on each rank for the sets of home ranks that it belongs to."""
        prices = {tuple(each[0].homes): (step_times(self.random).row(2, 300), self.random.choice([0.0, 0.0, 2.7]))
                  for each in self.states}  # fmt: skip
        for rank, budgets in enumerate(self.budgets):
            mine = {homes: price for homes, price in prices.items() if rank in homes}
            budgets.begin_step(mine if self.plan.adaptive else {})

    def draft(self, served: list[list[int]]) -> list[Any]:
        """Every rank's draft of a step."""
        k = self.plan.sizes.num_recycled
        return [
            self.core.draft_step(
                *([each[rank] for each in self.states], budgets, rank, served, self.capacity, k),
                *(rank, [2**64 - 7], self.plan.num_threads),
            )
            for rank, budgets in enumerate(self.budgets)
        ]

    def payloads(self, drafts: list[Any], results: list[np.ndarray]) -> np.ndarray:
        """What the ranks send, as Exchange packs it."""
        size = payload_words(self.plan.sizes, len(self.states), self.plan.num_serving, True)
        found = np.full((self.plan.num_ranks, size), -9, np.int32)
        tables = tables_of(found, self.capacity, self.width, self.plan.sizes.num_guesses)
        for payload, table, draft in zip(found, tables, drafts, strict=True):
            payload[: len(draft.header)] = draft.header
            rows = [results[i][list(draft.shards[i][draft.rank].nodes)] for i in draft.mine]
            source, target, words = draft.placement
            flat = table.reshape(-1, self.width)
            flat[target, :-2] = np.concatenate([*rows, flat[:0, :-2]])[source]
            flat[target, -2:] = words.view(np.int32).reshape(-1, 2)
        if self.plan.sizes.num_guesses:
            self.guess(blocks_of(found, self.capacity, self.width, self.plan.sizes.num_guesses), drafts, results)
        return found

    def guess(self, blocks: np.ndarray, drafts: list[Any], results: list[np.ndarray]) -> None:
        """Guesses of ranks for their trees, most of them for the accepted path."""
        for index, tree_ in enumerate(trees_of(drafts)):
            token, end = int(results[index][0, 0]), 0
            while token >= 0 and (child := tree_.find(end, token)) >= 0:
                end, token = child, int(results[index][child, 0])
            for draft in drafts:
                guesses = HeadDraft(is_copy=self.random.random() < 0.5)
                for _ in range(self.random.randrange(self.plan.sizes.num_guesses + 2)):
                    parent, steps = self.random.randrange(len(guesses.tokens)), self.random.randrange(PROBABILITY_STEPS)
                    guesses.add(parent, self.random.randrange(self.plan.vocabulary), steps)
                if index in draft.mine and self.random.random() < 0.8:
                    words = guesses.pack(end, token, self.plan.sizes.num_guesses)
                    blocks[draft.rank, list(draft.mine).index(index)] = words
            path, at = [token], end
            while at > 0:
                path.insert(0, tree_.tokens[at])
                at = tree_.parents[at]
            for rank in self.drafting:
                guesses, last = HeadDraft(is_copy=True), 0
                for each in path[: self.random.randrange(len(path) + 1)]:
                    last = guesses.add(last, each, self.random.randrange(PROBABILITY_STEPS))
                for _ in range(self.random.randrange(self.plan.sizes.num_guesses + 2)):
                    parent = self.random.choice([last, self.random.randrange(len(guesses.tokens))])
                    guesses.add(parent, self.random.randrange(self.plan.vocabulary), self.random.randrange(9999))
                blocks[rank, index] = guesses.pack(FROM_ROOT, 0, self.plan.sizes.num_guesses)


def run(core: Any, plan: Plan) -> list[Any]:
    """Steps of all ranks by the calls that the engine makes; what each step could see and decide, in order."""
    ranks, record = Ranks(core, plan), list[Any]()
    for _ in range(plan.num_steps):
        served = ranks.choose_homes()
        ranks.price(served)
        drafts = ranks.draft(served)
        trees = trees_of(drafts)
        texts = [list(each[0].tokens) for each in ranks.states]
        results = [answers(plan, ranks.random, *each) for each in zip(texts, trees, strict=True)]
        record.append([see_tree(each) for each in trees])
        record += [see_draft(core, draft, served) for draft in drafts]
        payloads = ranks.payloads(drafts, results)
        record.append(noticed(core, ranks, drafts, payloads, served))
        drafting = [] if plan.leaves_out else ranks.drafting
        done = [
            draft.conclude(payloads, ranks.width, budgets, plan.sizes.num_guesses, drafting)
            for draft, budgets in zip(drafts, ranks.budgets, strict=True)
        ]
        seen = [see_conclusions(draft, concluded) for draft, (concluded, _) in zip(drafts, done, strict=True)]
        assert all(each == seen[0] for each in seen), "all ranks know the same of all sequences"
        record.append([seen[0], [[[each.has_nan for each in concluded], moves.tolist()] for concluded, moves in done]])
        record.append([[concluded.ending, concluded.grown, concluded.with_nan] for concluded, _ in done])
        record.append(see_counts(ranks, [concluded for concluded, _ in done]))
        record.append([[float(each).hex() for each in states[0].probabilities] for states in ranks.states])
        record.append([len(budgets) for budgets in ranks.budgets])
        for index, each in enumerate(done[0][0]):
            if ranks.random.random() < 0.03 or (each.may_end and each.failure is None):
                ranks.end(index)
    if plan.shares:
        record.append([[list(each.history()), len(each), each.num_entries] for each in ranks.shared])
    return record


def trees_of(drafts: list[Any]) -> list[Any]:
    """Each sequence's tree, by the first rank that serves it; all ranks that do have the same."""
    trees: list[Any] = [None] * len(drafts[0])
    for draft in drafts:
        for index in draft.mine:
            trees[index] = trees[index] or draft.trees[index]
            assert see_tree(trees[index]) == see_tree(draft.trees[index])
    return trees


def see_draft(core: Any, draft: Any, served: list[list[int]]) -> list[Any]:
    """What a rank has drafted, and what it sends to its device and to other ranks."""
    assert (list(draft.mine), len(draft), draft.capacity > 0) == (served[draft.rank], len(draft.states), True)
    assert [tree is not None for tree in draft.trees] == [i in draft.mine for i in range(len(draft))]
    columns = draft.columns.tolist()
    words = placed(core, draft.columns, draft.entries)
    return [
        columns,
        draft.entries.tolist(),
        [*draft.totals],
        draft.placement.tolist(),
        draft.header.tolist(),
        draft.num_candidates,
        words,
    ]


def noticed(core: Any, ranks: Ranks, drafts: list[Any], payloads: np.ndarray, served: list[list[int]]) -> list[bool]:
    """Whether rank 0 notices another header of the last rank; where it does, nothing has changed."""
    found = []
    trees = [NUM_HEADER + NUM_TREE_HEADER * place for place in range(len(served[-1]))]
    for place in [0, 1, *trees, *(each + 1 for each in trees)]:
        other = payloads.copy()
        other[-1, place] += 1
        if place >= NUM_HEADER and not any(drafts[0].served[rank] for rank in range(len(payloads) - 1)):
            continue
        before = [state_.digest for state_ in drafts[0].states]
        tree = served[-1][(place - NUM_HEADER) // NUM_TREE_HEADER] if place >= NUM_HEADER else None
        shared = len(payloads) > 1 and (tree is None or any(tree in trees for trees in served[:-1]))
        if shared:
            try:
                drafts[0].conclude(other, ranks.width, ranks.budgets[0], ranks.plan.sizes.num_guesses)
            except ValueError:
                found.append(before == [state_.digest for state_ in drafts[0].states])
    assert all(found)
    return found


def see_counts(ranks: Ranks, done: list[Any]) -> list[Any]:
    """What the published steps of some sequences come to; those of the others wait."""
    for concluded in done:
        concluded.publish()
        concluded.publish()  # for nothing
    found = []
    for states in ranks.states:
        grows = ranks.random.randrange(4)
        for state_ in states:
            state_.care_at = len(state_.tokens) + grows
        if ranks.random.random() < 0.3:
            found.append([state_.take_counts() for state_ in states])
    return found


def see_conclusions(draft: Any, concluded: list[Any]) -> list[Any]:
    """What a rank knows after a step, also of sequences that others serve."""
    seen: list[Any] = [list(draft.num_entries)]
    for state_, each in zip(draft.states, concluded, strict=True):
        shards = [(list(shard.nodes), list(shard.owned)) for shard in each.shards]
        seen.append([see_tree(each.tree), list(each.next_tokens), list(each.path), list(each.emitted), shards])
        seen.append([each.failure, each.may_end, state_.digest, list(state_.tokens[-9:]), state_.num_pending])
        seen.append([list(state_.num_computed_tokens), list(state_.homes)])
    return seen


def placed(core: Any, columns: np.ndarray, entries: np.ndarray) -> list[int]:
    """The words of a step with one empty row."""
    num_cached, _, counts = columns.tolist()
    parts = np.split(entries, 3 * np.cumsum(counts[:-1], dtype=np.int64)) if counts else []
    rows = [each.reshape(3, -1) for each in parts]
    longest = 3 + max([row.shape[1] for row in rows], default=0)
    batch, words = len(rows) + 1, np.full(200_000, 7, np.int32)
    size = batch * longest * (3 + 2 * -(-longest // 64)) + 2 * batch
    tables = np.random.default_rng(batch).permutation(batch * 400).astype(np.int32).reshape(batch, 400)
    core.place_rows(words, batch, longest, tables, 16, 99999, num_cached, rows)
    slots = np.random.default_rng(batch).permutation(batch)[: len(rows)].astype(np.int64)
    kept = [index % (count + 1) for index, count in enumerate(counts)]
    others = np.array([num_cached, kept, counts], np.int64).reshape(3, -1)
    one, count = np.full(200_000, 7, np.int32), 5 + sum(row.shape[1] for row in rows)
    core.place_packed(one, batch, count, 3 + sum(kept), tables, 16, 99999, slots, others, entries)
    size_of_one = count * (3 + 2 * max(2, -(-count // 64))) + 3 + sum(kept) + 4 * batch + 1
    assert one[size_of_one] == 7
    return [*words[: size + 1].tolist(), *one[:size_of_one].tolist()]


def draft_along(core: Any, seed: int, capacity: int, vocabulary: int) -> list[Any]:
    """A drafter and its suffix indexes by themselves, as benchmarks use them."""
    random_ = random.Random(seed)
    shared, table, record = core.SuffixIndex(capacity), core.CandidateTable(), list[Any]()
    sizes = TreeSizes(trie_nodes=40, trie_capacity=capacity)
    text = [random_.randrange(vocabulary) for _ in range(30)]
    prediction = [*text[:20], *range(9), *text[15:]] if random_.random() < 0.5 else []
    drafter = core.Drafter(sizes, shared, table, random_.choice([None, 7]), prediction, random_.choice([7, 30]))
    drafter.observe(text)
    for _ in range(25):
        again = text[random_.randrange(len(text)) :][: random_.randint(1, 30)]
        call = random_.randrange(4)
        if call == 0:
            shared.extend(again)
        elif call == 1:
            shared.end_document()
        elif call == 2:
            shared.insert(np.array([each if random_.random() < 0.9 else -1 for each in again * 3], np.int32))
        tree = core.TokenTree(text[-1])
        tree.add_chain(0, again[:2], 1)
        probabilities = drafter.draft(tree, random_.choice([0, 9, 40]), random_.choice([None, 3]))
        path, found = [0], [[random_.randrange(vocabulary) for _ in range(3)] for _ in range(len(tree))]
        while (node := tree.find(path[-1], random_.choice(again))) >= 0:
            path.append(node)
        drafter.learn(tree, path)
        table.update(tree.tokens, found, [[5, 9, 30]] * len(tree))
        drafter.keep_candidates(tree, path, found, [[5, 9, 30]] * len(tree))
        text += [*(tree.tokens[node] for node in path[1:]), random_.choice(again)]
        drafter.observe(text[-len(path) :])
        record.append([see_tree(tree), [float(each).hex() for each in probabilities], path])
        found, shares = drafter.continuation(random_.choice([again[:3], []]), random_.choice([1, 8]))
        record.append([list(found), [each.hex() for each in shares]])
        record.append([list(shared.history()), len(shared), shared.num_entries])
    loaded = core.SuffixIndex.from_history(np.array(shared.history(), np.int32), capacity)
    record.append([list(loaded.history()), loaded.capacity_tokens])
    return record
