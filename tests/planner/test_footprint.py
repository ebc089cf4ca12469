"""The planner against what models, caches, exchanges and transformers' own sharding really make."""

from __future__ import annotations

import json
import math
import tomllib
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig

import dev.family_table
from dev.families import tiny_model as tiny_family
from lpr import Engine
from lpr.cli.plan import Args, main, make_plan, show
from lpr.config import DecodeConfig, InputError
from lpr.engine.exchange import Exchange
from lpr.engine.kv_pool import PoolNeeds
from lpr.model.kv_cache import KVCache
from lpr.model.loader import load
from lpr.model.low_bit.copy import make_copy
from lpr.model.low_bit.products import FORMS
from lpr.model.recurrent.scans import decayed_attention, delta_rule
from lpr.model.recurrent.tree import Tree
from lpr.model.runner import TreeModel
from lpr.model.self_check import self_check
from lpr.planner.facts import KeptState, ModelFacts, config_from, facts_of, preset_names, read_preset, resolve
from lpr.planner.footprint import (
    Mesh,
    copy_bytes,
    footprint,
    forward_flops,
    kv_entries,
    kv_token_bytes,
    meshes,
    payload_bytes,
    read_bytes,
    requests_at_once,
    shard_shape,
    split_problem,
    tp_traffic,
    weight_bytes,
)
from lpr.planner.hardware import GIB, GPUS, parse_bandwidth, parse_size
from tests.fakes.low_bit_checkpoints import CASES, write
from tests.fakes.models import tiny_model
from tests.fakes.paths import ROOT
from tests.fakes.sharded import config_values
from tests.fakes.worlds import ThreadWorld

FAMILIES = ("llama", "qwen2", "mixtral", "phi3", "deepseek_v3")

# "Model size" of the Hub's model pages, which is counted from the checkpoints' headers; LLaMA's paper (Touvron et al.
# 2023, arXiv 2302.13971, table 2) has 6.7B and 13.0B for the architectures that Llama 2 and CodeLlama kept.
PUBLISHED = {
    "codellama-7b": 6.74e9,
    "codellama-13b": 13.0e9,
    "codellama-34b": 33.7e9,
    "codellama-70b": 69.0e9,
    "llama-2-7b": 6.74e9,
    "llama-2-13b": 13.0e9,
    "llama-2-70b": 69.0e9,
    "llama-3.1-8b": 8.03e9,
    "llama-3.1-70b": 70.6e9,
}


@cache
def facts_named(name: str) -> ModelFacts:
    return facts_of(resolve(name).config, name)


def tiny_facts(model_type: str = "llama", **overrides: object) -> ModelFacts:
    return facts_of(config_from({**config_values(model_type), **overrides}), model_type)


SMALL = [name for name in PUBLISHED if name.endswith(("7b", "8b"))]
"""Presets of the fast suite; tests/slow has the larger ones, whose layers take seconds to make."""


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.slow(first=1)
def test_presets_have_the_published_parameters(name: str) -> None:
    assert facts_named(name).num_parameters == pytest.approx(PUBLISHED[name], rel=0.01)
    assert read_preset(name)["parameters"] == PUBLISHED[name]


