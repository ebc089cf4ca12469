"""Every decoder family of transformers: transformers' own tokens, or one clear refusal; never a wrong token."""

from __future__ import annotations

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassClassValidationError
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import lpr.model.self_check
from dev.families import PAGE, PROMPTS, observe, stock_greedy, tiny_model, with_table
from dev.family_table import FAMILIES, NOT_RUN, REFUSED, TRANSFORMERS, WORKS, WRAPPERS
from lpr import DecodeConfig, Engine, InputError, SamplingParams
from lpr.model.runner import TreeModel
from tests.model.test_families import BY_NAME, SHIMMED


@pytest.mark.parametrize("name", [family.name for family in FAMILIES if family.status != NOT_RUN])
def test_family(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Of recurrent families the weights are such that logits show what a state holds, or nothing would be tested."""
    family = BY_NAME[name]
    if family.model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family.model_type}")
    try:
        seen = observe(family)
    except StrictDataclassClassValidationError as refused:
        if transformers.__version__ == TRANSFORMERS:
            raise
        pytest.skip(f"transformers {transformers.__version__} has no such layers: {refused}")
    assert seen.matches(family), seen
    assert seen.status == WORKS or "\n" not in seen.detail
    assert "hardly depend on the model's recurrent states" not in caplog.text


def test_the_table_has_every_decoder_of_transformers() -> None:
    assert len(BY_NAME) == len(FAMILIES), "two entries share a name"
    if transformers.__version__ != TRANSFORMERS:
        pytest.skip(f"the table is of transformers {TRANSFORMERS}")
    types, others = ({family.model_type for family in families} for families in (FAMILIES, WRAPPERS))
    assert not types & others
    assert types == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - others


def test_the_page_has_the_table() -> None:
    """Exactly the families of the matrix, with the status that `test_family` holds them to."""
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_table(page), "run python -m dev.families"


@pytest.mark.parametrize("name", SHIMMED)
def test_a_shimmed_model_still_generates_by_itself(name: str) -> None:
    model = tiny_model(BY_NAME[name])
    before = stock_greedy(model)
    TreeModel(model)
    TreeModel(model)
    assert stock_greedy(model) == before


@pytest.mark.parametrize("name", ["rwkv", "openai-gpt"])
def test_a_refusal_by_name_is_one_line(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """No other form of attention is tried."""
    with pytest.raises(InputError, match="cannot run a token tree: "):
        Engine.from_model(tiny_model(BY_NAME[name]))
    assert not caplog.text


def test_longrope_ends_at_its_original_context() -> None:
    family = BY_NAME["phi3 (longrope)"]
    engine = Engine.from_model(tiny_model(family))
    assert engine.max_length == 128
    with pytest.raises(InputError, match="exceed the context of 128 tokens"):
        engine.generate([[5] * 100], SamplingParams(max_new_tokens=29))
    with pytest.raises(InputError, match="max_length=129 exceeds the model's 128 positions .*longrope"):
        Engine.from_model(tiny_model(family), decode=DecodeConfig(max_length=129))


@pytest.mark.parametrize("name", ["phi3 (longrope)", "llama (dynamic rope)", "ctrl"])
def test_the_last_position_that_a_model_has(name: str) -> None:
    """Drafts at the end of the context reach no position that changes the others' frequencies, or has none."""
    family = BY_NAME[name]
    model = tiny_model(family)
    engine = Engine.from_model(tiny_model(family), decode=DecodeConfig(max_batch_size=2, trie_nodes=16))
    prompts = [(PROMPTS[1] * 8)[: engine.max_length - 30], PROMPTS[0]]
    done = engine.generate(prompts, SamplingParams(max_new_tokens=30))
    for prompt, completion in zip(prompts, done, strict=True):
        ids = torch.tensor([prompt])
        stock = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False, pad_token_id=0
        )
        assert completion.token_ids == stock[0, len(prompt) :].tolist()


def test_every_refusal_and_every_omission_gives_its_reason() -> None:
    assert [family.name for family in FAMILIES if family.status != WORKS and not family.note] == []
