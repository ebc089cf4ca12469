"""The long tests of tests/model/test_parallel.py."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from dev.families import tiny_model as tiny_family
from dev.family_table import FAMILIES
from lpr import DecodeConfig, Engine
from lpr.model import transformers_versions as versions
from lpr.model.heads.forms import MIMO
from tests.fakes.adapters import ATTENTION, merged, write_adapter
from tests.fakes.models import stock_greedy, tiny_model
from tests.fakes.models_with_heads import checkpoint_with_head
from tests.fakes.tp_worker import DECODE, FEW, NUM_EXACT, PARAMS, PROMPTS
from tests.model.recurrent.test_split_heads import CASES, TWO_GROUPS, model_of
from tests.model.recurrent.test_split_heads import check as check_recurrent
from tests.model.test_parallel import (
    COMPILED,
    LARGE_MIB,
    TREES,
    check_compiled,
    check_exact,
    check_trees,
    folders,
    launch,
    models,
    two_replicas,
)


def test_exact_mode_gives_the_bits_of_plain_decoding_under_the_same_split(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    cases = {f"exact/{dtype}": {"model": str(folders["llama"]), "dtype": dtype} for dtype in ("float32", "bfloat16")}
    done = launch(2, {"tp": 2, "cases": cases}, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    for rank in range(2):
        results = json.loads((tmp_path / f"out.{rank}").read_text())
        for name, each in results.items():
            assert "error" not in each, (name, each)
            assert each["mesh"] == [1, 2]
            assert each["shapes"]["model.layers.0.self_attn.q_proj.weight"] == [32, 64], "half of the heads"
            for counts in each["found"].values():
                assert counts["outputs_that_differ"] == counts["logits_that_differ"] == 0, (name, counts)
                assert counts["logits_compared"] == 3 * NUM_EXACT and counts["steps"] < 3 * NUM_EXACT


def test_exact_mode_of_recurrent_layers_that_ranks_share(tmp_path: Path) -> None:
    """Logits have the same bits for trees, batches and pieces, with one group of heads that the ranks share too."""
    cases = {}
    for name, sizes in (("qwen3_5_text", {}), ("falcon_h1", {})):
        model_of(name, **sizes).save_pretrained(tmp_path / name)
        cases[f"exact/{name}"] = {"model": str(tmp_path / name), "dtype": "float32"}
    done = launch(2, {"tp": 2, "cases": cases}, tmp_path)
    for rank in range(2):
        results = json.loads((tmp_path / f"out.{rank}").read_text())
        assert list(results) == list(cases), done.stderr[-2000:]
        for name, each in results.items():
            assert "error" not in each, (name, each)
            for counts in each["found"].values():
                assert counts["outputs_that_differ"] == counts["logits_that_differ"] == 0, (name, counts)
                assert counts["logits_compared"] == 3 * NUM_EXACT, (name, counts)


def test_recurrent_layers_of_one_replica(tmp_path: Path) -> None:
    """Ids, states in parts, snapshots and preemption, and faults that show."""
    check_recurrent(CASES, tmp_path)


def test_ranks_have_their_part_of_adapters_of_recurrent_layers(tmp_path: Path) -> None:
    """Of projections that are cut in parts, of those that are one range, and of the one that adds up."""
    modules = [*ATTENTION, "in_proj", "out_proj", "in_proj_qkv", "in_proj_a", "in_proj_z"]
    cases, expected = {}, {}
    for name, sizes in (("bamba", TWO_GROUPS), ("qwen3_5_text", {})):
        model = model_of(name, **sizes)
        model.save_pretrained(tmp_path / name / "base")
        written = {str(seed): write_adapter(tmp_path / name / str(seed), model, modules, seed) for seed in (0, 1)}
        named = json.dumps({key: str(folder) for key, folder in written.items()})
        cases[f"adapters/{name}"] = {"model": str(tmp_path / name / "base"), "adapters": named, "exact": "no"}
        twins = [model, *(merged(model, folder) for folder in written.values())]
        expected[f"adapters/{name}"] = [stock_greedy(twin, prompt, 16) for prompt in PROMPTS for twin in twins]
    done = launch(2, {"tp": 2, "cases": cases}, tmp_path)
    for rank in range(2):
        report = json.loads((tmp_path / f"out.{rank}").read_text())
        assert {key: each.get("token_ids", each) for key, each in report.items()} == expected, done.stderr[-2000:]


@pytest.mark.timeout(900)
def test_one_replica_of_two_ranks(models: dict[str, PreTrainedModel], folders: dict[str, Path], tmp_path: Path) -> None:
    cases = {
        f"{name}/{backend}": {"model": str(folders[name]), "backend": backend}
        for name, backend in [
            ("llama", "deepspeed"), ("qwen2", "transformers"), ("qwen2", "deepspeed"), ("one_kv_head", "transformers"),
            ("one_kv_head", "deepspeed"), ("opt", "transformers"), ("incomplete", "transformers"),
        ]
    }  # fmt: skip
    compiled = tiny_model(spread=0.12, **COMPILED)  # type: ignore[arg-type]
    compiled.save_pretrained(tmp_path / "compiled")
    cases["compiled"] = {"model": str(tmp_path / "compiled")}
    for backend in ("transformers", "deepspeed"):
        cases[f"load/{backend}"] = {"model": str(folders["large"]), "backend": backend}
    done = launch(2, {"tp": 2, "cases": cases}, tmp_path)
    assert done.returncode == 0, done.stderr
    reports = [json.loads((tmp_path / f"out.{rank}").read_text()) for rank in range(2)]
    check_compiled(compiled, reports)
    for name in ("load/transformers", "load/deepspeed"):
        for found in [report.pop(name) for report in reports]:
            assert found["own_mib"] < 0.55 * LARGE_MIB
            assert found["peak_mib"] < 0.75 * LARGE_MIB, name
    refused = {name: reports[0].pop(name).get("error", "") for name in list(cases)[4:7]}
    assert "model-00002-of-" in refused["incomplete/transformers"]
    assert refused["one_kv_head/deepspeed"].endswith("--tp 1 would, or --tp-backend transformers")
    assert refused["opt/transformers"].endswith("plan for model type 'opt'; --tp-backend deepspeed does")
    check_exact(reports[0], models, [1, 2])
    assert reports[0]["one_kv_head/transformers"]["kv_heads"] == 1
    both = [torch.tensor(reports[0][f"qwen2/{backend}"]["logits"]) for backend in ("transformers", "deepspeed")]
    torch.testing.assert_close(*both, atol=1e-4, rtol=0)


def test_the_command_of_two_ranks(folders: dict[str, Path], tmp_path: Path) -> None:
    prompts, config = tmp_path / "in.jsonl", tmp_path / "run.toml"
    prompts.write_text('{"prompt": "def add(a, b):"}\n{"prompt": "x = [1, 2, 3]"}\n')
    config.write_text("mesh = { lp = 1, tp = 2 }\nmax_new_tokens = 12\nmax_length = 256\n")
    files = ["--prompts", str(prompts), "--output", str(tmp_path / "out.jsonl")]
    commands = [
        ["--config", str(config), *files, "--json"],
        ["--config", str(config), "--prompt", "import os", "--temperature", "0.8", "--json"],
        ["--tp", "2", "--model", str(folders["llama"]), "--kv-tokens", "2000000000"],
    ]  # one that fails, as rank 1 waits for 10 s after it
    done = launch(2, {"tp": 2, "cases": {}, "commands": commands}, tmp_path)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert json.loads((tmp_path / f"out.codes{rank}").read_text()) == [0, 0, 2]
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [len(row["token_ids"]) for row in rows] == [12, 12]
    assert all(row["mesh"] == {"lp": 1, "tp": 2} and row["world_size"] == 2 for row in rows)
    summary, shown = [json.loads(line) for line in done.stdout.splitlines()]
    assert summary["mesh"] == {"lp": 1, "tp": 2} and shown["runs"][0]["equal"] is True
    errors = [line for line in done.stderr.splitlines() if line.startswith("lpr.generate: error: ")]
    assert len(errors) == 1 and "kv_tokens=2000000000: the K/V of 2000000000 tokens needs " in errors[0]
    assert "Traceback" not in done.stderr


def test_exact_mode_of_two_processes_gives_the_bits_of_one(folders: dict[str, Path], tmp_path: Path) -> None:
    """Trees that two processes share (gloo); a process with another number of threads, or other last bits, is found."""
    model = str(folders["llama"])
    cases = {f"ranks/{dtype}": {"model": model, "dtype": dtype} for dtype in ("float32", "bfloat16")}
    cases["ranks/threads"] = {"model": model, "dtype": "bfloat16", "fault": "threads"}
    cases["ranks/rounding"] = {"model": model, "dtype": "float32", "fault": "rounding"}
    done = launch(2, {"tp": 1, "cases": cases}, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    reports = [json.loads((tmp_path / f"out.{rank}").read_text()) for rank in range(2)]
    for report in reports:
        refused = report.pop("ranks/threads")["error"]
        assert refused.startswith("InputError: rank 1 has another number of threads (exact mode needs one"), refused
    assert reports[1].pop("ranks/rounding")["differ"] > 0 and reports[0].pop("ranks/rounding")["differ"] == 0
    for name in reports[0]:
        found = [report[name] for report in reports]
        assert [each["mesh"] for each in found] == [[2, 1]] * 2
        assert all(each["same_ids"] and each["differ"] == 0 and each["steps"] < 3 * NUM_EXACT for each in found), found
        chosen = [{tuple(key) for key in each["chosen_here"]} for each in found]
        assert min(map(len, chosen)) > 5 and len(chosen[0] | chosen[1]) == 3 * NUM_EXACT, (
            "both evaluate a part of the text"
        )


@pytest.mark.timeout(900)
def test_two_replicas_of_two_ranks_and_every_kind_of_layer(
    models: dict[str, PreTrainedModel], folders: dict[str, Path], tmp_path: Path
) -> None:
    """Ids and states; tests/model/test_parallel.py has this mesh's faults."""
    wholes = {each.name: tiny_family(each) for each in FAMILIES if each.name in TREES}
    for name, whole in wholes.items():
        whole.save_pretrained(tmp_path / name)
    trees = {f"trees/{name}": {"model": str(tmp_path / name)} for name in wholes}
    runs = {"low_bit/t": ("low_bit", "transformers"), "opt/deepspeed": ("opt", "deepspeed")}
    done, reports = two_replicas(folders, tmp_path, runs, trees)
    assert done.returncode == 0, done.stderr[-2000:]
    check_trees(wholes, [{name: report.pop(f"trees/{name}") for name in wholes} for report in reports])
    for report in reports:
        assert list(report) == list(runs)
        check_exact(report, models, [2, 2])


