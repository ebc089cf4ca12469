from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

import lpr
from lpr import DecodeConfig, Engine, InputError, SamplingParams
from lpr.protocol import Submit
from tests.fakes.models import left_of_an_engine, tiny_model


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.from_pretrained(lpr.bundled_model(), DecodeConfig(max_batch_size=3), device="cpu")


PROMPT = "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"


def test_stream_equals_generate(engine: Engine) -> None:
    for sampling in ({}, {"temperature": 0.9, "seed": 3}):
        params = SamplingParams(max_new_tokens=60, ignore_eos=True, **sampling)
        done = engine.generate([PROMPT], params)[0]
        chunks = list(engine.stream(PROMPT, params))
        assert "".join(chunk.text for chunk in chunks) == done.text
        assert [token for chunk in chunks for token in chunk.token_ids] == done.token_ids
        assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1].finish_reason == done.finish_reason == "length"
        assert len(done.token_ids) == done.stats.num_tokens == 60
        assert done.stats.tokens_per_step == 60 / done.stats.num_steps


def test_text_continues_the_prompt(engine: Engine) -> None:
    done = engine.generate([PROMPT], SamplingParams(max_new_tokens=40))[0]
    tokenizer = AutoTokenizer.from_pretrained(lpr.bundled_model())
    assert done.prompt_token_ids == tokenizer(PROMPT)["input_ids"]
    written = tokenizer.decode(done.prompt_token_ids + done.token_ids, skip_special_tokens=True)
    assert PROMPT + done.text == written


def test_ids_are_prompts_too(engine: Engine) -> None:
    params = SamplingParams(max_new_tokens=20)
    text = engine.generate([PROMPT], params)[0]
    assert engine.generate([text.prompt_token_ids], params)[0].token_ids == text.token_ids


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 7, 31])
def test_every_length_is_a_prefix(engine: Engine, num_tokens: int) -> None:
    long = engine.generate([PROMPT], SamplingParams(max_new_tokens=31))[0]
    short = engine.generate([PROMPT], SamplingParams(max_new_tokens=num_tokens))[0]
    assert short.token_ids == long.token_ids[:num_tokens]


def test_every_stop_string_ends_where_plain_decoding_would(engine: Engine) -> None:
    """Stop at each of many places of a text that is emitted in large blocks."""
    full = engine.generate([PROMPT], SamplingParams(max_new_tokens=80))[0]
    for start in range(0, len(full.text) - 3, 5):
        stop = full.text[start : start + 3]
        done = engine.generate([PROMPT], SamplingParams(max_new_tokens=80, stop=(stop,)))[0]
        assert done.finish_reason == "stop"
        assert done.text == full.text[: full.text.index(stop)]
        assert done.token_ids == full.token_ids[: len(done.token_ids)]
        tokenizer = engine.tokenizer
        before = tokenizer.decode(done.prompt_token_ids + done.token_ids[:-1])[len(PROMPT) :]
        assert stop not in before, "the ids end with the token that completed the stop string"


def test_end_of_text_inside_a_block() -> None:
    """Every token as the end-of-text token in turn: the request ends at its first occurrence."""
    model = tiny_model(seed=1, spread=0.1)
    prompt = [4, 5, 6] * 4
    model.generation_config.eos_token_id = None
    full = Engine.from_model(model).generate([prompt], SamplingParams(max_new_tokens=60))[0].token_ids
    for token in dict.fromkeys(full):
        model.generation_config.eos_token_id = [96, token]
        engine = Engine.from_model(model)
        done = engine.generate([prompt], SamplingParams(max_new_tokens=60))[0]
        assert done.token_ids == full[: full.index(token) + 1]
        assert done.finish_reason == "stop"
        done = engine.generate([prompt], SamplingParams(max_new_tokens=60, ignore_eos=True))[0]
        assert done.token_ids == full


def test_more_requests_than_slots(engine: Engine) -> None:
    prompts = [PROMPT[: 20 + 5 * i] for i in range(8)]
    params = [SamplingParams(max_new_tokens=10 + 9 * (i % 4)) for i in range(8)]
    together = engine.generate(prompts, params)
    assert engine.is_idle
    for prompt, each, done in zip(prompts, params, together, strict=True):
        assert engine.generate([prompt], each)[0].token_ids == done.token_ids


def test_submit_step_and_abort(engine: Engine) -> None:
    expected = engine.generate([PROMPT], SamplingParams(max_new_tokens=50))[0].token_ids
    # What was generated before is drafted whole, so the one to be aborted in mid-request is another text.
    requests = [engine.submit([9, 8, 30, 2], SamplingParams(max_new_tokens=50, temperature=1.5, ignore_eos=True))]
    requests += [engine.submit(PROMPT, SamplingParams(max_new_tokens=50)) for _ in range(4)]
    engine.step()
    engine.abort(requests[0])
    engine.abort(requests[4])
    with pytest.raises(RuntimeError, match="without requests"):
        engine.configure(DecodeConfig())
    while not engine.is_idle:
        engine.step()
    for request in requests[1:4]:
        assert request.completion().token_ids == expected
    assert requests[0].finish_reason == requests[4].finish_reason == "abort"


