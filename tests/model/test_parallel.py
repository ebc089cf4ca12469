"""Tensor parallelism: real gloo processes, and in this process what can be said without any."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedModel

from lpr import DecodeConfig, Engine, InputError
from lpr.cli.generate import main, parse
from lpr.dist.runtime import World
from lpr.engine.kv_pool import PoolNeeds
from lpr.model import transformers_versions as versions
from lpr.model.loader import load
from lpr.model.parallel import check_shards, check_split, num_kv_heads, planned_ends
from lpr.planner.facts import facts_of
from tests.fakes.low_bit_checkpoints import CASES, write
from tests.fakes.models import tiny_model
from tests.fakes.paths import ROOT
from tests.fakes.tp_worker import FEW, PARAMS, PROMPTS

MODELS = {
    "llama": {},  # 4 heads, 2 key/value heads, a vocabulary of 97
    "qwen2": {"tie_word_embeddings": True},  # with a bias at q, k and v
    "one_kv_head": {"model_type": "mistral", "num_key_value_heads": 1, "vocab_size": 101},
    "opt": {"model_type": "opt", "ffn_dim": 96, "word_embed_proj_dim": 64},
}
COMPILED = {
    "model_type": "qwen2", "num_key_value_heads": 1, "vocab_size": 101, "tie_word_embeddings": True,
    "num_hidden_layers": 1,
}  # fmt: skip
"""A bias, a head that all ranks have, and a vocabulary that they do not share evenly: a compilation takes seconds of a
core for each layer. Faults of a part are in tests/slow/test_torch_compile.py."""


needs_mesh = pytest.mark.skipif(
    not hasattr(versions.distributed_mixin, "initialize_distributed_mesh"), reason="--tp needs transformers 5.18"
)
LARGE_MIB = 75.4
TREES = {
    "qwen3_next": ("linear_attn.in_proj_qkvz linear_attn.conv1d linear_attn.out_proj", "linear_attn.norm"),
    "granitemoehybrid": ("block_sparse_moe.experts.gate_up_proj mamba.in_proj mamba.norm", "block_sparse_moe.router"),
    "falcon_h1": ("mamba.in_proj self_attn.q_proj feed_forward.up_proj", "input_layernorm"),
    "deepseek_v32": ("self_attn.q_b_proj", "self_attn.indexer.wk"),
}
"""Families with recurrent layers or sparse attention: of the first layer, what a rank has half of, and all of."""


@pytest.fixture(scope="module")
def models() -> dict[str, PreTrainedModel]:
    return {
        name: tiny_model(**{"model_type": name, "spread": 0.12, **overrides})  # type: ignore[arg-type]
        for name, overrides in MODELS.items()
    }


@pytest.fixture(scope="module")
def folders(models: dict[str, PreTrainedModel], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of several files each, and one of which a file is gone."""
    found = {}
    for name, model in models.items():
        found[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(found[name], max_shard_size="60KB")
        assert len(list(found[name].glob("model-*.safetensors"))) > 2
    found["low_bit"] = tmp_path_factory.mktemp("low_bit")
    models["low_bit"] = write(found["low_bit"], CASES["gptq-asymmetric"], "qwen2", spread=0.12)
    # In half precision, so that what is read into float32 is memory of its own and no mapped file.
    large = tiny_model(hidden_size=512, intermediate_size=2048, num_hidden_layers=5)
    assert sum(parameter.nbytes for parameter in large.parameters()) / 2**20 == pytest.approx(LARGE_MIB, rel=0.01)
    found["large"] = tmp_path_factory.mktemp("large")
    large.to(torch.bfloat16).save_pretrained(found["large"], max_shard_size="8MB")
    found["incomplete"] = tmp_path_factory.mktemp("incomplete")
    models["llama"].save_pretrained(found["incomplete"], max_shard_size="60KB")
    sorted(found["incomplete"].glob("model-*.safetensors"))[1].unlink()
    return found


def launch(num_ranks: int, job: dict[str, object], folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "job.json").write_text(json.dumps({"output": str(folder / "out"), "commands": [], **job}))
    launcher = ["-m", "torch.distributed.run", f"--nproc_per_node={num_ranks}"] if "commands" in job else []
    command = [sys.executable, *launcher, str(ROOT / "tests/fakes/tp_worker.py"), str(folder / "job.json")]
    command += [] if launcher else [str(num_ranks)]  # which it forks by itself
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=560)


