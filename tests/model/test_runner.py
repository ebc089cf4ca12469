from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from lpr.config import InputError, SamplingParams
from lpr.core.wire import result_words
from lpr.model.input_builder import Row, build_inputs
from lpr.model.kv_cache import KVCache
from lpr.model.runner import TreeModel
from lpr.model.sampling.selection import Selection
from lpr.model.self_check import self_check
from tests.fakes.models import tiny_model

FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 9},
    "gemma2": {"head_dim": 16, "sliding_window": 9},
    "gpt2": {},
    "gpt_neox": {},
    "codegen": {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8},
    "phi3": {},
    "mixtral": {},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families_that_run_a_tree(family: str) -> None:
    runner = TreeModel(tiny_model(family, **FAMILIES[family]))
    cache = self_check(runner)
    assert isinstance(cache, KVCache)


def test_silently_wrong_models_are_refused() -> None:
    """RoBERTa counts its positions from the padding token's id, not from those it is given."""
    with pytest.raises(InputError, match="'roberta' cannot run a token tree: its logits differ"):
        self_check(TreeModel(tiny_model("roberta", is_decoder=True, pad_token_id=0)))


def test_recurrent_models_with_code_of_their_own_are_refused() -> None:
    with pytest.raises(InputError, match="'rwkv' cannot run a token tree: recurrent state"):
        self_check(TreeModel(tiny_model("rwkv")))


