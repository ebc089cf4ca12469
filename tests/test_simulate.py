"""The time model: its arithmetic by hand, its constants by the runs they were fitted to, its predictions by sense."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from benchmarks.simulated.published import FITTED, GPT_FAST, check_published, compare_runs, fit, gpt_fast_layout
from benchmarks.simulated.speed import TOLERANCE, measurements_of, simulate, simulate_parser
from rich.console import Console
from sharded import config_values

from benchmarks.common import RESULTS, show
from lpr.cli.plan import main as plan_main
from lpr.config import DecodeConfig, InputError
from lpr.core.step_times import StepTimes, interpolate, read_step_times
from lpr.planner.facts import ModelFacts, facts_of
from lpr.planner.footprint import Mesh, kv_row_bytes, read_bytes
from lpr.planner.hardware import GPUS
from lpr.planner.interconnect import LINKS, Network, all_gather, all_reduce
from lpr.planner.measured import Drafted, Measured, read_measured
from lpr.planner.prediction import (
    GREEDY_ACCEPTANCE,
    SPREAD,
    Inputs,
    Machine,
    Setting,
    advantage,
    forward_seconds,
    predict,
    spread,
)
from lpr.planner.presets import measured_values, resolve

A100 = Machine(GPUS["a100-80gb"], Network(LINKS["nvlink-a100"], LINKS["ib-hdr"]))
MEASURED = Measured(
    drafted=(Drafted(0.0, 32, 2.0, 32.0), Drafted(0.0, 64, 2.5, 64.0)),
    extra_nodes={0.0: ((1, 0.0), (8, 12.0))},
    host_ms={0.0: ((1, 0.1), (65, 0.5))},
    source="made up",
)


@cache
def facts_named(name: str) -> ModelFacts:
    return facts_of(resolve(name).config, name)


def setting(**changes: Any) -> Setting:
    facts = facts_named("llama-2-7b")
    return replace(Setting(facts, A100, MEASURED, kv=1024, element_size=2, temperature=0.0), **changes)


def test_collectives_by_hand() -> None:
    """NCCL's own model: base latency, hops, and bytes over the share of the bus that a protocol reaches."""
    network = A100.network
    small = all_reduce(network, 8, 8192)
    assert small.algorithm == "ring LL"
    assert small.seconds == pytest.approx((3.6 + 2 * 7 * 0.47) * 1e-6 + 2 * 7 / 8 * 8192 / (235e9 / 4))
    large = all_reduce(network, 8, 1 << 30)
    assert large.algorithm == "ring Simple"
    assert large.seconds == pytest.approx((8.4 + 2 * 7 * 3.4) * 1e-6 + 2 * 7 / 8 * (1 << 30) / 235e9)
    gathered = all_gather(network, 4, 4096)
    assert gathered.seconds == pytest.approx((3.6 + 3 * 0.47) * 1e-6 + 3 * 4096 / (235e9 / 4))
    assert all_reduce(network, 1, 1 << 30).seconds == 0 == all_gather(network, 1, 4).seconds


def test_hosts_are_joined_by_the_network() -> None:
    """Sixteen GPUs on two hosts: one hop of the ring, or one level of the tree, crosses; so does its bandwidth."""
    two_hosts = all_gather(A100.network, 16, 4096)
    assert two_hosts.seconds == pytest.approx((3.6 + 14 * 0.47 + 2.7) * 1e-6 + 15 * 4096 / (22e9 / 4))
    many = all_reduce(A100.network, 512, 64)
    assert many.algorithm.startswith("tree")  # the ring's hops grow with the ranks, the tree's with their logarithm
    assert (
        all_reduce(replace(A100.network, gpus_per_host=16), 16, 4096).seconds
        < all_reduce(A100.network, 16, 4096).seconds
    )


def test_constants_are_the_fit() -> None:
    fraction, launch = fit(facts_named(FITTED[0]))
    assert Inputs().bandwidth_fraction == pytest.approx(fraction, rel=0.005)
    assert Inputs().launch == pytest.approx(launch, rel=0.03)


