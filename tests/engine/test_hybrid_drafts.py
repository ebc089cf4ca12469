"""Low-bit copies of models with recurrent layers draft from scratch states; ids are those of plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import cycle, product
from typing import Any

import pytest
import torch

import lpr.engine.prepare
import lpr.engine.step
import lpr.model.self_check
from lpr import Completion, DecodeConfig, Engine, SamplingParams
from lpr.core.passes import FIRST, TRUSTED, Passes
from lpr.engine.draft_rank import DraftRank
from lpr.engine.line_states import LineStates
from lpr.model.kv_cache import KVCache
from lpr.model.low_bit.copy import LowBitCopy
from lpr.model.low_bit.products import LowBitPack
from lpr.model.recurrent.states import States
from lpr.model.self_draft import Ending, SelfDrafter
from lpr.model.step_inputs import Row
from tests.engine.test_draft_rank import compression, fix_copies
from tests.engine.test_self_draft import DECODE, PROMPTS, another_path_is_taken, copied, fix, ids
from tests.fakes.worlds import ThreadComm, ThreadWorld, generate_on, run_ranks
from tests.model.recurrent.test_recurrent import shared_model

SOME = ["qwen3_next", "jamba", "lfm2"]
"""Gated delta rule, Mamba 1, and convolutions alone."""
OTHERS = ["kimi_linear", "granitemoehybrid", "mamba2", "bamba", "falcon_h1", "zamba2", "nemotron_h", "olmo_hybrid"]
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in OTHERS]
IN_BATCHES = [
    *product(SOME, [1, 3]),
    *(pytest.param(*each, marks=pytest.mark.slow) for each in zip(OTHERS, cycle([1, 3]), strict=False)),
]
KINDS = ["kimi_linear", "granitemoehybrid", "mamba2"]
"""A decay per channel, Mamba 2, and no attention: a rank that drafts knows no more of a model than its states."""
ASKED = [PROMPTS[0], PROMPTS[1], PROMPTS[3]]
MIXED = [SamplingParams(max_new_tokens=24, temperature=0.8 * (seed > 0), seed=seed) for seed in range(3)]


def drafting(name: str, batch: int = 3, **more: Any) -> Engine:
    decode = replace(DECODE, max_batch_size=batch)
    engine = Engine.from_model(shared_model(name), decode=decode, self_draft="int8", **more)
    fix(engine)
    return engine


@cache
def plain(name: str, exact: bool = False) -> list[list[int]]:
    engine = Engine.from_model(shared_model(name), decode=DecodeConfig.autoregressive(), exact=exact)
    return ids(engine.generate(ASKED, MIXED))


@pytest.fixture
def rounds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy is the model itself, which reads scratch states: it chooses what the model chooses."""
    monkeypatch.setattr(lpr.engine.prepare, "make_copy", lambda model, form: LowBitCopy(model, form, 0))


def num_wrong(engine: Engine) -> float:
    """Choices of the copy that were not the model's."""
    assert engine.model.self_drafter is not None
    counts = engine.model.self_drafter.passes.copy
    return round(sum(counts.tried) - sum(counts.right) - sum(TRUSTED * (1 - first) for first in FIRST), 6)


@pytest.mark.parametrize("name, batch", IN_BATCHES)
def test_ids_are_those_of_plain_decoding(name: str, batch: int) -> None:
    done = drafting(name, batch).generate(ASKED, MIXED)
    assert ids(done) == plain(name)
    assert copied(done)[1] > 30


@pytest.mark.parametrize("name", [*SOME, *SLOW])
def test_a_copy_in_all_bits_chooses_what_the_model_chooses(name: str, rounds_nothing: None) -> None:
    """So its states are those of the model behind the same tokens."""
    engine = drafting(name)
    done = engine.generate(ASKED, MIXED)
    assert ids(done) == plain(name)
    assert num_wrong(engine) == 0 and copied(done)[1] > 40


