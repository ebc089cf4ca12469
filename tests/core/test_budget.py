"""The size of a step's trees: as many nodes as pay, by a table of step times that all ranks share."""

from __future__ import annotations

import itertools
import json
import math
import random
from array import array
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lpr
from lpr import DecodeConfig, Engine, InputError, SamplingParams
from lpr.core.budget import AcceptanceHistory, AdaptiveBudget, Draft, band_of
from lpr.core.constants import KNOTS, LEAST_GAIN, LONGEST_FAR_PAUSE, LONGEST_PAUSE, QUIET_STEPS
from lpr.core.drafting import Drafter
from lpr.core.step_times import MOST_TOKENS, StepTimes, StepTimesTracker, interpolate
from lpr.core.tree import Source, TokenTree
from lpr.engine.exchange import DesyncError
from tests.fakes.models import tiny_model
from tests.fakes.prompts import PROMPTS
from tests.fakes.worlds import ThreadWorld, generate_on, run_ranks

FLAT = StepTimes({(1, 256): [10 + 0.001 * knot for knot in KNOTS]})
"""An accelerator below its knee: nodes cost next to nothing."""
DEAR = StepTimes({(1, 256): [10.0 * knot**1.1 for knot in KNOTS]})
"""Every node costs more than a step of its own."""
RISING = StepTimes({(1, 256): [5 + 0.25 * knot for knot in KNOTS]})
TEXT = [(3 * i) % 7 for i in range(40)]


def chain(probabilities: Sequence[float], num_window: int = 1) -> Draft:
    """A draft that is a chain of nodes with these path probabilities."""
    tree = TokenTree(0)
    tree.add_chain(0, range(1, num_window), Source.WINDOW)
    tree.add_chain(0, range(100, 100 + len(probabilities)), Source.TRIE)
    return Draft(tree, [1.0] + [0.0] * (num_window - 1) + list(probabilities), num_window)


def path_tokens(tree: TokenTree, node: int) -> tuple[int, ...]:
    return tuple(tree.tokens[each] for each in tree.path_to(node))


def trie_budget(cost: StepTimes, num_ranks: int = 1) -> AdaptiveBudget:
    return AdaptiveBudget(DecodeConfig(window_size=0).resolved(num_ranks), cost.row(1, 1), num_ranks)


