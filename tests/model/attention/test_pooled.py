"""Attention to pools of tokens: each node sees those of its own path, in trees, batches and behind a prefix."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from dev.families import DECODE, PROMPTS, save_wrapper, stock_greedy, tiny_model
from dev.family_table import FAMILIES, WRAPPERS
from lpr import DecodeConfig, Engine, InputError, SamplingParams
from lpr.model.adapter import Adapter
from lpr.model.attention.pooled import Pools
from lpr.model.attention.sparse import few_selected
from lpr.model.kv_cache import KVCache
from lpr.model.recurrent.states import States
from lpr.model.rewrite import table
from lpr.model.step_inputs import Row
from tests.model.attention.test_sparse import worst_difference

MODELS = {family.name: family for family in [*FAMILIES, *WRAPPERS]}
POOLED = ["deepseek_v4", "qwen4_exp_text", "glm5_next"]
FEW = ["deepseek_v4"]
"""Of the fast suite; tests/slow has all."""
COUNT = 16
"""New tokens, in which pools of every kind are closed."""


def made(name: str, folder: Path) -> PreTrainedModel:
    """A random model that attends to each kind of its layers, and routes by each kind of its routers."""
    if name != "glm5_next":
        model = tiny_model(MODELS[name])
    else:
        save_wrapper(MODELS[name], str(folder))
        model = Engine.from_pretrained(str(folder), decode=DECODE).model.model
    generator = torch.Generator().manual_seed(5)
    for key, buffer in model.named_buffers():
        if key.endswith("tid2eid"):
            buffer.copy_(torch.randint(0, 4, buffer.shape, generator=generator))
        elif key.endswith("e_score_correction_bias"):
            buffer.copy_(torch.rand(buffer.shape, generator=generator))
    for key, weight in model.named_parameters():
        if key.endswith(("sinks", "index_kpool_compress_ape", "position_bias")):
            weight.data.normal_(0, 0.5, generator=generator)
    return model


Shared = Callable[[str], tuple[PreTrainedModel, list[list[int]] | None]]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Shared:
    """Models that no fault changes, each made once, with transformers' ids from before lpr has seen it."""

    @cache
    def make(name: str) -> tuple[PreTrainedModel, list[list[int]] | None]:
        model = made(name, tmp_path_factory.mktemp(name))
        if name == "glm5_next":  # its class was changed when it was read
            return model, None
        return model, [text[:COUNT] for text in stock_greedy(model)]

    return make


@pytest.mark.parametrize("name", FEW)
@pytest.mark.slow
def test_nodes_have_the_logits_of_their_paths(name: str, shared: Shared) -> None:
    model, _ = shared(name)
    assert worst_difference(Adapter(model), 2) < 1e-4
    with few_selected(model, 1):
        assert worst_difference(Adapter(model), 2) < 1e-4


@pytest.mark.parametrize("name", FEW)
def test_ids_are_those_of_plain_decoding(name: str, shared: Shared) -> None:
    """Greedily transformers', by seeds lpr's own without drafts; in a batch, with drafts, and again by the prefix."""
    model, greedy = shared(name)
    sampled = [SamplingParams(max_new_tokens=COUNT, temperature=0.8, seed=seed) for seed in range(len(PROMPTS))]
    plain = Engine.from_model(model, decode=DecodeConfig.autoregressive(max_length=120))
    wanted = [plain.generate([prompt], each)[0].token_ids for prompt, each in zip(PROMPTS, sampled, strict=True)]
    if greedy is None:
        greedy = [plain.generate([each], SamplingParams(max_new_tokens=COUNT))[0].token_ids for each in PROMPTS]
    engine = Engine.from_model(model, decode=DECODE)
    for text in greedy:
        engine.learn([token if i % 6 else (token + 1) % 97 for i, token in enumerate(text)])
    for _ in range(2):
        done = engine.generate(PROMPTS, SamplingParams(max_new_tokens=COUNT))
        assert [each.token_ids for each in done] == greedy
        assert [each.token_ids for each in engine.generate(PROMPTS, sampled)] == wanted
    assert sum(each.stats.num_steps for each in done) < sum(each.stats.num_tokens for each in done)


def _other_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools are computed from the cache rows before their last token, which are those of other branches."""
    stock = Pools.__init__

    def init(self: Pools, *args: Any) -> None:
        stock(self, *args)
        reach = self.windows.shape[2]
        last = self.windows[..., -1:]
        self.windows = torch.where(self.windows >= 0, last + torch.arange(1 - reach, 1), -1)

    monkeypatch.setattr(Pools, "__init__", init)


def _all_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries see the pools that other branches close."""
    stock = Pools.__init__

    def init(self: Pools, *args: Any) -> None:
        stock(self, *args)
        self.seen = self.seen.any(1, keepdim=True).expand_as(self.seen)

    monkeypatch.setattr(Pools, "__init__", init)


def _pools_not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = KVCache.move

    def move(self: KVCache, rows: Any) -> None:
        kept = {layer: pair[0].clone() for layer, pair in self.layer_tensors.items() if layer < 0}
        stock(self, rows)
        for layer, keys in kept.items():
            self.layer_tensors[layer][0].copy_(keys)

    monkeypatch.setattr(KVCache, "move", move)


@pytest.mark.parametrize("mutant", [_other_branches, _all_pools, _pools_not_moved])
@pytest.mark.parametrize("name", POOLED[:2])
@pytest.mark.slow(first=3)
def test_a_fault_is_found_at_load(name: str, mutant: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mutant(monkeypatch)
    with pytest.raises(InputError, match="its logits differ"):
        Engine.from_model(made(name, tmp_path), decode=DECODE)


def test_n_grams_follow_paths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also across the end of a text within a text, before which a window does not look."""
    model = made("qwen4_exp_text", tmp_path)
    adapter = Adapter(model)
    ids = torch.tensor([[5, 2, 7, 9, 2, 2, 11, 3, 4, 2, 6]])
    expected = model(input_ids=ids, use_cache=False).logits[0]
    found = adapter.logits([Row.chain(0, 0, ids[0].tolist(), 11)], KVCache(1, 32))
    assert float((found - expected).abs().max().detach()) < 1e-4
    stock = States.windows

    def rows(self: States, x: torch.Tensor, width: int) -> torch.Tensor:
        found = stock(self, x, width)
        return found if x.dtype != torch.int64 else found.roll(1, 2)

    monkeypatch.setattr(States, "windows", rows)
    with pytest.raises(InputError, match="its logits differ"):
        Engine.from_model(model, decode=DECODE)


@pytest.mark.parametrize(("name", "rewrite"), [("deepseek_v4", "PooledKeys"), ("qwen4_exp_text", "LayerEmbeddings")])
def test_without_its_rewrite_a_model_is_refused(
    name: str, rewrite: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(table, "REWRITES", tuple(each for each in table.REWRITES if type(each).__name__ != rewrite))
    with pytest.raises(InputError, match="cannot run a token tree"):
        Engine.from_model(made(name, tmp_path), decode=DECODE)
