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
from lpr.config import SamplingParams, TreeSizes, result_words
from lpr.core.step_times import KNOTS, StepTimes

HOMES = [import_module(f"lpr.core.{each.name}") for each in iter_modules(lpr.core.__path__)]
NAMES = [name for name in lpr.native.__all__ if name not in ("is_native", "missing")]
PURE = SimpleNamespace(**{name: getattr(home, name) for name in NAMES for home in HOMES if hasattr(home, name)})


def native_core() -> Any:
    """The extension, with the specification's numbers."""
    from lpr import _native

    _native.set_constants(lpr.native._constants())
    return _native


@dataclass(frozen=True)
class Plan:
    """What a run does; everything else follows from `seed`."""

    seed: int
    sizes: TreeSizes
    num_steps: int = 30
    num_sequences: int = 2
    num_ranks: int = 1
    vocabulary: int = 20
    shares: bool = True
    adaptive: bool = False
    fails: bool = False
    """Do answers hold failures and guesses now and then?"""
    homes_change: bool = False
    """Do sequences have fewer home ranks than there are ranks, and now and then others?"""
    repeats: float = 0.7
    """How often the text goes on as it did after an earlier equal token."""


def costs_of(random_: random.Random) -> StepTimes:
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


def run(core: Any, plan: Plan) -> list[Any]:
    """Decode some sequences together; what each step could see and decide, in order."""
    random_ = random.Random(plan.seed)
    record: list[Any] = []
    shared = core.SuffixIndex(plan.sizes.trie_capacity) if plan.shares else None
    budget_ = core.FixedBudget(plan.sizes, plan.num_ranks)
    if plan.adaptive:
        budget_ = core.AdaptiveBudget(plan.sizes, costs_of(random_), plan.num_ranks)
    states = [new_state(core, plan, random_, shared) for _ in range(plan.num_sequences)]
    for step in range(plan.num_steps):
        take_step(core, plan, random_, states, budget_, record)
        for index, each in enumerate(states):
            if random_.random() < 0.03 or len(each.tokens) > 300:
                if shared is not None:
                    shared.extend(each.tokens)
                    shared.end_document()
                states[index] = new_state(core, plan, random_, shared)
        if plan.adaptive and step % 11 == 10:
            budget_.cost = costs_of(random_)
    if shared is not None:
        record.append([list(shared.history()), shared.base, shared.start, len(shared)])
    return record


def new_state(core: Any, plan: Plan, random_: random.Random, shared: Any) -> Any:
    tokens = [random_.randrange(plan.vocabulary) for _ in range(random_.randint(1, 40))]
    params = SamplingParams(seed=random_.randrange(-5, 1000), temperature=random_.choice([0.0, 0.8]))
    computed = [random_.randrange(len(tokens)) for _ in range(plan.num_ranks)] if random_.random() < 0.5 else None
    stop_ids = frozenset(random_.randrange(plan.vocabulary) for _ in range(random_.randrange(3)))
    return core.SequenceState(tokens, params, plan.sizes, plan.num_ranks, shared, computed, len(tokens) + 40, stop_ids)


def take_step(
    core: Any, plan: Plan, random_: random.Random, states: list[Any], budget_: Any, record: list[Any]
) -> None:
    """One step as lpr.engine.step takes it, with answers made up."""
    budget_.begin(len(states), random_.choice([0, 0, 3]), max(len(each.tokens) for each in states))
    depths = [random_.choice([0, 3, 100, 100, 100]) for _ in states]
    requests = [budget_.request(each.acceptance) for each in states]
    record.append([(each.nodes, each.window, each.price.floor if each.price else None) for each in requests[:1]])
    drafts = [each.build(depth, request) for each, depth, request in zip(states, depths, requests, strict=True)]
    record.append([see_tree(draft.tree, draft.probabilities, draft.num_window) for draft in drafts])
    histories = [each.acceptance for each in states]
    budget_.cut(drafts, histories)
    trees, paths = [draft.tree for draft in drafts], []
    for each, tree_ in zip(states, trees, strict=True):
        pending = [len(each.tokens) - held - 1 for held in each.num_computed_tokens]
        shards = core.partition(tree_, plan.num_ranks, pending, plan.sizes.owned_capacity(plan.num_ranks))
        record.append([(list(shard.nodes), list(shard.owned)) for shard in shards])
        record.append(each.sign_tree(tree_))
        result = answers(core, plan, random_, each, tree_)
        path = core.accept(tree_, result.next_tokens)
        emitted = each.advance(tree_, path, result, shards)
        record.append([list(path), list(emitted), list(each.tokens[-5:]), list(each.num_computed_tokens)])
        record.append([core.has_nan_result(shard, result) for shard in shards])
        record.append([each.digest, each.is_suspect, each.num_pending])
        paths.append(path)
    budget_.observe(trees, paths, histories)
    for each in states:
        record.append(
            [getattr(each.acceptance, name) for name in ("expected", "accepted", "offered", "quiet", "pause")]
        )
        calibrated = each.drafter.calibration
        record.append([calibrated.digest, sum(calibrated.frequencies[:50]), len(each.drafter.pool)])


