"""Engines that are made or used in torch's modes, against one that is not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import lpr
from lpr import DecodeConfig, Engine, InputError, SamplingParams
from tests.fakes.models import tiny_model

DECODE = DecodeConfig(window_size=3, ngram_size=3, guess_set_size=3, trie_nodes=16, max_batch_size=4, kv_tokens=2000)
PROMPTS = [[(k * 7 + 3 * i * i + i) % 97 for i in range(20)] for k in range(3)]
GREEDY, SAMPLED = (
    SamplingParams(max_new_tokens=12),
    SamplingParams(max_new_tokens=12, temperature=0.9, seed=3, top_p=0.9),
)
Mode = Callable[[], AbstractContextManager[Any]]
MODES: dict[str, Mode] = {
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "meta device": lambda: torch.device("meta"),
}


def output(engine: Engine) -> list[list[int]]:
    params = [GREEDY, SAMPLED, SAMPLED]
    return [done.token_ids for done in engine.generate(PROMPTS, params)]


def model_of(family: str) -> PreTrainedModel:
    # Chunks of 256 tokens, the default, make the reference scans of short prompts slow, as states of 128 heads do.
    small = {"mamba_chunk_size": 8, "mamba_n_heads": 8, "mamba_d_state": 8}
    return tiny_model(family, **(small if family == "bamba" else {}))


@pytest.fixture(scope="module", params=["llama", "bamba"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return model_of(request.param)


@pytest.fixture(scope="module")
def expected(model: PreTrainedModel) -> list[list[int]]:
    return output(Engine.from_model(model, decode=DECODE))


CASES = [("llama", name, "both") for name in MODES]
CASES += [("llama", "inference", "inside"), ("llama", "inference", "outside"), ("llama", "meta device", "inside")]


@pytest.mark.parametrize("model, name, used", CASES, indirect=["model"])
@pytest.mark.slow(first=3)
def test_a_mode_changes_no_text(name: str, used: str, model: PreTrainedModel, expected: list[list[int]]) -> None:
    mode = MODES[name]
    with nullcontext() if used == "inside" else mode():
        engine = Engine.from_model(model, decode=DECODE)
        if used == "both":
            assert output(engine) == expected
    with mode() if used == "inside" else nullcontext():
        assert output(engine) == expected
        engine.configure(DECODE)
        assert output(engine) == expected
    assert output(engine) == expected


@pytest.mark.parametrize("model", ["llama"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_default_dtype_changes_no_text(dtype: torch.dtype, model: PreTrainedModel, expected: list[list[int]]) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        engine = Engine.from_model(model, decode=DECODE)
        assert output(engine) == expected
    finally:
        torch.set_default_dtype(before)
    assert output(engine) == expected


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_deterministic_algorithms_and_another_number_of_threads(
    model: PreTrainedModel, expected: list[list[int]]
) -> None:
    engine, threads = Engine.from_model(model, decode=DECODE), torch.get_num_threads()
    try:
        torch.use_deterministic_algorithms(True)
        assert output(engine) == expected
        torch.set_num_threads(threads + 1)
        assert output(engine) == expected
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)
    assert output(engine) == expected


@pytest.mark.parametrize("first", [True, False])
def test_the_drop_in_in_inference_mode_and_outside(first: bool) -> None:
    model, ids = tiny_model(), torch.tensor([PROMPTS[0]])
    how: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    how["attention_mask"] = torch.ones_like(ids)
    expected = model.generate(ids, **how)
    for inside in (first, not first):
        with torch.inference_mode(inside):
            assert torch.equal(model.generate(ids, **how, custom_generate=lpr.lookahead), expected)


@pytest.mark.parametrize("is_made", [False, True])
def test_the_drop_in_refuses_autocast_by_name(is_made: bool) -> None:
    """Its tokens would be those of the model's own dtype, and plain `generate` has autocast's."""
    model, ids = tiny_model(), torch.tensor([PROMPTS[0]])
    how: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    how |= {"attention_mask": torch.ones_like(ids), "custom_generate": lpr.lookahead}
    if is_made:
        model.generate(ids, **how)
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(InputError, match=r"cannot decode with torch\.autocast"),
    ):
        model.generate(ids, **how)
