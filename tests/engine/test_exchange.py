"""Lookahead parallelism on a thread world: the same text for any number of ranks, one gather per step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from lpr import DecodeConfig, Engine, SamplingParams
from lpr.config import InputError
from lpr.dist.comm import agree
from lpr.dist.errors import CommError
from lpr.engine.exchange import DesyncError, Exchange, check_replica
from lpr.engine.request import Request
from lpr.model.input_builder import Row
from lpr.model.loader import model_digest
from lpr.native import StepDraft
from tests.fakes.altered_gather import change_received, change_sent
from tests.fakes.models import plain_ids, tiny_model
from tests.fakes.worlds import ThreadComm, ThreadWorld, generate_on, run_ranks

PROMPTS = [[3, 5, 7, 9, 11, 13, 5, 7], [2, 4], [50] * 20 + [3, 4], [7, 8, 9] * 5, [(i * i) % 97 for i in range(90)]]
PARAMS = [
    SamplingParams(max_new_tokens=32, temperature=0.8 * (i % 2), top_p=(1.0, 0.9)[i // 2 % 2], seed=i)
    for i in range(len(PROMPTS))
]
CONFIGS = {
    "both": DecodeConfig(window_size=5, trie_nodes=24),
    "window": DecodeConfig(trie_nodes=0, window_size=6, ngram_size=4, max_batch_size=1),
    "trie": DecodeConfig(window_size=0, trie_nodes=16, max_batch_size=3),
    "tiny": DecodeConfig(
        window_size=2, ngram_size=2, guess_set_size=1, trie_nodes=1, branch_length=3, max_batch_size=2
    ),
}

SHARED = replace(CONFIGS["both"], home_ranks=0)
"""Every rank works on every tree, also when there are more requests than ranks: ancestors are evaluated by several."""


@pytest.fixture(scope="module")
def expected(model: PreTrainedModel) -> list[list[int]]:
    return plain_ids(model, PROMPTS, PARAMS)


CASES = [("both", 3), ("window", 4), ("trie", 2), ("tiny", 4)]


@pytest.mark.parametrize("name, num_ranks", CASES)
@pytest.mark.slow(first=3)
def test_the_same_text_for_any_number_of_ranks(
    model: PreTrainedModel, expected: list[list[int]], name: str, num_ranks: int
) -> None:
    for completions in generate_on(num_ranks, model, CONFIGS[name], PROMPTS, PARAMS):
        assert [each.token_ids for each in completions] == expected


def test_more_ranks_take_fewer_steps(model: PreTrainedModel) -> None:
    greedy = [SamplingParams(max_new_tokens=60)] * 3
    decode = DecodeConfig(window_size=4, trie_nodes=8, max_batch_size=1)
    steps = {
        n: sum(each.stats.num_steps for each in generate_on(n, model, decode, PROMPTS[:3], greedy)[0]) for n in (1, 4)
    }
    assert steps[4] < steps[1]


def test_ranks_take_the_steps_of_one_rank_with_their_budget(model: PreTrainedModel) -> None:
    """Nodes are split, never lost: what lets one process count the steps of many (benchmarks/strong_scaling.py)."""
    decode = DecodeConfig(window_size=4, trie_nodes=12, max_batch_size=2, home_ranks=0)
    alone = generate_on(1, model, decode.for_one_rank(3), PROMPTS[:3], PARAMS[:3])[0]
    together = generate_on(3, model, decode, PROMPTS[:3], PARAMS[:3])[0]
    assert [each.stats for each in alone] == [each.stats for each in together]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_one_gather_of_fixed_size_per_step(model: PreTrainedModel, num_ranks: int) -> None:
    def program(comm: ThreadComm) -> tuple[list[int], int, int, set[int]]:
        engine = Engine.from_model(model, decode=CONFIGS["both"], comm=comm)
        at_start = len(comm.gathered_bytes)
        steps = 0
        original = engine.replica.exchange.gather

        def counted(*args: object) -> object:
            nonlocal steps
            steps += 1
            return original(*args)  # type: ignore[arg-type]

        engine.replica.exchange.gather = counted  # type: ignore[method-assign,assignment]
        engine.generate(PROMPTS, PARAMS)
        payloads = {4 * engine.replica.exchange.payload_words(num_trees) for num_trees in range(9)}
        return comm.gathered_bytes[at_start:], comm.num_broadcasts, steps, payloads

    for sizes, num_broadcasts, steps, payloads in run_ranks(ThreadWorld(num_ranks), program):
        assert len(sizes) == steps > 10, "one collective per decode step"
        assert set(sizes) <= payloads and len(payloads) <= 5, "whose size depends on the number of trees only"
        # To configure, and to submit all requests at once; a rank alone has no rank to tell.
        assert num_broadcasts == (2 if num_ranks > 1 else 0)


def test_rank_zero_leads(model: PreTrainedModel, expected: list[list[int]]) -> None:
    """Requests that only rank 0 knows of, submitted while others run; a broadcast only where commands wait."""

    def program(comm: ThreadComm) -> tuple[list[list[int]] | None, int]:
        engine = Engine.from_model(
            model, decode=DecodeConfig(window_size=3, trie_nodes=16, max_batch_size=2), comm=comm
        )
        if comm.rank:
            engine.work()
            return None, comm.num_broadcasts
        requests = [engine.submit(PROMPTS[0], PARAMS[0]), engine.submit(PROMPTS[1], PARAMS[1])]
        for prompt, params in list(zip(PROMPTS, PARAMS, strict=True))[2:]:
            for _ in range(3):
                engine.step()
            requests.append(engine.submit(prompt, params))
        while not engine.is_idle:
            engine.step()
        with pytest.raises(InputError, match="the prompt is empty"):
            engine.submit([], PARAMS[0])
        engine.configure(DecodeConfig.autoregressive())
        [again] = engine.generate([PROMPTS[0]], PARAMS[0])
        assert again.token_ids == requests[0].token_ids
        assert again.stats.num_steps == PARAMS[0].max_new_tokens
        engine.close()
        for request in requests:
            assert [token for chunk in request.take() for token in chunk.token_ids] == request.token_ids
        return [request.token_ids for request in requests], comm.num_broadcasts

    (texts, messages), *others = run_ranks(ThreadWorld(3), program)
    assert texts == expected
    # One to configure at the start, two requests at once, one for each of the others, three to configure, submit, stop.
    assert messages == 1 + 1 + len(PROMPTS) - 2 + 3
    assert others == [(None, messages)] * 2


@pytest.mark.parametrize("decode", [DecodeConfig.autoregressive(max_batch_size=8), CONFIGS["both"]])
def test_results_of_plain_steps_need_no_placement(
    model: PreTrainedModel, expected: list[list[int]], decode: DecodeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank, many requests: a step without drafts places its results without an upload. Trees have places."""
    placed: list[int] = []
    place = Exchange._place

    def counted(self: Exchange, local: torch.Tensor, places: torch.Tensor | None, table: torch.Tensor) -> None:
        placed.extend([places.shape[1]] if places is not None else [])
        place(self, local, places, table)

    layout = Exchange._layout
    monkeypatch.setattr(Exchange, "_place", counted)
    # As on a GPU: on a CPU numpy places them.
    monkeypatch.setattr(Exchange, "_layout", lambda *args: replace(layout(*args), table=None))
    engine = Engine.from_model(model, decode=decode)
    assert [each.token_ids for each in engine.generate(PROMPTS, PARAMS)] == expected
    assert (len(placed) > 10) == (decode.trie_nodes > 0) and (decode.trie_nodes > 0 or not placed)