def see_tree(tree_: Any, probabilities: Any, num_window: int) -> list[Any]:
    children = [list(each.items()) for each in tree_.children]
    columns = [list(each) for each in (tree_.tokens, tree_.parents, tree_.depths, tree_.sources)]
    return [*columns, children, [float(p).hex() for p in probabilities], num_window, len(tree_)]


def answers(core: Any, plan: Plan, random_: random.Random, state_: Any, tree_: Any) -> Any:
    """The text's next tokens after each node, with noise, failures and guesses; and candidates."""
    tokens, parents = list(tree_.tokens), list(tree_.parents)
    begin, k = list(state_.tokens), plan.sizes.num_recycled
    paths: list[list[int]] = []
    next_tokens = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append([*paths[parent], token] if parent >= 0 else [])
        code = next_token([*begin, *paths[-1]], plan)
        if plan.fails and random_.random() < 0.05:
            code = random_.choice([-1, -2, -3 - code])
        next_tokens.append(code)
    candidates = [[random_.randrange(plan.vocabulary) for _ in range(k)] for _ in tokens]
    scores = [sorted(random_.randrange(256) for _ in range(k)) for _ in tokens]
    return core.TreeResult(next_tokens, candidates, scores)


def compare_histories(core: Any, seed: int, capacity: int, vocabulary: int, num_calls: int) -> list[Any]:
    """Random calls of a suffix index; what can be seen after each."""
    random_ = random.Random(seed)
    index = core.SuffixIndex(capacity)
    record: list[Any] = []
    text: list[int] = []
    for _ in range(num_calls):
        call = random_.randrange(8)
        some = [random_.randrange(vocabulary) for _ in range(random_.randint(0, 12))]
        if call < 4:
            again = random_.random() < 0.5 and len(text) > 8
            start = random_.randrange(len(text) - 6) if again else 0
            some = text[start : start + random_.randint(1, 30)] if again else some
            index.extend(some)
            text += some
        elif call == 4:
            index.end_document()
        elif call == 5 and random_.random() < 0.3:
            history = np.array([token if random_.random() < 0.9 else -1 for token in some * 3], np.int32)
            index.insert(history)
        elif call == 6 and random_.random() < 0.3:
            index = core.SuffixIndex.from_history(np.array(index.history(), np.int32), capacity)
        record.append(see_index(index, text, some, random_))
    return record


def see_index(index: Any, text: list[int], some: list[int], random_: random.Random) -> list[Any]:
    suffixes = [text[-20:], some, text[-random_.randint(1, 5) :]]
    found = [[tuple(each) for each in index.match(suffix, limit)] for suffix in suffixes for limit in (1, 8, 64)]
    ends = [list(index.match_last(token, limit)) for token in [*some, *text[-2:]] for limit in (1, 16)]
    on = [list(index.continuation(at, 9)) for each in found[2::3] for at, _ in each[:2]]
    return [
        found,
        ends,
        on,
        list(index.history()),
        list(index.tokens),
        index.base,
        index.start,
        len(index),
        index.num_entries,
    ]


