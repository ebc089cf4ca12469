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
    if plan.adaptive:
        budget_.beside = random_.choice([0.0, 0.0, 2.7])
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
    """Steps of all ranks through the calls that the engine makes, with what goes up and comes back in arrays.

    Each rank has states of its own and drafts for those that it serves. After each step all know the same.
    """
    random_ = random.Random(plan.seed)
    cost = costs_of(random_) if plan.adaptive else None
    setting, ranks = random_.getstate(), []
    for _ in range(plan.num_ranks):
        random_.setstate(setting)
        shared = core.SuffixIndex(plan.sizes.trie_capacity) if plan.shares else None
        states = [new_state(core, plan, random_, shared) for _ in range(plan.num_sequences)]
        ranks.append((states, core.Budgets(plan.sizes, plan.num_ranks, cost)))
    capacity, k, record = plan.sizes.owned_capacity(plan.num_ranks), plan.sizes.num_recycled, list[Any]()
    for _ in range(plan.num_steps):
        first = ranks[0][0]
        record.append([list(core.workload(first)), list(core.workload(first, first[0].homes))])
        depths = [random_.choice([0, 3, 100]) for _ in first]
        served = choose_homes(plan, random_, [states for states, _ in ranks]) if plan.homes_change else None
        drafts = [
            core.draft_step(states, depths, budgets, plan.num_ranks, capacity, rank, served)
            for rank, (states, budgets) in enumerate(ranks)
        ]
        trees = trees_of(drafts)
        results = [answers(core, plan, random_, *each) for each in zip(first, trees, strict=True)]
        payloads = np.full((plan.num_ranks, len(first), capacity, result_words(k) + 2), -9, np.int32)
        said = np.full((plan.num_ranks, 4 + 3 * len(first)), -9, np.int32)
        for rank, ((states, _), draft) in enumerate(zip(ranks, drafts, strict=True)):
            mine = list(range(len(states))) if served is None else served[rank]
            assert (list(draft.mine), len(draft.served)) == (mine, plan.num_ranks)
            assert list(draft.states) == states and (draft.rank, len(draft)) == (rank, len(states))
            assert [tree is not None for tree in draft.trees] == [i in mine for i in range(len(states))]
            rows = [entries for _, _, entries in draft.rows()]
            record.append([see_tree(trees[i], [], 0) for i in mine] + [row.tolist() for row in rows])
            record.append([[each[:2] for each in draft.rows()], draft.placement(capacity).tolist(), draft.has_nodes])
            each = [core.row_entries(states[i], trees[i], draft.shards[i][rank], rank) for i in mine]
            assert all(np.array_equal(*pair) for pair in zip(each, rows, strict=True)), "one by one and together"
            record.append(placed(core, rows, [states[i].num_computed_tokens[rank] for i in mine]))
            said[rank, : 4 + 3 * len(mine)] = draft.headers(2**64 - 7, rank, k, True)
            send(payloads[rank], draft, [results[i] for i in mine], k)
        record.append(said.tolist())
        assert all(draft.agrees(said) for draft in drafts), "ranks that serve a sequence have drafted alike"
        last = len(said[-1]) if served is None else 4 + 3 * len(served[-1])
        compared = [place for place in range(last) if place < 2 or (place > 3 and (place - 4) % 3 < 2)]
        for place in compared:
            other = said.copy()
            other[-1, place] += 1
            noticed = [not draft.agrees(other) for draft in drafts]
            assert all(noticed) or place > 3 or plan.num_ranks == 1, "what all ranks hold is compared"
            record.append(noticed)
        done = [draft.conclude(payloads, said, budgets) for draft, (_, budgets) in zip(drafts, ranks, strict=True)]
        seen = [
            see_conclusion(core, draft, concluded, results, trees)
            for draft, concluded in zip(drafts, done, strict=True)
        ]
        assert all(each == seen[0] for each in seen), "all ranks know the same of all sequences"
        record.append(seen[0])
        for i, (result, split) in enumerate(zip(results, drafts[0].shards, strict=True)):
            places = [list(each).index(i) if i in each else 0 for each in drafts[0].served]
            read = core.TreeResult.from_payloads(payloads, places, split, k)
            columns = [list(read.next_tokens), [*map(list, read.candidates)], [*map(list, read.scores)]]
            assert columns == [list(result.next_tokens), [*map(list, result.candidates)], [*map(list, result.scores)]]
        for draft, concluded in zip(drafts, done, strict=True):
            kept = [concluded[i] for i in draft.mine]
            record.append([(each.kept and list(each.kept), each.is_spoilt) for each in kept])
            record.append(core.cache_moves(kept, [100 * index for index in range(len(kept))]).tolist())
    return record


