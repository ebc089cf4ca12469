"""The simulated service: queues that theory knows, the scheduler's own rules, and the plan that comes of them."""

from __future__ import annotations

import json
import random
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lpr.cli.plan import main
from lpr.cli.plan_service import limits_of
from lpr.config import DecodeConfig
from lpr.core.step_times import KNOTS, StepTimes
from lpr.engine.limits import Limits
from lpr.engine.scheduler import Scheduler
from lpr.planner.footprint import Mesh
from lpr.planner.simulated.capacity import Effort, Kind, Search
from lpr.planner.simulated.costs import Point, StepCosts, measured_points, most_tokens_ahead
from lpr.planner.simulated.mesh import Arrivals, ClosedArrivals, PoissonArrivals, SimRequest, simulate_mesh
from lpr.planner.simulated.workload import Demand, Lengths, Speed, Workload, read_workload
from tests.fakes.paths import ROOT

EXAMPLE = ROOT / "configs" / "service" / "editors.toml"


class Constant:
    """Every step takes a second and brings every request so many tokens."""

    def __init__(self, tokens: int = 1) -> None:
        self.tokens = tokens
        self.steps: list[tuple[int, list[int]]] = []

    def __call__(
        self, decoding: Sequence[SimRequest], filling: Sequence[tuple[SimRequest, Sequence[int]]]
    ) -> tuple[float, Sequence[int]]:
        self.steps.append((len(decoding), [sum(counts) for _, counts in filling]))
        return 1.0, [self.tokens] * len(decoding)


def request(arrived: float, prompt: int = 4, output: int = 1) -> SimRequest:
    return SimRequest(arrived, prompt, output, tokens=list(range(prompt)))


def limits(**changes: Any) -> Limits[SimRequest]:
    usual = {"num_slots": 8, "num_ranks": 1, "prefill_chunk": 512, "longest_chain": 64, "packed": True,
             "num_ahead": 64}  # fmt: skip
    return Limits(**{**usual, "most_homes": 2, **changes})


def idle(**changes: Any) -> Scheduler[SimRequest]:
    return Scheduler(limits(**changes))


def given(*requests: SimRequest) -> Arrivals:
    """Arrivals that are these requests."""
    return Arrivals(requests)


def test_a_request_by_hand() -> None:
    """Three steps of two tokens make five, the prompt's last piece together with the first."""
    policy = Constant(2)
    (done,) = simulate_mesh(given(request(0.5, 20, 5)), policy, idle(prefill_chunk=8, longest_chain=4))
    assert policy.steps == [(0, [8]), (0, [8]), (1, []), (1, []), (1, [])]
    assert (done.first, done.ended, done.num_steps) == (3.5, 5.5, 3)
    assert (done.first_seconds, done.token_seconds) == (3.0, 0.5)


def test_slots_are_as_many_as_there_are() -> None:
    done = simulate_mesh(given(*(request(0.0, output=2) for _ in range(5))), Constant(), idle(num_slots=2))
    assert [each.ended for each in done] == [2, 2, 4, 4, 6]
    assert [each.first_seconds for each in done] == [1, 1, 3, 3, 5]


def test_padded_rows_fill_in_turn_with_decoding() -> None:
    policy = Constant()
    late = request(0.5, 30, 2)
    simulate_mesh(given(request(0.0, 4, 4), late), policy, idle(prefill_chunk=16, longest_chain=4, packed=False))
    assert (1, [16]) not in policy.steps and (0, [16]) in policy.steps and (2, []) in policy.steps


def test_prefixes_are_reused() -> None:
    policy = Constant()
    first, second = (SimRequest(at, 40, 1, tokens=[0] * 32 + [-at - 1] * 8) for at in (0, 100))
    simulate_mesh(given(first, second), policy, idle(prefill_chunk=8, longest_chain=8))
    assert len(policy.steps) == 5 + 1, "the second computes no more than a tree's worth"


