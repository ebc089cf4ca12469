"""Home ranks: who serves whom, and the same text whoever does, also when that changes in mid-request."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

import lpr.core.budgets
import lpr.core.step
import lpr.core.suffix_index
import lpr.engine.step
from lpr import DecodeConfig, Engine, SamplingParams
from lpr.core.state import SequenceState
from lpr.engine.exchange import DesyncError, Exchange
from lpr.engine.request import Request
from lpr.engine.stats import DecodeStats
from lpr.native import StepDraft
from lpr.sched.block_tables import RankPages
from lpr.sched.homes import FILLS_PER_TOKEN, Candidate, choose, speedup
from lpr.sched.limits import Limits
from lpr.sched.scheduler import Scheduler
from tests.fakes.altered_gather import change_received
from tests.fakes.models import plain_ids, tiny_model
from tests.fakes.worlds import ThreadComm, ThreadWorld, run_ranks

SHARED = [(7 * i * i + i) % 89 for i in range(40)]
PROMPTS = [[*SHARED[:30], 5], [9, 3, 9, 3, 9], [*SHARED, 8, 8], [1, 2, 3, 1, 2], [50] * 25, [*SHARED[:20], 4]]
LENGTHS = [40, 12, 14, 40, 10, 24]
PARAMS = [
    SamplingParams(
        max_new_tokens=length,
        temperature=0.8 * (i % 2),
        seed=i,
        ignore_eos=True,
        logprobs=2 if i == 2 else None,
        repetition_penalty=1.3 if i in (0, 4) else 1.0,
    )
    for i, length in enumerate(LENGTHS)
]
ARRIVALS = [0, 0, 5, 6, 6, 30]
"""Step before which each prompt is submitted."""
DECODE = DecodeConfig(
    window_size=2, ngram_size=3, trie_nodes=6, branch_length=4, max_batch_size=2, prefill_chunk=12, max_length=128
)


@pytest.fixture(scope="module")
def expected(model: PreTrainedModel) -> list[list[int]]:
    return plain_ids(model, PROMPTS, PARAMS)


Seen = list[dict[int, list[int]]]
"""Per step, the homes of each running prompt."""


def serve(
    num_ranks: int,
    model: PreTrainedModel,
    decode: DecodeConfig = DECODE,
    prepare: Callable[[Engine], None] = lambda engine: None,
    aborted: int | None = None,
) -> tuple[list[Request], Seen]:
    """Let prompts arrive while others run; prompt `aborted` is dropped on the way. Returns what rank 0 saw."""

    def program(comm: ThreadComm) -> tuple[list[Request], Seen]:
        engine = Engine.from_model(model, decode=decode, comm=comm)
        prepare(engine)
        if comm.rank:
            engine.work()
            return [], []
        requests: list[Request] = []
        seen: Seen = []
        while len(requests) < len(PROMPTS) or not engine.is_idle:
            while len(requests) < len(PROMPTS) and (ARRIVALS[len(requests)] <= len(seen) or engine.is_idle):
                requests.append(engine.submit(PROMPTS[len(requests)], PARAMS[len(requests)]))
            engine.step()
            seen.append({int(each.id): list(each.homes) for each in engine.scheduler.running})
            if aborted is not None and len(seen) == 12:
                engine.abort(requests[aborted])
        engine.close()
        return requests, seen

    return run_ranks(ThreadWorld(num_ranks), program)[0]


@pytest.mark.parametrize("num_ranks", [3])
def test_the_same_text_while_homes_change(model: PreTrainedModel, expected: list[list[int]], num_ranks: int) -> None:
    requests, seen = serve(num_ranks, model)
    assert [request.token_ids for request in requests] == expected
    assert requests[2].num_cached_tokens > 0, "a prefix was reused"
    assert len(requests[2].logprobs) == LENGTHS[2] and all(len(each.top) == 2 for each in requests[2].logprobs)
    widths = [[len(homes[index]) for homes in seen if index in homes] for index in range(len(PROMPTS))]
    changes = [after - before for each in widths for before, after in itertools.pairwise(each)]
    if num_ranks > 1:
        assert max(changes) > 0, "somebody got ranks when others were done"
    if num_ranks > 2:
        assert min(changes) < 0, "somebody made room for others"
    busy = [homes for homes in seen if len(homes) >= num_ranks]
    assert busy and all(len(each) == 1 for each in busy[-1].values()), "as many requests as ranks: one rank each"


def test_the_same_text_beside_a_cancelled_neighbour(model: PreTrainedModel, expected: list[list[int]]) -> None:
    requests, _ = serve(3, model, aborted=3)
    assert requests[3].finish_reason == "abort" and requests[3].token_ids == expected[3][: requests[3].num_output]
    for index in (0, 1, 2, 4, 5):
        assert requests[index].token_ids == expected[index]


def turns(model: PreTrainedModel, num_ranks: int, retained: bool = True) -> list[list[int]]:
    """The outputs of conversations whose second turns begin with the first, with all ranks as homes."""
    decode = replace(DECODE, home_ranks=0, trie_nodes=12, max_length=256)

    def program(comm: ThreadComm) -> list[list[int]]:
        engine = Engine.from_model(model, decode=decode, comm=comm, prefix_reuse=retained)
        if comm.rank:
            engine.work()
            return []
        found = []
        for prompt in PROMPTS[:4]:
            first = engine.generate([prompt], SamplingParams(max_new_tokens=18, ignore_eos=True))[0].token_ids
            params = SamplingParams(max_new_tokens=8, temperature=0.8, seed=1, ignore_eos=True)
            found += [first, engine.generate([[*prompt, *first, *range(5, 95)]], params)[0].token_ids]
        engine.close()
        return found

    return run_ranks(ThreadWorld(num_ranks), program)[0] if num_ranks > 1 else program(ThreadWorld(1).comm(0))


@pytest.mark.parametrize("num_ranks", [3])
def test_second_turns_where_all_ranks_are_homes(model: PreTrainedModel, num_ranks: int) -> None:
    """Ranks hold prefixes of unequal length then, and all of them draft all trees nevertheless."""
    assert turns(model, num_ranks) == turns(model, 1, retained=False)


@pytest.mark.parametrize("home_ranks", [0, 2])
def test_the_same_text_with_a_limit(model: PreTrainedModel, expected: list[list[int]], home_ranks: int) -> None:
    decode = DecodeConfig(**{**vars(DECODE), "home_ranks": home_ranks})
    requests, seen = serve(3, model, decode)
    assert [request.token_ids for request in requests] == expected
    widths = {len(homes) for each in seen for homes in each.values()}
    assert widths == {0: {3}, 1: {1}, 2: {1, 2}}[home_ranks]


def test_the_same_text_where_rows_are_padded() -> None:
    other = tiny_model("xglm", seed=1, spread=0.1, d_model=64, num_layers=2, attention_heads=4, ffn_dim=96)
    plain = Engine.from_model(other, decode=DecodeConfig.autoregressive(max_length=128))
    assert not plain.model.packed
    expected = [each.token_ids for each in plain.generate(PROMPTS, PARAMS)]
    requests, seen = serve(3, other)
    assert [request.token_ids for request in requests] == expected
    assert {len(homes) for each in seen for homes in each.values()} >= {1, 3}


def test_replicas_hold_as_many_times_the_requests(model: PreTrainedModel, expected: list[list[int]]) -> None:
    """Slots are per rank, a rank evaluates only what it serves, and what it does not serve it does not hold."""

    def program(comm: ThreadComm) -> tuple[list[int], int, list[int]]:
        decode = DecodeConfig(**{**vars(DECODE), "max_batch_size": 1})
        engine = Engine.from_model(model, decode=decode, comm=comm)
        requests = [engine.submit(prompt, params) for prompt, params in zip(PROMPTS[:4], PARAMS[:4], strict=True)]
        for _ in range(6):
            engine.step()
        running = engine.scheduler.running
        assert len(running) == 4 and engine.model.cache is not None and engine.model.cache.num_slots == 1
        held = [sum(count > 0 for count in request.num_computed_tokens) for request in running]
        while any(request.finish_reason is None for request in requests):
            engine.step()
        assert [request.token_ids for request in requests] == expected[:4]
        return sorted(home for request in running for home in request.homes), len(running), held

    for homes, _, held in run_ranks(ThreadWorld(4), program):
        assert held == [1, 1, 1, 1]
        assert homes == [] or len(homes) <= 4


# Seeded faults.


def test_mutant_a_rank_that_serves_with_stale_keys_and_values(
    model: PreTrainedModel, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks believe that one which joins holds everything."""
    enter = RankPages.enter

    def boasts(self: RankPages[Request], request: Request) -> int:
        held = enter(self, request)
        return len(request.tokens) - 1 if request.homes else held

    monkeypatch.setattr(RankPages, "enter", boasts)
    requests, _ = serve(3, model)
    assert [request.token_ids for request in requests] != expected