def test_projections_of_recurrent_layers_are_rounded() -> None:
    drafter = drafting("qwen3_next").model.self_drafter
    assert drafter is not None and isinstance(drafter.copy, LowBitCopy)
    packs = {name: getattr(module, "pack", None) for name, module in drafter.copy.named_modules()}
    for name in ("in_proj_qkvz", "in_proj_ba", "out_proj"):
        assert isinstance(packs[f"model.model.layers.0.linear_attn.{name}"], LowBitPack), name


def test_sequences_of_a_padded_batch_are_drafted_one_by_one(
    rounds_nothing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lpr.model.self_check, "_packs", lambda *args: False)
    monkeypatch.setattr(lpr.engine.prepare, "self_check", lpr.model.self_check.self_check)
    engine = drafting("lfm2")
    done = engine.generate(ASKED, MIXED)
    assert not engine.model.packed and ids(done) == plain("lfm2")
    assert num_wrong(engine) == 0 and copied(done)[1] > 40


def test_ranks_that_draft_by_themselves() -> None:
    how = replace(DECODE, home_ranks=0, max_batch_size=3)
    for done in generate_on(2, shared_model("lfm2"), how, ASKED, MIXED, fix, self_draft="int8"):
        assert ids(done) == plain("lfm2") and copied(done)[1] > 20


@pytest.mark.slow
@pytest.mark.parametrize("name", SOME)
def test_exact_mode(name: str) -> None:
    done = drafting(name, exact=True).generate(ASKED, MIXED)
    assert ids(done) == plain(name, exact=True) and copied(done)[1] > 30


def test_preemption_and_prefixes_that_are_found() -> None:
    """Snapshots of states lie beside the scratch states."""
    decode = replace(DECODE, kv_tokens=224, max_length=120, max_batch_size=4)
    engine = Engine.from_model(shared_model("lfm2"), decode=decode, self_draft="int8")
    fix(engine)
    prompts, params = [[*range(40), 7 * i] for i in range(5)], [replace(MIXED[1], seed=i) for i in range(5)]
    alone = Engine.from_model(shared_model("lfm2"), decode=DecodeConfig.autoregressive())
    expected = ids(alone.generate(prompts, params))
    for _ in range(2):
        assert ids(engine.generate(prompts, params)) == expected
    assert engine.scheduler.placement.retained[1] > 0


def test_memory_of_scratch_states_is_counted() -> None:
    engine = drafting("lfm2")
    cache = engine.model.cache
    assert cache is not None and cache.states.scratch is not None
    each = cache.states.bytes_per_place
    assert cache.states.scratch.num_places == 3 and cache.states.num_bytes == each * (cache.states.num_places + 3)
    assert cache.num_bytes == cache.bytes_per_token * cache.num_rows + cache.states.num_bytes


# Ranks that only draft.


def drafted(name: str, num_drafting: int = 1, form: str = "int8") -> list[Completion]:
    """The completions of rank 0 beside so many ranks that draft."""
    decode = replace(DECODE, max_batch_size=3)
    how: dict[str, Any] = {"draft_ranks": num_drafting, "self_draft": form}
    every = generate_on(1 + num_drafting, shared_model(name), decode, ASKED, MIXED, fix_copies, **how)
    assert ids(every[1]) == ids(every[0])
    return every[0]


@pytest.mark.parametrize(
    "name", ["qwen3_next", "lfm2", *(pytest.param(name, marks=pytest.mark.slow) for name in KINDS)]
)
def test_a_rank_that_drafts(name: str) -> None:
    done = drafted(name)
    assert ids(done) == plain(name)
    assert copied(done)[1] > 30


@pytest.mark.parametrize("name", ["lfm2", *(pytest.param(name, marks=pytest.mark.slow) for name in SOME[:2])])
def test_what_a_rank_with_all_bits_drafts_stands(name: str, rounds_nothing: None) -> None:
    done = drafted(name)
    assert ids(done) == plain(name)
    assert compression(done) > LEAST


LEAST = 3.3


@pytest.mark.slow
def test_two_ranks_that_draft() -> None:
    assert ids(drafted("qwen3_next", 2)) == plain("qwen3_next")