def sequential(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


@st.composite
def tree_rows(draw: st.DrawFn) -> list[tuple[list[int], list[int], list[int]]]:
    """Per sequence: prompt, node tokens, node parents (-1: the prompt's end)."""
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        prompt = draw(st.lists(st.integers(0, 96), min_size=1, max_size=20))
        count = draw(st.integers(1, 12))
        nodes = draw(st.lists(st.integers(0, 96), min_size=count, max_size=count))
        parents = [draw(st.integers(-1, i - 1)) for i in range(count)]
        rows.append((prompt, nodes, parents))
    return rows


def paths(parents: list[int]) -> list[list[int]]:
    known: list[list[int]] = []
    for node, parent in enumerate(parents):
        known.append(([] if parent < 0 else known[parent]) + [node])
    return known


@settings(max_examples=25, deadline=None)
@given(tree_rows(), st.sampled_from([(1, 1), (8, 16), (16, 64)]), st.booleans())
def test_ragged_trees_equal_sequential_evaluation(llama: PreTrainedModel, rows, buckets, packed: bool) -> None:
    """Prompts in a ragged batch, then trees, a commit of one path each, and one more token after it."""
    runner = TreeModel(llama)
    cache = KVCache(len(rows), 64)

    def forward(batch: list[Row]) -> torch.Tensor:
        return runner.adapter.logits(batch, cache, *buckets, packed=packed)

    def chain(slot: int, cached: int, tokens: list[int]) -> Row:
        count = len(tokens)
        return Row(slot, cached, tokens, list(range(-1, count - 1)), list(range(cached, cached + count)), count)

    forward([chain(slot, 0, prompt) for slot, (prompt, _, _) in enumerate(rows)])
    batch = []
    for slot, (prompt, nodes, parents) in enumerate(rows):
        positions = [len(prompt) + len(path) - 1 for path in paths(parents)]
        batch.append(Row(slot, len(prompt), nodes, parents, positions, len(nodes)))
    logits = forward(batch)
    texts = []
    found = iter(logits)
    for slot, (prompt, nodes, parents) in enumerate(rows):
        for path in paths(parents):
            expected = sequential(llama, prompt + [nodes[i] for i in path])[-1]
            assert torch.allclose(next(found), expected, atol=2e-4)
        path = max(paths(parents), key=len)
        cache.commit(Row(slot, len(prompt), nodes, parents, nodes, 0), path)
        texts.append(prompt + [nodes[i] for i in path])
    logits = forward([chain(slot, len(text), [5]) for slot, text in enumerate(texts)])
    for slot, text in enumerate(texts):
        assert torch.allclose(logits[slot], sequential(llama, [*text, 5])[-1], atol=2e-4)


def test_a_table_that_grows_is_the_same_as_one_assigned_whole() -> None:
    random = Random(1)
    for _ in range(200):
        pages, (grown, whole) = list[int](), (KVCache(2, 320, 64), KVCache(2, 320, 64))
        for _ in range(8):
            pages = pages[: random.randint(0, 9)]  # pages that others have computed replace its own ones
            first = len(pages)
            for _ in range(random.choice([1, 1, 2, 3])):
                follows = pages and pages[-1] < 62 and random.random() < 0.7
                pages.append(pages[-1] + 1 if follows else random.randrange(63))
            whole.assign(1, pages)
            grown.assign(1, pages[first:], first)
            assert (grown.run_rows == whole.run_rows).all() and (grown.tables == whole.tables).all()
            devices = [cache.device_tables(torch.device("cpu")) for cache in (grown, whole)]
            assert torch.equal(*devices) and np.array_equal(devices[0][1], grown.tables[1])


def test_pages_in_any_order_hold_a_sequence(llama: PreTrainedModel) -> None:
    runner = TreeModel(llama)
    cache = KVCache(2, 32, num_pages=9, page_size=4)
    text = [4, 8, 15, 16, 23, 42]
    cache.assign(1, [7, 2])
    runner.adapter.logits([Row.chain(1, 0, text, 1)], cache)
    cache.assign(0, [7, 5, 1])  # another sequence begins with the same page
    cache.copy_page(2, 5, 2)
    row = Row(0, 6, [7, 9, 3, 4], [-1, 0, 0, 2], [6, 7, 7, 8], 4)
    logits = runner.adapter.logits([row], cache)
    assert torch.allclose(logits[3], sequential(llama, [*text, 7, 3, 4])[-1], atol=2e-4)
    cache.commit(row, [0, 2, 3])
    for slot, tail in ((0, [7, 3, 4]), (1, [])):
        more = Row.chain(slot, 6 + len(tail), [11], 1)
        cache.assign(slot, [7, 5, 1] if slot == 0 else [7, 2])
        logits = runner.adapter.logits([more], cache)
        assert torch.allclose(logits[0], sequential(llama, [*text, *tail, 11])[-1], atol=2e-4)


def test_evaluate_returns_choices_and_candidates(llama: PreTrainedModel) -> None:
    runner = TreeModel(llama)
    runner.allocate(2, 64, 8, self_check(runner))
    rows = [Row(0, 0, [1, 2, 3], [-1, 0, 1], [0, 1, 2], 2), Row(1, 0, [9], [-1], [0], 1)]
    requests = [(SamplingParams(), [2, 3]), (SamplingParams(), [1])]
    results = runner.evaluate(rows, Selection.build(requests, runner.device), 4)
    assert results.shape == (3, result_words(4)) and results.dtype == torch.int32
    expected = [sequential(llama, [1, 2])[-1], sequential(llama, [1, 2, 3])[-1], sequential(llama, [9])[-1]]
    for result, logits in zip(results, expected, strict=True):
        assert result[0] == logits.argmax()
        assert torch.equal(result[1:5].long(), logits.topk(4).indices)
        scores = result[5:].view(torch.uint8).tolist()
        assert len(scores) == 4 and scores == sorted(scores)


def test_stock_generate_still_works_after_the_switch() -> None:
    model = tiny_model(seed=3)
    prompt = torch.tensor([[5, 6, 7, 8]])
    mask = torch.ones_like(prompt)
    before = model.generate(prompt, attention_mask=mask, max_new_tokens=20, do_sample=False, pad_token_id=0)
    TreeModel(model)
    after = model.generate(prompt, attention_mask=mask, max_new_tokens=20, do_sample=False, pad_token_id=0)
    assert torch.equal(before, after)


def prompt_logits(runner: TreeModel, prompts: list[list[int]]) -> torch.Tensor:
    """The logits of the last token of each prompt, evaluated together from nothing."""
    rows = [
        Row(slot, 0, tokens, list(range(-1, len(tokens) - 1)), list(range(len(tokens))), 1)
        for slot, tokens in enumerate(prompts)
    ]
    return runner.adapter.logits(rows, KVCache(len(rows), 64), packed=True)


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral", "gemma2", "gpt2"])
def test_prompts_need_no_mask(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes later in a prompt is hidden without a mask; branches, later pieces and other rules have one."""
    model = tiny_model(family, **FAMILIES[family])
    runner = TreeModel(model)
    prompts = [[5, 17, 9, 4, 80, 3, 3, 41, 7, 12, 60, 2], [8, 8, 1]]
    blocks = [build_inputs([row], KVCache(1, 64), torch.device("cpu")).blocks[0] for row in pieces()]
    assert [block.is_causal for block in blocks] == [True, False, False]
    found = prompt_logits(runner, prompts)
    for prompt, mine in zip(prompts, found, strict=True):
        torch.testing.assert_close(mine, sequential(model, prompt)[-1], rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(Row, "is_prompt", False)
    torch.testing.assert_close(found, prompt_logits(runner, prompts), rtol=1e-5, atol=1e-5)


def pieces() -> list[Row]:
    """A prompt, one with a branch at its end, and a later piece."""
    return [
        Row(0, 0, [5, 6, 7], [-1, 0, 1], [0, 1, 2], 1),
        Row(0, 0, [5, 6, 7], [-1, 0, 0], [0, 1, 1], 2),
        Row(0, 3, [5, 6, 7], [-1, 0, 1], [3, 4, 5], 1),
    ]