def cut(budget: AdaptiveBudget, drafts: list[Draft], histories: list[AcceptanceHistory], pending: int = 0) -> None:
    budget.begin(len(drafts), pending)
    budget.cut(drafts, histories)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.floats(0, 1), max_size=12), min_size=1, max_size=3),
    st.floats(0.01, 2.0),
    st.integers(0, 5),
    st.integers(1, 3),
)
def test_the_size_is_the_one_with_most_tokens_per_millisecond(
    rows: list[list[float]], slope: float, pending: int, num_ranks: int
) -> None:
    cost = StepTimes({(1, 256): [3 + slope * knot for knot in KNOTS]})
    drafts = [chain(sorted(row, reverse=True)) for row in rows]
    gains = sorted((p for row in rows for p in row), reverse=True)

    def rate(kept: Sequence[float]) -> float:
        per_rank = -(-(len(rows) + len(kept)) // num_ranks) + (pending if num_ranks > 1 else 0)
        return (len(rows) + sum(kept)) / cost.time(per_rank, len(rows))

    best = max(rate(gains[:count]) for count in range(len(gains) + 1))
    if best < rate([]) * (1 + LEAST_GAIN * (1 - 1 / len(rows))):
        best = rate([])
    cut(trie_budget(cost, num_ranks), drafts, [AcceptanceHistory() for _ in rows], pending)
    kept = [p for draft in drafts for p in draft.probabilities[1 : len(draft.tree)]]
    # Equally likely nodes are kept or left together, which can only matter where they are worth their price exactly.
    assert rate(kept) == pytest.approx(best, rel=1e-9) or len(set(gains)) < len(gains)
    for draft in drafts:
        draft.tree.verify()


def test_where_16_rows_are_full_nodes_come_together_or_not_at_all() -> None:
    """A matrix unit takes 16 rows at once: the first node costs a second lot, and the next 15 next to nothing."""
    times = StepTimes.from_json({
        "nodes": [1, 16, 17, 32, 64, 1024], "rows": [{"batch": 1, "kv": 256, "ms": [23, 23, 26, 28, 40, 400]}]
    })  # fmt: skip
    kept = []
    for likely in (1, 4, 10):
        drafts = [chain([0.8] if index < likely else []) for index in range(16)]
        cut(trie_budget(times), drafts, [AcceptanceHistory() for _ in drafts])
        kept.append(sum(len(draft.tree) - 1 for draft in drafts))
    assert kept == [0, 4, 10], "0.8 tokens are not worth 3 ms, and 3.2 of them are"


@pytest.mark.parametrize(("count", "kept"), [(1, 1), (16, 0)])
def test_a_node_that_seems_free_is_not_believed_in_a_large_batch(count: int, kept: int) -> None:
    """17 tokens seldom take as long as 16, but were once measured so; 0.4 of 16 tokens are less than such an error."""
    times = StepTimes.from_json({"nodes": [1, 17, 32], "rows": [{"batch": 1, "kv": 256, "ms": [50, 50, 90]}]})
    drafts = [chain([0.4] if index == 0 else []) for index in range(count)]
    cut(trie_budget(times), drafts, [AcceptanceHistory() for _ in drafts])
    assert sum(len(draft.tree) - 1 for draft in drafts) == kept


def test_a_long_prompt_makes_no_node_cheap() -> None:
    """Beside 600 tokens of a prompt a node takes a hundredth of the step, and a tenth of what it takes in another."""
    times = [10 + 1.0 * min(knot, 64) + 0.1 * max(0, knot - 64) for knot in KNOTS]
    budget, kept = trie_budget(StepTimes({(1, 256): times})), []
    for pending in (0, 600):
        draft = chain([0.3, 0.12, 0.08, 0.03, 0.02])
        cut(budget, [draft], [AcceptanceHistory()], pending)
        kept.append(len(draft.tree) - 1)
    assert kept == [2, 2]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(0, 1), max_size=60),
    st.lists(st.floats(0.001, 9.0), min_size=len(KNOTS), max_size=len(KNOTS)),
    st.integers(0, 30),
)
def test_what_is_not_drafted_for_its_price_would_not_have_paid(
    row: list[float], further: list[float], pending: int
) -> None:
    cost = StepTimes({(1, 256): [3 + each for each in itertools.accumulate(further)]})
    budget = trie_budget(cost)
    budget.begin(1, pending)
    price = budget.request(AcceptanceHistory()).price
    assert price is not None
    falling = sorted(row, reverse=True)
    drafted = []
    for p in falling:
        if p < price.floor:
            break
        price.take(p)
        drafted.append(p)

    def best_rate(nodes: Sequence[float]) -> float:
        tokens = itertools.accumulate(nodes, initial=1.0)
        return max(kept / cost.time(1 + count) for count, kept in enumerate(tokens))

    # A node that is worth its price exactly may be drafted or not, as sums are rounded.
    assert best_rate(drafted) == pytest.approx(best_rate(falling), rel=1e-9)


def test_free_nodes_are_all_kept_and_dear_ones_none() -> None:
    draft = chain([0.5, 0.4, 0.1, 0.01])
    cut(trie_budget(FLAT), [draft], [AcceptanceHistory()])
    assert len(draft.tree) == 5
    draft = chain([0.9, 0.4, 0.1])
    cut(trie_budget(DEAR), [draft], [AcceptanceHistory()])
    assert len(draft.tree) == 1


def test_the_budget_goes_to_the_sequence_that_gains_most() -> None:
    sure, unsure = chain([0.95, 0.9, 0.85, 0.8]), chain([0.04, 0.03, 0.02])
    cut(trie_budget(RISING), [sure, unsure], [AcceptanceHistory(), AcceptanceHistory()])
    assert (len(sure.tree), len(unsure.tree)) == (5, 1)


def test_nodes_after_an_unlikely_one_are_not_kept_in_its_place() -> None:
    draft = chain([0.9, 0.001, 0.9])
    cut(trie_budget(RISING), [draft], [AcceptanceHistory()])
    assert len(draft.tree) == 2


