"""The long tests of tests/model/test_torch_compile.py."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lpr.model.input_builder import Row
from lpr.model.kv_cache import KVCache
from lpr.model.loader import load
from lpr.model.parallel import TensorParallel
from lpr.model.rewrite.sharded_layers import VocabularyHead
from lpr.model.runner import SharedWeights, TreeModel
from lpr.model.self_check import check_compiled
from lpr.model.step_inputs import current_step
from lpr.model.torch_compile import CompiledForward
from lpr.planner.facts import facts_of, resolve
from lpr.planner.footprint import step_launches, tp_traffic
from tests.fakes.kernel_counts import count
from tests.fakes.models import tiny_model
from tests.fakes.paths import ROOT
from tests.fakes.pretend_gpu import guard
from tests.model.test_torch_compile import (
    BATCHES,
    KEYS,
    Small,
    asks_for_parts,
    equal_sizes_are_one,
    forms_of,
    quick_kernel,
    replica,
    runner_of,
    small,
    start_compiled,
    step_of,
    the_number_of_keys_decides,
)


def test_a_start_of_a_replica_compiles_three_forms(replica: TensorParallel, tmp_path: Path) -> None:
    """Of a rank's half of a model, with the collectives of its steps."""
    assert start_compiled("llama", 2, 16, replica=replica, folder=tmp_path) == (3, 3, 3)


def test_compiled_code_is_kept_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled again, as in a second process, is read."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    # A new folder has neither of these, and each takes longer than the compilation.
    monkeypatch.setattr(torch._inductor.config, "cpp_cache_precompile_headers", False)
    monkeypatch.setattr(torch._inductor.config.cpp, "vec_isa_ok", True)
    said = []
    for _ in range(2):
        torch._dynamo.reset()
        layer = Small()
        compiled = CompiledForward(SimpleNamespace(model=layer, device=torch.device("cpu")))  # type: ignore[arg-type]
        with torch.no_grad():
            layer(torch.randn(3, 8))
        said.append(str(compiled.describe()))
    folder = tmp_path / "lpr" / "compiled"
    assert ", 0 of them read" in said[0] and said[1].endswith(f", 1 of them read from {folder}") and folder.is_dir()


def test_kernels_of_a_step(guard: None) -> None:
    """Ten a layer: norm, QKV, rotation with the cache's writes, attention and its second launch, output, norm, gate
    and up, SiLU, down; and no copy of a cache. Over two ranks, also two sums a layer and one for the embedding."""
    for tp, layers, entries in ((1, 2, 1), (2, 1, 16)):
        config = small(num_hidden_layers=layers)
        step, facts = count(config, entries, 1024, tp=tp), facts_of(config, "small")
        forward, split = step["compiled"]["forward"], 2 + 2 * layers if tp > 1 else 0
        assert forward == 10 * layers + 2 + split, "the last norm and the head; the embedding and its sum"
        assert step["packed_groups"] == 2 * layers and step["compiled"]["largest_copies"] == 0
        assert step["packed"]["forward"] == step["operators"]["forward"] - 3 * layers
        assert step["compiled"]["launches"] == step_launches(facts, tp, entries > 1)
        assert step["collectives"] == (tp_traffic(facts, 1, 1, 2, tp).num_collectives if tp > 1 else 0)


def test_a_start_of_gemma2_compiles_three_forms() -> None:
    """A sliding window, and logits with a soft cap."""
    assert start_compiled("gemma2", 2, 16) == (3, 3, 3)


def test_collectives_are_operators_of_the_one_graph(replica: TensorParallel, tmp_path: Path) -> None:
    """A sum for the embedding and two a layer, in the order of the model."""
    names: list[str] = []

    def backend(graph: Any, _: Any) -> Any:
        names.extend(str(node.target) for node in graph.graph.nodes if "all_reduce" in str(node.target))
        return graph.forward

    runner, like = runner_of(replica=replica, folder=tmp_path)
    runner.compile(backend)  # type: ignore[arg-type]
    check_compiled(runner, like, 1)
    assert runner.compiled is not None and runner.compiled.reason is None
    assert len(names) == 2 * (1 + 2 * runner.config.num_hidden_layers), "of each form, one token or more"


def test_what_one_rank_cannot_compile_none_does(caplog: pytest.LogCaptureFixture) -> None:
    """Compiled and direct steps round otherwise, and the ranks of a replica hold the same hidden states."""
    model = tiny_model(num_hidden_layers=1)
    runner, like = TreeModel(model, attention="triton", shared=SharedWeights(worst=lambda found: 1)), KVCache(1, 32)
    runner.adapter.logits([Row(0, 0, [1, 2], [-1, 0], [0, 1], 1)], like)
    torch._dynamo.reset()
    runner.compile(backend="eager")
    check_compiled(runner, like, 1)
    assert runner.compiled is not None and runner.compiled.reason == "another rank of this replica could not"
    assert "steps are not compiled: another rank" in caplog.text


