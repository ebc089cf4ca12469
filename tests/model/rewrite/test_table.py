"""The list of rewrites: what is done to a model and in which order, what conflicts, and the way back."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import dev.family_table
from dev.families import tiny_model as tiny_family
from lpr import Engine, SamplingParams
from lpr.cli.plan import main
from lpr.model.fused.decoder_layer import DecoderLayers
from lpr.model.recurrent import plug
from lpr.model.rewrite.base import Setting, Stage, carry_out, done_to, undo
from lpr.model.rewrite.compiled_model import CompiledModel
from lpr.model.rewrite.merged_linear import MergedLinear
from lpr.model.rewrite.table import CONFLICTS, REWRITES, Line, dry_run, rewrite, undo_forwards, why_not
from lpr.model.runner import TreeModel
from lpr.model.self_check import self_check
from tests.fakes.models import tiny_model
from tests.fakes.rewriting import make_faster

BY_TYPE = {type(each): each for each in REWRITES}
FAMILIES = {each.name: each for each in dev.family_table.FAMILIES}
CPU, GPU = torch.device("cpu"), torch.device("cuda")


def snapshot(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    """Classes, own attributes by name, hooks, and weights bit for bit."""
    return {
        name: (
            type(module),
            sorted(set(vars(module)) - {"_lpr_rewrites"}),
            getattr(vars(module).get("config"), "__class__", None),
            len(module._forward_hooks) + len(module._forward_pre_hooks),
            [
                (key, id(each) if id(each) in TIED else None, each.detach().clone())
                for key, each in module._parameters.items()
                if each is not None
            ],
        )
        for name, module in model.named_modules()
    }


TIED: set[int] = set()


def same(one: dict[str, tuple[Any, ...]], other: dict[str, tuple[Any, ...]]) -> bool:
    def plain(found: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
        return {name: (*each[:4], [(key, tied) for key, tied, _ in each[4]]) for name, each in found.items()}

    tensors = [[tensor for each in found.values() for _, _, tensor in each[4]] for found in (one, other)]
    return plain(one) == plain(other) and all(map(torch.equal, *tensors))


UNDONE: dict[str, tuple[dict[str, Any], set[str]]] = {
    "llama": ({"tie_word_embeddings": True}, {"prepacked products", "decoder layers", "RMS norms"}),
    "qwen2": ({}, {"prepacked products", "decoder layers", "RMS norms"}),
    "gemma2": ({"head_dim": 16}, {"prepacked products", "gated MLPs", "RMS norms"}),
    "gpt2": ({}, {"prepacked products"}),
}


@pytest.mark.parametrize("family", UNDONE)
def test_undo_gives_the_model_back_bit_for_bit(family: str) -> None:
    """All of the list in exact mode, in the reverse order; what is tied stays tied."""
    sizes, expected = UNDONE[family]
    model = tiny_model(family, **sizes)
    TIED.update({id(model.get_input_embeddings().weight)})
    ids = torch.tensor([[3, 5, 7, 9]])
    before, logits = snapshot(model), model(ids).logits
    setting = Setting(CPU, exact=True)
    done = {line.name for line in rewrite(model, setting, Stage.TREE, Stage.FASTER, Stage.EXACT) if line.reason is None}
    assert done == expected | {"products at fixed heights"} and set(done_to(model)) == done
    assert not same(snapshot(model), before)
    for each in reversed(REWRITES):
        if each.name in done:
            undo(each, model)
    assert same(snapshot(model), before) and not done_to(model)
    assert torch.equal(model(ids).logits, logits)
    TIED.clear()


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_merged_projections_are_taken_apart(family: str) -> None:
    model = tiny_model(family)
    before = snapshot(model)
    assert len(carry_out(MergedLinear(lambda device: True), model, Setting(CPU))) == 4
    assert not same(snapshot(model), before)
    undo(BY_TYPE[MergedLinear], model)
    assert same(snapshot(model), before)


@pytest.mark.parametrize(
    "name, rewritten",
    [
        ("llama4_text", "temperature by position"),
        ("inkling_text", "distances by position"),
        ("falcon (7B: rope, multi-query)", "attention name of layers"),
        ("deepseek_v32", "selection by position"),
        ("minimax_m3_vl_text", "selection by position"),
    ],
)
def test_what_lets_a_family_evaluate_trees_is_undone(name: str, rewritten: str) -> None:
    if FAMILIES[name].is_old:
        pytest.skip(f"this transformers does not run {name} in trees")
    model = tiny_family(FAMILIES[name])
    before = snapshot(model)
    lines = rewrite(model, Setting(CPU), Stage.TREE)
    done = [line.name for line in lines if line.reason is None]
    assert rewritten in done and set(done) <= {rewritten, "recurrent calls over trees"}
    assert not same(snapshot(model), before)
    again = rewrite(model, Setting(CPU), Stage.TREE)
    assert again == lines, "once"
    for each in REWRITES:
        if each.name in done:
            undo(each, model)
    assert same(snapshot(model), before)


def test_names_of_a_file_are_given_back_by_its_last_model() -> None:
    """A copy of a model counts, though its record says that it is done."""
    first = tiny_family(FAMILIES["mamba2"])
    (place, *_) = plug._places(first)
    stock = getattr(getattr(*place), "stock", getattr(*place))
    calls = BY_TYPE[plug.RecurrentCalls]
    for each in list(getattr(getattr(*place), "users", ())):
        undo(calls, each)
    carry_out(calls, first, Setting(CPU))
    second = copy.deepcopy(first)
    carry_out(calls, second, Setting(CPU))
    undo(calls, first)
    assert getattr(*place) is not stock
    undo(calls, second)
    assert getattr(*place) is stock


def test_a_copy_of_a_model_knows_what_is_done() -> None:
    model = tiny_model()
    done = make_faster(model)
    copied = copy.deepcopy(model)
    assert make_faster(copied) == done
    assert undo_forwards(copied) and not undo_forwards(copied)
    assert isinstance(vars(model.model.layers[0]).get("forward"), object) and "forward" in vars(model.model.layers[0])
    assert "forward" not in vars(copied.model.layers[0])
    self_check(TreeModel(copied))


# The order and the conflicts.


def test_the_order_of_the_list() -> None:
    """By stages; what layers are made of comes before them, and what is in none of them after them."""
    names = [each.name for each in REWRITES]
    assert len(set(names)) == len(names)
    early = [each.stage for each in REWRITES if each.stage is not Stage.LATE]
    assert early == sorted(early) and REWRITES[-1].stage is Stage.LATE
    assert names.index("prepacked products") < names.index("decoder layers") < names.index("gated MLPs")
    assert names.index("merged projections") < names.index("decoder layers") < names.index("RMS norms")


def test_layers_before_their_products_are_not_found() -> None:
    """The order matters: a fault of it loses the layers."""
    model = tiny_model()
    assert not carry_out(DecoderLayers(), model, Setting(CPU))
    assert len(make_faster(model)) == 3 and "decoder layers" in done_to(model)


def test_conflicts_name_what_is_in_the_list() -> None:
    modes = {
        "tp",
        "exact",
        "adapters",
        "draft head",
        "foreign",
        "compile=on",
        "compile=auto",
        "compile=off",
        "cuda",
        "cpu",
    }
    for each in CONFLICTS:
        assert set(each.losers) <= set(BY_TYPE) and each.reason and "\n" not in each.reason
        assert each.winner in modes if isinstance(each.winner, str) else each.winner in BY_TYPE
        assert not each.only or each.only in modes
        assert each.unless is None or each.unless in BY_TYPE
    asked = dict.fromkeys(("exact", "tp", "has_head", "adapters"), True)
    assert Setting(GPU, is_ours=False, compile="on", **asked).modes == modes - {
        "compile=auto", "compile=off", "cpu",
    }  # fmt: skip


GPU_OURS = Setting(GPU, compile="auto")
CASES: dict[str, tuple[Setting, set[str]]] = {
    "on a GPU": (GPU_OURS, {"merged projections", "decoder layers", "RMS norms"}),
    "asked to compile": (replace(GPU_OURS, compile="on"), {"merged projections", "torch.compile"}),
    "split": (replace(GPU_OURS, tp=True), {"merged projections", "decoder layers", "RMS norms"}),
    "split, asked to compile": (replace(GPU_OURS, tp=True, compile="on"), {"merged projections", "torch.compile"}),
    "split, not captured": (
        replace(GPU_OURS, tp=True, uncaptured="it is"),
        {"merged projections", "decoder layers", "RMS norms"},
    ),
    "split, exact on a GPU": (replace(GPU_OURS, tp=True, exact=True), set()),
    "the program's": (replace(GPU_OURS, is_ours=False), set()),
    "the program's, asked to compile": (
        replace(GPU_OURS, is_ours=False, compile="on"),
        {"merged projections", "torch.compile"},
    ),
    "exact on a GPU": (replace(GPU_OURS, exact=True), set()),
    "exact on a CPU": (Setting(CPU, exact=True), {"prepacked products", "decoder layers", "RMS norms"}),
    "with a head": (
        replace(GPU_OURS, tp=True, has_head=True),
        {"merged projections", "decoder layers", "RMS norms"},
    ),
    "split on a CPU": (Setting(CPU, tp=True), {"prepacked products", "decoder layers", "RMS norms"}),
    "split, exact on a CPU": (Setting(CPU, tp=True, exact=True), set()),
}


@pytest.mark.parametrize("case", CASES)
def test_what_goes_together(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    setting, expected = CASES[case]
    monkeypatch.setattr("lpr.model.fused.modules.is_available", lambda device: True)
    monkeypatch.setattr("lpr.model.rewrite.merged_linear.has_room_to_pack", lambda device: True)
    monkeypatch.setattr(CompiledModel, "apply", lambda *_: None)
    with torch.device("meta"):
        model = tiny_model()
    lines = rewrite(model, setting, Stage.FASTER, Stage.LATE)
    assert {line.name for line in lines if line.reason is None} == expected, lines


def test_modules_beside_unknown_layers_yield_to_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lpr.model.fused.modules.is_available", lambda device: True)
    monkeypatch.setattr(CompiledModel, "apply", lambda *_: None)
    with torch.device("meta"):
        model = tiny_model("gemma2", head_dim=16)
    lines = {line.name: line for line in rewrite(model, GPU_OURS, Stage.FASTER, Stage.LATE)}
    assert lines["RMS norms"].reason == lines["gated MLPs"].reason == "the compiler fuses them"
    assert lines["torch.compile"].reason is None


def test_the_compiler_takes_what_the_check_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lpr.model.fused.modules.is_available", lambda device: True)
    with torch.device("meta"):
        model = tiny_model()
    rewrite(model, GPU_OURS, Stage.FASTER)
    assert why_not(BY_TYPE[CompiledModel], model, GPU_OURS) == "whole layers are computed by few calls"
    assert undo_forwards(model)
    assert why_not(BY_TYPE[CompiledModel], model, GPU_OURS) is None


def test_loading_is_final() -> None:
    for each in REWRITES:
        if each.stage is Stage.LOAD:
            with pytest.raises(TypeError, match="is final: load the model anew"):
                each.undo(nn.Linear(1, 1))


# What the command prints is what an engine does.


@pytest.mark.parametrize("family, sizes", [("llama", {}), ("gemma2", {"head_dim": 16}), ("gpt2", {})])
def test_a_dry_run_is_what_is_done(family: str, sizes: dict[str, Any]) -> None:
    model = tiny_model(family, **sizes)
    told = dry_run(model.config, CPU, torch.float32)
    stages = Stage.TREE, Stage.FASTER, Stage.EXACT
    assert rewrite(model, Setting(CPU), *stages) == [
        line for line, each in zip(told, REWRITES, strict=True) if each.stage in stages
    ]


def test_an_engine_of_ours_is_told_alike(tmp_path: Any) -> None:
    model: PreTrainedModel = tiny_model()
    model.save_pretrained(tmp_path)
    engine = Engine.from_pretrained(str(tmp_path), device="cpu", dtype="float32")
    told = {line.name: line.num_modules for line in dry_run(model.config, CPU, torch.float32) if line.reason is None}
    assert {name: len(found) for name, found in done_to(engine.model.model).items()} == told
    assert engine.generate([[3, 4]], SamplingParams(max_new_tokens=2))


def test_the_command_prints_one_line_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "small.toml").write_text('[config]\nmodel_type = "llama"\nnum_hidden_layers = 2\n')
    model = ["--model", str(tmp_path / "small.toml")]
    assert main([*model, "--rewrites"]) == 0
    printed = capsys.readouterr().out
    for each in REWRITES:
        assert printed.count(f"\n│ {each.name} ") == 2, each.name
    assert re.search(r"│ prepacked products +│ +9 │", printed)
    assert main([*model, "--rewrites", "--json"]) == 0
    on_gpu, on_cpu = json.loads(capsys.readouterr().out).values()
    assert [Line(**each).name for each in on_cpu] == [each["name"] for each in on_gpu] == [r.name for r in REWRITES]
    assert main(["--rewrites"]) == 2 and "--model is missing" in capsys.readouterr().err