@pytest.mark.skipif(
    not hasattr(versions.distributed_mixin, "initialize_distributed_mesh"), reason="--tp needs transformers 5.18"
)
def test_ranks_have_their_part_of_adapters(
    models: dict[str, PreTrainedModel], folders: dict[str, Path], tmp_path: Path
) -> None:
    """Of heads that are split, of a head that both ranks have, and of layers that are split along their input."""
    cases, expected, sizes = {}, {}, {}
    for name, modules in (("llama", [*ATTENTION, "up_proj", "down_proj"]), ("one_kv_head", ATTENTION)):
        written = {
            str(seed): write_adapter(tmp_path / name / str(seed), models[name], modules, seed) for seed in (0, 1)
        }
        named = json.dumps({key: str(folder) for key, folder in written.items()})
        twins = [models[name], *(merged(models[name], folder) for folder in written.values())]
        for exact in ("yes", "no"):
            key = f"adapters/{name}/{exact}"
            cases[key] = {"model": str(folders[name]), "adapters": named, "exact": exact}
            expected[key] = [stock_greedy(twin, prompt, 16) for prompt in PROMPTS for twin in twins]
            weights = [load_file(folder / "adapter_model.safetensors").values() for folder in written.values()]
            sizes[key] = sum(each.nbytes for adapter in weights for each in adapter)
    done = launch(2, {"tp": 2, "cases": cases}, tmp_path)
    for rank in range(2):
        report = json.loads((tmp_path / f"out.{rank}").read_text())
        assert {key: each.get("token_ids", each) for key, each in report.items()} == expected, done.stderr
        assert all(each["bytes"] < 0.9 * sizes[key] for key, each in report.items())


