"""The program that runs on a GPU, run here with tiny models: every section works, and one that fails is reported."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from pretend_gpu import CUDA, OnGpu, PretendGpu, gpu, guard, to_gpu

from benchmarks import gpu_check
from benchmarks.gpu import kernels, models
from benchmarks.gpu import parts as gpu_parts
from benchmarks.gpu_check import Report
from benchmarks.report.times import step_times
from lpr.core.step_times import StepTimes
from lpr.model import loader

__all__ = ["gpu", "guard"]
ROOT = Path(__file__).parent.parent
SECTIONS = [
    "environment", "bandwidth", "build:tiny", "t(n):tiny", "end_to_end:tiny", "profile:tiny", "transformers:tiny",
    "kernels", "correctness", "exact", "sampling", "end_to_end", "host_share", "ranks:2", "hybrid",
]  # fmt: skip


def run(monkeypatch: pytest.MonkeyPatch, target: Path, *more: str) -> int:
    arguments = ["gpu_check", "--device", "cpu", "--tiny", "--output", str(target), *more]
    monkeypatch.setattr(sys, "argv", arguments)
    return gpu_check.main()


def test_every_section_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "gpu_check.json"
    assert run(monkeypatch, target) == 0
    record = json.loads(target.read_text())
    assert list(record["sections"]) == SECTIONS and record["failed_sections"] == []
    correct = record["sections"]["correctness"]
    assert correct["eager"]["equal_to_cpu"] == correct["graphs_equal_to_eager"] == {"greedy": 2, "seeded": 2}
    assert record["sections"]["ranks:2"]["equal_to_cpu"] == {"greedy": 2, "seeded": 2}
    assert record["sections"]["build:tiny"]["self_check"] == "passed"
    assert record["sections"]["end_to_end:tiny"]["same_text"] == {"greedy": True, "sampled": True}
    assert record["sections"]["sampling"]["different"] == 0
    assert record["sections"]["exact"]["equal with exact"] == 2
    rows = record["sections"]["t(n):tiny"]["rows"]
    assert [row["kv"] for row in rows] == [32, 64] and all(min(row["ms"]) > row["floor_ms"] > 0 for row in rows)
    table = json.loads((tmp_path / "tn_cpu_tiny.json").read_text())
    assert StepTimes.from_json(table).time(8, kv=64) > 0 and "tiny" in table["source"]
    for kind in ("window", "both, batch of 4, fills of 32"):
        found = {name: record["sections"]["exact"][name][kind] for name in ("exact", "usual")}
        assert found["exact"]["logits_that_differ"] == 0  # on this CPU those of the usual mode may agree, too
        assert found["exact"]["logits_compared"] == 2 * 12
    assert 0 < record["sections"]["hybrid"]["torch"]["tree_ms"] < 1000
    [part] = step_times(record)
    assert [row[0] for row in part.table.rows] == ["tiny: batch 1, 32 cached", "tiny: batch 1, 64 cached"]


def test_a_failed_section_is_recorded_and_the_rest_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(sizes: Any) -> dict[str, Any]:
        raise ValueError("first line\nsecond line")

    monkeypatch.setattr(gpu_parts, "bandwidth", broken)
    target = tmp_path / "gpu_check.json"
    assert run(monkeypatch, target, "--sections", "bandwidth", "build", "t(n)") == 1
    record = json.loads(target.read_text())
    assert record["failed_sections"] == ["bandwidth"]
    assert record["sections"]["bandwidth"]["failed"] == "ValueError: first line"
    assert "broken" in "".join(record["sections"]["bandwidth"]["traceback"])
    assert "floor_ms" not in record["sections"]["t(n):tiny"]["rows"][0], "no floor without a bandwidth"


def test_a_section_is_cut_off_at_its_budget_and_not_begun_without_it(tmp_path: Path) -> None:
    """A section that hangs, or swallows what it takes for a failure, must not take the others' time."""

    def slow() -> dict[str, Any]:
        while True:
            with suppress(Exception):
                time.sleep(5.0)

    report = Report(tmp_path / "out.json", 0.1, (), {"slow": 0.2, "long": 7.0, "quick": 1.0})
    began = time.perf_counter()
    assert report.run("slow:one", slow) is None and time.perf_counter() - began < 3
    assert report.run("long", lambda: {"ran": True}) is None and report.run("quick", lambda: {"ran": True})
    record = report.write()
    assert record["sections"]["slow:one"]["cut"] == "cut off after its 0.2 s"
    assert "needs 7 s" in record["sections"]["long"]["skipped"]
    assert (record["cut_sections"], record["skipped_sections"], record["failed_sections"]) == (
        ["slow:one"],
        ["long"],
        [],
    )