def test_published_runs_are_reproduced() -> None:
    """All fourteen rows within 25 %, of which two are the fit: Llama-2-7B on one and eight GPUs."""
    checks = check_published({name: facts_named(name) for name in GPT_FAST}, Inputs())
    assert len(checks) == 14 and sum(check.is_fitted for check in checks) == 2
    outside = [check for check in checks if abs(check.ratio - 1) > TOLERANCE]
    assert outside == []
    # A model without the collectives, or with sharded output heads, would not pass: the check can fail.
    free = check_published({name: facts_named(name) for name in GPT_FAST}, replace(Inputs(), collectives=0.0))
    assert sum(abs(check.ratio - 1) > TOLERANCE for check in free) >= 4


def test_gpt_fast_leaves_the_head_whole() -> None:
    facts = facts_named("llama-2-7b")
    layout = gpt_fast_layout(facts)
    assert [each.count for each in layout.collectives] == [64]
    whole = 2 * 32000 * 4096
    assert read_bytes(layout, 8, 2, 1) - read_bytes(facts, 8, 2, 1) == whole - whole // 8


def test_forward_is_the_roofline() -> None:
    facts, inputs = facts_named("llama-2-7b"), Inputs()
    read = read_bytes(facts, 1, 2, 1) + 1000 * kv_row_bytes(facts, 1, 2)
    assert forward_seconds(facts, 1, 2, 1, 1000, A100, inputs) == pytest.approx(read / (2039e9 * 0.683))
    wide = forward_seconds(facts, 1, 2, 4000, 1000, A100, inputs)
    assert wide == pytest.approx(2 * forward_seconds(facts, 1, 2, 2000, 1000, A100, inputs))
    eager = replace(A100, is_eager=True)
    assert forward_seconds(facts, 8, 2, 1, 1000, eager, inputs) == pytest.approx(1 / 25.5, rel=0.01)


def test_interpolation() -> None:
    assert interpolate((10.0, 20.0), 2, (1, 3)) == 15
    assert interpolate((10.0, 20.0, 21.0), 6, (1, 3, 4)) == 23
    assert interpolate((10.0, 20.0), 1, (2, 4)) == 10, "fewer than were measured take no less"
    assert interpolate((10.0,), 100, (2,)) == 10


def test_payload_is_that_of_the_exchange() -> None:
    for lp in (1, 2, 8):
        decode = DecodeConfig(window_size=4, guess_set_size=4, trie_nodes=32, max_batch_size=1)
        expected = 4 * decode.resolved(lp).payload_words(1, lp, decode.carries_trees(lp))
        assert Drafted(0.0, 64 * lp, 1.0, 64.0 * lp).payload_bytes(lp) == expected


def test_prediction_by_hand() -> None:
    """Two replicas, 128 nodes: 3 tokens in a step of 64 + 4 nodes per rank, one gather, and the host's 0.894 ms."""
    found = predict(setting(), Mesh(2, 1))
    assert found.drafted is not None and found.drafted.budget == 128 and found.drafted.is_extrapolated
    gather = all_gather(A100.network, 2, found.drafted.payload_bytes(2)).seconds + Inputs().launch
    forward = forward_seconds(facts_named("llama-2-7b"), 1, 2, 68, 1024, A100, Inputs())
    host = 1e-3 * (0.1 + 0.4 * 127 / 64)
    assert found.step.total == pytest.approx(forward + gather + host)
    assert found.tokens_per_second.mid == pytest.approx(3 / (forward + gather + host))
    assert found.tokens_per_second.low < found.tokens_per_second.mid < found.tokens_per_second.high


def test_larger_trees_are_extrapolated_and_say_so() -> None:
    ways = MEASURED.ways(0.0, 8)
    assert [way.budget for way in ways] == [32, 64, 128, 256, 512]
    assert [way.tokens_per_step for way in ways] == pytest.approx([2.0, 2.5, 3.0, 3.5, 4.0])
    assert [way.is_extrapolated for way in ways] == [False, False, True, True, True]
    assert MEASURED.ways(0.0, 1) == list(MEASURED.drafted)
    assert MEASURED.ways(0.7, 1) == list(MEASURED.drafted)  # the nearest temperature that was measured


def test_plain_decoding_where_drafts_do_not_pay() -> None:
    slow_host = replace(MEASURED, host_ms={0.0: ((1, 0.1), (32, 50.0))})
    found = predict(setting(measured=slow_host), Mesh(1, 8))
    assert found.drafted is None and found.tokens_per_step == 1
    assert predict(setting(temperature=None), Mesh(1, 8)).drafted is None


