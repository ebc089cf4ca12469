"""Batches: a request's ids do not depend on its neighbours, on the form of the batch or on when slots change hands."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from transformers import PreTrainedModel

from lpr import DecodeConfig, Engine, SamplingParams
from lpr.model.input_builder import Block, Row, StepInputs, build_inputs
from lpr.model.kv_cache import KVCache
from lpr.model.runner import TreeModel
from lpr.model.sampling.choice import choose
from lpr.model.sampling.selection import Selection
from lpr.model.self_check import self_check
from tests.fakes.models import stock_greedy, tiny_model
from tests.fakes.worlds import generate_on

LENGTHS = (1, 70, 9, 23, 130, 2, 40, 5, 64, 17)
"""Of the prompts; some exceed a step's prefill of 48 tokens."""
DECODE = {"window_size": 3, "guess_set_size": 2, "trie_nodes": 16, "prefill_chunk": 48}


@cache
def model() -> PreTrainedModel:
    return tiny_model(seed=1, spread=0.1)


@cache
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 97, (length,), generator=generator).tolist() for length in LENGTHS]


GREEDY = [SamplingParams(max_new_tokens=27 - 5 * (i % 4)) for i in range(len(LENGTHS))]
SEEDED = [SamplingParams(max_new_tokens=5 + 4 * (i % 4), temperature=0.8, seed=i) for i in range(len(LENGTHS))]


@cache
def greedy_ids() -> list[list[int]]:
    return [stock_greedy(model(), *each) for each in zip(prompts(), [p.max_new_tokens for p in GREEDY], strict=True)]


@cache
def seeded_ids() -> list[list[int]]:
    """One token after the other from a model without a cache."""
    texts = []
    for prompt, params in zip(prompts(), SEEDED, strict=True):
        text = list(prompt)
        for _ in range(params.max_new_tokens):
            with torch.no_grad():
                logits = model()(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1:]
            text.append(int(choose(logits, Selection.build([(params, [len(text)])], logits.device))))
        texts.append(text[len(prompt) :])
    return texts


def batch_engine(size: int, packed: bool = True, attention: str = "auto", **overrides: int) -> Engine:
    decode = DecodeConfig(max_batch_size=size, **{**DECODE, **overrides})
    engine = Engine.from_model(model(), decode=decode, attention=attention)
    assert engine.model.packed, "a model that dispatches its attention takes packed rows"
    engine.model.adapter.packed = engine.scheduler.limits.packed = packed
    return engine


def ids(engine: Engine, params: list[SamplingParams]) -> list[list[int]]:
    return [done.token_ids for done in engine.generate(prompts(), params)]


SIZES = [(1, False), (2, True), (5, False), (8, True)]


@pytest.mark.parametrize("size, packed", SIZES)
@pytest.mark.slow(first=2)
def test_ids_do_not_depend_on_the_batch(size: int, packed: bool) -> None:
    """More requests than slots, of unequal prompts and ends: waiting ones take the slots of finished ones."""
    engine = batch_engine(size, packed)
    assert ids(engine, GREEDY) == greedy_ids()
    assert ids(engine, SEEDED) == seeded_ids()
    assert engine.is_idle


def test_a_free_slot_is_taken_in_the_next_step() -> None:
    engine = batch_engine(3, prefill_chunk=512)
    requests = [engine.submit(*each) for each in zip(prompts(), GREEDY, strict=True)]
    while not engine.is_idle:
        unfinished = sum(request.finish_reason is None for request in requests)
        assert len(engine.step()) == min(3, unfinished)
    assert [request.completion().token_ids for request in requests] == greedy_ids()


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_others_go_on_while_a_long_prompt_is_read(packed: bool) -> None:
    """Packed, every step advances them; padded, every other one, as the prompt is read by itself."""
    engine = batch_engine(3, packed)
    first = [engine.submit(prompts()[i], SamplingParams(max_new_tokens=40)) for i in (0, 2)]
    while any(request.stats.num_steps == 0 for request in first):
        engine.step()
    long = engine.submit([7, *prompts()[4]], SamplingParams(max_new_tokens=4))
    steps = []
    while long.stats.num_steps == 0:
        steps.append(engine.step())
    assert long.stats.num_fill_steps == 2, "131 tokens are two pieces of 48 and a rest that decodes"
    assert steps[:3] == ([first, first, [*first, long]] if packed else [[], first, []])
    while not engine.is_idle:
        engine.step()
    assert long.completion().token_ids == stock_greedy(model(), long.prompt_ids, 4)


