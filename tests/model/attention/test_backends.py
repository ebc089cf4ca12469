"""The list of attention backends and the one place where one is chosen."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import dev.family_table
from dev.families import tiny_model as tiny_family
from lpr import InputError, native
from lpr.model.attention import backends
from lpr.model.attention.backends import ATTENTION, BACKENDS, choose
from lpr.model.runner import TreeModel
from lpr.model.self_check import self_check
from tests.fakes.models import tiny_model

FAMILIES = {each.name: each for each in dev.family_table.FAMILIES}
needs_extension = pytest.mark.skipif(native.PagedAttention is None, reason="no extension")


def own_code() -> PreTrainedModel:
    return tiny_model("xglm", num_layers=2, ffn_dim=96, attention_heads=4)


def sparse() -> PreTrainedModel:
    return tiny_family(FAMILIES["deepseek_v32"])


def on_gpu(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> PreTrainedModel:
    monkeypatch.setattr(type(model), "device", torch.device("cuda"), raising=False)
    monkeypatch.setattr(backends, "find_spec", lambda name: True)
    return model


def test_every_choice_has_a_backend_and_every_backend_is_registered() -> None:
    assert {each.choice for each in BACKENDS} == set(ATTENTION) - {"auto"}
    for each in BACKENDS:
        for exact in (False, True):
            assert each.name(exact) in ALL_ATTENTION_FUNCTIONS
    assert BACKENDS[-1].supports(own_code()) is None, "the last one can always attend"


@pytest.mark.parametrize(
    "family, places, on_cpu",
    [("llama", [4], 1), ("xglm", [2, 4], 2), ("deepseek_v32", [3, 4], 3)],
)
def test_what_each_can_do(family: str, places: list[int], on_cpu: int) -> None:
    """Reasons are one line, and "auto" on a CPU takes the first that has none."""
    model = {"llama": tiny_model, "xglm": own_code, "deepseek_v32": sparse}[family]().double()
    reasons = [each.supports(model) for each in BACKENDS]
    assert [place for place in range(2, 5) if reasons[place] is None] == places
    assert reasons[1] is not None, "the kernel of C++ knows no float64"
    assert all("\n" not in reason for reason in reasons if reason is not None)
    chosen = BACKENDS[on_cpu] if family != "llama" or native.PagedAttention is not None else BACKENDS[4]
    assert choose(model.float(), "auto") is chosen


def test_auto_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's kernels, but for what they do not know; a kernel that is missing is no error."""
    for make, place in ((tiny_model, 0), (own_code, 2), (sparse, 3)):
        with monkeypatch.context() as patch:
            assert choose(on_gpu(make(), patch), "auto") is BACKENDS[place]
    with monkeypatch.context() as patch:
        model = on_gpu(tiny_model(), patch)
        patch.setattr(backends, "find_spec", lambda name: None)
        assert choose(model, "auto") is BACKENDS[4]
        with pytest.raises(InputError, match="needs the package triton"):
            choose(model, "triton")


@pytest.mark.parametrize(
    "choice, make, message",
    [
        ("fast", tiny_model, "attention='fast' is none of auto, sdpa, triton, native"),
        ("triton", own_code, "'xglm' has its own attention code, which attention='triton' does not reach"),
        ("native", own_code, "'xglm' has its own attention code, which attention='native' does not reach"),
        ("triton", sparse, "attention='triton' knows no sparse attention"),
        ("native", sparse, "attention='native' knows no sparse attention"),
        ("native", lambda: tiny_model().half(), "attention='native' cannot be used: it works in float32 and bfloat16"),
    ],
)
@needs_extension
def test_a_choice_that_cannot_be_is_one_line(
    choice: str, make: object, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "find_spec", lambda name: True)
    with pytest.raises(InputError, match=message) as refused:
        choose(make(), choice)  # type: ignore[operator]
    assert "\n" not in str(refused.value)


def test_one_more_backend_is_one_more_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """It attends for the models that it supports, also in place of a better known one, and for no others."""
    dense = BACKENDS[4]
    mine = backends.Backend(
        "sdpa", lambda model: None if model.dtype is torch.float32 else "no", *["lpr_tree_sparse"] * 2
    )
    monkeypatch.setattr(backends, "BACKENDS", (mine, *BACKENDS))
    runner = TreeModel(tiny_model(), attention="sdpa")
    assert runner.adapter.backend is mine and runner.adapter.attention_name == "lpr_tree_sparse"
    self_check(runner)
    assert choose(tiny_model().double(), "sdpa") is dense


@needs_extension
def test_exact_mode_takes_the_exact_form() -> None:
    for exact, name in ((False, "lpr_tree_native"), (True, "lpr_tree_native_exact")):
        adapter = TreeModel(tiny_model(), exact=exact).adapter
        assert adapter.attention == "native" and adapter.attention_name == name and adapter.reads_pages
