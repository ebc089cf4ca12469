"""Ranks that only draft: ids are those of plain decoding, drafts stand, and faults that must show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import lpr.engine.draft_rank
from lpr import Completion, DecodeConfig, Engine, SamplingParams
from lpr.config import InputError, TreeSizes
from lpr.core.heads import FROM_ROOT, HeadDraft, read_ahead
from lpr.engine.draft_rank import DraftRank, Line, along, followed
from lpr.model.self_draft import SelfDrafter
from lpr.model.step_inputs import Row
from tests.engine.test_self_draft import (
    DECODE,
    GREEDY,
    PROMPTS,
    SAMPLED,
    a_choice_of_the_copy_counts,
    copied,
    fix,
    ids,
    model_of,
    noise_of_another_seed,
    plain,
    plain_ids,
)
from tests.fakes.worlds import ThreadComm, ThreadWorld, generate_on, run_ranks

MIXED = [GREEDY[0], *SAMPLED[1:]]


def fix_copies(engine: Engine) -> None:
    """Let ranks that draft make four passes in every step, whatever they take."""
    if engine.model.self_drafter is not None:
        fix(engine)


def drafted(
    num_ranks: int = 2, num_drafting: int = 1, decode: DecodeConfig = DECODE, params: Sequence[SamplingParams] = MIXED,
    prompts: Sequence[Sequence[int]] = PROMPTS, **options: Any,
) -> list[Completion]:  # fmt: skip
    """The completions of rank 0, which are those of all ranks."""
    how = {"draft_ranks": num_drafting, **options}
    every = generate_on(num_ranks, model_of(), decode, prompts, params, fix_copies, **how)
    for other in every[1:]:
        assert ids(other) == ids(every[0]) and copied(other) == copied(every[0])
    return every[0]


def compression(done: Sequence[Completion]) -> float:
    return sum(each.stats.num_tokens for each in done) / sum(each.stats.num_steps for each in done)


@pytest.mark.parametrize(
    "num_ranks, num_drafting, decode",
    [
        (3, 2, DECODE),
        (3, 1, replace(DECODE, home_ranks=0)),
        (2, 1, replace(DECODE, window_size="auto", trie_nodes="auto", max_nodes=24)),
    ],
)
@pytest.mark.slow(first=2)
def test_ids_are_those_of_plain_decoding(num_ranks: int, num_drafting: int, decode: DecodeConfig) -> None:
    for params in (GREEDY, SAMPLED):
        done = drafted(num_ranks, num_drafting, decode, params)
        assert ids(done) == plain_ids(*params)
        assert copied(done)[1] > 60


def test_what_is_drafted_meanwhile_stands() -> None:
    """Four passes a step bring up to four tokens a step; a second rank, which follows other ways, brings more."""
    with_one = compression(drafted())
    assert with_one > 3.0
    assert compression(drafted(3, 2)) > with_one + 0.05


def test_passes_evaluate_what_the_text_has_behind_the_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a text that has all that comes, four passes draft far more than four tokens."""
    texts = [[*prompt, *text] for prompt, text in zip(PROMPTS, plain_ids(*MIXED), strict=True)]

    def text_of(self: Line, request: Any, sizes: Any) -> SimpleNamespace:
        def continuation(chain: list[int], count: int) -> tuple[list[int], list[float]]:
            known = [*request.tokens, *chain]
            found = [text[len(known) :][:count] for text in texts if text[: len(known)] == known]
            return (found[0], [0.99] * len(found[0])) if found else ([], [])

        return SimpleNamespace(continuation=continuation)

    without = compression(drafted())
    monkeypatch.setattr(Line, "text_of", text_of)
    done = drafted()
    assert ids(done) == plain_ids(*MIXED)
    assert compression(done) > without + 1.0


def test_a_line_has_the_text_of_its_request() -> None:
    line, request, sizes = Line(0), SimpleNamespace(tokens=[1, 2, 3, 4, 1, 2]), TreeSizes(trie_nodes=8)
    assert line.text_of(request, sizes).continuation([], 2)[0] == [3, 4]  # type: ignore[arg-type]
    request.tokens = [*request.tokens, 7, 1, 2, 7, 1, 2]
    assert line.text_of(request, sizes).continuation([], 2)[0] == [7, 1]  # type: ignore[arg-type]
    assert line.text_of(request, sizes).continuation([7], 2)[0] == [1, 2]  # type: ignore[arg-type]


def test_batches_come_and_go() -> None:
    prompts = [[(5 * i + 3 * j) % 89 for j in range(5 + 9 * i)] for i in range(9)]
    params = [SamplingParams(max_new_tokens=9 + 7 * i % 31, temperature=0.8 * (i % 2), seed=i) for i in range(9)]
    done = drafted(3, 1, replace(DECODE, max_batch_size=4), params, prompts)
    assert ids(done) == ids(plain().generate(prompts, params))
    assert copied(done)[1] > 60