@pytest.mark.parametrize(("promise", "longest"), [(0.1, LONGEST_FAR_PAUSE), (0.9, LONGEST_PAUSE)])
def test_drafts_that_never_pay_are_tried_ever_more_rarely(promise: float, longest: int) -> None:
    budget, pause = trie_budget(DEAR), AcceptanceHistory()
    tried = []
    for step in range(400):
        request = budget.request(pause)
        tried += [step] if request.nodes else []
        cut(budget, [chain([promise] if request.nodes else [])], [pause])
    gaps = [after - before for before, after in itertools.pairwise(tried)]
    assert gaps[: QUIET_STEPS - 1] == [1] * (QUIET_STEPS - 1)
    assert gaps[-1] == longest + 1 and sorted(gaps) == gaps
    pause.pause = 0
    draft = chain([0.9])
    cut(trie_budget(FLAT), [draft], [pause])
    assert pause.quiet == pause.pause == 0, "one that pays ends the pauses"


def test_a_batch_remembers_failed_promises_until_long_after_it_drafts() -> None:
    """Fifteen of sixteen sequences without a draft left nothing of the record after six steps: each draft was believed.

    A record that only drafts change would never be forgotten once it stops them.
    """
    budget, fresh = trie_budget(RISING), trie_budget(RISING)

    def trust(each: AdaptiveBudget) -> float:
        each.begin(16, 0)
        trusts = each.request(AcceptanceHistory()).trusts
        assert trusts is not None
        return trusts[0]

    def observe(num_steps: int, offered: float) -> None:
        trees = [chain([0.5] if offered and not index else []).tree for index in range(16)]
        for _ in range(num_steps):
            histories = [AcceptanceHistory() for _ in range(16)]
            histories[0].offered[0] = offered
            budget.observe(trees, [[0]] * 16, histories)

    assert trust(fresh) == 1.0
    observe(100, offered=0.5)
    assert trust(budget) < 0.1
    observe(50, offered=0.0)
    assert trust(budget) < 0.2
    observe(750, offered=0.0)
    assert trust(budget) == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize("breaks_at", [9, 20, 60])
def test_a_chain_that_breaks_off_takes_the_trust_from_what_is_deeper_alone(breaks_at: int) -> None:
    """One trust for all depths kept on believing in 60 more tokens, as the first nine were always right.

    In a batch on a processor they cost two steps of plain decoding (SmolLM2, HumanEval, 16 requests: 0.88 of plain).
    """
    budget, own = trie_budget(FLAT), AcceptanceHistory()
    for _ in range(20):
        draft = chain([0.9] * 60)
        draft.trusts = own.trusts()
        draft.probabilities[1:] = [0.9 * draft.trusts[band_of(depth)] for depth in range(1, 61)]
        cut(budget, [draft], [own])
        assert sum(own.offered) == pytest.approx(60 * 0.9), "what promises say does not depend on the trust in them"
        budget.observe([draft.tree], [range(breaks_at)], [own])
    expected = [sum(0 < depth < breaks_at for depth in range(1, 61) if band_of(depth) == band) for band in range(6)]
    sizes = [1, 2, 4, 8, 16, 29]
    trusts = own.trusts()
    for band, (right, size) in enumerate(zip(expected, sizes, strict=True)):
        assert trusts[band] == pytest.approx(right / (0.9 * size), abs=0.15), band
    other = budget.request(AcceptanceHistory()).trusts
    assert other is not None and other == pytest.approx(trusts, abs=0.15), "a new sequence starts from all others"