@pytest.mark.slow
def test_requests_that_come_and_go_at_a_rank_that_drafts() -> None:
    prompts = [[(5 * i + 3 * j) % 89 for j in range(5 + 9 * i)] for i in range(7)]
    params = [SamplingParams(max_new_tokens=9 + 7 * i % 31, temperature=0.8 * (i % 2), seed=i) for i in range(7)]
    model = shared_model("qwen3_next")
    alone = Engine.from_model(model, decode=DecodeConfig.autoregressive())
    decode = replace(DECODE, kv_tokens=448, max_length=120, max_batch_size=3)

    def program(comm: ThreadComm) -> list[list[list[int]]]:
        engine = Engine.from_model(model, decode=decode, comm=comm, draft_ranks=1)
        fix_copies(engine)
        return [ids(engine.generate(prompts, params)) for _ in range(2)]

    expected = ids(alone.generate(prompts, params))
    assert run_ranks(ThreadWorld(2), program) == 2 * [2 * [expected]]


# Seeded faults.


def change_advance(patch: pytest.MonkeyPatch, change: Callable[[Sequence[Row], Any, bool, bool], Any]) -> None:
    """Let `change` give the entries along which states advance: of rows, what is accepted, and two flags.

    The first one is true for scratch states, the second one where others are written.
    """
    advance, run = States.advance, SelfDrafter._pass

    def mutant(self: States, rows: Sequence[Row], kept: Any, into: States | None = None) -> None:
        advance(self, rows, change(rows, kept, "is_scratch" in vars(self), into is not None), into)

    def marked(self: SelfDrafter, active: Any, cache: KVCache) -> Any:
        vars(cache.states.scratch)["is_scratch"] = True
        return run(self, active, cache)

    patch.setattr(States, "advance", mutant)
    patch.setattr(SelfDrafter, "_pass", marked)


def the_path_is_left_out(patch: pytest.MonkeyPatch) -> None:
    """Scratch states begin as those behind the first entry of the step."""
    change_advance(patch, lambda rows, kept, scratch, other: [each[:1] if other else each for each in kept])


def passes_do_not_advance(patch: pytest.MonkeyPatch) -> None:
    change_advance(patch, lambda rows, kept, scratch, other: [() if scratch and not other else each for each in kept])


def passes_keep_all_that_they_evaluate(patch: pytest.MonkeyPatch) -> None:
    def change(rows: Sequence[Row], kept: Any, scratch: bool, other: bool) -> Any:
        return [range(row.num_entries) for row in rows] if scratch and not other else kept

    change_advance(patch, change)