def test_preemption_and_prefixes_that_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, filled = [[*range(40), 7 * i] for i in range(5)], list[int]()
    params, model = [replace(SAMPLED[0], seed=i) for i in range(5)], model_of()
    expected = ids(plain().generate(prompts, params))
    fill = SelfDrafter.fill
    monkeypatch.setattr(
        SelfDrafter, "fill", lambda self, row, cache: (filled.append(row.num_entries), fill(self, row, cache))[1]
    )

    def program(comm: ThreadComm) -> tuple[int, list[int]]:
        decode = replace(DECODE, kv_tokens=336, max_length=120, max_batch_size=4)
        engine = Engine.from_model(model, decode=decode, comm=comm, draft_ranks=1)
        fix_copies(engine)
        sums = []
        for _ in range(2):
            assert ids(engine.generate(prompts, params)) == expected
            sums.append(sum(filled))
        return engine.scheduler.counts.preemptions, sums

    (preemptions, _), (_, (first, both)) = run_ranks(ThreadWorld(2), program)
    assert preemptions > 0
    assert first >= 40 and both - first < first, "the second time a part of the prompts is found"


@pytest.mark.parametrize(
    "rule",
    [{"repetition_penalty": 1.4}, {"logit_bias": {3: 2.0, 8: -5.0}, "min_new_tokens": 6, "stop_token_ids": (3, 9)}],
    ids=lambda rule: next(iter(rule)),
)
def test_penalties_and_limits_act_on_drafts(rule: dict[str, Any]) -> None:
    params = [replace(each, **rule) for each in MIXED]
    done = drafted(params=params)
    assert ids(done) == plain_ids(*params)
    assert copied(done)[1] >= 0.5 * sum(each.stats.num_tokens - each.stats.num_steps for each in done)


def test_passes_are_as_many_as_fit() -> None:
    """By the clock: ids are the same, however late the copy is."""
    every = generate_on(2, model_of(), DECODE, PROMPTS, MIXED, draft_ranks=1)
    assert ids(every[0]) == plain_ids(*MIXED)


def test_the_full_weights_of_a_draft_rank_are_released(tmp_path: Path) -> None:
    model_of().save_pretrained(tmp_path)
    alone = Engine.from_pretrained(str(tmp_path), DecodeConfig.autoregressive(), dtype="float32")
    expected = ids(alone.generate(PROMPTS, MIXED))

    def program(comm: ThreadComm) -> tuple[list[list[int]], int]:
        engine = Engine.from_pretrained(str(tmp_path), DECODE, comm=comm, dtype="float32", draft_ranks=1)
        fix_copies(engine)
        found = ids(engine.generate(PROMPTS, MIXED))
        layer = engine.model.model.get_submodule("model.layers.0.mlp.down_proj")
        return found, int("LowBit" in type(layer).__name__)

    assert run_ranks(ThreadWorld(2), program) == [(expected, 0), (expected, 1)]


@pytest.mark.parametrize("num_ranks, num_drafting", [(1, 1), (2, 2), (2, -1)])
def test_a_job_needs_a_rank_that_holds_the_model(num_ranks: int, num_drafting: int) -> None:
    with pytest.raises(InputError, match=f"draft_ranks={num_drafting}: of the job's {num_ranks} replicas"):
        drafted(num_ranks, num_drafting)


@pytest.mark.parametrize("is_fixed", [True, False])
@pytest.mark.parametrize("draft_ranks", [1, 0])
def test_ranks_that_share_the_weights_of_a_copy_draft_the_same(is_fixed: bool, draft_ranks: int) -> None:
    rows, every = rows_of_two(is_fixed, draft_ranks)
    assert [ids(each) for each in every] == 4 * [plain_ids(*MIXED)]
    assert rows[0] == rows[1] and len(rows[0]) > 10
    assert copied(every[0])[1] > (60 if is_fixed else 0)


def rows_of_two(is_fixed: bool, draft_ranks: int) -> tuple[list[list[Any]], list[list[Completion]]]:
    """The rows of the copy on each of the two ranks that share it, what a pass takes, and all ranks' completions.

    The second rank measures other times.
    """
    seen: list[list[Any]] = [[], []]
    drafters = dict[int, SelfDrafter]()

    def watch(engine: Engine) -> None:
        if is_fixed:
            fix_copies(engine)
        drafter = engine.model.self_drafter
        assert (drafter is not None) == (not draft_ranks or engine.comm.rank == 1)
        if drafter is None or engine.comm.rank == 0:
            return
        drafters[engine.comm.tp_rank] = drafter
        mine, draft, fill, agreed = seen[engine.comm.tp_rank], drafter._logits, drafter.fill, drafter._agreed
        if engine.comm.tp_rank and draft_ranks:
            drafter.passes.pass_time = lambda num_entries: 1e-3  # type: ignore[method-assign]
        elif engine.comm.tp_rank:
            drafter._agreed = lambda times, *drafted: agreed([ms + 1e3 for ms in times], *drafted)  # type: ignore[method-assign]

        def shown(row: Row) -> tuple[int, int, list[int]]:
            return row.slot, row.num_cached, row.tokens.tolist()

        def logits(rows: Sequence[Row], *more: Any) -> Any:
            mine.append([*map(shown, rows)])
            return draft(rows, *more)

        def filled(row: Row, cache: Any) -> None:
            mine.append(shown(row))
            fill(row, cache)

        drafter._logits, drafter.fill = logits, filled  # type: ignore[method-assign]

    how = {"draft_ranks": 1} if draft_ranks else {"self_draft": "int8"}
    done = generate_on(4, model_of(), DECODE, PROMPTS, MIXED, watch, tp=2, **how)
    if not draft_ranks:
        for rank, drafter in drafters.items():
            seen[rank].append(drafter.passes.pass_time(1))
    return seen, done