@pytest.mark.parametrize(("first", "later"), [(0, 4), (4, 0)])
def test_how_a_text_begins_is_trusted_by_how_others_began(first: int, later: int) -> None:
    """MT-Bench's first trees promised 3.2 tokens and gave 0.9, GSM8K's promised 3.5 and gave 4.9 (SmolLM2)."""
    budget = trie_budget(FLAT)

    def step(history: AcceptanceHistory, kept: int) -> None:
        draft = chain([0.9] * 4)
        cut(budget, [draft], [history])
        budget.observe([draft.tree], [range(1 + kept)], [history])

    def trust(history: AcceptanceHistory) -> float:
        trusts = budget.request(history).trusts
        assert trusts is not None
        return trusts[0]

    for _ in range(12):
        history = AcceptanceHistory()
        for kept in (first, later, later, later):
            step(history, kept)
    begun = AcceptanceHistory()
    begun.is_new = False
    new, other = trust(AcceptanceHistory()), trust(begun)
    assert (new < 0.3 < 0.6 < other) if first < later else (new > 0.8 > 0.4 > other)
    for _ in range(800):  # nothing that was not tried is held against them for ever
        history = AcceptanceHistory()
        budget.observe([chain([]).tree], [[0]], [history])
    assert trust(AcceptanceHistory()) == pytest.approx(1.0, abs=0.1)


def test_no_node_is_more_likely_than_its_parent_however_its_depth_is_trusted() -> None:
    history = AcceptanceHistory()
    for band, (kept, promised) in enumerate([(1, 10), (30, 10), (0, 5), (4, 4), (9, 3), (1, 1), (2, 1)]):
        history.by_band[band].accepted, history.by_band[band].expected = float(kept), float(promised)
    trusts = history.trusts()
    assert trusts == sorted(trusts, reverse=True) and trusts[0] == 3 / 12
    drafter = Drafter(replace(DecodeConfig(window_size=0).resolved(), branch_length=200))
    drafter.calibration.frequencies[:] = array("d", [0.99]) * len(drafter.calibration.frequencies)
    drafter.observe(TEXT * 8)
    tree = TokenTree(TEXT[-1])
    found = drafter.draft(tree, 300, trusts=trusts)
    alone = drafter.draft(untrusted := TokenTree(TEXT[-1]), 900)
    plain = {path_tokens(untrusted, node): alone[node] for node in range(len(untrusted))}
    assert max(tree.depths) > 130, "two octaves share the last band"
    for node in range(1, len(tree)):
        assert found[node] <= found[tree.parents[node]]
        whole = plain[path_tokens(tree, node)]
        assert found[node] == pytest.approx(whole * trusts[band_of(tree.depths[node])])


def test_the_window_runs_where_nodes_are_free_and_stops_where_it_earns_nothing() -> None:
    config = DecodeConfig().resolved()
    assert not AdaptiveBudget(config, DEAR.row(1, 1)).window
    budget = AdaptiveBudget(config, [10 + 0.02 * knot for knot in KNOTS])
    assert budget.window
    for _ in range(400):
        draft = chain([0.5], config.num_window_nodes + 1 if budget.window else 1)
        cut(budget, [draft], [AcceptanceHistory()])
        budget.observe([draft.tree], [[0]], [AcceptanceHistory()])
        if not budget.window:
            break
    assert not budget.window


@pytest.mark.parametrize(("tail", "runs"), [(0.1, False), (1e-5, True)])
def test_the_window_takes_nodes_from_the_last_of_the_search(tail: float, runs: bool) -> None:
    """Where nodes cost nothing and all are spent, they go to whoever earns more."""
    config = DecodeConfig().resolved()
    budget = AdaptiveBudget(config, [10.0 for _ in KNOTS])
    seen = []
    for _ in range(100):
        budget.begin(1, 0)
        request = budget.request(AcceptanceHistory())
        held = config.num_window_nodes if request.window else 0
        assert request.nodes + held == config.num_nodes - 1
        draft = chain([1.0, 1.0, *[tail] * (request.nodes - 2)], held + 1)
        budget.cut([draft], [AcceptanceHistory()])
        budget.observe([draft.tree], [[0, held + 1, held + 2]], [AcceptanceHistory()])
        seen.append(budget.window)
    assert seen[16:] == [runs] * 84


# The table of step times.


@given(st.lists(st.floats(0.01, 1e3), min_size=len(KNOTS), max_size=len(KNOTS)), st.integers(1, 3000))
def test_more_tokens_never_take_less_time(row: list[float], count: int) -> None:
    cost = StepTimes({(1, 256): row})
    assert cost.time(count) <= cost.time(count + 1) + 1e-9
    tracker = StepTimesTracker(cost)
    tracker.observe(count, 1, 256, 0.5 * cost.time(count))
    assert tracker.table().time(count) <= tracker.table().time(count + 1) + 1e-9


