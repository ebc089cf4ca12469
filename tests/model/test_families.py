"""Families that need a shim or are refused, against faults; tests/slow has all families."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import lpr.model.self_check
from dev.families import observe, tiny_model
from dev.family_table import FAMILIES, REFUSED
from lpr import Engine, InputError
from lpr.model.rewrite import table

BY_NAME = {family.name: family for family in FAMILIES}
SHIMMED = ["falcon (7B: rope, multi-query)", "inkling_text", "llama4_text"]
UNTOLD = ["rwkv", "inkling2_text", "openai-gpt"]


# Falcon's layers need theirs in a padded batch alone, and fail loudly there.
@pytest.mark.parametrize("name", SHIMMED[1:])
def test_a_shimmed_family_without_its_shim_is_found_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tuple(each for each in table.REWRITES if type(each).__module__ != "lpr.model.rewrite.positions")
    monkeypatch.setattr(table, "REWRITES", kept)
    assert observe(BY_NAME[name]).status == REFUSED


@pytest.mark.parametrize("name", UNTOLD)
def test_the_self_check_finds_what_no_config_tells(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recurrent and sparse models are refused by their name for it, and would be without that as well."""
    monkeypatch.setattr(lpr.model.self_check, "refusal", lambda model: None)
    with pytest.raises(InputError, match="cannot run a token tree: its (logits differ|forward failed)"):
        Engine.from_model(tiny_model(BY_NAME[name]))


def test_an_argument_of_attention_that_is_not_known_is_refused() -> None:
    """It may change scores; left out, all steps would agree with each other and with no other program."""
    model = tiny_model(BY_NAME["llama"])
    inner = model.model.layers[0].self_attn.forward
    model.model.layers[0].self_attn.forward = partial(inner, score_bias=torch.ones(1))
    with pytest.raises(InputError, match="its attention is given 'score_bias', which is not known here"):
        Engine.from_model(model)
