"""Families that need a shim or are refused, against faults; tests/slow has all families."""

from __future__ import annotations

import pytest

import lpr.model.families
import lpr.model.self_check
from dev.families import observe, tiny_model
from dev.family_table import FAMILIES, REFUSED
from lpr import Engine, InputError

BY_NAME = {family.name: family for family in FAMILIES}
SHIMMED = [
    "bloom", "bloom (6 heads)", "mpt", "mpt (6 heads)", "falcon (RW: ALiBi)", "falcon (RW: ALiBi, 6 heads)", "gpt_neo",
    "gpt_neox_japanese", "llama4_text",
]  # fmt: skip
UNTOLD = ["rwkv", "inkling2_text", "deepseek_v4", "qwen4_exp_text", "openai-gpt"]


@pytest.mark.parametrize("name", SHIMMED)
def test_a_shimmed_family_without_its_shim_is_found_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lpr.model.families, "_SHIMS", {})
    code = lpr.model.families.import_module("transformers.models.falcon.modeling_falcon")
    alibi = code.build_alibi_tensor
    monkeypatch.setattr(code, "build_alibi_tensor", getattr(alibi, "stock", alibi))
    try:
        seen = observe(BY_NAME[name])
    except RuntimeError as failure:  # in a batch only, and loudly
        assert "view size is not compatible" in str(failure)
    else:
        assert seen.status == REFUSED, seen


@pytest.mark.parametrize("name", UNTOLD)
def test_the_self_check_finds_what_no_config_tells(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recurrent and sparse models are refused by their name for it, and would be without that as well."""
    monkeypatch.setattr(lpr.model.self_check, "refusal", lambda model: None)
    with pytest.raises(InputError, match="cannot run a token tree: its (logits differ|forward failed)"):
        Engine.from_model(tiny_model(BY_NAME[name]))
