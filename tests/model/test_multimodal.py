"""Multimodal checkpoints, saved with their towers, run as text models with the ids of the wrapper's own `generate`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

import lpr.model.multimodal
from dev.families import DECODE, NEW_TOKENS, PROMPTS, observe, save_wrapper, stock_greedy
from dev.family_table import FAMILIES, TRANSFORMERS, WORKS, WRAPPERS
from lpr import Engine, InputError, SamplingParams
from lpr.model.loader import load
from lpr.model.multimodal import check_generate, decoder_class, empty_decoder

BY_NAME = {family.name: family for family in [*FAMILIES, *WRAPPERS]}


@pytest.mark.parametrize(
    "name",
    [
        "mistral3",
        "qwen2_5_vl",
        "qwen3_vl_moe",
        "glm4v",
        "llava",
        "idefics3",
        "minimax_m3_vl",
        "paligemma",
        "blip",
        "udop",
    ],
)
@pytest.mark.slow(first=3)
def test_wrapper(name: str) -> None:
    """Some of the table's; `python -m dev.families` runs all."""
    family = BY_NAME[name]
    seen = observe(family)
    assert seen.matches(family), seen
    assert seen.status == WORKS or "\n" not in seen.detail


def test_the_table_has_every_multimodal_type_of_transformers() -> None:
    if transformers.__version__ != TRANSFORMERS:
        pytest.skip(f"the table is of transformers {TRANSFORMERS}")
    others = set(MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES) - set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    types = [family.model_type for family in WRAPPERS]
    assert len(types) == len(set(types)) and others <= set(types) <= set(MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES)
    assert [family.name for family in WRAPPERS if family.status != WORKS and not family.note] == []


@pytest.mark.parametrize("name", ["gemma3", "llama4", "qwen3_5_moe"])
@pytest.mark.slow(first=1)
def test_types_that_are_causal_ones_too(name: str, tmp_path: Path) -> None:
    stock = save_wrapper(BY_NAME[name], str(tmp_path))
    if name == "llama4" and transformers.__version__ == "5.24.0":  # its wrapper's forward raises AttributeError
        stock = AutoModelForCausalLM.from_pretrained(str(tmp_path))
    expected = stock_greedy(stock)
    engine = Engine.from_pretrained(str(tmp_path), decode=DECODE)
    done = engine.generate(PROMPTS, SamplingParams(max_new_tokens=NEW_TOKENS))
    assert [list(each.token_ids) for each in done] == expected


def test_towers_take_no_memory(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    whole = save_wrapper(BY_NAME["mistral3"], str(tmp_path))
    capfd.readouterr()
    read = load(str(tmp_path)).model
    Engine.from_model(read)
    assert not capfd.readouterr().err, "towers that are not read are no news"
    names = {name for name, _ in read.named_parameters()}
    towers = "model.vision_tower", "model.multi_modal_projector"
    assert names == {name for name, _ in whole.named_parameters() if not name.startswith(towers)}
    with pytest.raises(InputError, match="text passes through its vision_tower, which a text model does not have"):
        read.get_image_features(torch.zeros(1, 3, 28, 28), image_sizes=torch.tensor([[28, 28]]))


def edited(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> str:
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


def _lacks(weights: dict[str, torch.Tensor]) -> None:
    del weights["language_model.model.layers.1.mlp.up_proj.weight"]


def _renamed(weights: dict[str, torch.Tensor]) -> None:
    for key in list(weights):
        if key.startswith("language_model.model"):
            weights[key.replace("language_model.model", "language.model")] = weights.pop(key)


def _left_over(weights: dict[str, torch.Tensor]) -> None:
    weights["language_model.model.layers.2.mlp.up_proj.weight"] = torch.zeros(2, 2)


def _without_towers(weights: dict[str, torch.Tensor]) -> None:
    for key in [key for key in weights if key.startswith(("vision_tower", "multi_modal_projector"))]:
        del weights[key]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_lacks, "lack 1 tensors that the model needs, the first: model.language_model.layers.1.mlp.up_proj.weight"),
        (_renamed, "lack 20 tensors that the model needs"),
        (
            _left_over,
            "have 1 tensors of its text part that the model has no place for, the first: .*layers.2.mlp.up",
        ),
    ],
)
def test_text_weights_must_fit(edit: Any, message: str, tmp_path: Path) -> None:
    save_wrapper(BY_NAME["mistral3"], str(tmp_path))
    with pytest.raises(InputError, match=message) as refused:
        load(edited(tmp_path, edit))
    assert "\n" not in str(refused.value)


def test_weights_of_towers_may_be_absent(tmp_path: Path) -> None:
    expected = stock_greedy(save_wrapper(BY_NAME["mistral3"], str(tmp_path)))
    engine = Engine.from_pretrained(edited(tmp_path, _without_towers), decode=DECODE)
    assert list(engine.generate(PROMPTS[:1], SamplingParams(max_new_tokens=NEW_TOKENS))[0].token_ids) == expected[0]


def test_positions_of_text_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrapper whose `generate` counts other positions than its forward is refused."""
    model = save_wrapper(BY_NAME["qwen2_5_vl"], str(tmp_path))
    check_generate(model)
    stock = type(model).prepare_inputs_for_generation

    def shifted(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = stock(self, *args, **kwargs)
        made["position_ids"] = made["position_ids"] * 2
        return made

    monkeypatch.setattr(type(model), "prepare_inputs_for_generation", shifted)
    with pytest.raises(InputError, match="logits of its generate differ"):
        load(str(tmp_path))


def test_a_wrapper_keeps_its_name_and_module() -> None:
    """transformers finds the mapping of a checkpoint's keys by them."""
    config = transformers.AutoConfig.for_model("mistral3")
    found = decoder_class(config)
    assert issubclass(found, transformers.Mistral3ForConditionalGeneration)
    wrapper = transformers.Mistral3ForConditionalGeneration
    assert (found.__name__, found.__module__) == (wrapper.__name__, wrapper.__module__)
    assert decoder_class(config) is found
    with torch.device("meta"):
        assert not any("vision" in name for name, _ in empty_decoder(config).named_parameters())


def test_an_encoder_decoder_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "udop"}))
    with pytest.raises(InputError, match="model type 'udop' is an encoder-decoder"):
        load(str(tmp_path))
    assert lpr.model.multimodal.is_text(transformers.AutoConfig.for_model("llama"))