def test_every_uncertainty_moves_a_prediction_as_it_says() -> None:
    """Slow values lower tokens per second and fast ones raise them, where the input matters at all."""
    one = setting(machine=replace(A100, gpu=replace(A100.gpu, flops=2e13)))  # slow enough for arithmetic to matter
    drafted = MEASURED.drafted[1]
    gained = replace(MEASURED, drafted=(*MEASURED.drafted, Drafted(0.0, 128, 3.0, 128.0)))
    for name, (slow, fast) in SPREAD.items():
        where = one if name == "flops_fraction" else setting(measured=gained)
        tree = gained.drafted[2] if name == "scaling" else drafted
        changed = [
            where.rate(Mesh(1, 2), tree, replace(Inputs(), **{name: side if name == "scaling" else value * side}))
            for side in (slow, fast)
            for value in [getattr(Inputs(), name)]
        ]
        assert changed[0] < where.rate(Mesh(1, 2), tree, Inputs()) < changed[1], name


def test_spread_adds_squares_of_logarithms() -> None:
    found = spread(lambda inputs: inputs.acceptance * inputs.host, Inputs())
    assert found.mid == 1
    assert found.high == pytest.approx(math.exp(math.hypot(math.log(1.09), math.log(2.0))))
    assert found.low == pytest.approx(math.exp(-math.hypot(math.log(0.90), math.log(0.5))))
    greedy = spread(lambda inputs: inputs.acceptance, Inputs(), temperature=0.0)
    assert (greedy.low, greedy.high) == pytest.approx(GREEDY_ACCEPTANCE)


def test_what_both_meshes_share_cancels_in_their_ratio() -> None:
    both = [predict(setting(), Mesh(1, tp)) for tp in (1, 1)]
    same = advantage(setting(), both[0], both[1])
    assert (same.low, same.mid, same.high) == (1, 1, 1)
    faster = advantage(setting(), predict(setting(), Mesh(1, 8)), both[0])
    alone = predict(setting(), Mesh(1, 8)).tokens_per_second
    assert 1 < faster.low < faster.mid and faster.high / faster.low < alone.high / alone.low


def test_batches_share_the_weights() -> None:
    one, four = (setting(batch=batch).rate(Mesh(1, 1), None, Inputs()) for batch in (1, 4))
    assert 3 < four / one < 4


def test_package_has_the_measurements_of_the_results() -> None:
    results = Path(__file__).parent.parent / "benchmarks" / "results"
    expected = measurements_of(results)
    assert measured_values() == expected, "run: python -m benchmarks.strong_scaling --simulate --refresh"
    measured = read_measured(expected)
    assert {each.temperature for each in measured.drafted} == {0.0, 0.8}
    runs = json.loads((results / "strong_scaling.json").read_text())["runs"]
    for run in runs:
        [tree] = [
            each
            for each in measured.drafted
            if each.temperature == run["temperature"] and each.budget == run["budget_per_rank"] * run["num_ranks"]
        ]
        assert tree.tokens_per_step == run["tokens_per_step"]  # one tree, however many ranks share it
        assert measured.shard_nodes(tree, run["num_ranks"]) == pytest.approx(run["nodes_of_largest_shard"], rel=0.1)


