"""Recurrent layers split by heads over two ranks: ids of the whole model, states in parts, and faults that show."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dev.families import tiny_model
from dev.family_table import FAMILIES
from lpr import DecodeConfig, Engine
from lpr.model.recurrent.split_heads import Cut, own_plan, refusal, split_layers
from lpr.planner.facts import facts_of
from lpr.planner.footprint import kv_token_bytes, split_problem, weight_bytes
from tests.fakes.tp_worker import PARAMS, PROMPTS
from tests.model.test_parallel import launch, needs_mesh

BY_NAME = {each.name: each for each in FAMILIES}
TWO_GROUPS = {"mamba_n_groups": 2}
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "qwen3_5_text": ("qwen3_5_text", {}, ""),
    "bamba": ("bamba", {}, ""),  # one group, which the ranks share
    "two groups": ("bamba", TWO_GROUPS, ""),
    "columns": ("bamba", TWO_GROUPS, "columns"),
    "whole": ("qwen3_5_text", {}, "whole"),
}
"""Jobs of processes, which tests/slow/test_parallel.py starts."""


def model_of(name: str, **sizes: Any) -> Any:
    return tiny_model(replace(BY_NAME[name], config={**BY_NAME[name].config, **sizes}))


def check(cases: dict[str, tuple[str, dict[str, Any], str]], tmp_path: Path) -> None:
    """Two ranks share each model."""
    wholes, job = {}, {}
    for key, (name, sizes, fault) in cases.items():
        wholes[key] = model_of(name, **sizes)
        wholes[key].save_pretrained(tmp_path / key)
        job[f"trees/{key}"] = {"model": str(tmp_path / key), "fault": fault}
    done = launch(2, {"tp": 2, "cases": job}, tmp_path)
    reports = [json.loads((tmp_path / f"out.{rank}").read_text()) for rank in range(2)]
    for key, (name, _, fault) in cases.items():
        engine = Engine.from_model(wholes[key], decode=DecodeConfig.autoregressive(max_batch_size=3))
        expected = [each.token_ids for each in engine.generate(PROMPTS * 2, PARAMS)]
        facts = facts_of(wholes[key].config, name)
        halved = engine.replica.like.states.bytes_per_place
        for found in [report[f"trees/{key}"] for report in reports]:
            assert "error" not in found, (key, found, done.stderr[-2000:])
            assert (found["token_ids"] == expected) == (fault != "columns"), key
            assert (found["state_bytes"] == facts.state_bytes(4, 2) < 0.6 * halved) == (fault != "whole"), key
            if not fault:
                assert found["steps"] < sum(map(len, expected)), "drafts were accepted"
                assert found["same_again"] and found["hits"], "from snapshots"
                assert found["crowded_ids"] == [expected[2]] * 3 and found["preemptions"]
                assert found["token_bytes"] == kv_token_bytes(facts, 2, 4)
        held = [report[f"trees/{key}"]["weight_bytes"] for report in reports]
        assert (max(held) == weight_bytes(facts, 2, 4)) == (fault != "whole"), (key, held)


def test_a_rank_has_the_same_share_of_every_part() -> None:
    cut = Cut(0, ((8, 4), (6, 1), (4, 2)))
    assert cut.places(0, 2).tolist() == [*range(4), *range(8, 14), 14, 15]
    assert cut.places(1, 2).tolist() == [*range(4, 8), *range(8, 14), 16, 17]
    assert cut.size(2) == 12 and cut.size(4) == 2 + 6 + 2
    assert [Cut(0, ((4, 2),)).places(rank, 4).tolist() for rank in range(4)] == [[0, 1], [0, 1], [2, 3], [2, 3]]


@pytest.mark.parametrize(
    ("name", "sizes", "tp", "message"),
    [
        ("qwen3_next", {}, 4, "4 does not divide the 2 heads of its recurrent layers"),
        ("bamba", {}, 3, "3 does not divide the 8 heads of its recurrent layers"),
        pytest.param("bamba", {"mamba_n_groups": 4}, 8, None, marks=needs_mesh),
        ("nemotron_h", {"n_groups": 8, "mamba_num_heads": 24, "mamba_head_dim": 8}, 12,
         "12 neither divides the 8 groups of its recurrent heads nor is a multiple of them"),
        ("falcon_h1", {"mamba_rms_norm": True}, 2,
         "2 exceeds the 1 groups of its recurrent layers, whose norm is their own"),
    ],
)  # fmt: skip
def test_what_cannot_be_split(name: str, sizes: dict[str, Any], tp: int, message: str | None) -> None:
    layers = split_layers(model_of(name, **sizes))
    assert layers and refusal(layers.values(), tp) == message
    if name == "qwen3_next":
        assert split_problem(facts_of(model_of(name).config, name), tp) == message


def test_layers_of_other_kinds_are_left_to_the_plan() -> None:
    for name in ("jamba", "kimi_linear", "lfm2"):
        model = model_of(name)
        assert not split_layers(model) and not own_plan(model, dict(model.tp_plan or {}))
    with torch.device("meta"):
        plan = own_plan(model_of("falcon_h1"), {})
    assert plan["model.layers.*.mamba.out_proj"] == plan["model.layers.*.feed_forward.down_proj"] == "rowwise"