def test_another_engines_compiled_model_is_called_directly() -> None:
    model, num_compiled = tiny_model(num_hidden_layers=1), 0

    def backend(graph: Any, inputs: Any) -> Any:
        nonlocal num_compiled
        num_compiled += 1
        return graph.forward

    first, second = (TreeModel(model, attention="sdpa", graphs=False) for _ in range(2))
    torch._dynamo.reset()
    first.compile(backend)  # type: ignore[arg-type]
    for runner, expected in ((second, 0), (first, 1)):
        cache = KVCache(1, 32)
        for each in filter(None, (runner.adapter, runner.compiled)):
            each.forward(runner.adapter.inputs([Row(0, 0, [1, 2], [-1, 0], [0, 1], 1)], cache), cache)
        assert min(num_compiled, 1) == expected


def test_a_forward_that_breaks_is_called_directly(caplog: pytest.LogCaptureFixture) -> None:
    runner, like = runner_of(num_hidden_layers=1)
    inner = runner.model.model.layers[0].mlp.forward

    def waiting(hidden: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return inner(hidden)

    runner.model.model.layers[0].mlp.forward = waiting
    runner.compile(backend="eager")
    with caplog.at_level(logging.WARNING):
        check_compiled(runner, like)
    assert runner.compiled is not None and runner.compiled.reason and "steps are not compiled" in caplog.text
    assert runner.model._compiled_call_impl is None


def test_the_planner_knows_the_counted_launches() -> None:
    """Of 7B, 34B and 70B on one to eight ranks, as the program wrote them; a step of 7B on one rank has few."""
    path = ROOT / "benchmarks" / "results" / "answered" / "kernel_counts.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert {(row["model"], row["tp"], row["entries"]) for row in rows} == set(
        itertools.product(("llama-2-7b", "codellama-34b", "llama-2-70b"), (1, 2, 4, 8), (1, 64))
    )
    known = {name: facts_of(resolve(name).config, name) for name in {row["model"] for row in rows}}
    for row in rows:
        facts = known[row["model"]]
        more = 3 if row["tp"] > 1 else 1  # around a step with torch 2.15; the file is of 2.13
        assert row["compiled"] + more == step_launches(facts, row["tp"], row["entries"] > 1)
        assert row["collectives"] == (tp_traffic(facts, 1, 1, 2, row["tp"]).num_collectives if row["tp"] > 1 else 0)
    assert max(row["compiled"] for row in rows if row["model"] == "llama-2-7b" and row["tp"] == 1) < 340


@pytest.mark.parametrize(
    "fault, steps",
    [(None, KEYS), (the_number_of_keys_decides, KEYS), (None, BATCHES), (equal_sizes_are_one, BATCHES)],
)
def test_sizes_make_no_form_of_their_own(
    fault: Callable[[pytest.MonkeyPatch], None] | None,
    steps: list[tuple[int, int, bool]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if fault is not None:
        fault(monkeypatch)
    assert (forms_of(*runner_of(num_hidden_layers=1), steps) > 1) == (fault is not None)


@pytest.mark.parametrize("fault", [False, True])
def test_logits_in_parts_make_no_form_of_their_own(
    fault: bool, replica: TensorParallel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are gathered outside of what is compiled."""
    if fault:
        monkeypatch.setattr(VocabularyHead, "forward", asks_for_parts)
    runner, like = runner_of(replica=replica, folder=tmp_path, num_hidden_layers=1)
    assert (forms_of(runner, like, [(1, 12, False), (1, 12, True)]) > 1) == fault


@pytest.mark.parametrize("fault", [False, True])
def test_compiled_parts_of_a_rank_keep_their_order(fault: bool, replica: TensorParallel, tmp_path: Path) -> None:
    """With values in the place of keys, which are as high, its logits are others than those of layers as loaded."""
    runner, like = runner_of(replica=replica, folder=tmp_path, num_hidden_layers=1)
    loaded = TreeModel(load(str(tmp_path), tp=replica).model, attention="triton")
    packed = runner.model.model.layers[0].self_attn.q_proj.pack
    if fault:
        queries, keys, values = packed.weight.clone().split(packed.sizes)
        packed.weight.copy_(torch.cat([queries, values, keys]))
    runner.compile(backend="eager")
    found = []
    for made, forward in ((loaded, loaded.adapter.forward), (runner, runner.compiled.forward)):  # type: ignore[union-attr]
        cache = like.resized(5, 64)
        found.append(torch.cat([forward(step_of(made, cache, 1, at, True), cache) for at in range(3)]))
    assert torch.allclose(*found, atol=1e-4) != fault