def check_exact(results: dict[str, dict[str, object]], models: dict[str, PreTrainedModel], mesh: list[int]) -> None:
    """Text equal to plain decoding in the same layout, and logits equal to the whole model's."""
    for name, found in results.items():
        assert "error" not in found, (name, found)
        assert found["mesh"] == mesh
        assert found["token_ids"] == found["expected"], name
        # Two all-reduces for each of 2 layers, one for the embedding where that is split, and the logits.
        assert found["collectives"] == (5 if name.endswith("deepspeed") else 6)
        assert found["num_steps"] < 6 * 16, "drafts were accepted"  # type: ignore[operator]
        in_parts = not name.endswith("deepspeed")  # which splits the head along its input
        assert found["same_as_gathered"] and (found["first_token"] is not None) == in_parts, name
        assert (found["not_compiled"] is None) == in_parts, "deepspeed's layers are its own"
        whole_bytes, part_bytes = found["gathered_bytes"]  # type: ignore[misc]
        assert part_bytes < 0.7 * whole_bytes if in_parts else part_bytes == whole_bytes, name
        with torch.no_grad():
            whole = models[name.partition("/")[0]](torch.tensor(PROMPTS[2:]), use_cache=False).logits[0]
        torch.testing.assert_close(torch.tensor(found["logits"]), whole, atol=1e-4, rtol=0)


def check_trees(wholes: dict[str, PreTrainedModel], reports: list[dict[str, Any]]) -> None:
    """Ids of the whole model's plain decoding on one rank."""
    for name, (split, kept) in TREES.items():
        if name not in wholes:
            continue
        engine = Engine.from_model(wholes[name], decode=DecodeConfig.autoregressive(max_batch_size=3))
        expected = [each.token_ids for each in engine.generate(PROMPTS * 2, PARAMS)]
        full = {key.removesuffix(".weight"): list(each.shape) for key, each in wholes[name].named_parameters()}
        for rank, report in enumerate(reports):
            found = report[name]
            assert found["mesh"] == [2, 2] and found["token_ids"] == expected, (name, rank)
            assert found["steps"] < sum(map(len, expected)), "drafts were accepted"
            facts = facts_of(wholes[name].config, name)
            assert found["state_bytes"] == facts.state_bytes(4, 2)
            assert found["same_again"] and found["crowded_ids"] == [expected[2]] * 3
            mine = {key.removesuffix(".weight"): shape for key, shape in found["shapes"].items()}
            for is_whole, names in ((False, split), (True, kept)):
                for each in names.split():
                    assert [mine[key] == full[key] for key in full if key.endswith(f".0.{each}")] == [is_whole], each


def check_compiled(model: PreTrainedModel, reports: list[dict[str, Any]]) -> None:
    """Packed and compiled parts give the ids of plain decoding on one rank."""
    engine = Engine.from_model(model, decode=DecodeConfig.autoregressive(max_batch_size=3))
    expected = [each.token_ids for each in engine.generate(PROMPTS * 2, FEW)]
    for found in [report.pop("compiled") for report in reports]:
        assert "error" not in found, found
        assert found["token_ids"] == expected
        assert found["steps"] < sum(map(len, expected)), "drafts were accepted"
        assert found["groups"] == 2 * model.config.num_hidden_layers
        assert 0 < found["forms"] <= 4 and not found["breaks"] and found["reasons"] == [None, None]


