"""Sparse attention: the tree's mask goes before the top-k, and the indexer's keys move on commit like K and V."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import lpr.model.attention.sparse
from dev.families import DECODE, PROMPTS, tiny_model
from dev.family_table import FAMILIES
from lpr import DecodeConfig, Engine, InputError, SamplingParams
from lpr.model.adapter import Adapter
from lpr.model.attention.sparse import first_of_equal
from lpr.model.kv_cache import KVCache
from lpr.model.step_inputs import Row
from tests.fakes.worlds import generate_on

BY_NAME = {family.name: family for family in FAMILIES}
SPARSE = ["deepseek_v32", "glm_moe_dsa", "minimax_m3_vl_text"]
PARENTS = (-1, 0, 0, 1, 1, 2, 1, 4, 7, 8)
ACCEPTED = (0, 2, 5)


def path(node: int) -> list[int]:
    return [] if node < 0 else [*path(PARENTS[node]), node]


def worst_difference(adapter: Adapter, num_trees: int = 3) -> float:
    """Between the logits of nodes of trees and of plain forwards over their paths, with a commit after each tree."""
    generator = torch.Generator().manual_seed(3)

    def random(count: int) -> list[int]:
        return torch.randint(2, 97, (count,), generator=generator).tolist()

    cache, text, worst = KVCache(1, 128), random(41), 0.0
    prompt = Row.chain(0, 0, text, 0)
    adapter.logits([prompt], cache)
    cache.commit(prompt, range(len(text)))
    for _ in range(num_trees):
        nodes = random(len(PARENTS))
        positions = [len(text) + len(path(node)) - 1 for node in range(len(nodes))]
        row = Row(0, len(text), nodes, PARENTS, positions, len(nodes))
        logits = adapter.logits([row], cache)
        for node in range(len(nodes)):
            ids = torch.tensor([text + [nodes[i] for i in path(node)]])
            with torch.no_grad():
                expected = adapter.model(input_ids=ids, use_cache=False).logits[0, -1]
            worst = max(worst, float((logits[node] - expected).abs().max()))
        cache.commit(row, ACCEPTED)
        text += [nodes[i] for i in ACCEPTED]
    return worst


@pytest.mark.parametrize("name", SPARSE)
def test_nodes_have_the_logits_of_their_paths(name: str) -> None:
    assert worst_difference(Adapter(tiny_model(BY_NAME[name]))) < 1e-4


def _mask_after_top_k(monkeypatch: pytest.MonkeyPatch) -> None:
    """The indexer sees every row, and what is hidden from an entry takes places of its top-k."""
    from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer

    stock = DeepseekV32Indexer.forward

    def unmasked(self: Any, states: Any, q: Any, where: Any, mask: torch.Tensor, *rest: Any, **kwargs: Any) -> Any:
        hidden = mask if mask.dtype == torch.bool else torch.zeros_like(mask)
        return stock(self, states, q, where, hidden, *rest, **kwargs)

    monkeypatch.setattr(DeepseekV32Indexer, "forward", unmasked)


def _keys_not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit leaves the indexer's keys where they are."""
    stock = KVCache.move

    def move(self: KVCache, rows: np.ndarray) -> None:
        kept = {layer: pair[0].clone() for layer, pair in self.layer_tensors.items() if layer < 0}
        assert kept
        stock(self, rows)
        for layer, keys in kept.items():
            self.layer_tensors[layer][0].copy_(keys)

    monkeypatch.setattr(KVCache, "move", move)


@pytest.mark.parametrize("mutant", [_mask_after_top_k, _keys_not_moved])
def test_the_self_check_refuses(mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    model = tiny_model(BY_NAME["deepseek_v32"])
    with pytest.raises(InputError, match="its logits differ"):
        Engine.from_model(model)
    assert worst_difference(Adapter(model)) > 1e-2


def test_blocks_of_rows_are_not_blocks_of_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """MiniMax-M3's own blocks, runs of cache rows, are other tokens below a branch."""

    def best_rows(scores: torch.Tensor, step: Any, *sizes: int) -> torch.Tensor:
        block = step.blocks[0]
        block.given_kv_positions = torch.arange(block.num_kv).expand(len(block.positions), -1)
        return best(scores, step, *sizes)

    best = lpr.model.attention.sparse.best_blocks
    monkeypatch.setattr(lpr.model.attention.sparse, "best_blocks", best_rows)
    assert worst_difference(Adapter(tiny_model(BY_NAME["minimax_m3_vl_text"]))) > 1e-2


def test_the_self_check_needs_no_text_longer_than_the_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    _keys_not_moved(monkeypatch)
    model = tiny_model(BY_NAME["deepseek_v32"])
    for layer in model.model.layers:
        layer.self_attn.indexer.index_topk = 2048
    with pytest.raises(InputError, match="its logits differ"):
        Engine.from_model(model)
    assert {layer.self_attn.indexer.index_topk for layer in model.model.layers} == {2048}


def texts(engine: Engine, prompts: Sequence[Sequence[int]], temperature: float) -> list[list[int]]:
    params = SamplingParams(max_new_tokens=16, temperature=temperature, seed=5)
    return [list(done.token_ids) for done in engine.generate([list(prompt) for prompt in prompts], params)]


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.slow(first=1)
def test_sampled_ids_equal_those_of_plain_decoding(name: str) -> None:
    """Ragged batches with drafts, the second time on prefixes that are in the cache, against one token at a time."""
    plain_config = DecodeConfig.autoregressive(max_length=120)
    plain = Engine.from_model(tiny_model(BY_NAME[name]), decode=plain_config)
    drafting = Engine.from_model(tiny_model(BY_NAME[name]), decode=DECODE)
    prompts = [PROMPTS[1] + [3, 9], PROMPTS[0], PROMPTS[1] + [60]]
    expected = [texts(plain, [prompt], 0.7)[0] for prompt in prompts]
    for _ in range(2):
        assert texts(drafting, prompts, 0.7) == expected


def test_two_ranks_give_the_ids_of_one() -> None:
    model = tiny_model(BY_NAME["glm_moe_dsa"])
    params = [SamplingParams(max_new_tokens=20, temperature=0.7 * index, seed=3) for index in range(2)]
    plain = Engine.from_model(model, decode=DecodeConfig.autoregressive(max_length=120))
    expected = [list(done.token_ids) for done in plain.generate(PROMPTS, params)]
    for completions in generate_on(2, model, replace(DECODE, home_ranks=0), PROMPTS, params):
        assert [list(done.token_ids) for done in completions] == expected


@pytest.mark.parametrize("count", [1, 5, 40, 64])
def test_of_equal_scores_the_first_are_selected(count: int) -> None:
    scores = torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(0)).relu() * -1.0
    scores[0, 0, ::3] = torch.finfo(torch.float32).min
    scores[1, :, :5] = float("-inf")
    expected = (scores + 0.0).sort(dim=-1, descending=True, stable=True).indices[..., :count]
    assert torch.equal(first_of_equal(scores, count).indices.sort().values, expected.sort().values)


def test_exact_mode_refuses_by_name() -> None:
    with pytest.raises(InputError, match="cannot be exact: its sparse attention selects"):
        Engine.from_model(tiny_model(BY_NAME["deepseek_v32"]), exact=True)


def test_kernels_that_read_bits_are_refused() -> None:
    with pytest.raises(InputError, match="knows no sparse attention; use attention='sdpa'"):
        Adapter(tiny_model(BY_NAME["deepseek_v32"]), attention="triton")