@pytest.mark.parametrize(
    "fault", [None, the_path_is_left_out, passes_do_not_advance, passes_keep_all_that_they_evaluate]
)
def test_stale_states_lose_drafts_and_no_token(
    fault: Callable[[pytest.MonkeyPatch], None] | None, rounds_nothing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes evaluate a text as well, of which the copy chooses no token or only the first."""
    look = Ending.look

    def with_text(self: Ending, passes: Passes) -> None:
        look(self, passes)
        self.text = [self.chain[-1] if self.chain else 62, 9][: max(0, min(self.most, 8) - len(self.chain) - 1)]
        self.text_shares = [0.9, 0.9][: len(self.text)]

    monkeypatch.setattr(Ending, "look", with_text)
    if fault is not None:
        fault(monkeypatch)
    engine = drafting("lfm2")
    assert ids(engine.generate(ASKED, MIXED)) == plain("lfm2")
    assert num_wrong(engine) == 0 if fault is None else num_wrong(engine) >= 3


def test_passes_that_advance_the_own_states_change_ids() -> None:
    engine = drafting("lfm2")
    assert engine.model.cache is not None
    engine.model.cache.states.scratch = engine.model.cache.states
    assert ids(engine.generate(ASKED, MIXED)) != plain("lfm2")


def advance_after_the_forward(model: Any, rows: Any, concluded: Any, fills: Any, again: Any, rank: int) -> None:
    for row in again.values():
        model.fill([row])
    ADVANCE(model, rows, concluded, fills, {}, rank)


ADVANCE = lpr.engine.step.advance_states


@pytest.mark.parametrize("is_right", [True, False])
def test_a_rank_that_took_another_path_computes_the_accepted_one(
    is_right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    another_path_is_taken(monkeypatch)
    if not is_right:
        monkeypatch.setattr(lpr.engine.step, "advance_states", advance_after_the_forward)
    how = replace(DECODE, home_ranks=0, max_batch_size=3)
    run = partial(generate_on, 2, shared_model("lfm2"), how, ASKED, MIXED, fix, self_draft="int8")
    try:
        same = all(ids(done) == plain("lfm2") for done in run())
    except (RuntimeError, ValueError, AssertionError, IndexError, KeyError):
        same = False
    assert same == is_right


def the_scratch_states_never_go_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LineStates, "go_to", lambda self, num_held, num_right: num_held)


def the_own_states_stay(patch: pytest.MonkeyPatch) -> None:
    """Those of the slot are not written behind committed tokens, and count as if they were."""
    change_advance(patch, lambda rows, kept, scratch, other: [() if scratch and other else each for each in kept])


@pytest.mark.parametrize("fault", [passes_do_not_advance, the_scratch_states_never_go_back])
@pytest.mark.slow(first=1)
def test_wrong_states_of_a_rank_that_drafts_lose_drafts_and_no_token(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    best = without_a_fault()
    fault(monkeypatch)
    done = drafted("qwen3_next")
    assert ids(done) == plain("qwen3_next")
    assert compression(done) < best - 0.3


@pytest.mark.parametrize("fault", [None, the_scratch_states_never_go_back, the_own_states_stay])
@pytest.mark.slow(first=1)
def test_places_of_a_rank_that_drafts_have_the_states_of_their_tokens(
    fault: Callable[[pytest.MonkeyPatch], None] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before passes, each place has the states that the copy computes from the beginning; with 4 bits, often wrong."""
    if fault is not None:
        fault(monkeypatch)
    run, worst, counts = DraftRank._pass, [0.0], set[int]()

    def check(self: DraftRank, active: Sequence[Ending], *limits: float) -> None:
        cache, drafter = self.model.cache, self.drafter
        assert cache is not None and cache.states.scratch is not None
        for each in active:
            line, start = self._lines[each.slot], each.row().num_cached
            assert line.states is not None
            base, mark = line.states._base, line.states._mark
            places = (start, cache.states.scratch, each.slot), (base, cache.states, each.slot)
            for count, states, place in (*places, (mark, cache.states, cache.num_slots + each.slot)):
                if count:
                    fresh = cache.resized(1, cache.rows_per_slot)
                    assert fresh.states.scratch is not None
                    drafter.fill(Row.chain(0, 0, line.held[:count], 0), fresh)
                    for site, right in fresh.states.scratch.of(0).items():
                        error = (states.of(place)[site] - right).abs().max() / right.abs().max()
                        worst[0] = max(worst[0], float(error))
            counts.update([each.num_right, start - base, mark - base])
        run(self, active, *limits)

    monkeypatch.setattr(DraftRank, "_pass", check)
    assert ids(drafted("qwen3_next", form="int4")) == plain("qwen3_next")
    assert (worst[0] < 1e-3) == (fault is None)
    assert max(counts) > 1


@cache
def without_a_fault() -> float:
    return compression(drafted("qwen3_next"))


def test_passes_of_nan_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second pass of each step gives NaN: the draft ends there, and states of the model stay finite."""
    engine = drafting("lfm2")
    drafter = engine.model.self_drafter
    assert drafter is not None
    run, calls = drafter._logits, [0]

    def logits(*args: Any) -> torch.Tensor:
        calls[0] += 1
        found = run(*args)
        return found.fill_(torch.nan) if calls[0] % 2 == 0 else found

    monkeypatch.setattr(drafter, "_logits", logits)
    done = engine.generate(ASKED, MIXED)
    assert ids(done) == plain("lfm2") and calls[0] > 10
    cache = engine.model.cache
    assert cache is not None and all(each.isfinite().all() for each in cache.states._tensors.values())