@needs_mesh
def test_two_replicas_of_two_ranks(
    models: dict[str, PreTrainedModel], folders: dict[str, Path], tmp_path: Path
) -> None:
    runs = {
        "llama/lie": ("llama", "transformers", "lie"),  # which changes nothing
        "llama/state": ("llama", "transformers", "state"),
    }
    done, reports = two_replicas(folders, tmp_path, runs)
    spoiled = [report.pop("llama/state")["error"] for report in reports]
    for report in reports:
        check_exact(report, models, [2, 2])
    # Found before the ranks of replica 1 enter a forward with different numbers of rows.
    named = "DesyncError: the replicated state of rank 3 differs from that of the other 1 of 2 ranks"
    assert [error.startswith(named) for error in spoiled] == [False, False, True, True], done.stderr
    assert [error.startswith("CommError") for error in spoiled[:2]] == [True, True]
    for report in reports:
        rewrites = report["llama/lie"]["rewrites"]
        assert rewrites["decoder layers"] == models["llama"].config.num_hidden_layers, rewrites
    shapes = [report["llama/lie"]["shapes"] for report in reports]
    assert shapes[0] == shapes[2] and shapes[1] == shapes[3], "rank 2 is tp rank 0 of replica 1"
    layer = "model.layers.1."
    assert {name.removeprefix(layer): shape for name, shape in shapes[0].items() if name.startswith(layer)} == {
        "self_attn.q_proj.weight": [32, 64],
        "self_attn.k_proj.weight": [16, 64],
        "self_attn.v_proj.weight": [16, 64],
        "self_attn.o_proj.weight": [64, 32],
        "mlp.gate_proj.weight": [48, 64],
        "mlp.up_proj.weight": [48, 64],
        "mlp.down_proj.weight": [64, 48],
        "input_layernorm.weight": [64],
        "post_attention_layernorm.weight": [64],
    }
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert [shapes[rank][name] for rank in (0, 1)] == [[49, 64], [48, 64]]


def two_replicas(
    folders: dict[str, Path], tmp_path: Path, runs: dict[str, tuple[str, ...]],
    more: dict[str, dict[str, str]] | None = None,
) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:  # fmt: skip
    """The job of four ranks and their reports: cases of `more`, and `runs`, of a model, a backend, perhaps a fault."""
    cases = {
        name: dict(zip(("model", "backend", "fault"), (str(folders[model]), *rest), strict=False))
        for name, (model, *rest) in runs.items()
    }
    done = launch(4, {"tp": 2, "cases": {**(more or {}), **cases}}, tmp_path)
    return done, [json.loads((tmp_path / f"out.{rank}").read_text()) for rank in range(4)]