def test_real_runs_are_compared() -> None:
    """Made-up runs that the model explains exactly, and one that takes twice as long."""
    alone = {"rows": [{"nodes": 1, "kv": 9, "milliseconds": 4.0}], "first_step_ms": 20.0}
    rows = [{"nodes": 17, "kv": 9, "milliseconds": 8.0}, {"nodes": 1, "kv": 9, "milliseconds": 4.5}]
    repeat = {
        "times": {"1": alone, "2": {"rows": rows, "first_step_ms": 20.0}},
        "all_gather_ms": 1.0,
        "load_average": 0.5,
        "runs": [
            {"name": "plain decoding", "processes": 1, "tokens": 100, "steps": 100, "seconds": 0.04 + 98 * 0.004},
            {"name": "lookahead", "processes": 2, "tokens": 100, "steps": 40, "seconds": 2 * (0.042 + 38 * 0.009)},
        ],
    }
    found = {
        "source": "made up",
        "num_prompts": 2,
        "counted": [
            {"num_ranks": 1, "tokens_per_step": 2.0, "nodes": 17},
            {"num_ranks": 2, "tokens_per_step": 2.5, "nodes": 17},
        ],
        "repeats": [repeat, repeat],
    }
    plain, ahead = compare_runs(found)
    assert plain["ratios"] == [1, 1] and plain["predicted_steps"] == plain["steps"] == 100
    assert ahead["ratio"] == 2 and ahead["predicted_steps"] == ahead["steps"] == 40
    with pytest.raises(InputError, match="not recorded runs"):
        compare_runs({**found, "counted": []})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rows": []}, "t.json: not a table of step times"),
        ({"nodes": [1, 2], "rows": []}, "t.json: a table of step times needs two or more"),
        ({"nodes": [1, 2], "rows": [{"batch": 1, "kv": 9, "ms": [0, 1]}]}, "t.json: each row of step times needs"),
        ([], "t.json: not a table of step times"),
    ],
)
def test_bad_tables_are_one_line(values: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_step_times(values, "t.json")


def test_recorded_runs_are_those_of_the_result() -> None:
    """What a result says of the recorded runs is what the model says of them today."""
    runs = json.loads((RESULTS / "simulate_runs.json").read_text())
    assert compare_runs(runs) == json.loads((RESULTS / "simulate.json").read_text())["runs"]


def test_times_are_read_from_the_table_of_another_tool(tmp_path: Path) -> None:
    """`--times` takes what `--costs` and benchmarks.gpu_check write: one form of step times."""
    path = tmp_path / "tn.json"
    path.write_text(json.dumps({**StepTimes({(1, 1024): [5.0] * 16}).to_json(), "source": "a GPU"}))
    arguments = ["--models", "llama-2-7b", "--gpus", "1", "2", "--gpu", "h100", "--times", str(path)]
    result = simulate(simulate_parser().parse_args(arguments), Console(quiet=True))
    assert result["times_source"] == "a GPU"
    found = [each for setting in result["models"][0]["settings"] for each in setting["predictions"]]
    assert {each["tp"] for each in found} == {1} and {each["step_ms"]["forward"] for each in found} == {5.0}


def test_the_benchmark_answers_and_says_that_it_predicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "config.json"
    model.write_text(json.dumps(config_values("llama")))
    options = simulate_parser().parse_args(["--models", str(model), "--gpus", "1", "8", "--gpu", "h100", "--kv", "32"])
    console = Console(width=200, record=True, quiet=False)
    result = simulate(options, console)
    show(result, console)
    assert "PREDICTED" in console.export_text() and "no GPU was available" in result["note"]
    assert [row["is_fitted"] for row in result["gpt_fast"]].count(True) == 2
    [found] = result["models"]
    assert [each["temperature"] for each in found["settings"]] == [None, 0.0, 0.8]
    for each in found["settings"]:
        assert {(row["lp"], row["tp"]) for row in each["predictions"]} == {(1, 1), (8, 1), (4, 2), (2, 4), (1, 8)}
        best = max(row["tokens_per_second"]["mid"] for row in each["predictions"] if row["lp"] * row["tp"] == 8)
        assert each["on_8_gpus"]["tokens_per_second"]["mid"] == best
        assert all(times["mid"] >= 1 for times in each["on_8_gpus"]["times"].values())
    json.dumps(result)
    capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "h1000"], "--gpu 'h1000' is none of"),
        (["--link", "string"], "link 'string' is none of nvlink-a100"),
        (["--times", "no.json"], "cannot read no.json"),
        (["--check-runs", "no.json"], "cannot read no.json"),
        (["--models", "nope"], "'nope' is no preset"),
    ],
)
def test_bad_arguments_are_one_line(arguments: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        simulate(simulate_parser().parse_args(["--gpus", "1", "--gpu", "h100", *arguments]), Console(quiet=True))


def test_the_planner_recommends_by_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_main(["--model", "llama-2-7b", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    rates = {
        (row["lp"], row["tp"]): row["predicted_tokens_per_second"][0]["mid"] for row in record["meshes"] if row["fits"]
    }
    assert (record["recommended"]["lp"], record["recommended"]["tp"]) == max(rates, key=lambda mesh: rates[mesh])
    assert "predicted" in record["reason"] and " times " in record["reason"]
    assert plan_main(["--model", "llama-2-7b", "--eager", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["recommended"]["lp"] == 8  # nothing is gained by splitting what only waits for launches
    assert plan_main(["--model", "llama-2-7b", "--link", "rope"]) == 2
    assert "link 'rope' is none of" in capsys.readouterr().err