def test_ranks_share_long_prompts_in_packed_batches() -> None:
    params = [SamplingParams(max_new_tokens=each.max_new_tokens // 2) for each in GREEDY]
    for done in generate_on(3, model(), DecodeConfig(max_batch_size=4, **DECODE), prompts(), params):
        for completion, expected in zip(done, greedy_ids(), strict=True):
            assert completion.token_ids == expected[: len(completion.token_ids)]


FAMILIES = {
    "llama": {},
    "gemma2": {"head_dim": 16, "sliding_window": 9},
    "gpt2": {},
    "gpt_oss": {"head_dim": 16, "sliding_window": 9, "num_local_experts": 4, "rope_parameters": None},
    "llama4_text": {"head_dim": 16, "num_local_experts": 4, "attention_chunk_size": 16, "intermediate_size_mlp": 96},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_logits_equal_padded_ones(family: str) -> None:
    """Prompts, then trees, one of them after a piece of prompt, some without results."""
    runner = TreeModel(tiny_model(family, **FAMILIES[family]))
    self_check(runner)
    assert runner.packed
    generator = torch.Generator().manual_seed(2)

    def tokens(count: int) -> list[int]:
        return torch.randint(0, 97, (count,), generator=generator).tolist()

    lengths = (20, 3, 31)
    first = [Row(i, 0, tokens(n), list(range(-1, n - 1)), list(range(n)), i) for i, n in enumerate(lengths)]
    second = [
        Row(0, 20, tokens(6), [-1, 0, 0, 1, 1, 2], [20, 21, 21, 22, 22, 22], 6),
        Row(1, 3, tokens(9), list(range(-1, 8)), list(range(3, 12)), 0),
        Row(2, 31, tokens(4), [-1, 0, 1, 1], [31, 32, 33, 33], 2),
    ]
    logits = []
    for packed in (True, False):
        cache = KVCache(3, 64)
        inputs = [build_inputs(rows, cache, runner.device, packed=packed) for rows in (first, second)]
        assert [each.packed for each in inputs] == [packed, packed]
        logits.append(torch.cat([runner.adapter.forward(each, cache) for each in inputs]))
    assert logits[0].shape == (3 + 8, 97)
    assert torch.allclose(*logits, rtol=0, atol=1e-5 * float(logits[1].abs().max()))


def test_packed_rows_need_no_neighbouring_slots(llama: PreTrainedModel) -> None:
    runner = TreeModel(llama)
    texts = {4: [5, 6, 7], 0: [9, 8, 7, 6], 2: [1]}
    rows = [
        Row(slot, 0, text, list(range(-1, len(text) - 1)), list(range(len(text))), 1) for slot, text in texts.items()
    ]
    cache = KVCache(5, 16)
    logits = runner.adapter.logits(rows, cache, packed=True)
    for found, text in zip(logits, texts.values(), strict=True):
        with torch.no_grad():
            expected = llama(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1]
        assert torch.allclose(found, expected, atol=1e-5)
    with pytest.raises(AssertionError, match="neighbours"):
        build_inputs(rows, cache, runner.device)


def test_rows_of_equal_shape_are_one_block_in_either_form() -> None:
    rows = [Row(slot, 4, [1, 2], [-1, 0], [4, 5], 1) for slot in (1, 2)]
    cache = KVCache(3, 16)
    inputs = build_inputs(rows, cache, torch.device("cpu"), packed=True)
    assert not inputs.packed and inputs.tokens.shape == (2, 2)
    assert build_inputs(rows[::-1], cache, torch.device("cpu"), packed=True).packed


@pytest.mark.parametrize(("pages", "first"), [([2, 3, 4], 10), ([2, 0, 4], None)])
def test_rows_are_written_as_a_run_only_where_all_are_neighbours(pages: list[int], first: int | None) -> None:
    """The first and the last of them may lie as far apart as in a run, with another sequence's page in between."""
    cache = KVCache(1, 16, 6, 4)
    cache.assign(0, pages)
    row = Row(0, 2, list(range(8)), list(range(-1, 7)), list(range(2, 10)), 1)
    assert build_inputs([row], cache, torch.device("cpu")).blocks[0].first_row == first


@pytest.mark.parametrize(
    ("family", "sizes"),
    {
        "xglm": {"d_model": 64, "num_layers": 2, "attention_heads": 4, "ffn_dim": 96},
        "deepseek_v3": {
            "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "q_lora_rank": 16,
            "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
            "moe_intermediate_size": 32, "num_key_value_heads": 4,
        },
    }.items(),
)  # fmt: skip
def test_models_that_cannot_be_packed_are_padded(family: str, sizes: dict[str, int]) -> None:
    """One with attention code of its own, and one that would expand the latents of every row of the cache."""
    other = tiny_model(family, seed=1, spread=0.1, **sizes)
    expected = [stock_greedy(other, prompt, 12) for prompt in prompts()[:5]]
    engine = Engine.from_model(other, decode=DecodeConfig(max_batch_size=3, **DECODE))
    assert not engine.model.packed
    done = engine.generate(prompts()[:5], SamplingParams(max_new_tokens=12))
    assert [each.token_ids for each in done] == expected


def sees_a_row_of_the_neighbour(patch: pytest.MonkeyPatch) -> None:
    of_block = KVCache.of_block

    def mutant(self: KVCache, flat: torch.Tensor, block: Block) -> torch.Tensor:
        seen = of_block(self, flat, block).clone()
        if block.first_slot:
            seen[0, :, 0] = flat[0, :, (block.first_slot - 1) * self.rows_per_slot]
        return seen

    patch.setattr(KVCache, "of_block", mutant)


def sees_an_entry_of_the_neighbour(patch: pytest.MonkeyPatch) -> None:
    entries = Block.entries

    def mutant(self: Block, states: torch.Tensor) -> torch.Tensor:
        if not self.start or states.shape[2] <= self.start + self.positions.shape[1]:
            return entries(self, states)
        return states[:, :, self.start + 1 : self.start + 1 + self.positions.shape[1]]

    patch.setattr(Block, "entries", mutant)


def hides_a_token(patch: pytest.MonkeyPatch) -> None:
    import lpr.model.attention.dense as attention

    visible = attention.visible_nodes

    def mutant(block: Block, rule: Callable[..., object]) -> torch.Tensor:
        mask = visible(block, rule).clone()
        if block.start:
            mask[..., -1, 0] = False
        return mask

    patch.setattr(attention, "visible_nodes", mutant)


def results_of_the_neighbour(patch: pytest.MonkeyPatch) -> None:
    results = StepInputs.results

    def mutant(self: StepInputs, logits: torch.Tensor) -> torch.Tensor:
        found = results(self, logits)
        return found.roll(1, 0) if self.packed else found

    patch.setattr(StepInputs, "results", mutant)


@pytest.mark.parametrize(
    "fault",
    [
        sees_a_row_of_the_neighbour,
        sees_an_entry_of_the_neighbour,
        hides_a_token,
        results_of_the_neighbour,
    ],
)
def test_faults_of_packed_batches_are_noticed(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both by the ids, in an engine that was sound when it was loaded, and at load; with masks, where the faults are.

    Faults of attention over pages are in tests/model/attention/test_native.py.
    """
    engine = batch_engine(5, attention="sdpa")
    assert ids(engine, GREEDY) == greedy_ids()
    engine.configure(engine.decode)
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        assert ids(engine, GREEDY) == greedy_ids()
    runner = TreeModel(model(), attention="sdpa")
    self_check(runner)
    assert not runner.packed