def test_an_abandoned_stream_frees_its_slot(engine: Engine) -> None:
    for _ in range(5):
        next(iter(engine.stream(PROMPT, SamplingParams(max_new_tokens=50))))
    assert engine.is_idle


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ("", SamplingParams(), "the prompt is empty"),
        ([], SamplingParams(), "the prompt is empty"),
        ([5, 99999], SamplingParams(), "token id 99999 is not in the model's vocabulary"),
        ("x = 1\n" * 3000, SamplingParams(), "exceed the context of"),
        ("x", SamplingParams(max_new_tokens=10**6), "exceed the context of"),
    ],
)
def test_prompts_that_cannot_be_completed(engine: Engine, prompt, params: SamplingParams, message: str) -> None:
    with pytest.raises(InputError, match=message):
        engine.generate([PROMPT, prompt], params)
    assert engine.is_idle, "nothing of a refused call stays behind"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"window_size": -1}, "window_size=-1 must be int >= 0"),
        ({"ngram_size": 1}, "ngram_size=1 must be at least 2"),
        ({"window_size": 4000, "ngram_size": 20}, "nodes a step; the limit is 16384"),
        ({"trie_nodes": 1.5}, "trie_nodes=1.5 must be a whole number"),
        ({"branch_length": 0}, "branch_length=0 must be int >= 1"),
        ({"max_length": 1}, "max_length=1"),
        ({"num_candidates": 65}, "num_candidates=65 must be int <= 64"),
    ],
)
def test_impossible_decode_configs(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        DecodeConfig(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": -0.5}, "temperature=-0.5"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_k": -1}, "top_k=-1"),
        ({"min_p": 2.0}, "min_p=2.0"),
        ({"stop": ("",)}, "stop="),
        ({"seed": 2**64}, "64 bits"),
    ],
)
def test_impossible_sampling_params(arguments, message: str) -> None:
    with pytest.raises(InputError, match=message):
        SamplingParams(**arguments)


def save(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def test_models_that_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        Engine.from_pretrained(str(tmp_path / "none"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="cannot load a model"):
        Engine.from_pretrained(str(tmp_path / "empty"))
    broken = save(tiny_model(), tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"no weights at all")
    with pytest.raises(InputError, match="cannot load a model"):
        Engine.from_pretrained(str(broken))
    lacking = save(tiny_model(), tmp_path / "lacking")
    config = (lacking / "config.json").read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 3')
    (lacking / "config.json").write_text(config)
    with pytest.raises(InputError, match="lack 9 tensors that the model needs"):
        Engine.from_pretrained(str(lacking))
    with pytest.raises(InputError, match="dtype 'int3' is none of"):
        Engine.from_pretrained(str(lacking), dtype="int3")
    with pytest.raises(InputError, match="device 'cuda:99' cannot be used|device 'tpu' cannot be used"):
        Engine.from_pretrained(str(lacking), device="tpu")


REVISIONS = """
import json, sys
import lpr
from lpr.model.loader import load
found = []
for revision in (None, "main", "v1", "b" * 40, "c" * 40):
    try:
        loaded = load("org/name", revision=revision)
        found.append([next(loaded.model.parameters()).sum().item(), len(loaded.tokenizer)])
    except lpr.InputError as failure:
        found.append(str(failure))
print(json.dumps(found))
"""


def test_a_model_without_a_tokenizer(tmp_path: Path) -> None:
    engine = Engine.from_pretrained(str(save(tiny_model(), tmp_path / "model")))
    assert engine.model.model.dtype == torch.float32
    done = engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=5))[0]
    assert len(done.token_ids) == 5 and done.text == ""
    with pytest.raises(InputError, match="no tokenizer"):
        engine.generate(["text"])


def test_a_longer_context_than_the_model_has(engine: Engine) -> None:
    with pytest.raises(InputError, match="exceeds the model's 512 positions"):
        Engine.from_model(tiny_model(), decode=DecodeConfig(max_length=513))


@pytest.mark.parametrize(
    "wrong",
    [
        {"top_k": 2**31}, {"no_repeat_ngram_size": 2**70}, {"max_new_tokens": True}, {"min_new_tokens": True},
        {"stop_token_ids": (2**31,)}, {"forced_ids": (True,)}, {"logit_bias": ((2**40, 1.0),)}, {"stop": 3},
        {"logit_bias": 3}, {"logit_bias": ((1,),)}, {"logprobs": False},
    ],
)  # fmt: skip
def test_numbers_that_no_rank_can_be_sent_are_refused(wrong: dict[str, Any]) -> None:
    """Beyond 2**31 they would fail on their way to the other ranks or in native code, after the request was queued."""
    with pytest.raises(InputError, match=next(iter(wrong))):
        SamplingParams(**wrong)


def test_none_and_dicts_are_taken_as_elsewhere() -> None:
    params = SamplingParams(stop=None, stop_token_ids=None, logit_bias={5: 1, 7: -2.5})  # type: ignore[arg-type]
    assert (params.stop, params.stop_token_ids, params.logit_bias) == ((), (), ((5, 1.0), (7, -2.5)))