# Without processes.


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp", "backend", "message"),
    [
        (8, 8, 3, "transformers", "--tp 3 does not divide the model's 8 attention heads; --tp 1, 2, 4, 8 would"),
        (12, 3, 8, "transformers", "--tp 8 does not divide the model's 12 attention heads; --tp 1, 3, 6, 12 would"),
        (12, 3, 2, "transformers", "neither divides the model's 3 key/value heads nor is a multiple of them; "
         "--tp 1, 3, 6, 12 would"),
        (8, 2, 4, "deepspeed", "leaves ranks without any; --tp 1, 2 would, or --tp-backend transformers"),
        (8, 2, 4, "transformers", None),
        (12, 3, 6, "transformers", None),
        (8, 4, 2, "deepspeed", None),
    ],
)  # fmt: skip
def test_heads_that_cannot_be_split(heads: int, kv_heads: int, tp: int, backend: str, message: str | None) -> None:
    sizes = {"hidden_size": 768, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    config = AutoConfig.for_model("llama", **sizes)
    if message is None:
        check_split(config, tp, backend, has_plan=True)
        return
    with pytest.raises(InputError) as caught:
        check_split(config, tp, backend, has_plan=True)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_families_that_cannot_be_split() -> None:
    for family, backend, message in [
        ("gpt2", "transformers", "no tensor-parallel plan for model type 'gpt2'; --tp 1 works"),
        ("gptj", "transformers", "no tensor-parallel plan for model type 'gptj'; --tp-backend deepspeed does"),
        ("gpt2", "deepspeed", "split model type 'gpt2' rightly (it is for biogpt, falcon"),
        ("gemma3_text", "deepspeed", "use --tp-backend transformers"),
    ]:
        config = AutoConfig.for_model(family)
        with pytest.raises(InputError) as caught:
            check_split(config, 2, backend, has_plan=family.startswith("gemma"))
        assert message in str(caught.value)


def test_key_value_heads_of_configs() -> None:
    counts = {
        "llama": ({"num_attention_heads": 8, "num_key_value_heads": 2}, 2),
        "gpt2": ({"n_head": 6}, 6),
        "falcon": ({"num_attention_heads": 8, "multi_query": True, "new_decoder_architecture": False}, 1),
    }
    for family, (sizes, expected) in counts.items():
        assert num_kv_heads(AutoConfig.for_model(family, **sizes)) == expected


def test_shards_are_checked_by_name() -> None:
    """Each silent failure that was seen: nothing split, split by another size, and a single layer left whole."""
    model = tiny_model()
    full = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    halves = {
        name: (shape[0], shape[1] // 2) if "o_proj" in name or "down_proj" in name
        else (-(-shape[0] // 2), *shape[1:]) if len(shape) > 1 else shape
        for name, shape in full.items()
    }  # fmt: skip
    check_shards(full, halves, 2, num_kv_heads=2)
    for name, shape, message in [
        ("model.layers.0.self_attn.q_proj.weight", (64, 64), "whole on every rank"),
        ("model.layers.1.mlp.up_proj.weight", (96, 64), "whole on every rank"),
        ("model.layers.1.mlp.up_proj.weight", (96, 32), None),
        ("model.layers.1.mlp.up_proj.weight", (72, 64), r"with shape \(72, 64\) of \(96, 64\)"),
        ("model.layers.1.mlp.up_proj.weight", (48, 32), r"with shape \(48, 32\)"),
        ("model.layers.1.self_attn.k_proj.weight", (0, 64), r"with shape \(0, 64\)"),
        ("lm_head.weight", (97, 64), None),
    ]:
        found = {**halves, name: shape}
        if message is None:
            check_shards(full, found, 2, num_kv_heads=2)
            continue
        with pytest.raises(InputError, match=f"{name} .*{message}|{name} {message}"):
            check_shards(full, found, 2, num_kv_heads=2)
    with pytest.raises(InputError, match=r"left model.layers.0.self_attn.q_proj.weight \(64, 64\) whole"):
        check_shards(full, full, 2, num_kv_heads=2)
    ends = planned_ends(full, {"lm_head": "colwise_gather_output", "model.norm": "sequence_parallel"})
    assert ends == ["lm_head.weight"]
    check_shards(full, halves, 2, 2, ends)
    with pytest.raises(InputError, match=r"left lm_head.weight \(97, 64\) whole"):
        check_shards(full, {**halves, "lm_head.weight": (97, 64)}, 2, 2, ends)
    del halves["model.layers.0.mlp.up_proj.weight"]
    with pytest.raises(InputError, match=r"lost the parameter model.layers.0.mlp.up_proj.weight"):
        check_shards(full, halves, 2, num_kv_heads=2)


def test_a_missing_file_of_a_checkpoint_is_named(folders: dict[str, Path]) -> None:
    with pytest.raises(InputError, match=r"cannot load a model from .*model-00002-of-0000\d\.safetensors"):
        load(str(folders["incomplete"]))


def needs(free: int | None, kv_memory: float | None = None, **sizes: Any) -> PoolNeeds:
    decode = DecodeConfig(**sizes)
    known = {"longest": decode.max_length or 32768, "num_ahead": 500, "page_size": 16, "bytes_per_token": 100_000}
    return PoolNeeds(decode=decode, kv_memory=kv_memory, free=free, **known)


def test_the_size_of_the_cache() -> None:
    gib = 2**30
    assert needs(None).num_pages() == 8 * (4096 + 512) // 16, "max_batch_size sequences of 4096 tokens, and trees"
    assert needs(10 * gib).num_pages() == 8 * (4096 + 512) // 16
    few = needs(2 * gib)
    assert few.num_pages() == int(int(2 * gib * 0.95) // 100_000 * 0.5) // 16, "half of what is free"
    assert few.size(few.num_pages()).max_length == few.num_pages() * 16 - 500
    assert needs(10 * gib, kv_memory=0.5).num_pages() == int(int(10 * gib * 0.95) // 100_000 * 0.5) // 16
    assert needs(10 * gib, kv_memory=gib).num_pages() == gib // 100_000 // 16
    assert needs(None, kv_tokens=1001).num_pages() == 63
    assert needs(10 * gib, max_length=600).size(200).max_length == 600
    assert replace(needs(10 * gib), longest=None).size(200).max_length == 200 * 16 - 500


def test_a_cache_that_does_not_fit() -> None:
    gib = 2**30
    with pytest.raises(InputError, match=r"kv_tokens=50000: .* needs 4.7 GiB, and 1.9 GiB .* 20401 tokens$"):
        needs(2 * gib, kv_tokens=50_000).num_pages()
    with pytest.raises(InputError, match=r"for 1600 tokens \(152.6 MiB\), and one sequence of 2000 tokens and a tree"):
        needs(2 * gib, max_length=2000).size(100)
    with pytest.raises(InputError, match=r"for 32 tokens .* of 2 tokens and a tree of 500 nodes need 502$"):
        needs(10**7).size(needs(10**7).num_pages())


def test_an_engine_asks_before_it_allocates(
    models: dict[str, PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lpr.model.runner.free_bytes", lambda device: 100_000)
    monkeypatch.setattr("lpr.model.runner.TreeModel.allocate", None)
    with pytest.raises(InputError, match=r"there is K/V for .* tokens .* one sequence of 512 tokens"):
        Engine.from_model(models["llama"], decode=DecodeConfig.autoregressive(max_length=512))


def test_meshes_of_a_config_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.toml"
    path.write_text("mesh = { lp = 4, tp = 2 }\n")
    args = parse(["--config", str(path)])
    assert (args.lp, args.tp) == (4, 2)
    assert World(0, 8, 0, 0, True).mesh_shape(args.tp, args.lp) == (4, 2)
    assert World(0, 8, 0, 0, True).mesh_shape(4) == (2, 4)
    assert main(["--config", str(path)]) == 2
    assert "error: a mesh of lp 4 x tp 2 needs 8 ranks, and this job has 1" in capsys.readouterr().err
    for text, message in {
        "mesh = 3": "mesh must be like { lp = 4, tp = 2 }, not 3",
        "mesh = { lp = 4 }": "mesh must be like",
        "mesh = { lp = 4, tp = '2' }": "mesh must be like",
        "tp = 2\nmesh = { lp = 4, tp = 2 }": "tp is given twice",
    }.items():
        path.write_text(text)
        with pytest.raises(InputError) as caught:
            parse(["--config", str(path)])
        assert message in str(caught.value)
    for tp, lp in [(0, None), (3, None), (16, None), (2, 2), (-2, -4), (8, 0)]:
        with pytest.raises(InputError, match="ranks"):
            World(0, 8, 0, 0, True).mesh_shape(tp, lp)
    with pytest.raises(InputError, match="--tp 4 does not divide the 2 ranks of this job; 1, 2 would"):
        World(0, 2, 0, 0, True).mesh_shape(4)


def test_a_transformers_that_cannot_split_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(versions.distributed_mixin, "initialize_distributed_mesh", raising=False)
    with pytest.raises(InputError, match=r"--tp needs transformers 5\.18"), versions.split_over(None, None):  # type: ignore[arg-type]
        pass