def test_the_plan_fits_eight_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What tells most comes first, and all of that fits; every section has a budget."""
    began: list[str] = []

    def run(self: Report, name: str, section: Any) -> Any:
        assert self.budget(name), name
        began.append(name)
        return {"ids": {}, "bytes_per_s": 1.0}

    monkeypatch.setattr(Report, "run", run)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    num_gpus = 8
    report = Report(tmp_path / "out.json", 8.0, (), gpu_check.BUDGETS)
    gpu_check.check(report, gpu_parts.Sizes.real(torch.device("cuda")))
    assert began[:5] == ["environment", "bandwidth", "build:codellama-7b", "t(n):codellama-7b", "default:codellama-7b"]
    assert {"sampling", "exact", "ranks:2", "ranks:8", "ranks:tp 2", "ranks:tp 8", "attention"} < set(began)
    first = began[: began.index("ranks:2")]
    assert sum(report.budget(name) or 0.0 for name in first) <= 8 * 60
    num_gpus = 1
    began.clear()
    gpu_check.check(report, gpu_parts.Sizes.real(torch.device("cuda")))
    assert not any(name.startswith("ranks") for name in began), "ranks that share a GPU tell nothing of several"


def test_a_section_that_is_cut_off_keeps_what_it_has_measured(tmp_path: Path) -> None:
    """Each row is in the file as soon as it is measured."""
    target = tmp_path / "out.json"
    report = Report(target, 1.0, (), {"slow": 0.3})

    def slow() -> dict[str, Any]:
        rows: list[int] = []
        while True:
            rows.append(len(rows))
            gpu_parts.measured({"rows": rows})
            written = json.loads(target.read_text())["sections"]["slow"]
            assert written == {"rows": rows, "unfinished": True}
            time.sleep(0.05 if len(rows) < 3 else 5.0)

    assert report.run("slow", slow) is None
    record = json.loads(target.read_text())["sections"]["slow"]
    assert record["rows"] == [0, 1, 2] and "unfinished" not in record and record["cut"]


@pytest.fixture
def loaded_there(gpu: PretendGpu, monkeypatch: pytest.MonkeyPatch) -> PretendGpu:
    """Models come to the pretend GPU where they would come to a real one."""

    def there(model: Any) -> Any:
        return model if isinstance(next(model.parameters()).data, OnGpu) else to_gpu(model)

    def read_there(where: torch.device, read: Any, dtype: Any) -> Any:
        model, info = read(dtype=dtype)
        return (there(model) if where.type == "cuda" else model), info

    def moved(module: Any, where: Any = "cpu", *_: Any) -> Any:
        return there(module) if str(where).startswith("cuda") else module

    make = models.random_model
    on_cpu = gpu_parts.Sizes.tiny(torch.device("cpu"))
    monkeypatch.setattr(loader, "_read_to", read_there)
    monkeypatch.setattr(torch.nn.Module, "to", moved)
    monkeypatch.setattr(models, "random_model", lambda shape, sizes: there(make(shape, on_cpu)))
    monkeypatch.setattr("lpr.model.graphs.MOST_COMMON", 3)
    monkeypatch.setattr(kernels, "VOCABULARIES", (500,))
    monkeypatch.setattr(kernels, "ATTENTION_GRID", ((1, 4), (64,)))
    monkeypatch.setattr(kernels, "COLD_BYTES", 1)
    return gpu


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_a_dry_run_on_the_pretend_gpu(loaded_there: PretendGpu, tmp_path: Path) -> None:
    """As on one GPU, but for sizes: within its budgets, and each section with its rows.

    Those with whole engines of the bundled model take a minute here; they run on a CPU above.
    """
    only = ("environment", "bandwidth", "build", "t(n)", "default", "kernels", "sampling", "attention")
    report = Report(tmp_path / "out.json", 8.0, only, gpu_check.BUDGETS)
    gpu_check.check(report, gpu_parts.Sizes.tiny(CUDA))
    record = report.write()
    assert not record["failed_sections"] + record["cut_sections"] + record["skipped_sections"], record["sections"]
    assert list(record["sections"])[:5] == ["environment", "bandwidth", "build:tiny", "t(n):tiny", "default:tiny"]
    assert record["total_seconds"] < 60
    times = record["sections"]["t(n):tiny"]
    assert [(row["form"], row["kv"]) for row in times["rows"]] == [
        ("graphs", 32), ("eager", 32), ("graphs", 64), ("eager", 64)
    ]  # fmt: skip
    assert times["chains"][0]["nodes"] == [2, 8] and times["graphs"]["reason"] is None
    assert all(times["replay_equals_program"].values())
    [part] = step_times(record)
    assert part.table.rows


def test_no_section_begins_after_the_time_is_up(tmp_path: Path) -> None:
    report = Report(tmp_path / "out.json", minutes=0.0, only=())
    assert report.run("late", lambda: {"ran": True}) is None
    assert "skipped" in report.sections["late"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_in_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_check"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "no CUDA device" in done.stderr
