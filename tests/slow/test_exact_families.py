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
REASONS = (
    "its attention is its own code", "its sparse attention selects", "its recurrent layers are convolutions",
    "its own code multiplies by", "in its own code adds",
)  # fmt: skip
NAMES = [family.name for family in FAMILIES if family.status == WORKS]


@pytest.mark.parametrize("name", NAMES)
def test_family(name: str) -> None:
    """The end of a text past a block's border, in pieces of one, three and four tokens, and in one."""
    family = next(each for each in FAMILIES if each.name == name)
    if family.model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family.model_type}")
    model = tiny_model(family)
    text = TEXT[:67]
    try:
        runner = checked(model)
    except InputError as refused:
        line = str(refused)
        assert "\n" not in line and "cannot be exact: " in line
        if transformers.__version__ == TRANSFORMERS:
            assert ("its attention is its own code" in line) == (family.model_type in OWN_ATTENTION)
            assert any(reason in line for reason in REASONS)
        return
    if transformers.__version__ == TRANSFORMERS:
        assert family.model_type not in OWN_ATTENTION
    single = in_pieces(runner, text, [60] + [1] * 7)[60:]
    for sizes in ([67], [60, 3, 4]):
        assert torch.equal(in_pieces(runner, text, sizes)[60:], single)