def test_every_preset_is_checked() -> None:
    assert set(preset_names()) == set(PUBLISHED)


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_few_kv_heads_are_shared_by_ranks(model_type: str) -> None:
    """Two key/value heads on four ranks: each holds one head's rows of k_proj and v_proj, and a quarter of the rest."""
    model = tiny_model(model_type, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False)
    facts = facts_of(model.config, model_type)
    held = 0
    for name, weight in model.named_parameters():
        head_rows = weight.shape[0] // 2
        if "k_proj" in name or "v_proj" in name:
            held += weight[:head_rows].numel()
        elif any(part in name for part in ("q_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")):
            held += weight[: -(-weight.shape[0] // 4)].numel()
        elif "o_proj" in name or "down_proj" in name:
            held += weight[:, : weight.shape[1] // 4].numel()
        else:
            held += weight.numel()
    assert weight_bytes(facts, 4, 4) == 4 * held
    assert kv_token_bytes(facts, 4, 1) == 2 * 1 * 16 * 2  # layers, one head, its size, K and V


@pytest.mark.parametrize("lp", [1, 2, 8])
def test_payload_is_that_of_the_exchange(lp: int) -> None:
    decode = DecodeConfig(window_size=7, guess_set_size=7, max_batch_size=3)
    comm = ThreadWorld(lp).comm(0)
    exchange = Exchange(decode.resolved(lp), 3, comm, torch.device("cpu"), decode.carries_trees(lp))
    assert payload_bytes(decode, lp) == exchange.payload_bytes


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "deepseek_v3"])
def test_kv_bytes_are_those_of_the_cache(model_type: str) -> None:
    values = config_values(model_type)
    model = tiny_model(values.pop("model_type"), **values)  # type: ignore[arg-type]
    runner = TreeModel(model)
    runner.adapter.node_bucket, runner.adapter.kv_bucket = 16, 256
    decode = DecodeConfig(window_size=3, guess_set_size=3, trie_nodes=8, max_batch_size=2, branch_length=8)
    runner.allocate(2, 64, decode.resolved().num_nodes, self_check(runner))
    cache = runner.cache
    assert isinstance(cache, KVCache)
    held = cache.num_bytes
    facts = facts_of(model.config, model_type)
    assert kv_entries(decode, 1, 64) == cache.rows_per_slot
    assert footprint(facts, decode, Mesh(1, 1), 64, 4).kv_bytes == held


@pytest.mark.parametrize(
    "name",
    ["qwen3_next", "granitemoehybrid", "jamba", "mamba2", "lfm2", "deepseek_v32"],
)
@pytest.mark.slow(first=2)
def test_bytes_of_recurrent_and_sparse_models_are_those_of_the_engine(name: str) -> None:
    """States of requests and snapshots, keys of indexers, and weights."""
    model = tiny_family(next(each for each in dev.family_table.FAMILIES if each.name == name))
    facts = facts_of(model.config, name)
    assert weight_bytes(facts, 1, 4) == sum(each.nbytes for each in model.parameters())
    engine = Engine.from_model(model, decode=DecodeConfig(window_size=3, trie_nodes=8, max_batch_size=2, max_length=64))
    cache = engine.model.cache
    assert cache is not None and bool(facts.states) == cache.has_states
    assert facts.state_bytes(4) == cache.states.bytes_per_place
    assert kv_token_bytes(facts, 1, 4) == cache.bytes_per_token
    planned = footprint(facts, engine.decode, Mesh(1, 1), 64, 4)
    assert planned.state_bytes == cache.num_bytes - cache.bytes_per_token * cache.num_rows
    assert planned.kv_bytes >= planned.state_bytes and planned.step_bytes > weight_bytes(facts, 1, 4) / 2
    assert planned.pool_tokens(80 * GIB) > 0
    assert facts.state_bytes(2) < facts.state_bytes(4) or not facts.states, "windows of convolutions"


def test_flops_of_a_scan_are_those_that_are_counted() -> None:
    """Up to the parts that only some rules have."""
    heads, size, count = 4, 16, 64
    shape = (1, count, heads, size)
    inputs = [torch.zeros(*shape), torch.zeros(*shape), torch.zeros(*shape), torch.zeros(shape[:3])]
    planned = KeptState((heads, size, size), True, 1).flops(count)
    tree = Tree.chain(1, count, torch.device("cpu"))
    for rule, given in ((decayed_attention, inputs), (delta_rule, [*inputs, torch.zeros(shape[:3])])):
        with FlopCounterMode(display=False) as counted:
            written = rule(given, torch.zeros(1, heads, size, size), tree)[1]
            written.after(torch.zeros(1, heads, size, size))
        assert 0.4 * planned < counted.get_total_flops() <= planned


def test_weight_bytes_are_those_of_the_model() -> None:
    for model_type in ("llama", "gemma2", "mixtral", "gpt2"):
        values = config_values(model_type)
        model = tiny_model(values.pop("model_type"), **values)  # type: ignore[arg-type]
        held = sum(each.numel() * each.element_size() for each in model.parameters())
        assert weight_bytes(facts_of(model.config, model_type), 1, 4) == held


@pytest.mark.parametrize("name", ["ct-w4a16-asymmetric", "fp8-blocks", "gptq-8-bits"])
def test_weight_bytes_of_low_bit_checkpoints_are_those_that_are_loaded(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, CASES[name])
    held = sum(each.nbytes for each in load(str(tmp_path)).model.parameters())
    facts = resolve(str(tmp_path))
    assert weight_bytes(facts_of(facts.config, name), 1, 4) == held
    assert main(["--model", str(tmp_path), "--gpus", "1", "--context", "256", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["low_bit"] == CASES[name].config["quant_method"]


def test_a_copy_has_the_bytes_that_the_planner_says() -> None:
    model = tiny_model(vocab_size=128)  # tiles are of 32 outputs
    facts = facts_of(model.config, "llama")
    for form in FORMS:
        assert copy_bytes(facts, form) == make_copy(model, form).num_bytes


def test_sizes_that_llama_2_70b_must_have() -> None:
    """By hand: 80 layers, 8 key/value heads of 128, 16 bit; two all-reduces a layer and one for the embedding."""
    facts = facts_named("llama-2-70b")
    assert kv_token_bytes(facts, 1, 2) == 80 * 8 * 128 * 2 * 2
    assert kv_token_bytes(facts, 4, 2) == 80 * 2 * 128 * 2 * 2
    assert kv_token_bytes(facts, 16, 2) == 80 * 1 * 128 * 2 * 2
    traffic = tp_traffic(facts, 10, 3, 2, 4)
    assert traffic.num_collectives == 2 * 80 + 1 + 1
    choices = 4 * 3 * (3 + 2 * 8)  # of three tokens: total, token, sum of weights, and eight candidates with scores
    assert traffic.payload_bytes == 2 * 161 * 10 * 8192 + 4 * choices
    matrices = facts.num_parameters - 32000 * 8192 - 161 * 8192  # without the embedding and the norms
    assert forward_flops(facts, 1, 5, 0) == 2 * 5 * matrices


def test_lookup_tables_and_idle_experts_are_not_read() -> None:
    tied, untied = tiny_facts(tie_word_embeddings=True), tiny_facts()
    assert untied.num_parameters - tied.num_parameters == 257 * 64
    assert read_bytes(tied, 1, 2, 1) == read_bytes(untied, 1, 2, 1)
    experts = tiny_facts("mixtral")  # two of four experts per token
    numel = sum(weights.count * math.prod(weights.shape) for weights in experts.weights if weights.is_expert)
    few, many = read_bytes(experts, 1, 1, 1), read_bytes(experts, 1, 1, 1000)
    assert many - few == numel // 2


def test_meshes_and_what_cannot_be_split() -> None:
    assert [str(mesh) for mesh in meshes(12)] == ["12 x 1", "6 x 2", "4 x 3", "3 x 4", "2 x 6", "1 x 12"]
    facts = facts_named("codellama-34b")
    assert split_problem(facts, 8) is None
    assert split_problem(facts, 3) == "3 does not divide 64 attention heads"
    assert split_problem(facts, 16) is None
    assert split_problem(tiny_facts(hidden_size=96, num_attention_heads=12, num_key_value_heads=4), 6) == (
        "6 neither divides 4 key/value heads nor is a multiple of them"
    )
    gpt2 = facts_of(AutoConfig.for_model("gpt2"), "gpt2")
    assert split_problem(gpt2, 2) == "transformers has no tensor-parallel plan for gpt2"
    assert split_problem(gpt2, 1) is None


def test_every_style_of_the_plans_is_known() -> None:
    for model_type in (*FAMILIES, "qwen3", "gemma3_text", "olmo2", "cohere", "deepseek_v2", "gpt_neox", "starcoder2"):
        config = AutoConfig.for_model(model_type)
        config.num_hidden_layers = 2
        if model_type == "deepseek_v2":
            config.topk_group, config.n_group, config.num_experts_per_tok = 1, 1, 2
        facts = facts_of(config, model_type)
        for weights in facts.weights:
            assert len(shard_shape(weights, facts, 2)) == len(weights.shape)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.stem)
@pytest.mark.slow(first=3)
def test_named_runs_fit_the_planner(path: Path) -> None:
    values = tomllib.loads(path.read_text())
    mesh = values.pop("mesh", {"lp": 1, "tp": 1})
    assert path.stem.endswith(f"_lp{mesh['lp']}_tp{mesh['tp']}") or mesh == {"lp": 1, "tp": 1}
    known = {field.name for field in fields(DecodeConfig)}
    decode = DecodeConfig(**{name: value for name, value in values.items() if name in known})
    assert decode.window_size == decode.guess_set_size > 0 and decode.ngram_size == 5
    planned = resolve(str(path))
    assert planned.origin.startswith(f"{path}: preset ")  # no download is needed
    assert planned.decode["window_size"] == resolve(planned.origin.split()[2].rstrip(",")).decode["window_size"]
    row = footprint(facts_of(planned.config, path.stem), decode, Mesh(**mesh), 4096, 2)
    assert row.fits(80 * GIB), row
    assert set(values) <= known | {"model", "max_new_tokens"}


def test_table_and_recommendation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "codellama-34b", "--gpus", "8", "--gpu-memory", "80GiB"]) == 0
    printed = capsys.readouterr().out
    for text in ("33.74B parameters", "8 x 1", "4 x 2", "2 x 4", "1 x 8", "2039 GB/s"):
        assert text in printed
    plan = make_plan(Args(model="codellama-34b", gpus=6))
    console = Console(width=200, record=True, quiet=True)
    show(plan, console)
    assert [row.problem for row in plan.rows][2:] == [
        "3 does not divide 64 attention heads",
        "6 does not divide 64 attention heads",
    ]


