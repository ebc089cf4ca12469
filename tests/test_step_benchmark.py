"""The step benchmark's own parts: t(n), and the payload and time of the collective."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel
from worlds import ThreadComm, ThreadWorld, run_ranks

from benchmarks import step
from benchmarks.engines import split_budget
from benchmarks.step import gather_times, payload_bytes
from lpr import DecodeConfig, Engine, InputError
from lpr.core.step_times import KNOTS
from lpr.engine.exchange import Exchange


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize(
    "decode", [split_budget("both", 64), split_budget("window", 32), DecodeConfig.autoregressive()]
)
def test_the_payload_is_that_of_the_exchange(decode: DecodeConfig, num_ranks: int) -> None:
    comm = ThreadWorld(num_ranks).comm(0)
    sizes, carries_trees = decode.resolved(num_ranks), decode.carries_trees(num_ranks)
    exchange = Exchange(sizes, decode.max_batch_size, comm, torch.device("cpu"), carries_trees)
    assert payload_bytes(decode, num_ranks) == exchange.payload_bytes


def test_a_gather_takes_as_long_as_on_the_slowest_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.step.dist.barrier", lambda: None)

    def program(comm: ThreadComm) -> list[float]:
        return gather_times(comm, torch.device("cpu"), 400, 5)

    first, second = run_ranks(ThreadWorld(2), program)
    assert first == second and len(first) == 5, "every rank knows the slowest's times"
    assert all(0 < ms < 60_000 for ms in first)


def test_step_times_of_several_cached_lengths(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine.from_model(llama, decode=DecodeConfig(window_size=0, trie_nodes=8))
    asked = []

    def time_once(model: object, batch: int, count: int, kv: int) -> float:
        assert batch == 1
        asked.append((count, kv))
        return 0.001 * count * (2 if kv > 256 else 1) * (10 if count > 16 else 1)

    monkeypatch.setattr("lpr.engine.sizing._time_once", time_once)
    rows = step.step_times(engine, [256, 400], 64)
    assert [row["kv"] for row in rows] == [256, 400]
    assert rows[0]["ms"] == {"1": 1.0, "2": 2.0, "4": 4.0, "8": 8.0}, "no further than what was measured"
    assert rows[1]["ms"] == {"1": 2.0, "2": 4.0, "4": 8.0, "8": 16.0}
    assert {kv for _, kv in asked} == {256, 400} and {count for count, _ in asked} <= set(KNOTS)
    with pytest.raises(InputError, match="--kv 449 and 64 nodes need 513 positions; the engine has 512"):
        step.step_times(engine, [449], 64)


def test_a_real_step_is_timed_at_a_longer_cache(llama: PreTrainedModel) -> None:
    engine = Engine.from_model(llama, decode=DecodeConfig(window_size=0, trie_nodes=8))
    (row,) = step.step_times(engine, [500], 4)
    assert next(iter(row["ms"])) == "1" and all(ms > 0 for ms in row["ms"].values())


@pytest.mark.parametrize("fails", [False, True])
def test_the_collective_is_timed_by_ranks_of_its_own(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {"num_ranks": 2, "backend": "gloo", "device": "cpu", "runs": [{"bytes": 20, "median_ms": 0.1}]}
    script = tmp_path / "fake.py"
    script.write_text(
        f"import sys\nassert sys.argv[-2:] == ['20', '400'], sys.argv\nif {fails}: sys.exit('no such port')\n"
        f"print({json.dumps({**said, 'cpu': 'x'})!r})"
    )
    monkeypatch.setattr(step, "LAUNCHER", [sys.executable, str(script)])
    found = step.time_collective([20, 400], argparse.Namespace(device=None, threads=1))
    assert found == ({"num_ranks": 2, "failed": "exit code 1: no such port"} if fails else said)