def steps(tracker: StepTimesTracker, sizes: Sequence[int], truth: StepTimes, rng: random.Random, kv: int = 256) -> None:
    """Show a tracker steps that take what `truth` says, 10 % more or less, and one in fifty three times as long."""
    for size in sizes:
        late = 3.0 if rng.random() < 0.02 else 1.0
        tracker.observe(size, 1, kv, truth.time(size, 1, kv) * late * math.exp(rng.gauss(0.0, 0.1)))


def test_a_table_follows_what_steps_take() -> None:
    measured = StepTimes({(1, 256): [5 + 0.25 * knot for knot in KNOTS]})
    truth = StepTimes({(1, 256): [7 + 0.3 * knot for knot in KNOTS]})
    tracker, rng = StepTimesTracker(measured), random.Random(0)
    steps(tracker, [rng.choice((1, 3, 8, 20, 40)) for _ in range(300)], truth, rng)
    for size in (1, 3, 8, 20, 40):
        assert tracker.table().time(size) == pytest.approx(truth.time(size), rel=0.08)


@pytest.mark.parametrize("sizes", [[1] * 500, [1] * 490 + [40] * 10, [60] * 500, [1, 33] * 250], ids=str)
def test_what_is_not_tried_keeps_its_measured_relation_to_what_is(sizes: list[int]) -> None:
    """However long only some sizes are seen, and however loaded the machine became, the measured shape stays."""
    measured = StepTimes({(1, 256): [5 + 0.25 * knot for knot in KNOTS]})
    loaded = StepTimes({(1, 256): [1.8 * ms for ms in measured.rows[1, 256]]})
    tracker = StepTimesTracker(measured)
    steps(tracker, sizes, loaded, random.Random(1))
    for size in (1, 2, 8, 16, 32, 64, 96, 128):
        assert tracker.table().time(size) == pytest.approx(loaded.time(size), rel=0.12), size


def test_one_late_step_hardly_moves_a_table() -> None:
    tracker = StepTimesTracker(StepTimes({(1, 256): [5 + 0.25 * knot for knot in KNOTS]}))
    for _ in range(100):
        tracker.observe(20, 1, 100, 10.0)
    before = tracker.table().time(20)
    tracker.observe(20, 1, 100, 1e6)
    assert tracker.table().time(20) < 1.1 * before


def test_rows_between_the_measured_ones() -> None:
    rows = {(batch, kv): [batch + kv / 256 + knot for knot in KNOTS] for batch in (1, 8) for kv in (256, 1024)}
    cost = StepTimes(rows)
    assert cost.time(4, 1, 100) == cost.time(4, 1, 256) == 6
    assert cost.time(4, 1, 640) == 7.5, "half-way"
    assert cost.time(4, 1, 1792) == 12, "the line goes on"
    assert cost.time(4, 3, 256) == pytest.approx(8)
    backwards = StepTimes({(1, 256): [9.0] * len(KNOTS), (1, 1024): [8.0] * len(KNOTS)})
    assert backwards.time(1, 1, 100_000) == 9, "longer texts never take less"


def test_a_further_sequence_costs_alike_whatever_the_step_has() -> None:
    """Noise of 2 ms in one time of a batch of 8 made the line through it fall short by 18 ms at 64 sequences."""
    rows = {(batch, 256): [4 + batch + 0.5 * knot for knot in KNOTS] for batch in (1, 8)}
    rows[8, 256][KNOTS.index(128)] -= 2
    cost = StepTimes(rows)
    assert cost.time(64, 64) == 4 + 64 + 32
    assert cost.time(128, 64) == 4 + 64 + 64 - 2
    assert cost.time(1024, 64) == 4 + 64 + 512


