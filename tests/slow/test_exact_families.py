"""Exact mode over every family that decodes: the same bits, or a refusal by name; never other bits without a word."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from dev.families import tiny_model
from dev.family_table import FAMILIES, TRANSFORMERS, WORKS
from lpr import InputError
from tests.model.exact.test_check import TEXT, checked, in_pieces

OWN_ATTENTION = {
    "big_bird", "falcon", "megatron-bert", "rembert",
    "xglm",
}  # fmt: skip
"""Their attention is in the middle of code that this test's transformers does not let others replace."""
FOUND_BY_TRYING = {"aria_text", "dbrx"}
"""Mixtures of experts that no setting of their config gives away: the check at load computes one text in pieces."""
NAMES = [family.name for family in FAMILIES if family.status == WORKS]


@pytest.mark.parametrize("name", NAMES)
def test_family(name: str) -> None:
    """The end of a text past a block's border, in pieces of one, three and seven tokens, and in one."""
    family = next(each for each in FAMILIES if each.name == name)
    if family.model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family.model_type}")
    model = tiny_model(family)
    text = TEXT[:70]
    try:
        runner = checked(model)
    except InputError as refused:
        line = str(refused)
        assert "\n" not in line and "cannot be exact: " in line
        if transformers.__version__ == TRANSFORMERS:
            own, tried = "its attention is its own code" in line, "its logits are other bits" in line
            assert own == (family.model_type in OWN_ATTENTION) and tried == (family.model_type in FOUND_BY_TRYING)
            named = "its experts' matrix products", "its sparse attention selects", "its recurrent layers add"
            assert own or tried or any(reason in line for reason in named)
        return
    if transformers.__version__ == TRANSFORMERS:
        assert family.model_type not in OWN_ATTENTION | FOUND_BY_TRYING
    single = in_pieces(runner, text, [60] + [1] * 10)[60:]
    for sizes in ([70], [60, 3, 7]):
        assert torch.equal(in_pieces(runner, text, sizes)[60:], single)