@pytest.mark.parametrize("forgetful", [0, 1, 2])
def test_mutant_a_home_forgotten_by_one_rank(model: PreTrainedModel, forgetful: int) -> None:
    def forget(engine: Engine) -> None:
        if engine.comm.rank != forgetful:
            return
        update = engine.scheduler.placement.update

        def forgets() -> None:
            update()
            for request in engine.scheduler.running:
                if request.homes == [0, 1, 2] and request.num_output > 4:
                    request.homes = [0, 1]

        engine.scheduler.placement.update = forgets  # type: ignore[method-assign]

    with pytest.raises(DesyncError, match=f"rank {forgetful}"):
        serve(3, model, prepare=forget)


def test_mutant_one_rank_lets_others_join_later(model: PreTrainedModel) -> None:
    def hesitate(engine: Engine) -> None:
        if engine.comm.rank == 2:
            engine.scheduler.limits.join_chunk = 1

    with pytest.raises(DesyncError, match="rank 2"):
        serve(3, model, prepare=hesitate)


def test_mutant_home_ranks_draft_on_as_if_nobody_had_joined(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They let the newcomer begin anew alone, which knows less than they do."""
    monkeypatch.setattr("lpr.engine.replica.SequenceState", Forgetful)
    monkeypatch.setattr("lpr.engine.drafts.SuffixIndex", lpr.core.suffix_index.SuffixIndex)
    monkeypatch.setattr("lpr.engine.step.draft_step", lpr.core.step.draft_step)
    monkeypatch.setattr("lpr.engine.sizing.Budgets", lpr.core.budgets.Budgets)
    with pytest.raises(DesyncError, match="their drafts or tokens are not the same"):
        serve(3, model)


class Forgetful(SequenceState):
    """Has home ranks without a word to what drafts."""

    @property
    def homes(self) -> list[int]:
        return self._homes

    @homes.setter
    def homes(self, ranks: list[int]) -> None:
        self._homes = list(ranks)


@pytest.mark.parametrize("column", [0, 1])
def test_mutant_a_rank_reads_anothers_tree_wrongly(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, column: int
) -> None:
    """It takes a node for another's child, or for another token: its tokens differ from the next step on."""

    def change(exchange: Exchange, draft: StepDraft, values: np.ndarray) -> None:
        if exchange.comm.rank != 2:
            return
        words = values[..., -2:]
        nodes = words[..., 0] & 0x3FFF
        if column:
            words[..., 1] = np.where(nodes > 0, words[..., 1] ^ 1, words[..., 1])
        else:
            words[..., 0] &= ~np.int32(0x3FFF << 14)  # all hang from the root

    change_received(monkeypatch, change)
    with pytest.raises(DesyncError, match="rank 2|does not fit together"):
        serve(3, model)


def test_a_rank_drafts_for_those_that_it_serves_alone(
    model: PreTrainedModel, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what it sends is of one size, whoever serves whom: a rank that forgets a home must not hang the others."""
    drafted: list[tuple[int, int, int]] = []
    draft_step = lpr.engine.step.draft_step

    def watched(*args: Any) -> Any:
        draft = draft_step(*args)
        trees = [tree is not None for tree in draft.trees]
        assert trees == [draft.rank in state.homes for state in draft.states]
        drafted.append((draft.rank, sum(trees), len(draft)))
        return draft

    monkeypatch.setattr(lpr.engine.step, "draft_step", watched)
    requests, seen = serve(4, model)
    assert [request.token_ids for request in requests] == expected
    assert any(mine < all_trees for _, mine, all_trees in drafted), "some drafted for a part of them only"
    steps_of_all = sum(count for rank, _, count in drafted if rank == 0)
    of_busiest = max(sum(mine for rank, mine, _ in drafted if rank == each) for each in range(4))
    assert of_busiest < 0.8 * steps_of_all and seen


# The choice alone.


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[Candidate], int, int]:
    num_ranks = draw(st.integers(1, 6))
    ranks = st.lists(st.integers(0, num_ranks - 1), max_size=num_ranks, unique=True).map(sorted)
    found = []
    for _ in range(draw(st.integers(0, 9))):
        counts = draw(st.lists(st.sampled_from([0, 3, 400, 5000]), min_size=num_ranks, max_size=num_ranks))
        serving = draw(ranks)
        gain = draw(st.sampled_from([0.5, 1.02, 1.3, float("inf")]))
        left = draw(st.sampled_from([1, 20, 1000]))
        lacking = [0 if rank in serving else count for rank, count in enumerate(counts)]
        found.append(Candidate(serving, lacking.__getitem__, left, lambda width, gain=gain: gain))
    return found, num_ranks, draw(st.sampled_from([1, 2, 99]))


@given(situations())
@settings(max_examples=200, deadline=None)
def test_choice(situation: tuple[list[Candidate], int, int]) -> None:
    requests, num_ranks, most = situation
    chosen = choose(requests, num_ranks, most)
    assert chosen == choose(requests, num_ranks, most)
    assert len(chosen) == len(requests)
    for homes in chosen:
        assert homes and homes == sorted(set(homes)) and set(homes) <= set(range(num_ranks)) and len(homes) <= most
    loads = [sum(rank in homes for homes in chosen) for rank in range(num_ranks)]
    cheap = all(each.lacking(rank) <= FILLS_PER_TOKEN * each.num_left for each in requests for rank in range(num_ranks))
    if cheap and requests:
        assert max(loads) <= -(-len(requests) // num_ranks), "evenly spread"
    if len(requests) >= num_ranks and cheap:
        assert all(len(homes) == 1 for homes in chosen)
    for request, homes in zip(requests, chosen, strict=True):
        moved = request.serving and not set(homes) & set(request.serving)
        assert not moved or request.lacking(homes[0]) <= FILLS_PER_TOKEN * request.num_left


def test_what_is_chosen_stays_chosen() -> None:
    """Nobody moves when nothing has changed."""
    for count in range(1, 9):
        requests = [Candidate([], lambda rank: 50, 100, lambda width: 1.2) for _ in range(count)]
        chosen = choose(requests, 4, 99)
        for _ in range(3):
            again = [
                Candidate(homes, lambda rank, homes=homes: 0 if rank in homes else 50, 100, lambda width: 1.2)
                for homes in chosen
            ]
            assert choose(again, 4, 99) == chosen


def test_speedup_by_the_table() -> None:
    """Where more nodes take no longer, ranks that share a tree help; where time grows with them, they do not."""
    flat = speedup(1, lambda count: 10.0 + 0.001 * count, 64, DecodeStats(100, 0, 250, 6400))
    steep = speedup(1, lambda count: count, 64, DecodeStats(100, 0, 250, 6400))
    assert 1.05 < flat < 1.5 and steep <= 1.0
    assert speedup(4, lambda count: 10.0, 64, DecodeStats(100, 0, 250, 6400)) < flat, "every further rank adds less"
    assert speedup(1, lambda count: 10.0, 64, DecodeStats(100, 0, 100, 6400)) < 1.05, "no draft was ever right"
    assert 1.0 < speedup(1, lambda count: 10.0, 64, DecodeStats(0, 0, 0, 0)) < 1.5, "a new request is believed a little"


def test_homes_are_a_setting() -> None:
    assert Scheduler(Limits(2, 3, 8, 3, True, True, 0)).capacity == 2
    assert Scheduler(Limits(2, 3, 8, 3, True, True, 1)).capacity == 6