def test_the_most_tokens_within_a_time() -> None:
    times = StepTimes({(1, 256): [3 + 2 * knot for knot in KNOTS]})
    for milliseconds, most in ((1, 1), (5, 1), (13, 5), (2051, 1024), (4003, 2000)):
        assert times.most_tokens(milliseconds) == most
    assert StepTimes({(1, 256): [3.0] * len(KNOTS)}).most_tokens(4) == MOST_TOKENS


@pytest.mark.parametrize(
    ("rows", "fault"),
    [
        ({1: [5 + 0.25 * knot for knot in KNOTS]}, None),
        ({1: [10.0] + [14.0 + 0.1 * knot for knot in KNOTS[1:]]}, None),
        ({1: [4.0 * knot for knot in KNOTS], 8: [4.0 * knot + 3 for knot in KNOTS]}, None),
        ({1: [10.0 if knot <= 64 else 28.0 for knot in KNOTS]}, None),
        ({1: [10.0 if knot < 2 else 80.0 for knot in KNOTS]}, "2 tokens take 80 ms and 1 take 10"),
        ({1: [10.0 if knot < 96 else 400.0 for knot in KNOTS]}, "96 tokens take 400 ms and 65 take 10"),
        (
            {batch: [ms] * len(KNOTS) for batch, ms in ((1, 50.0), (8, 20.0))},
            "8 sequences take 20 ms, one 50 with as many tokens and 400 in turn",
        ),
        (
            {batch: [ms] * len(KNOTS) for batch, ms in ((1, 5.0), (4, 40.0))},
            "4 sequences take 40 ms, one 5 with as many tokens and 20 in turn",
        ),
    ],
)
def test_times_that_cannot_be_right(rows: dict[int, list[float]], fault: str | None) -> None:
    assert StepTimes({(batch, 256): row for batch, row in rows.items()}).fault() == fault


def test_batches_have_a_correction_of_their_own() -> None:
    tracker = StepTimesTracker(StepTimes({(1, 256): [5 + 0.25 * knot for knot in KNOTS]}))
    for _ in range(100):
        tracker.observe(20, 1, 100, 10.0)
    assert tracker.table().time(20, batch=4, kv=5000) == tracker.table().time(20), "like the nearest one that was seen"
    for _ in range(100):
        tracker.observe(20, 4, 100, 20.0)
    table = tracker.table()
    assert (table.time(20, 1), table.time(20, 4)) == (pytest.approx(10, rel=0.05), pytest.approx(20, rel=0.05))
    assert table.time(20, 1) < table.time(20, 2) < table.time(20, 4)


def test_equal_factors_are_no_difference() -> None:
    row = [5 + 0.25 * knot for knot in KNOTS]
    one, twice = StepTimes({(1, 256): row}), StepTimes({(1, 256): [2 * ms for ms in row]})
    steeper = StepTimes({(1, 256): [5 + 0.3 * knot for knot in KNOTS]})
    assert not one.differs(twice, 0.05) and one.differs(steeper, 0.05)


def test_tables_survive_json_and_other_numbers_of_nodes() -> None:
    cost = StepTimes.from_json({"nodes": [1, 100], "rows": [{"batch": 2, "kv": 600, "ms": [4.0, 8.0]}]})
    assert cost.time(50.5, 2, 600) == pytest.approx(6.0, rel=0.01)
    assert StepTimes.from_json(json.loads(json.dumps(cost.to_json()))).to_json() == cost.to_json()


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"nodes": [1], "rows": [{"batch": 1, "kv": 1, "ms": [1.0]}]},
        {"nodes": [1, 2], "rows": []},
        {"nodes": [2, 1], "rows": [{"batch": 1, "kv": 1, "ms": [1.0, 2.0]}]},
        {"nodes": [1, 2], "rows": [{"batch": 1, "kv": 1, "ms": [1.0]}]},
        {"nodes": [1, 2], "rows": [{"batch": 1, "kv": 1, "ms": [0.0, 1.0]}]},
        {"nodes": [1, 2], "rows": [3]},
        {"nodes": [1, 2], "rows": [{"batch": 1, "kv": 1, "ms": [math.nan, 1.0]}]},
        {"nodes": [1, 2], "rows": [{"batch": 1, "kv": 1, "ms": [1.0, math.inf]}]},
        {"nodes": [1, 2], "rows": [{"batch": 0, "kv": 1, "ms": [1.0, 2.0]}]},
        {"nodes": [1, math.nan], "rows": [{"batch": 1, "kv": 1, "ms": [1.0, 2.0]}]},
    ],
)
def test_what_is_no_table_is_refused(record: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="step times"):
        StepTimes.from_json(record)