def test_json_and_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "meta-llama/Llama-2-70b-hf", "--gpus", "1", "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert record["recommended"] is None and "nothing fits" in record["reason"]
    [row] = record["meshes"]
    assert row["fits"] is False and row["spare_bytes"] < -50 * GIB
    assert row["weight_bytes"] == record["num_parameters"] * 2
    assert main(["--model", "llama-2-70b", "--gpus", "2", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["recommended"] == {"lp": 1, "tp": 2}
    assert [row["fits"] for row in record["meshes"]] == [False, True]


def test_models_by_folder_file_and_toml(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundled = ROOT / "lpr" / "assets" / "bundled"
    mine = tmp_path / "mine.toml"
    mine.write_text('[config]\nmodel_type = "llama"\nnum_hidden_layers = 1\n[decode]\nwindow_size = 3\n')
    for source in (bundled, bundled / "config.json", mine, ROOT / "configs" / "codellama-7b.toml"):
        assert main(["--model", str(source), "--gpus", "1", "--context", "512", "--json"]) == 0, source
        json.loads(capsys.readouterr().out)
    assert main(["--list"]) == 0
    models, gpus, links = capsys.readouterr().out.splitlines()
    assert models.split()[1:] == preset_names() and gpus.split()[1:] == list(GPUS) and "pcie4" in links


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--model is missing"),
        (["--model", "nope"], "'nope' is no preset, and no such file or folder exists"),
        (["--model", "no/such"], "cannot read the config of 'no/such'"),
        (["--model", "llama-2-7b", "--gpu-memory", "80"], "--gpu-memory '80' is no size; write a number and a unit"),
        (["--model", "llama-2-7b", "--gpu-memory", "0GiB"], "--gpu-memory '0GiB' is no size"),
        (["--model", "llama-2-7b", "--bandwidth", "fast"], "--bandwidth 'fast' is no size"),
        (["--model", "llama-2-7b", "--gpu", "h1000"], "--gpu 'h1000' is none of a100-80gb"),
        (["--model", "llama-2-7b", "--network", "string"], "link 'string' is none of nvlink-a100"),
        (["--model", "llama-2-7b", "--temperature", "-1"], "temperature=-1.0 must be float >= 0"),
        (["--model", "llama-2-7b", "--gpus", "0"], "--gpus 0 must be at least 1"),
        (["--model", "llama-2-7b", "--batch", "0"], "max_batch_size=0 must be int >= 1"),
        (["--model", "llama-2-7b", "--context", "1"], "--context 1 leaves no room"),
        (["--model", "llama-2-7b", "--context", "8192"], "--context 8192 exceeds the 4096 positions"),
        (["--model", "llama-2-7b", "--window-size", "-1"], "window_size=-1 must be int >= 0"),
        (["--model", "missing.toml"], "cannot read missing.toml: No such file"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    [line] = printed.err.strip().splitlines()
    assert line.startswith("lpr.plan: error: ") and message in line


def test_bad_files_are_one_line(tmp_path: Path) -> None:
    for text, message in {
        "= 3": "is not TOML",
        "window_size = 3": "names no model",
        'model = "llama-2-7b"\nmesh = 3': "mesh must be like",
        '[config]\nmodel_type = "no_such_type"': "model_type 'no_such_type'",
        "[config]\nhidden_size = 3": "names no model_type",
        '[config]\nmodel_type = "llama"\nhidden_size = 30': "not a multiple of the number of attention heads",
        '[config]\nmodel_type = "rwkv"': "recurrent state in no cache",
        '[config]\nmodel_type = "vit"': "the config makes no causal LM",
    }.items():
        path = tmp_path / "bad.toml"
        path.write_text(text)
        with pytest.raises(InputError, match=message):
            make_plan(Args(model=str(path), context=64))


def test_sizes_with_units() -> None:
    assert parse_size("80GiB", "--x") == 80 << 30 and parse_size("1.5 gb", "--x") == 1_500_000_000
    assert parse_bandwidth("2039GB/s", "--x") == 2039e9 and parse_bandwidth("3.35TBps", "--x") == 3.35e12
    assert all(gpu.memory > 20 * GIB and 1e11 < gpu.bandwidth < 1e13 for gpu in GPUS.values())


def test_the_pool_is_that_of_the_engine() -> None:
    """Tokens that the K/V cache holds, and requests at once, with and without a shared beginning."""
    planned = resolve("codellama-34b")
    facts = facts_of(planned.config, "codellama-34b")
    decode = DecodeConfig(window_size=3, trie_nodes=8)
    rows = [footprint(facts, decode, Mesh(1, 4), 4096, 2, num_full) for num_full in (1, 4)]
    assert rows[1].kv_bytes > 3.9 * rows[0].kv_bytes
    memory = 80 * GIB
    told = rows[0].needs
    assert told is not None
    free = memory - told.before
    known = {
        "kv_memory": None,
        "reserve": told.steps,
        "longest": 16384,
        "num_ahead": 40,
        "page_size": 16,
        "on_gpu": True,
    }
    needs = PoolNeeds(decode=decode, bytes_per_token=rows[0].kv_token_bytes, free=free, **known)
    assert rows[0].pool_tokens(memory) == rows[1].pool_tokens(memory) == needs.num_pages() * 16
    assert footprint(facts, decode, Mesh(1, 1), 4096, 2).pool_tokens(60 * GIB) == 0
    assert requests_at_once(1600, 160, 0, 0) == 10
    assert requests_at_once(1600, 160, 79, 0) == (100 - 4) // 6, "four full pages exist once"
    assert requests_at_once(1600, 160, 160, 16) == 90
    plans = [make_plan(Args(model="codellama-34b", gpus=4, shared_tokens=shared)) for shared in (0, 1000)]
    [without, shared] = [[plan.pool(row)[1] for row in plan.rows] for plan in plans]
    assert all(more > 2 * fewer for fewer, more in zip(without, shared, strict=True) if fewer)
    with pytest.raises(InputError, match="--shared-tokens 2000"):
        make_plan(Args(model="codellama-34b", shared_tokens=2000))


def test_keys_and_values_in_8_bits_have_room_for_more_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    plans = [make_plan(Args(model="codellama-34b", gpus=4, kv_dtype=kind)) for kind in ("auto", "fp8")]
    whole, halves = (plan.rows[-1] for plan in plans)
    assert 2 * halves.kv_token_bytes == whole.kv_token_bytes
    assert halves.needs == whole.needs
    assert main(["--model", "codellama-34b", "--gpus", "4", "--kv-dtype", "fp8"]) == 0
    assert "in bfloat16, K/V in FP8" in capsys.readouterr().out