# Seeded faults: what would make replicas drift apart must be found, at the step at which it happens.


def perturb_what_is_not_owned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[StepDraft, torch.Tensor]]:
    """Ranks compute ancestors that they do not own a little differently, as GEMMs of other numbers of rows do.

    Returns, as they come, drafts in which there were such nodes and the perturbed results.
    """
    perturbed: list[tuple[StepDraft, torch.Tensor]] = []

    def noisy(draft: StepDraft, local: torch.Tensor) -> torch.Tensor:
        nodes = [(node, draft.shards[index][draft.rank]) for index in draft.mine
                 for node in draft.shards[index][draft.rank].nodes]  # fmt: skip
        others = [place for place, (node, shard) in enumerate(nodes) if node not in shard.owned]
        local = local.clone()
        local[others, 0] = (local[others, 0] + 1) % 97
        if others:
            perturbed.append((draft, local))
        return local

    monkeypatch.setattr(Exchange, "gather", Exchange.gather)  # restored afterwards
    change_sent(Exchange, noisy)
    return perturbed


def test_a_node_has_its_owners_value(
    model: PreTrainedModel, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    perturbed = perturb_what_is_not_owned(monkeypatch)
    for completions in generate_on(3, model, SHARED, PROMPTS, PARAMS):
        assert [each.token_ids for each in completions] == expected
    assert perturbed


def test_mutant_own_value_for_an_ancestor(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    perturbed = perturb_what_is_not_owned(monkeypatch)

    def own_values(exchange: Exchange, draft: StepDraft, values: np.ndarray) -> None:
        local, start = next((local for each, local in perturbed if each is draft), None), 0
        for index in draft.mine if local is not None else ():
            split = draft.shards[index]
            mine = split[exchange.comm.rank].nodes
            for rank, shard in enumerate(split):
                tree = draft.served[rank].index(index) if shard.owned else 0
                for place, node in enumerate(shard.owned):
                    if node in mine:
                        values[rank, tree, place, 0] = local[start + mine.index(node), 0]
            start += len(mine)

    change_received(monkeypatch, own_values)
    with pytest.raises(DesyncError, match=r"the replicated state of rank \d"):
        generate_on(3, model, SHARED, PROMPTS, PARAMS)


def test_mutant_another_trie_on_one_rank(model: PreTrainedModel) -> None:
    def spoil(engine: Engine) -> None:
        if engine.comm.rank == 2:
            engine.replica.drafts.shared.extend([3, 4, 60, 61, 62, 63, 64])

    with pytest.raises(DesyncError, match="the replicated state of rank 2 differs from that of the other 3 of 4 ranks"):
        generate_on(4, model, CONFIGS["trie"], PROMPTS, PARAMS, spoil)


def test_mutant_reordered_gather(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers in place, results of ranks 0 and 1 exchanged on one rank."""

    def swapped(exchange: Exchange, draft: StepDraft, values: np.ndarray) -> None:
        if exchange.comm.rank == 1:
            values[[0, 1]] = values[[1, 0]]

    change_received(monkeypatch, swapped)
    with pytest.raises(DesyncError):
        generate_on(3, model, CONFIGS["both"], PROMPTS, PARAMS)


def test_a_token_of_a_request_that_others_serve_is_compared(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank only reads what has come of such requests, and learns nothing from it."""

    def another_token(exchange: Exchange, draft: StepDraft, values: np.ndarray) -> None:
        others = [index for index in draft.served[0] if index not in draft.mine]
        if exchange.comm.rank == 1 and len(others) > 1:
            place = draft.served[0].index(others[1])
            values[0, place, 0, 0] = (values[0, place, 0, 0] + 1) % 97

    change_received(monkeypatch, another_token)
    for name in ("trie", "plain"):
        decode = CONFIGS[name] if name in CONFIGS else DecodeConfig.autoregressive()
        with pytest.raises(DesyncError, match="the replicated state of rank 1 differs"):
            generate_on(3, model, decode, PROMPTS, PARAMS)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_requests_that_move_are_drafted_anew(
    model: PreTrainedModel, num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank has no drafting state of requests that it does not serve; all home ranks rebuild it where one joins."""
    moved = set[tuple[object, int]]()
    set_homes = Request.homes.fset
    assert set_homes is not None

    def noted(request: Request, homes: list[int]) -> None:
        if request.state is not None and not set(homes) <= set(request.homes):
            moved.add((request.id, request.num_output))
        set_homes(request, homes)

    monkeypatch.setattr(Request, "homes", Request.homes.setter(noted))
    lengths = [4, 9, 60, 14, 80, 6, 70, 20]
    prompts = [PROMPTS[index % len(PROMPTS)] + [index] for index in range(len(lengths))]
    params = [
        SamplingParams(max_new_tokens=length, temperature=0.8 * (index % 3 == 1), seed=index, ignore_eos=True)
        for index, length in enumerate(lengths)
    ]
    ids = plain_ids(model, prompts, params)
    decode = DecodeConfig(window_size=3, trie_nodes=16, max_batch_size=2)
    for completions in generate_on(num_ranks, model, decode, prompts, params):
        assert [each.token_ids for each in completions] == ids
    assert any(num_output for _, num_output in moved), "none that had begun"


def test_mutant_another_seed_on_one_rank(model: PreTrainedModel) -> None:
    def program(comm: ThreadComm) -> None:
        engine = Engine.from_model(model, decode=CONFIGS["both"], comm=comm)
        engine.generate(PROMPTS[:1], SamplingParams(max_new_tokens=40, temperature=1.5, seed=int(comm.rank == 1)))

    with pytest.raises(DesyncError, match="request 0 of this rank differs from that of rank 0"):
        run_ranks(ThreadWorld(3), program)


def test_mutant_another_configuration_on_one_rank(model: PreTrainedModel) -> None:
    def program(comm: ThreadComm) -> None:
        Engine.from_model(model, decode=DecodeConfig(trie_nodes=16 + (comm.rank == 1)), comm=comm)

    with pytest.raises(InputError, match="rank 1 has another configuration than rank 0"):
        run_ranks(ThreadWorld(3), program)


def test_a_rank_that_dies_ends_the_others(model: PreTrainedModel) -> None:
    def program(comm: ThreadComm) -> None:
        engine = Engine.from_model(model, decode=CONFIGS["both"], comm=comm)
        if comm.rank == 1:
            engine.generate(PROMPTS[:1], SamplingParams(max_new_tokens=1))
            raise KeyError("rank 1 is gone")
        engine.generate(PROMPTS[:1], SamplingParams(max_new_tokens=1))
        with pytest.raises(CommError, match="another rank has ended or hangs"):
            engine.generate(PROMPTS, PARAMS)

    with pytest.raises(KeyError):
        run_ranks(ThreadWorld(3), program)


# Two axes: replicas of several ranks. Here each rank holds the full model; tests/model/test_parallel.py shards it.


@pytest.mark.parametrize("num_ranks, tp", [(4, 2)])
def test_replicas_of_several_ranks(model: PreTrainedModel, expected: list[list[int]], num_ranks: int, tp: int) -> None:
    together = generate_on(num_ranks, model, CONFIGS["both"], PROMPTS, PARAMS, tp=tp)
    for completions in together:
        assert [each.token_ids for each in completions] == expected
    alone = generate_on(num_ranks // tp, model, CONFIGS["both"], PROMPTS, PARAMS)
    assert [each.stats for each in together[-1]] == [each.stats for each in alone[0]], "tp adds no nodes"


def lie(engine: Engine) -> None:
    """A rank that is not its replica's first one computes other results than that one."""
    if engine.comm.tp_rank:
        change_sent(engine.replica.exchange, lambda draft, local: (local + 1) % 97)


def test_the_first_rank_of_a_replica_is_authoritative(model: PreTrainedModel, expected: list[list[int]]) -> None:
    for completions in generate_on(4, model, CONFIGS["both"], PROMPTS[:3], PARAMS[:3], lie, tp=2):
        assert [each.token_ids for each in completions] == expected[:3]


def test_mutant_another_rank_of_a_replica_is_followed(
    model: PreTrainedModel, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:

    def follow_second(exchange: Exchange, draft: StepDraft, values: np.ndarray) -> None:
        values[::2] = values[1::2]

    change_received(monkeypatch, follow_second)
    completions = generate_on(4, model, CONFIGS["both"], PROMPTS[:3], PARAMS[:3], lie, tp=2)[0]
    assert [each.token_ids for each in completions] != expected[:3]


@pytest.mark.parametrize("spoiled", [3])
def test_mutant_another_state_on_one_rank_of_a_replica(model: PreTrainedModel, spoiled: int) -> None:
    def spoil(engine: Engine) -> None:
        if engine.comm.rank * 2 + engine.comm.tp_rank == spoiled:
            engine.replica.drafts.shared.extend([3, 4, 60, 61, 62, 63, 64])

    pair = f"[{spoiled // 2 * 2}{spoiled // 2 * 2 + 1}]"  # of two that differ, nobody knows which is wrong
    with pytest.raises(DesyncError, match=f"state of rank {pair} differs from that of the other 1 of 2 ranks"):
        generate_on(4, model, CONFIGS["trie"], PROMPTS, PARAMS, spoil, tp=2)


def test_ranks_of_a_replica_compare_rows_before_a_forward() -> None:
    def program(comm: ThreadComm) -> str:
        rows = [Row(0, 4, [5, 6 + (comm.rank == 1 and comm.tp_rank == 2)], [-1, 0], [4, 5], 1)]
        try:
            check_replica(comm, rows)()
        except DesyncError as error:
            return str(error)
        return "fine"

    named = "the replicated state of rank 5 differs from that of the other 2 of 3 ranks"
    found = run_ranks(ThreadWorld(6, tp=3), program)
    assert found[:3] == ["fine"] * 3
    assert [each.split(":")[0] for each in found[3:]] == [named] * 3


def test_weights_are_compared_along_lp_only() -> None:
    def program(comm: ThreadComm, spoiled: int | None = None) -> str:
        rank = comm.rank * 2 + comm.tp_rank
        try:
            agree(comm, None, {"tokenizer": 3}, {"model": 100 + comm.tp_rank + 10 * (rank == spoiled)})
        except InputError as error:
            return str(error)
        return "fine"

    assert run_ranks(ThreadWorld(4, tp=2), program) == ["fine"] * 4
    named = ["rank 3 has another model than rank 1"] * 4
    assert run_ranks(ThreadWorld(4, tp=2), lambda comm: program(comm, 3)) == named


def test_start_checks_name_the_rank_and_what_differs(model: PreTrainedModel) -> None:
    def program(comm: ThreadComm, **spoiled: int) -> str:
        facts = {"set of arguments": 5, "model": model_digest(model), "tokenizer": 7}
        failure = None
        if comm.rank == 1:
            facts |= {name: value for name, value in spoiled.items() if name != "failure"}
            failure = "cannot load" if "failure" in spoiled else None
        try:
            agree(comm, failure, facts)
        except InputError as error:
            return str(error)
        return "fine"

    assert run_ranks(ThreadWorld(3), program) == ["fine"] * 3
    assert run_ranks(ThreadWorld(3), lambda c: program(c, model=3)) == ["rank 1 has another model than rank 0"] * 3
    both = "rank 1 has another model and another tokenizer than rank 0"
    assert run_ranks(ThreadWorld(3), lambda c: program(c, model=3, tokenizer=1)) == [both] * 3
    assert run_ranks(ThreadWorld(3), lambda c: program(c, failure=1)) == ["rank 1: cannot load"] * 3


def test_model_digest_sees_one_changed_or_two_exchanged_weights() -> None:
    model = tiny_model(seed=5)
    before = model_digest(model)
    assert before == model_digest(tiny_model(seed=5))
    weight = next(model.parameters()).data
    weight[3, 4] += 1e-3
    assert model_digest(model) != before
    weight[3, 4] -= 1e-3
    weight[[0, 1]] = weight[[1, 0]]
    assert model_digest(model) != before