@pytest.mark.parametrize("prompt", ["a\ud800", 3, ["a"], [1.5]])
def test_a_prompt_that_is_none_is_refused(engine: Engine, prompt: Any) -> None:
    with pytest.raises(InputError, match="prompt"):
        engine.generate([prompt])
    assert engine.is_idle


def test_a_priority_that_no_rank_can_be_sent_is_refused(engine: Engine) -> None:
    with pytest.raises(InputError, match="priority"):
        engine.submit(PROMPT, priority=2**70)
    assert engine.is_idle


def test_a_submit_is_a_request_as_it_is(engine: Engine) -> None:
    ids, params = engine.encode(PROMPT), SamplingParams(max_new_tokens=12, temperature=0.9, seed=5)
    [whole] = engine.generate([ids], params)
    fields: dict[str, Any] = {"tenant": "a", "details": True, "share": "k", "weight": 2.0, "learns": False}
    given = Submit.of(ids, params, whole.token_ids[:5], prediction=whole.token_ids[:8], **fields)
    request = engine.submit(msgspec.structs.replace(given, id=77))
    while request.finish_reason is None:
        engine.step()
    assert request.id == 77 and request.token_ids == whole.token_ids and request.prompt_ids == ids
    assert {name: getattr(request, name) for name in fields} == fields
    assert [token for chunk in request.take() for token in chunk.token_ids] == whole.token_ids[5:]


@pytest.mark.parametrize(
    ("changes", "more", "wrong"),
    [
        ({"token_ids": []}, {}, "empty"),
        ({"token_ids": [10**9]}, {}, "token id"),
        ({"token_ids": [1, 10**9]}, {}, "token id"),
        ({"prediction": [10**9]}, {}, "token id"),
        ({"weight": 0.0}, {}, "weight"),
        ({"priority": 2**70}, {}, "priority"),
        ({"params": SamplingParams(max_new_tokens=10**6)}, {}, "context"),
        ({}, {"params": SamplingParams()}, "without other arguments"),
        ({}, {"tenant": "a"}, "without other arguments"),
        ({}, {"prediction": [1]}, "without other arguments"),
    ],
)
def test_a_submit_that_cannot_be_completed_is_refused(
    engine: Engine, changes: dict[str, Any], more: dict[str, Any], wrong: str
) -> None:
    given = msgspec.structs.replace(Submit.of([1], SamplingParams(max_new_tokens=4)), id="new", **changes)
    with pytest.raises(InputError, match=wrong):
        engine.submit(given, **more)
    with pytest.raises(InputError, match="a prompt is text or a list"):
        engine.generate([given])  # type: ignore[list-item]
    assert engine.is_idle and not engine.requests


@pytest.mark.parametrize("given", [b"def", bytearray(b"def")])
def test_bytes_are_no_list_of_ids(engine: Engine, given: bytes) -> None:
    with pytest.raises(InputError, match="a prompt is text or a list of token ids, not"):
        engine.generate([given])
    with pytest.raises(InputError, match="a document is a list of token ids, not"):
        engine.learn(given)
    with pytest.raises(InputError, match="a prediction is text or a list of token ids, not"):
        engine.submit([1, 2], prediction=given)
    assert engine.is_idle and not engine.requests


@pytest.mark.parametrize("given", [{"max_new_tokens": 4}, "abc"])
def test_parameters_of_another_type_are_refused(engine: Engine, given: Any) -> None:
    with pytest.raises(InputError, match="parameters are SamplingParams, not"):
        engine.submit([1, 2], given)
    with pytest.raises(InputError, match="parameters are SamplingParams, not"):
        engine.generate([[1, 2]] * len(given), given)
    assert engine.is_idle and not engine.requests


def test_a_completion_before_the_end_is_refused(engine: Engine) -> None:
    request = engine.submit([1, 2], SamplingParams(max_new_tokens=4))
    with pytest.raises(RuntimeError, match=f"request {request.id} has not finished"):
        request.completion()
    while not engine.is_idle:
        engine.step()
    assert len(request.completion().token_ids) == 4


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_dropped_engine_frees_weights_and_cache_at_once(is_closed: bool) -> None:
    """In a cycle they would stay until Python's collector runs, which counts objects and not bytes."""
    assert left_of_an_engine(lambda: Engine.from_pretrained(lpr.bundled_model(), device="cpu"), is_closed) == []


def test_an_interrupted_call_leaves_no_request_behind(engine: Engine) -> None:
    calls = 0

    def interrupt(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return scores

    expected = engine.generate([PROMPT], SamplingParams(max_new_tokens=5))[0].token_ids
    with pytest.raises(KeyboardInterrupt):
        engine.generate([PROMPT] * 3, SamplingParams(max_new_tokens=50), [interrupt])
    assert engine.generate([PROMPT], SamplingParams(max_new_tokens=5))[0].token_ids == expected
    assert engine.is_idle and calls == 3
