"""Agents on a small hybrid model: calls with tools and grammars, each with the tokens of plain decoding.

40 calls; LPR_AGENT_TURNS=50 makes 500 of them, in 6 to 8 minutes of a core.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import lpr
from lpr import DecodeConfig, Engine, SamplingParams
from lpr.model.loader import load
from tests.model.recurrent.test_recurrent import KINDS, SIZES

llguidance = pytest.importorskip("llguidance", reason="llguidance is not installed")
NUM_AGENTS, NUM_TURNS, LONGEST = 10, int(os.environ.get("LPR_AGENT_TURNS", 4)), 360
CALL = {
    "type": "object",
    "properties": {"tool": {"enum": ["read", "grep", "run"]}, "path": {"type": "string", "maxLength": 8}},
    "required": ["tool", "path"],
    "additionalProperties": False,
}
TOOL = llguidance.LLMatcher.grammar_from_json_schema(CALL)
ANSWER = llguidance.LLMatcher.grammar_from_regex(r"(yes|no), [a-z ]{4,12}\.")


def hybrid_of(vocab_size: int, name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(name)
    known = {key: value for key, value in SIZES.items() if hasattr(config, key)} | {"vocab_size": vocab_size}
    known["max_position_embeddings"] = 1024
    model = AutoModelForCausalLM.from_config(type(config)(**{**known, **KINDS[name]}), dtype=torch.bfloat16).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=1.5 * weight.shape[-1] ** -0.5)
    return model


def params_of(agent: int, turn: int) -> SamplingParams:
    sampled = SamplingParams(temperature=0.8 * (agent % 3 > 0), seed=97 * agent + turn, max_new_tokens=12)
    kind = (agent + turn) % 4
    return replace(sampled, max_new_tokens=40, grammar=TOOL if kind < 2 else ANSWER) if kind < 3 else sampled


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["qwen3_next"])
def test_every_call_of_an_agent_has_the_tokens_of_plain_decoding(name: str) -> None:
    """Histories grow by calls and by their results; prefixes are found behind snapshots; other agents share steps."""
    tokenizer = load(lpr.bundled_model(), "float32").tokenizer
    model = hybrid_of(len(tokenizer), name)
    drafting = DecodeConfig(window_size=4, trie_nodes=16, max_batch_size=5, max_length=512, prefill_chunk=64)
    engine = Engine.from_model(model, tokenizer, drafting, exact=True)
    plain_decode = DecodeConfig.autoregressive(max_batch_size=1, max_length=512)
    plain = Engine.from_model(model, tokenizer, plain_decode, exact=True)
    starts = [tokenizer(f"# agent {agent}\ndef tools(read, grep, run):\n")["input_ids"] for agent in range(NUM_AGENTS)]
    histories, num_calls, num_found, num_steps, num_tokens = [list(each) for each in starts], 0, 0, 0, 0
    for turn in range(NUM_TURNS):
        params = [params_of(agent, turn) for agent in range(NUM_AGENTS)]
        asked = [engine.submit(history, each) for history, each in zip(histories, params, strict=True)]
        while not engine.is_idle:
            engine.step()
        for agent, request in enumerate(asked):
            expected = plain.generate([histories[agent]], params[agent])[0]
            assert request.token_ids == expected.token_ids, (turn, agent)
            if params[agent].grammar == TOOL and request.finish_reason == "stop":
                assert set(json.loads(expected.text)) == {"tool", "path"}
            num_calls, num_found = num_calls + 1, num_found + (request.num_cached_tokens > 0)
            num_steps, num_tokens = num_steps + request.stats.num_steps, num_tokens + len(request.token_ids)
            result = tokenizer(f"\n# result {turn}: {agent * turn % 7} files\n")["input_ids"]
            histories[agent] += [*request.token_ids, *result]
            if len(histories[agent]) > LONGEST:
                histories[agent] = list(starts[agent])
    assert num_calls == NUM_AGENTS * NUM_TURNS and num_found > num_calls / 4 and num_steps < num_tokens
    print(f"{num_calls} calls, {num_found} with a prefix, {num_tokens} tokens in {num_steps} steps")