def test_two_ranks_share_one_request_or_have_one_each() -> None:
    """The scheduler's own choice of home ranks decides what a step costs."""
    homes = []

    class Watching(StepCosts):
        def __call__(
            self, decoding: Sequence[SimRequest], filling: Sequence[tuple[SimRequest, Sequence[int]]]
        ) -> tuple[float, Sequence[int]]:
            seconds, emitted = super().__call__(decoding, filling)
            homes.append((sorted(tuple(each.homes) for each in decoding), round(1e3 * seconds, 6)))
            return seconds, [1] * len(emitted)

    points = {(0.0, 1, 1): Point(1.0, 10.0), (0.0, 1, 2): Point(1.0, 20.0, gather_ms=0.5)}
    pair = given(request(0.0, 4, 60), request(0.0, 4, 4))
    simulate_mesh(pair, Watching(TIMES, points, random.Random(0)), idle(num_ranks=2, longest_chain=8))
    assert homes[1] == ([(0,), (1,)], 3.0), "each evaluates one request: 2 + 0.1 x 10 ms"
    assert homes[-1] == ([(0, 1)], 4.5), "both evaluate what is left: 2 + 0.1 x 20 ms, and the gather"


def mean_wait(num_slots: int, load: float, number: int = 8000) -> float:
    """Seconds that requests of one step each wait, the step included, when a second's arrivals are `load`."""
    arrivals = PoissonArrivals(load, number, request, random.Random(1))
    done = simulate_mesh(arrivals, Constant(), idle(num_slots=num_slots, retains=False))
    return statistics.mean(each.first_seconds for each in done)


def test_clients_keep_littles_law() -> None:
    """Clients that ask again at once: as many as there are = answers a second times seconds per answer."""
    done = simulate_mesh(ClosedArrivals(7, 7000, lambda now: request(now, output=3)), Constant(), idle(num_slots=4))
    seconds = statistics.mean(each.ended - each.arrived for each in done)
    assert len(done) == 7000
    assert len(done) / max(each.ended for each in done) * seconds == pytest.approx(7, rel=0.01)


# Step times and tokens per step.

TIMES = StepTimes({(1, 256): [2.0 + 0.1 * n for n in KNOTS], (8, 256): [4.0 + 0.1 * n for n in KNOTS]})


def running(request: SimRequest, computed: int, homes: Sequence[int] = (0,)) -> SimRequest:
    """A request that some ranks serve, which hold so much of it."""
    request.homes, request.num_computed_tokens = list(homes), [computed] * (max(homes) + 1)
    return request


def test_steps_cost_what_the_table_says() -> None:
    costs = StepCosts(TIMES, {(0.0, 8, 1): Point(3.0, 10.0, host_ms=0.5, gather_ms=1.0)}, random.Random(0))
    requests = [running(request(0.0), 1) for _ in range(2)]  # two tokens of the prompt beside the root
    long = running(request(0.0, 100), 0)
    took, emitted = costs(requests, [(long, [50])])
    entries = 2 * (2 + 10) + 50
    assert took == pytest.approx((TIMES.time(entries, 3) + 2 * 0.5 + 1.0) * 1e-3) and len(emitted) == 2
    apart = StepCosts(TIMES, {(0.0, 8, 1): Point(3.0, 10.0)}, random.Random(0), prompt_ms=0.3)
    assert apart(requests, [(long, [50])])[0] == pytest.approx((TIMES.time(20, 2) + 54 * 0.3) * 1e-3)


