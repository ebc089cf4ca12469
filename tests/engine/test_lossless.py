"""Lossless is equality: ids against transformers' own generate, and seeded sampling against plain decoding."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import lpr
from lpr import DecodeConfig, Engine, SamplingParams
from tests.fakes.models import stock_greedy, tiny_model
from tests.fakes.prompts import PROMPTS

CONFIGS = {
    "auto": DecodeConfig(),
    "both": DecodeConfig(window_size=15, trie_nodes=64),
    "window": DecodeConfig(window_size=15, trie_nodes=0),
    "trie": DecodeConfig(window_size=0, trie_nodes=64),
    "trie without recycling": DecodeConfig(window_size=0, num_candidates=0, trie_nodes=32, branch_length=8),
    "small": DecodeConfig(window_size=4, ngram_size=3, guess_set_size=2, trie_nodes=9, max_batch_size=3),
    "one column": DecodeConfig(window_size=1, ngram_size=2, guess_set_size=1, trie_nodes=1, max_batch_size=1),
    "wide": DecodeConfig(window_size=30, ngram_size=4, guess_set_size=30, trie_nodes=128, max_batch_size=2),
}


GREEDY_CASES = [("auto", 2), ("both", 1), ("window", 1), ("trie", 1), ("small", 2), ("one column", 1)]
SAMPLED_CASES = [("auto", 2), ("both", 1), ("window", 1), ("trie without recycling", 1), ("small", 2)]
"""How many prompts; tests/slow has all configurations and more prompts."""


@cache
def bundled_engine() -> Engine:
    return Engine.from_pretrained(lpr.bundled_model(), dtype="float32", device="cpu")


@cache
def bundled_reference(number: int) -> list[int]:
    """80 tokens after a prompt by an untouched transformers model."""
    model, tokenizer = bundled()
    return stock_greedy(model, tokenizer(PROMPTS[number])["input_ids"], 80)


@cache
def bundled() -> tuple[PreTrainedModel, Any]:
    return (
        AutoModelForCausalLM.from_pretrained(lpr.bundled_model(), dtype=torch.float32),
        AutoTokenizer.from_pretrained(lpr.bundled_model()),
    )


@pytest.mark.parametrize("name, count", GREEDY_CASES)
@pytest.mark.slow(first=4)
def test_greedy_equals_transformers(name: str, count: int) -> None:
    """So many prompts x 80 tokens of the bundled model, in batches as the configuration allows."""
    engine = bundled_engine()
    engine.configure(CONFIGS[name])
    done = engine.generate(PROMPTS[:count], SamplingParams(max_new_tokens=80))
    for number, completion in enumerate(done):
        assert completion.token_ids == bundled_reference(number), completion.prompt
    steps = sum(each.stats.num_steps for each in done)
    assert steps < sum(each.stats.num_tokens for each in done)


SAMPLED = [
    SamplingParams(
        max_new_tokens=40, temperature=0.8, seed=seed, top_p=(1.0, 0.9)[seed % 2], top_k=(0, 40)[seed // 4 % 2]
    )
    for seed in range(len(PROMPTS))
]


@cache
def sampled_reference(count: int) -> list[list[int]]:
    engine = bundled_engine()
    engine.configure(DecodeConfig.autoregressive())
    return [each.token_ids for each in engine.generate(PROMPTS[:count], SAMPLED[:count])]


@pytest.mark.parametrize("name, count", SAMPLED_CASES)
def test_sampling_equals_plain_decoding_with_the_seed(name: str, count: int) -> None:
    expected = sampled_reference(max(count, 2))[:count]
    engine = bundled_engine()
    engine.configure(CONFIGS[name])
    assert [each.token_ids for each in engine.generate(PROMPTS[:count], SAMPLED[:count])] == expected


def test_sampling_depends_on_the_seed() -> None:
    engine = bundled_engine()
    engine.configure(CONFIGS["small"])
    texts = {
        tuple(engine.generate(PROMPTS[:1], SamplingParams(max_new_tokens=20, temperature=1.0, seed=s))[0].token_ids)
        for s in range(4)
    }
    assert len(texts) == 4


FAMILIES = {
    "llama": {},
    "gemma2": {"head_dim": 16, "sliding_window": 9},
    "qwen2": {"tie_word_embeddings": True},
    "gpt2": {},
}


@pytest.mark.parametrize("family", ["gemma2", "gpt2"])
def test_batches_equal_single_runs_and_transformers(family: str) -> None:
    model = tiny_model(family, seed=1, spread=0.1, **FAMILIES[family])
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 97, (int(n),), generator=generator).tolist() for n in (1, 3, 40, 17, 8, 150)]
    expected = [stock_greedy(model, prompt, 60) for prompt in prompts]
    engine = Engine.from_model(model, decode=DecodeConfig(max_batch_size=4, prefill_chunk=64, trie_nodes=16))
    params = [SamplingParams(max_new_tokens=60 - 7 * (i % 3)) for i in range(len(prompts))]
    together = engine.generate(prompts, params)
    for prompt, each, completion, ids in zip(prompts, params, together, expected, strict=True):
        assert completion.token_ids == ids[: each.max_new_tokens]
        assert engine.generate([prompt], each)[0].token_ids == completion.token_ids


def test_prompt_longer_than_a_chunk() -> None:
    model = tiny_model(seed=2, spread=0.1)
    prompt = [(7 * i + i * i) % 97 for i in range(300)]
    for chunk in (7, 128, 512):
        engine = Engine.from_model(model, decode=DecodeConfig(prefill_chunk=chunk, trie_nodes=8, window_size=3))
        assert engine.generate([prompt], SamplingParams(max_new_tokens=20))[0].token_ids == stock_greedy(
            model, prompt, 20
        )


def test_the_last_position_of_the_context() -> None:
    """A tree never reaches past the model's positions, even where absolute position embeddings end."""
    model = tiny_model("gpt2", n_positions=64, max_position_embeddings=64, seed=4)
    prompt = list(range(30))
    engine = Engine.from_model(model)
    done = engine.generate([prompt], SamplingParams(max_new_tokens=34))[0]
    assert done.token_ids == stock_greedy(model, prompt, 34)
    assert done.finish_reason == "length"
