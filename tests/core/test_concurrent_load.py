"""What other ranks do in the same step: what it makes of a tree's price, and that ranks must agree about it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lpr import DecodeConfig, Engine, SamplingParams
from lpr.config import TreeSizes
from lpr.core.budget import AcceptanceHistory, AdaptiveBudget, Draft
from lpr.core.concurrent_load import PART, ConcurrentLoad, Work, times_under_load
from lpr.core.step_times import KNOTS, StepTimes, interpolate
from lpr.core.tree import Source, TokenTree
from lpr.engine.exchange import DesyncError
from tests.fakes.models import tiny_model
from tests.fakes.worlds import ThreadComm, ThreadWorld, run_ranks

TABLE = StepTimes({(1, 256): [7.0 + 0.02 * knot for knot in KNOTS]})
ROW = TABLE.row(1, 300)
PROMPTS = [[7, 3, 7, 3, 7], [*range(1, 60)], [5, 5, 5], [2, 9] * 20]


def test_times_beside_nobody_are_those_of_the_table() -> None:
    assert times_under_load(ROW, 0, []) == pytest.approx(ROW)


def test_nodes_below_another_ranks_load_cost_nothing() -> None:
    row = times_under_load(ROW, 0, [64.0, 64.0])
    assert interpolate(row, 1) == interpolate(row, 64) == pytest.approx(TABLE.time(64))
    assert interpolate(row, 128) == pytest.approx(TABLE.time(128))


def test_what_a_rank_evaluates_anyway_is_paid_already() -> None:
    row = times_under_load(ROW, 100, [])
    assert interpolate(row, 16) == pytest.approx(TABLE.time(116))


def test_loads_that_are_uncertain_count_for_their_part() -> None:
    row = times_under_load(ROW, 0, [16.0, 128.0])
    assert interpolate(row, 64) == pytest.approx((TABLE.time(64) + TABLE.time(128)) / 2)


def test_what_others_are_expected_to_do() -> None:
    load = ConcurrentLoad(3)
    work = Work(served=[1, 2, 0], pending=[3, 4, 0], fills=[0, 0, 0])
    assert load.others(work, [1]) == [3.0] * 8, "no tree is known yet"
    load.observe(work, [43, 64, 0])
    assert set(load.others(work, [1])) == {3 + PART * 40}
    assert set(load.others(work, [0])) == {4 + PART * 60}, "two requests of 30 nodes"
    assert set(load.others(Work([1, 1, 0], [3, 0, 0], [0, 0, 500]), [0])) == {500.0}, "a prompt is longer"
    assert load.others(Work([1, 0, 0], [3, 0, 0], [0, 0, 0]), [0]) == [], "nobody else works"


def drafted(probabilities: list[float]) -> Draft:
    tree = TokenTree(0)
    for token in range(1, len(probabilities)):
        tree.add(0, token, Source.TRIE)
    return Draft(tree, probabilities, 1)


def test_trees_are_smaller_where_others_wait_and_larger_where_nobody_does() -> None:
    sizes = {}
    for name, times, tokens in (
        ("alone", ROW, 0.0),
        ("others wait", ROW, 9.0),
        ("another is busier", times_under_load(ROW, 0, [200.0]), 9.0),
    ):
        budget = AdaptiveBudget(TreeSizes(trie_nodes=63), times)
        budget.other_tokens = tokens
        draft = drafted([1.0, *(0.5 / (1 + each) ** 1.3 for each in range(60))])
        budget.begin(1, 0)
        budget.cut([draft], [AcceptanceHistory()])
        sizes[name] = len(draft.tree)
    assert 1 < sizes["others wait"] < sizes["alone"] < sizes["another is busier"] == 61


def serve(prepare: Callable[[Engine], None] = lambda engine: None) -> list[list[int]]:
    """Three requests on four ranks, and a fourth one behind them: one of three has two ranks."""
    model = tiny_model(spread=0.12)
    decode = DecodeConfig(max_batch_size=2, prefill_chunk=12, max_length=128)
    params = [SamplingParams(max_new_tokens=count, ignore_eos=True) for count in (40, 24, 30, 20)]

    def program(comm: ThreadComm) -> list[list[int]]:
        engine = Engine.from_model(model, decode=decode, comm=comm, costs=TABLE)
        prepare(engine)
        if comm.rank:
            engine.work()
            return []
        requests = [engine.submit(*each) for each in zip(PROMPTS[:3], params[:3], strict=True)]
        for _ in range(4):
            engine.step()
        requests.append(engine.submit(PROMPTS[3], params[3]))
        while not engine.is_idle:
            engine.step()
        engine.close()
        return [each.token_ids for each in requests]

    return run_ranks(ThreadWorld(4), program)[0]


def plain() -> list[list[int]]:
    engine = Engine.from_model(tiny_model(spread=0.12), decode=DecodeConfig.autoregressive(max_batch_size=2))
    lengths = (40, 24, 30, 20)
    return [
        each.token_ids
        for each in engine.generate(
            PROMPTS, [SamplingParams(max_new_tokens=count, ignore_eos=True) for count in lengths]
        )
    ]


def test_the_same_text_whatever_trees_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[float]] = []
    others = ConcurrentLoad.others

    def watched(self: ConcurrentLoad, work: Work, homes: list[int]) -> list[float]:
        asked.append(others(self, work, homes))
        return asked[-1]

    monkeypatch.setattr(ConcurrentLoad, "others", watched)
    assert serve() == plain()
    assert any(max(each, default=0.0) > 1.0 for each in asked), "trees were priced by what others did"


def test_mutant_one_rank_prices_trees_by_other_loads() -> None:
    """Ranks that share a tree must cut it alike."""

    def misjudge(engine: Engine) -> None:
        if engine.comm.rank == 3:
            engine.replica.sizer.load.others = lambda work, homes: [0.5, 900.0]  # type: ignore[method-assign]

    with pytest.raises(DesyncError, match="rank 3|rank 0"):
        serve(misjudge)