def test_ranks_that_go_by_their_own_clocks_show(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (lpr.engine.draft_rank, lpr.engine.prepare):
        monkeypatch.setattr(module, "decide_as_first", lambda comm, decisions, *seen: decisions)
    for draft_ranks in (1, 0):
        rows, _ = rows_of_two(False, draft_ranks)
        assert rows[0] != rows[1]


# Drafts as data.


def guesses() -> HeadDraft:
    """5 (.9) and 6 (.1) behind the last token, 7 and 8 behind 5."""
    draft = HeadDraft(is_copy=True)
    first = draft.add(0, 5, 59000)
    draft.add(0, 6, 6500)
    draft.add(first, 7, 40000)
    draft.add(first, 8, 20000)
    return draft


def test_what_lies_behind_the_emitted_tokens_is_kept() -> None:
    block = guesses().pack(FROM_ROOT, 0, 8)
    kept = read_ahead([block, block], [5])
    assert kept is not None and kept.tokens == [-1, 7, 8] and kept.parents == [-1, 0, 0]
    assert read_ahead([block], [6]) is None and read_ahead([block], [5, 9]) is None
    other = HeadDraft(is_copy=True)
    other.add(other.add(0, 5, 59000), 9, 100)
    merged = read_ahead([block, other.pack(FROM_ROOT, 0, 8)], [5])
    assert merged is not None and merged.tokens == [-1, 7, 8, 9]


def test_ranks_follow_different_ways() -> None:
    assert [followed(guesses(), place) for place in range(4)] == [(3, -1), (4, -1), (2, -1), (3, 0)]
    assert followed(HeadDraft(is_copy=True), 2) == (0, 1)
    draft, guess = along(guesses(), 4)
    assert draft.tokens[guess] == 8 and [draft.tokens[each] for each in draft.path_to(guess)] == [5, 8]


# Seeded faults.


def run_with(patch: Callable[[pytest.MonkeyPatch], None]) -> tuple[bool, int, float]:
    with pytest.MonkeyPatch.context() as context:
        patch(context)
        done = drafted(decode=replace(DECODE, max_batch_size=4))
    return ids(done) == plain_ids(*MIXED), copied(done)[1], compression(done)


@cache
def without_a_fault() -> tuple[bool, int, float]:
    return run_with(lambda patch: None)


def stale_drafts_are_kept(patch: pytest.MonkeyPatch) -> None:
    """What was drafted behind an earlier token counts as drafted behind the last one."""
    monkey = lpr.engine.draft_rank.read_ahead
    patch.setattr(lpr.engine.draft_rank, "read_ahead", lambda blocks, emitted: monkey(blocks, emitted[:1]))


def kv_that_was_not_computed_counts(patch: pytest.MonkeyPatch) -> None:
    """Tokens whose K/V the rank has not computed count as if it had."""
    patch.setattr(Line, "num_held", lambda self, tokens, chain=(): len(tokens) + len(chain))


def nothing_is_followed(patch: pytest.MonkeyPatch) -> None:
    """Every step's draft begins anew behind the root, as if the last one had missed."""
    patch.setattr(lpr.engine.draft_rank, "read_ahead", lambda blocks, emitted: None)


@pytest.mark.parametrize(
    "fault", [stale_drafts_are_kept, kv_that_was_not_computed_counts, nothing_is_followed, noise_of_another_seed]
)
def test_faults_of_drafts_lose_drafts_and_no_token(fault: Callable[[pytest.MonkeyPatch], None]) -> None:
    _, most, best = without_a_fault()
    same, accepted, found = run_with(fault)
    assert same and accepted < most and found < best


def test_a_token_of_the_copy_that_is_committed_changes_ids() -> None:
    def fault(patch: pytest.MonkeyPatch) -> None:
        noise_of_another_seed(patch)
        a_choice_of_the_copy_counts(patch)

    try:
        same, _, _ = run_with(fault)
    except (RuntimeError, ValueError, AssertionError, IndexError):
        return  # noticed
    assert not same


def test_a_draft_rank_forgets_k_v_of_other_weights() -> None:
    model = model_of()

    def program(comm: ThreadComm) -> list[int]:
        engine = Engine.from_model(model, decode=DECODE, comm=comm, draft_ranks=1)
        fix_copies(engine)
        engine.generate(PROMPTS, MIXED)
        role = engine.replica.drafting
        if role is None:
            return []
        assert isinstance(role, DraftRank) and any(line.held for line in role._lines)
        role.forget()
        return [len(line.held) for line in role._lines]

    serving, drafting = run_ranks(ThreadWorld(2), program)
    assert serving == [] and set(drafting) == {0}