def test_the_critical_decoding_length_is_where_time_begins_to_rise() -> None:
    flat_to_64 = StepTimes({(1, 256): [10 + 0.1 * max(0, knot - 64) for knot in KNOTS]})
    assert flat_to_64.critical_length() == 89, "10 + 0.1 * (89 - 64) = 12.5"
    assert flat_to_64.longest(1.0) == 64 and flat_to_64.longest(1e9) == KNOTS[-1]
    assert DEAR.critical_length() == 1 and DEAR.critical_length(batch=4) == 4
    assert RISING.longest(2.0) == 22, "twice 5.25 is 5 + 0.25 * 22"


def test_times_between_and_beyond_the_knots() -> None:
    row = [float(knot) for knot in KNOTS]
    assert [interpolate(row, n) for n in (0, 1, 3, 40, 1024, 2048)] == [1, 1, 3, 40, 1024, 2048]


# The engine.


@pytest.mark.parametrize("cost, temperature", [(RISING, 0.8), (DEAR, 0.0)], ids=["rising", "dear"])
@pytest.mark.slow
def test_the_text_does_not_depend_on_the_sizes(cost: StepTimes, temperature: float) -> None:
    prompts, decode = PROMPTS[:4], DecodeConfig(max_batch_size=3, max_nodes=64)
    params = [SamplingParams(max_new_tokens=24, temperature=temperature, seed=seed) for seed in range(4)]
    plain = Engine.from_pretrained(lpr.bundled_model(), DecodeConfig.autoregressive(), device="cpu")
    expected = [each.token_ids for each in plain.generate(prompts, params)]
    engine = Engine.from_pretrained(lpr.bundled_model(), decode, device="cpu", costs=cost)
    done = engine.generate(prompts, params)
    assert [each.token_ids for each in done] == expected
    steps, nodes = (sum(getattr(each.stats, name) for each in done) for name in ("num_steps", "num_nodes"))
    if cost is DEAR:
        assert nodes < 1.1 * steps, "plain decoding, but for steps that evaluate a prompt anyway"
        assert steps > 0.9 * sum(each.stats.num_tokens for each in done)
    else:
        assert nodes > (20 if cost is FLAT else 1.3) * steps
    again = Engine.from_pretrained(lpr.bundled_model(), decode, device="cpu", costs=cost)
    assert [each.stats for each in again.generate(prompts, params)] == [each.stats for each in done]


def test_sizes_are_measured_at_the_start() -> None:
    engine = Engine.from_model(tiny_model(), decode=DecodeConfig(max_nodes=48))
    assert 16 < engine.sizes.num_nodes <= 50
    assert engine.generate([TEXT], SamplingParams(max_new_tokens=30))[0].stats.num_tokens == 30


@pytest.mark.parametrize("max_nodes", [1, 2, 8, 12])
@pytest.mark.parametrize("max_batch_size", [2, 3, 5, 7, 9, 20])
@pytest.mark.slow(first=8)
def test_every_batch_size_and_limit_can_be_measured(max_nodes: int, max_batch_size: int) -> None:
    decode = DecodeConfig(max_nodes=max_nodes, max_batch_size=max_batch_size)
    engine = Engine.from_model(tiny_model(), decode=decode)
    assert engine.step_times is not None
    assert {batch for batch, _ in engine.step_times.rows} == {1, min(8, max_batch_size), min(16, max_batch_size)}
    assert engine.step_times.row(max_batch_size, 256)[0] > 0