def trees_of(drafts: list[Any]) -> list[Any]:
    """Each sequence's tree, by the first rank that serves it; all ranks that do have the same."""
    trees: list[Any] = [None] * len(drafts[0])
    for draft in drafts:
        for index in draft.mine:
            trees[index] = trees[index] or draft.trees[index]
            assert see_tree(trees[index], [], 0) == see_tree(draft.trees[index], [], 0)
    return trees


def send(payload: np.ndarray, draft: Any, results: list[Any], k: int) -> None:
    """Write what a rank says into its payload, int32 [trees, capacity, words], as Exchange does."""
    rows = np.concatenate(
        [
            result_rows(result, split[draft.rank].nodes, k)
            for result, split in zip(results, own_shards(draft), strict=True)
        ]
        or [np.empty((0, result_words(k)), np.int32)]
    )
    source, target, words = draft.placement(payload.shape[1])
    table = payload.reshape(-1, payload.shape[2])
    table[target, :-2] = rows[source]
    table[target, -2:] = words.view(np.int32).reshape(-1, 2)


def own_shards(draft: Any) -> list[Any]:
    """The shards of the trees that a rank serves."""
    return [draft.shards[index] for index in draft.mine]


def result_rows(result: Any, nodes: Any, k: int) -> np.ndarray:
    """What a rank has computed of some nodes: int32 [nodes, result_words(k)]."""
    rows = np.zeros((len(nodes), result_words(k)), np.int32)
    for row, node in zip(rows, nodes, strict=True):
        row[0] = result.next_tokens[node]
        row[1 : 1 + k] = result.candidates[node]
        row[1 + k :].view(np.uint8)[:k] = result.scores[node]
    return rows


def see_conclusion(core: Any, draft: Any, concluded: Any, results: list[Any], trees: list[Any]) -> list[Any]:
    """What a rank knows after a step, also of sequences that others serve."""
    seen: list[Any] = [list(draft.num_entries)]
    for i, (state_, each) in enumerate(zip(draft.states, concluded, strict=True)):
        assert see_tree(each.tree, [], 0) == see_tree(trees[i], [], 0)
        assert list(each.next_tokens) == list(results[i].next_tokens)
        assert list(each.path) == list(core.accept(each.tree, each.next_tokens))
        shards = [(list(shard.nodes), list(shard.owned)) for shard in each.shards]
        seen.append([list(each.path), list(each.emitted), each.failure, each.may_end, shards])
        table = [list(state_.table.get(token)) for token in state_.tokens[-5:]] if state_.table is not None else []
        seen.append([state_.digest, list(state_.tokens[-9:]), list(state_.num_computed_tokens), table])
        seen.append([state_.is_suspect, state_.num_pending, list(state_.homes)])
    return seen


def choose_homes(plan: Plan, random_: random.Random, ranks: list[list[Any]]) -> list[list[int]]:
    """Other home ranks for some of the states, on all ranks; which of them each serves, in an order of its own."""
    for index in range(plan.num_sequences):
        if random_.random() < 0.3:
            homes = sorted(random_.sample(range(plan.num_ranks), random_.randint(1, plan.num_ranks)))
            for states in ranks:
                states[index].homes = homes
    served = [[i for i, each in enumerate(ranks[0]) if rank in each.homes] for rank in range(plan.num_ranks)]
    for each in served:
        random_.shuffle(each)
    return served


def placed(core: Any, rows: list[np.ndarray], num_cached: list[int]) -> list[int]:
    """The words of a step with one empty row."""
    longest = 3 + max([row.shape[1] for row in rows], default=0)
    batch, words = len(rows) + 1, np.full(200_000, 7, np.int32)
    size = batch * longest * (3 + 2 * -(-longest // 64)) + 2 * batch
    core.place_rows(words, batch, longest, range(2, 2 + batch), 5000, num_cached, rows)
    return words[: size + 1].tolist()