def test_ranks_run_a_prediction_head_together(tmp_path: Path) -> None:
    """Its guesses are those of one rank; with the parts of its logits in the wrong order they are others."""
    checkpoint_with_head(tmp_path / "model", "qwen2", MIMO)
    cases = {
        f"heads/{name}": {"model": str(tmp_path / "model"), "adaptive": adaptive, "fault": fault}
        for name, adaptive, fault in (("fixed", "no", ""), ("adaptive", "yes", ""), ("order", "no", "order"))
    }
    done = launch(2, {"tp": 2, "cases": cases}, tmp_path)
    engine = Engine.from_pretrained(str(tmp_path / "model"), replace(DECODE, window_size=0, draft_heads="on"))
    alone = engine.generate(PROMPTS * 2, FEW)
    heads = [each.stats.sources["head"] for each in alone]
    guesses = [sum(each.drafted for each in heads), sum(each.accepted for each in heads)]
    for rank in range(2):
        report = json.loads((tmp_path / f"out.{rank}").read_text())
        for name in ("fixed", "adaptive", "order"):
            assert f"heads/{name}" in report, done.stderr[-3000:]
            found = report[f"heads/{name}"]
            assert found["token_ids"] == [each.token_ids for each in alone], done.stderr
            assert not found["has_pace"]
        assert report["heads/fixed"]["guesses"] == guesses and guesses[0]
        assert report["heads/order"]["guesses"] != guesses