def test_ranks_decide_by_the_table_of_rank_0() -> None:
    """Each rank measures other times; what they decide by is one table, which changes while they decode."""
    model = tiny_model(seed=3, spread=0.1)
    params = [SamplingParams(max_new_tokens=60, temperature=0.7, seed=seed) for seed in range(3)]
    prompts = [TEXT, [*TEXT[3:], 9], TEXT[::-1]]
    expected = [each.token_ids for each in generate_on(1, model, DecodeConfig.autoregressive(), prompts, params)[0]]
    shared: list[StepTimes] = []

    def program(comm):  # type: ignore[no-untyped-def]
        engine = Engine.from_model(model, decode=DecodeConfig(max_nodes=32, max_batch_size=2), comm=comm)
        assert (engine.replica.sizer._tracker is None) == (comm.rank > 0), "one clock counts"
        done = [each.token_ids for each in engine.generate(prompts, params)]
        shared.append(engine.step_times)
        return done, comm.num_broadcasts

    results = run_ranks(ThreadWorld(3), program)
    assert [done for done, _ in results] == [expected] * 3
    assert len({count for _, count in results}) == 1
    assert len({json.dumps(cost.to_json()) for cost in shared}) == 1


def test_ranks_agree_after_other_settings() -> None:
    """What rank 0 has measured meanwhile, and not shared yet, must not come in by the back door."""
    model = tiny_model(seed=3, spread=0.1)
    params = SamplingParams(max_new_tokens=20)

    def program(comm):  # type: ignore[no-untyped-def]
        engine = Engine.from_model(model, decode=DecodeConfig(max_nodes=32), comm=comm)
        first = engine.generate([TEXT], params)[0].token_ids
        for _ in range(200 if comm.rank == 0 else 0):
            engine.replica.sizer._tracker.observe(1, 1, 1, 1e3)
        engine.configure(DecodeConfig(max_nodes=48))
        assert engine.generate([TEXT], params)[0].token_ids == first
        return engine.sizes

    configs = run_ranks(ThreadWorld(3), program)
    assert configs[0] == configs[1] == configs[2]


def test_a_rank_that_decides_by_its_own_clock_is_caught() -> None:
    model = tiny_model(seed=3, spread=0.1)

    def program(comm):  # type: ignore[no-untyped-def]
        cost = DEAR if comm.rank == 1 else FLAT
        engine = Engine.from_model(model, decode=DecodeConfig(max_nodes=32), comm=comm, costs=FLAT)
        engine.replica.sizer.times = cost
        return engine.generate([TEXT], SamplingParams(max_new_tokens=40))

    with pytest.raises(DesyncError, match="rank 1"):
        run_ranks(ThreadWorld(3), program)


# Configuration.


def test_sizes_that_are_numbers_are_spent_in_every_step() -> None:
    assert not DecodeConfig(window_size=3, trie_nodes=5).adaptive
    assert DecodeConfig(window_size=3, trie_nodes=5).guess_set_size == 3
    assert DecodeConfig(window_size=3).adaptive and DecodeConfig(trie_nodes=3).adaptive and DecodeConfig().adaptive
    assert not DecodeConfig.autoregressive().adaptive


@given(st.integers(1, 300), st.integers(1, 8), st.sampled_from(["auto", 0, 4]), st.sampled_from(["auto", 0, 16]))
def test_resolved_sizes_fit_the_limit(most: int, num_ranks: int, window: int | str, trie: int | str) -> None:
    config = DecodeConfig(window_size=window, trie_nodes=trie, max_nodes=most).resolved(num_ranks)
    if window == trie == "auto":
        assert config.num_nodes <= 1 + most * num_ranks
    assert config.num_nodes >= 1


@pytest.mark.parametrize("field", ["window_size", "trie_nodes", "ngram_size", "guess_set_size"])
def test_other_words_than_auto_are_refused(field: str) -> None:
    with pytest.raises(InputError, match=f"{field}='automatic' must be a whole number"):
        DecodeConfig(**{field: "automatic"})


def test_noise_at_the_end_of_a_measurement_does_not_make_large_trees_free() -> None:
    cost = StepTimes.from_json({"nodes": [1, 64, 96], "rows": [{"batch": 1, "kv": 1, "ms": [5.0, 20.0, 12.0]}]})
    assert 0 < cost.time(1) <= cost.time(64) <= cost.time(96) <= cost.time(1024)
