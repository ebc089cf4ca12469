"""The long tests of tests/model/exact/test_exact_gpu.py."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lpr import DecodeConfig, Engine
from lpr.model.exact import check
from tests.fakes.models import tiny_model
from tests.fakes.pretend_gpu import PretendGpu, gpu, guard, to_gpu
from tests.model.exact.test_exact_gpu import DECODE, PARAMS, PROMPTS, ROOM, replays_that_round_otherwise


def test_ids_are_those_of_plain_decoding_and_products_have_one_height(
    gpu: PretendGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    gemm_rows: set[int] = set()
    multiply = nn.Linear.forward

    def counted(self: nn.Linear, states: torch.Tensor) -> torch.Tensor:
        gemm_rows.add(states.flatten(0, -2).shape[0])
        return multiply(self, states)

    model = tiny_model(spread=0.12).to(torch.bfloat16)
    plain = Engine.from_model(
        to_gpu(copy.deepcopy(model)), decode=DecodeConfig.autoregressive(max_batch_size=1), exact=True, graphs=False
    )
    assert plain.model.attention == "triton" and plain.model.exact
    expected = [each.token_ids for each in plain.generate(PROMPTS, PARAMS)]
    monkeypatch.setattr(nn.Linear, "forward", counted)
    gpu.memory = ROOM
    engine = Engine.from_model(to_gpu(copy.deepcopy(model)), decode=DECODE, exact=True)
    graphs = engine.model.graphs
    assert graphs is not None and {shape.num_entries % 64 for shape in graphs.common_shapes(8)} == {0}
    gemm_rows.clear()
    done = engine.generate(PROMPTS, PARAMS)
    assert [each.token_ids for each in done] == expected
    assert sum(each.stats.num_steps for each in done) < 20, "drafts were accepted"
    assert engine.model.graph_reason is None and gpu.num_replays
    engine.model.capturer = None
    engine.configure(engine.decode)
    assert [each.token_ids for each in engine.generate(PROMPTS, PARAMS)] == expected
    assert gemm_rows == {check.GPU_ROWS}


@pytest.mark.parametrize("rows", [0, 64, 256])
def test_replays_are_compared_with_direct_steps_at_every_height(
    rows: int, gpu: PretendGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At load: where one number of rows differs, steps go on without graphs, with the ids of plain decoding."""
    model = tiny_model(spread=0.12, num_hidden_layers=1).to(torch.bfloat16)
    expected = Engine.from_model(to_gpu(copy.deepcopy(model)), decode=DECODE, exact=True, graphs=False)
    replays_that_round_otherwise(monkeypatch, rows)
    gpu.memory = ROOM
    engine = Engine.from_model(to_gpu(model), decode=DECODE, exact=True)
    reason, replays = engine.model.graph_reason, gpu.num_replays
    assert reason == (f"a replay of {rows} rows has other bits than a direct step" if rows else None)
    assert engine.model.graphs is not None
    gemm_rows = {shape.batch * shape.num_entries for shape in engine.model.graphs.common_shapes(8)}
    assert gemm_rows == {64, 128, 256} and (rows or replays >= len(gemm_rows))
    found = [[each.token_ids for each in it.generate(PROMPTS, PARAMS)] for it in (engine, expected)]
    assert found[0] == found[1] and (gpu.num_replays > replays) == (not rows)