def test_ranks_have_parts_of_a_low_bit_copy_with_recurrent_layers(tmp_path: Path) -> None:
    """Of one family beside ranks that serve, of another in every replica."""
    cases, expected = {}, {}
    for name, ranks in (("qwen3_5_text", "1"), ("falcon_h1", "0")):
        model = model_of(name)
        model.save_pretrained(tmp_path / name)
        how = {"model": str(tmp_path / name), "form": "int8", "fixed": "yes", "fault": ""}
        cases[f"copies/{name}/{ranks}"] = {**how, "draft_ranks": ranks}
        engine = Engine.from_model(model, decode=DecodeConfig.autoregressive(max_batch_size=3))
        expected[f"copies/{name}/{ranks}"] = [each.token_ids for each in engine.generate(PROMPTS * 2, PARAMS)]
    done = launch(4, {"tp": 2, "cases": cases}, tmp_path)
    for rank in range(4):
        report = json.loads((tmp_path / f"out.{rank}").read_text())
        assert {key: each.get("token_ids", each) for key, each in report.items()} == expected, done.stderr[-2000:]
        assert all(each["accepted"] > 40 for each in report.values()), report


def test_ranks_have_parts_of_a_low_bit_copy(
    models: dict[str, PreTrainedModel], folders: dict[str, Path], tmp_path: Path
) -> None:
    """Beside one of two ranks that serves; or every replica has a copy. Without the sums of layers it drafts badly."""
    cases = {
        f"copies/{name}/{form}/{fixed}/{fault}/{ranks}": {
            "model": str(folders[name]), "form": form, "fixed": fixed, "fault": fault, "draft_ranks": ranks
        }
        for name, form, fixed, fault, ranks in (
            ("llama", "int8", "yes", "", "1"),
            ("qwen2", "int8", "no", "", "1"),
            ("one_kv_head", "int4", "yes", "", "1"),
            ("llama", "int8", "yes", "sum", "1"),
            ("llama", "int8", "yes", "", "0"),
            ("one_kv_head", "int4", "no", "", "0"),
            ("llama", "int8", "yes", "sum", "0"),
        )
    }  # fmt: skip
    done = launch(4, {"tp": 2, "cases": cases}, tmp_path)
    reports = [json.loads((tmp_path / f"out.{rank}").read_text()) for rank in range(4)]
    accepted = {}
    for name in cases:
        model = models[name.split("/")[1]]
        engine = Engine.from_model(model, decode=DecodeConfig.autoregressive(max_batch_size=3))
        expected = [each.token_ids for each in engine.generate(PROMPTS * 2, PARAMS)]
        errors = [report.get(name, {}).get("error") for report in reports]
        assert errors == [None] * 4, (name, errors, done.stderr)
        for rank, found in enumerate(report[name] for report in reports):
            assert found["token_ids"] == expected, (name, rank)
            drafts = rank > 1 and name.endswith("1")
            linear, head = ("LowBitLinear", "LowBitHead") if drafts else ("PrepackedLinear", "PrepackedHead")
            assert found["kinds"] == [linear, linear, head], name
        accepted[name] = reports[0][name]["accepted"]
        assert accepted[name] == reports[3][name]["accepted"]
    whole, _, _, torn, own, _, torn_own = accepted.values()
    assert whole > 40 and torn < whole / 2, accepted
    assert own > 40 and torn_own < own / 2, accepted
