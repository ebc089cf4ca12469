"""Tiny random models: real transformers classes, fp32, made on the spot."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from lpr import DecodeConfig, Engine, SamplingParams


def tiny_model(model_type: str = "llama", seed: int = 0, spread: float = 0.15, **overrides: object) -> PreTrainedModel:
    """A random model of `model_type` whose attention and logits are far from uniform."""
    sizes = {
        "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "bos_token_id": 1, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    config = AutoConfig.for_model(model_type, **{**sizes, **overrides})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name and weight.dim() > 1:
                weight.normal_(0, spread)
    model.generation_config.eos_token_id = overrides.get("eos_token_id")
    return model


def stock_greedy(model: PreTrainedModel, prompt: list[int], max_new_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    done = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=0
    )
    return done[0, len(prompt):].tolist()  # fmt: skip


def plain_ids(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
) -> list[list[int]]:
    """What plain decoding emits, one token a step."""
    engine = Engine.from_model(model, decode=DecodeConfig.autoregressive())
    return [each.token_ids for each in engine.generate(prompts, params)]


def left_of_an_engine(make: Callable[[], Engine], is_closed: bool) -> list[str]:
    """What of an engine that has decoded, perhaps was closed, and is dropped lives on without the collector."""
    gc.collect()
    gc.disable()
    try:
        engine = make()
        engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=8))
        runner = engine.model
        parts = {"Engine": engine, "Model": runner.adapter.model, "Cache": runner.cache, "Forward": runner.forward}
        left = {name: weakref.ref(part) for name, part in parts.items()}
        if is_closed:
            engine.close()
        del engine, runner, parts
        return [name for name, part in left.items() if part() is not None]
    finally:
        gc.enable()