def fused(core: Any, plan: Plan) -> list[Any]:
    """The same steps through the calls that the engine makes, with what goes up and comes back in arrays."""
    random_ = random.Random(plan.seed)
    shared = core.SuffixIndex(plan.sizes.trie_capacity) if plan.shares else None
    budget_ = core.FixedBudget(plan.sizes, plan.num_ranks)
    if plan.adaptive:
        budget_ = core.AdaptiveBudget(plan.sizes, costs_of(random_), plan.num_ranks)
    states = [new_state(core, plan, random_, shared) for _ in range(plan.num_sequences)]
    capacity, record = plan.sizes.owned_capacity(plan.num_ranks), []
    for _ in range(plan.num_steps):
        record.append(list(core.workload(states)))
        depths = [random_.choice([0, 3, 100]) for _ in states]
        rank = random_.randrange(plan.num_ranks)
        served = choose_homes(plan, random_, states) if plan.homes_change else None
        draft = core.draft_step(states, depths, budget_, plan.num_ranks, capacity, rank, served)
        mine = list(range(len(states))) if served is None else served[rank]
        assert (list(draft.mine), len(draft.served)) == (mine, plan.num_ranks)
        assert list(draft.states) == states and (draft.rank, len(draft)) == (rank, len(states))
        trees, shards, k = draft.trees, draft.shards, plan.sizes.num_recycled
        rows = [entries for _, _, entries in draft.rows()]
        record.append([see_tree(tree, [], 0) for tree in trees] + [row.tolist() for row in rows])
        record.append([[each[:2] for each in draft.rows()], draft.placement(capacity).tolist(), draft.has_nodes])
        record.append([list(draft.num_entries), list(core.workload(states, states[0].homes))])
        each = [core.row_entries(states[i], trees[i], shards[i][rank], rank) for i in mine]
        assert all(np.array_equal(*pair) for pair in zip(each, rows, strict=True)), "one by one and together"
        record.append(placed(core, rows, [states[i].num_computed_tokens[rank] for i in mine]))
        record.append(list(draft.sign()))
        results = [answers(core, plan, random_, *each) for each in zip(states, trees, strict=True)]
        places = places_of(draft.served, len(states))
        payloads = payloads_of(results, shards, capacity, k, places)
        for place, split in zip(places, shards, strict=True):
            result = core.TreeResult.from_payloads(payloads, place, split, k)
            record.append([list(result.next_tokens), [*map(list, result.candidates)], [*map(list, result.scores)]])
        done = draft.conclude(payloads, k, budget_)
        for state_, tree_, each in zip(states, trees, done, strict=True):
            assert each.tree is tree_ and list(each.path) == list(core.accept(tree_, each.next_tokens))
            record.append(
                [list(each.path), list(each.emitted), each.kept and list(each.kept), each.failure, each.may_end]
            )
            record.append(
                [state_.digest, list(state_.tokens[-9:]), list(each.next_tokens), len(each.shards), each.is_spoilt]
            )
        moved = [done[i] for i in mine]
        record.append(core.cache_moves(moved, [100 * index for index in range(len(moved))]).tolist())
        record.append([list(each.num_computed_tokens) for each in states])
    return record


def choose_homes(plan: Plan, random_: random.Random, states: list[Any]) -> list[list[int]]:
    """Other home ranks for some of the states; which of these each rank serves, in an order of its own."""
    for each in states:
        if random_.random() < 0.5:
            count = random_.randint(1, plan.num_ranks)
            each.homes = sorted(random_.sample(range(plan.num_ranks), count))
    served = [[i for i, each in enumerate(states) if rank in each.homes] for rank in range(plan.num_ranks)]
    for each in served:
        random_.shuffle(each)
    return served


def places_of(served: Any, num_trees: int) -> list[list[int]]:
    """Per tree and rank, its number among those that the rank serves."""
    return [[list(each).index(tree) if tree in each else 0 for each in served] for tree in range(num_trees)]


def placed(core: Any, rows: list[np.ndarray], num_cached: list[int]) -> list[int]:
    """The words of a step with one empty row."""
    longest = 3 + max([row.shape[1] for row in rows], default=0)
    batch, words = len(rows) + 1, np.full(200_000, 7, np.int32)
    size = batch * longest * (3 + 2 * -(-longest // 64)) + 2 * batch
    core.place_rows(words, batch, longest, range(2, 2 + batch), 5000, num_cached, rows)
    return words[: size + 1].tolist()


def payloads_of(results: list[Any], shards: list[Any], capacity: int, k: int, places: list[list[int]]) -> np.ndarray:
    """What the ranks would have gathered: int32 [ranks, trees, capacity, words of a result + 2], with room to spare."""
    width = result_words(k)
    payloads = np.full((len(shards[0]), len(results), capacity, width + 2), -9, np.int32)
    for index, (result, split) in enumerate(zip(results, shards, strict=True)):
        for rank, shard in enumerate(split):
            for place, node in enumerate(shard.owned):
                row = payloads[rank, places[index][rank], place]
                row[0] = result.next_tokens[node]
                row[1 : 1 + k] = result.candidates[node]
                scores = np.zeros(4 * (width - 1 - k), np.uint8)
                scores[:k] = result.scores[node]
                row[1 + k : width] = scores.view(np.int32)
    return payloads