def test_tokens_of_a_step_have_the_mean_that_was_measured() -> None:
    """However short the outputs are: the last step is cut, and counts."""
    for length, pace in ((12, 1.0), (400, 1.0), (400, 2.0)):
        costs = StepCosts(TIMES, {(0.0, 8, 1): Point(3.0, 10.0)}, random.Random(0))
        asked = [SimRequest(0.0, 4, length, pace=pace, tokens=[1, 2, 3, 4]) for _ in range(24000 // length)]
        done = simulate_mesh(given(*asked), costs, idle(retains=False))
        assert length * len(done) / sum(each.num_steps for each in done) == pytest.approx(3.0 * pace, rel=0.03)
    plain = StepCosts(TIMES, {(0.0, 1, 1): Point(1.0, 1.0)}, random.Random(0))
    fast = running(request(0.0, output=50), 3)
    fast.pace = 4.0
    assert {plain([fast], [])[1][0] for _ in range(100)} == {1}, "plain decoding brings one token a step"


def test_no_step_brings_more_tokens_than_its_tree_has_nodes() -> None:
    """Else its tokens need pages that the scheduler has not reserved."""
    costs = StepCosts(TIMES, {(0.0, 8, 1): Point(6.0, 8.0), (0.0, 8, 2): Point(9.0, 5.0)}, random.Random(0))
    for homes, pace, most, mean in (([0], 1.0, 8, 6.0), ([0, 1], 1.0, 10, 9.0), ([0], 2.0, 8, 8.0)):
        asked = running(request(0.0, output=100_000), 3, homes)
        asked.pace = pace
        drawn = [costs([asked], [])[1][0] for _ in range(2000)]
        assert max(drawn) == most and sum(drawn) / 2000 == pytest.approx(mean, rel=0.03)


def test_the_largest_trees_have_room() -> None:
    points = {(0.0, 1, 1): Point(2.0, 200.0), (0.0, 1, 2): Point(3.0, 150.0), (0.0, 1, 4): Point(4.0, 20.0)}
    assert most_tokens_ahead(points, 5) == 3 * 150 and most_tokens_ahead({(0.0, 1, 1): Point(2.0, 9.5)}, 4) == 38
    length, ahead = 1000, most_tokens_ahead(points, 5)
    found = limits_of(5, 1, DecodeConfig(max_nodes=64, max_length=length, max_batch_size=1), points)
    assert found.num_ahead == ahead and found.num_pages * found.page_size >= length + ahead
    for output in range(240, 272):  # requests that end within any part of a page
        wide = {(0.0, 1, 1): Point(190.0, 200.0)}
        limits = limits_of(1, 1, DecodeConfig(max_nodes=64, max_length=length, max_batch_size=1), wide)
        costs = StepCosts(TIMES, wide, random.Random(0))
        (done,) = simulate_mesh(given(request(0.0, 100, output)), costs, Scheduler(limits))
        assert done.num_tokens == output


def test_points_between_measured_batches() -> None:
    speeds = [
        Speed(temperature=0.0, batch=1, tokens_per_step=4.0, nodes=32.0),
        Speed(temperature=0.0, batch=16, tokens_per_step=2.0, nodes=8.0),
    ]
    points = measured_points(speeds, 32)
    assert points[0.0, 4, 1] == Point(3.0, 20.0) and points[0.0, 32, 1] == Point(2.0, 8.0)


# The plan.


def workload(**changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "arrivals": {"rate": 50.0},
        "prompt": {"median": 100, "p90": 300, "most": 600},
        "output": {"median": 32, "p90": 64, "most": 128},
        "slo": {"first_token_ms": 300, "per_token_ms": 20, "share": 0.9},
        "tokens_per_step": [{"temperature": 0.0, "tokens_per_step": 3.0, "nodes": 16}],
        "step_times": [{"file": "times.json"}],
    }
    return {name: value for name, value in (found | changes).items() if value is not None}


@pytest.fixture
def plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Runs the command on a workload; returns exit code, stdout and stderr."""
    (tmp_path / "times.json").write_text(json.dumps(TIMES.to_json()))

    def run(values: dict[str, Any] | str, *flags: str) -> tuple[int, str, str]:
        path = tmp_path / "work.json"
        path.write_text(values if isinstance(values, str) else json.dumps(values))
        few = ["--simulated-requests", "200", "--slots", "8"]
        code = main(["--service", str(path), *few, *flags])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def test_a_plan_keeps_its_promise_and_is_the_same_every_time(plan) -> None:
    code, out, _ = plan(workload(), "--json")
    found = json.loads(out)
    best = found["recommended"]
    assert code == 0 and best["kept"] >= 0.9 and best["meshes"] == best["gpus"] > 1
    assert best["meshes"] >= 50 / best["capacity_per_mesh"] - 1e-6 and best["simulated_meshes"] == best["meshes"]
    assert best["first_token_ms"][1] <= 300 and best["tokens_per_step"] == pytest.approx(3.0, rel=0.35)
    assert plan(workload(), "--json")[1] == out
    assert plan(workload(), "--json", "--seed", "1")[1] != out
    code, out, _ = plan(workload(arrivals={"rate": 100.0}))
    assert code == 0 and "4 of the" in out and "further kinds" not in out
    code, out, _ = plan(workload())
    assert code == 0 and f"{best['meshes']} meshes of lp 1 x tp 1" in out


def test_thousands_of_meshes_are_a_thousand_times_one(plan) -> None:
    few, many = (json.loads(plan(workload(), "--json", "--rate", rate)[1])["recommended"] for rate in ("50", "50000"))
    assert many["meshes"] > 2000 and many["meshes"] / few["meshes"] == pytest.approx(1000, rel=0.25)
    assert many["capacity_per_mesh"] == few["capacity_per_mesh"]


def test_what_no_number_of_meshes_can_do_is_said(plan) -> None:
    code, out, _ = plan(workload(), "--per-token-ms", "0.5")
    assert code == 1 and "no number of these meshes keeps the promise" in out and "none" in out


def test_hopeless_kinds_cost_one_look() -> None:
    work = Workload(
        arrivals=Demand(clients=4),
        prompt=Lengths(values=(50,)),
        output=Lengths(median=8),
        slo=read_workload(EXAMPLE).slo,
        shared_prefix=10,
    )
    kind = Kind(Mesh(1, 1), limits(num_slots=2), TIMES, {(0.0, 2, 1): Point(1.0, 1.0)})
    search = Search(work, kind, Effort(requests=40))
    alone = search.alone()
    assert search.hopeless(alone).num_gpus is None and alone.tokens_per_step == 1.0


def test_gpus_are_planned_by_predicted_times(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--service", str(EXAMPLE), "--model", "codellama-7b", "--gpu", "h100", "--gpus", "2", "--slots", "8", "16"]
    assert main([*flags, "--simulated-requests", "60", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kinds_considered"] == 6 and {row["lp"] * row["tp"] for row in found["kinds"]} <= {1, 2}
    assert found["recommended"]["gpus"] > 4 and any("PREDICTED" in note for note in found["notes"])


def test_the_example_says_all_that_can_be_said(tmp_path: Path) -> None:
    """With what is commented out too, every field of a workload is there, and all is taken."""
    assert read_workload(EXAMPLE).arrivals == Demand(rate=200.0)
    text = re.sub(r"^# (?=\[|[\w\"]+(?:\.\d\")? = )", "", EXAMPLE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    text = text.replace("rate = 200.0", "").replace("median = 900\np90 = 2400\nmost = 3500", "")
    path = tmp_path / "all.toml"
    path.write_text(text)
    found = read_workload(path)
    names = set(Workload.__struct_fields__)
    assert names == {name for name in names if re.search(rf"^\[*{name}\b", text, re.MULTILINE)}
    assert found.prompt.values and found.arrivals.clients and found.step_times and found.tokens_per_step


@pytest.mark.parametrize(
    ("values", "flags", "message"),
    [
        ("{", [], "work.json: "),
        (workload(arrivals={"rate": 0}), [], "arrivals: give either a rate above 0 or a number of clients"),
        (workload(arrivals={"rate": 1, "clients": 2}), [], "arrivals: give either"),
        (workload(prompt={"median": 10, "p90": 5, "most": 20}), [], "prompt: a spread needs median <= p90 <= most"),
        (workload(output={}), [], "output: give either values, or a median"),
        (workload(output={"values": [0]}), [], "Expected `int` >= 1 - at `$.output.values"),
        (
            workload(slo={"first_token_ms": 1, "per_token_ms": 0}),
            [],
            "> 0.0 - at `$.slo.per_token_ms`",
        ),
        (workload(slo={"first_token_ms": 1, "per_token_ms": 1, "share": 1}), [], "at `$.slo.share`"),
        (workload(slo={"first_token_ms": 1}), [], "missing required field `per_token_ms`"),
        (workload(temperature={"hot": 1}), [], "temperature: its keys are temperatures"),
        (workload(temperature={"0": 0}), [], "temperature: no request has one"),
        (workload(request_ms=-1), [], "at `$.request_ms`"),
        (workload(no_such=1), [], "unknown field `no_such`"),
        (workload(step_times=[{"file": "gone.json"}]), [], "cannot read"),
        (
            workload(tokens_per_step=[{"temperature": 0, "tokens_per_step": 0.5, "nodes": 1}]),
            [],
            "at `$.tokens_per_step",
        ),
        (workload(tokens_per_step=None), [], "step_times need tokens_per_step"),
        (workload(step_times=None), [], "--model is missing"),
        (workload(), ["--rate", "-1"], "arrivals: give either"),
        (workload(), ["--slots", "0"], "--slots must be at least 1"),
        (workload(), ["--simulated-requests", "3"], "--simulated-requests must be at least 20"),
    ],
)
def test_bad_input_is_one_line(plan, values: Any, flags: list[str], message: str) -> None:
    code, out, err = plan(values, *flags)
    assert code == 2 and out == "" and message in err and err.startswith("lpr.plan: error: ") and err.count("\n") == 1


def test_a_missing_file_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--service", "gone.toml"]) == 2
    assert capsys.readouterr().err == "lpr.plan: error: cannot read --service gone.toml: No such file or directory\n"
