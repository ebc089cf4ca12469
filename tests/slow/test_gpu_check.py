"""The program that runs on a GPU, run here with tiny models: every section works, and one that fails is reported."""

from __future__ import annotations

import gc
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from benchmarks import gpu_check, recorded
from benchmarks.gpu import bare, models, several
from benchmarks.gpu import parts as gpu_parts
from benchmarks.gpu_check import Report
from benchmarks.report.tables import step_times
from lpr import bundled_model
from lpr.core.step_times import StepTimes
from lpr.model import loader
from tests.fakes.models import tiny_model
from tests.fakes.paths import ROOT
from tests.fakes.pretend_gpu import CUDA, OnGpu, PretendGpu, gpu, guard, short_steps, to_gpu

__all__ = ["gpu", "guard", "short_steps"]
SECTIONS = [
    "environment", "bandwidth", "build:tiny", "t(n):tiny", "recorded:tiny", "copies:tiny", "profile:tiny",
    "kernels", "correctness", "exact", "sampling", "ranks:2", "hybrid",
]  # fmt: skip


ON_ONE_GPU = [
    "environment", "bandwidth", "build:tiny", "t(n):tiny", "recorded:tiny",
    "copies:tiny", "profile:tiny", "kernels", "correctness", "sampling",
]  # fmt: skip


@pytest.fixture(autouse=True)
def short_sections(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Clients have few recorded texts to follow, a time is the median of five, and what the tests hold is not garbage.

    Behind each section the program collects garbage, for which 0.3 s of objects of the tests were looked at.
    """
    all_texts = recorded.stand_in
    monkeypatch.setattr(recorded, "stand_in", lambda: all_texts()[:8])
    monkeypatch.setattr(gpu_parts.median_ms, "__defaults__", (0.0, 5))
    gc.freeze()
    yield
    gc.unfreeze()


def run(monkeypatch: pytest.MonkeyPatch, target: Path, *more: str) -> int:
    minutes = ["--minutes", "60", "--several-minutes", "60"]  # machines of tests differ in speed by a factor of 5
    arguments = ["gpu_check", "--device", "cpu", "--tiny", "--output", str(target), *minutes, *more]
    monkeypatch.setattr(sys, "argv", arguments)
    return gpu_check.main()


@pytest.mark.timeout(900)
def test_every_section_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "gpu_check.json"
    assert run(monkeypatch, target) == 0
    record = json.loads(target.read_text())
    assert list(record["sections"]) == SECTIONS and record["failed_sections"] == []
    correct = record["sections"]["correctness"]
    assert correct["eager"]["equal_to_cpu"] == correct["graphs_equal_to_eager"] == {"greedy": 2, "seeded": 2}
    assert record["sections"]["ranks:2"]["equal_to_cpu"] == {"greedy": 2, "seeded": 2}
    assert set(record["sections"]["ranks:2"]["gather_us"]) == {"64", "1024", "16384"}
    assert record["sections"]["build:tiny"]["by_module"] == "passed"
    rows = record["sections"]["recorded:tiny"]["rows"]
    assert [(row["clients"], row["drafts"]) for row in rows] == [(2, False), (2, True)]
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
                time.sleep(60.0)

    report = Report(tmp_path / "out.json", 2.0, (), {"slow": 0.2, "long": 130.0, "quick": 1.0})
    began = time.perf_counter()
    assert report.run("slow:one", slow) is None and time.perf_counter() - began < 30
    assert report.run("long", lambda: {"ran": True}) is None and report.run("quick", lambda: {"ran": True})
    record = report.write()
    assert record["sections"]["slow:one"]["cut"] == "cut off after its 0.2 s"
    assert "needs 130 s" in record["sections"]["long"]["skipped"]
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
    assert began[:2] == ["environment", "bandwidth"]
    assert began[2:6] == [f"{name}:codellama-7b" for name in ("build", "t(n)", "recorded", "copies")]
    assert {"sampling", "exact", "ranks:2", "ranks:8", "ranks:tp 2", "ranks:tp 8", "hybrid"} < set(began)
    first, last = began.index("ranks:8"), began.index("ranks:tp 2")
    assert began[first : last + 1] == [
        "ranks:8", "ranks:4", "ranks:2", "ranks:1", "ranks:tp 8", "ranks:tp 4", "ranks:tp 2"
    ]  # fmt: skip
    assert sum(report.budget(name) or 0.0 for name in began[:first]) <= 8 * 60
    assert sum(report.budget(name) or 0.0 for name in began[first : last + 1]) <= 8 * 60
    assert 15.9 * 60 < report.seconds_left < 16 * 60
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


@pytest.fixture(scope="module")
def small_bundled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the bundled one's tokenizer, of one layer."""
    folder = tmp_path_factory.mktemp("bundled")
    config: Any = AutoConfig.from_pretrained(bundled_model())
    small = tiny_model(
        vocab_size=config.vocab_size, num_hidden_layers=1, max_position_embeddings=1024,
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id,
    )  # fmt: skip
    small.save_pretrained(folder)
    AutoTokenizer.from_pretrained(bundled_model()).save_pretrained(folder)
    return folder


@pytest.fixture
def loaded_there(
    gpu: PretendGpu, short_steps: None, small_bundled: Path, monkeypatch: pytest.MonkeyPatch
) -> PretendGpu:
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
    gpu.memory = 80 << 30, 84 << 30
    # An engine takes what it is told of, and here it is the host's.
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: ((2 << 30) + (256 << 20), 4 << 30))
    monkeypatch.setattr(loader, "_read_to", read_there)
    monkeypatch.setattr(torch.nn.Module, "to", moved)
    monkeypatch.setattr(models, "random_model", lambda shape, sizes: there(make(shape, on_cpu)))
    monkeypatch.setattr(gpu_parts, "bundled_model", lambda: str(small_bundled))
    monkeypatch.setattr("lpr.model.graphs.MOST_COMMON", 3)
    # Its other activity asks CUDA for the time of each operator, which takes half a minute to fail.
    profile, activity = torch.profiler.profile, torch.profiler.ProfilerActivity.CPU
    monkeypatch.setattr(torch.profiler, "profile", lambda activities: profile(activities=[activity]))
    monkeypatch.setattr(gpu_parts, "VOCABULARIES", (500,))
    return gpu


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_a_dry_run_on_the_pretend_gpu(loaded_there: PretendGpu, tmp_path: Path) -> None:
    """As on one GPU, but for sizes: within its budgets, each section with its rows, and the report reads the file.

    A machine of the tests may be slower than a GPU. `exact` and `hybrid` take a minute here, and run on a CPU above.
    """
    target = tmp_path / "gpu_check.json"
    only = tuple(dict.fromkeys(name.split(":")[0] for name in ON_ONE_GPU))
    report = Report(target, 60.0, only, {name: 15 * seconds for name, seconds in gpu_check.BUDGETS.items()})
    gpu_check.check(report, gpu_parts.Sizes.tiny(CUDA))
    record = report.write()
    assert not record["failed_sections"] + record["cut_sections"] + record["skipped_sections"], record["sections"]
    assert list(record["sections"]) == ON_ONE_GPU and record["total_seconds"] < 5 * 8 * 60
    times = record["sections"]["t(n):tiny"]
    assert [(row["form"], row["kv"]) for row in times["rows"]] == [
        ("graphs", 32), ("eager", 32), ("graphs", 64), ("eager", 64)
    ]  # fmt: skip
    assert times["graphs"]["reason"] is None
    assert all(times["replay_equals_program"].values())
    for made in (record["sections"]["copies:tiny"][form] for form in ("int8", "int4", "fp8")):
        assert made["reason"] is None and made["graphs"].keys() == made["eager"].keys() == {1, 4}
    assert record["sections"]["correctness"]["graphs_equal_to_eager"] == {"greedy": 2, "seeded": 2}
    plain, drafts = record["sections"]["recorded:tiny"]["overlap"]
    assert plain["same_ids"] and drafts["same_ids"] and plain["launched"] > 0
    assert json.loads(target.read_text())["sections"] == json.loads(json.dumps(record["sections"]))
    [part] = step_times(json.loads(target.read_text()))
    assert len(part.table.rows) == 2


def test_a_job_of_ranks_that_fails_or_hangs_is_told_in_a_line(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("raise ValueError('no such thing')")
    with pytest.raises(RuntimeError, match="exit code 1: .*ValueError: no such thing"):
        several.execute(["--nproc_per_node=1", str(program)], 120.0, tmp_path / "log")
    program.write_text("import time\ntime.sleep(600)")
    with pytest.raises(RuntimeError, match="did not end within 0.5 s"):
        several.execute(["--nproc_per_node=1", str(program)], 0.5, tmp_path / "log")


def missing(patch: pytest.MonkeyPatch, *names: str) -> list[tuple[str, ...]]:
    """Modules that are not there, and what is run for them."""
    find, ran = importlib.util.find_spec, list[tuple[str, ...]]()
    patch.setattr(bare.importlib.util, "find_spec", lambda name: None if name in names else find(name))

    def run(*words: str) -> bool:
        ran.append(words)
        return "is_native" not in words[-1] and "nowhere" not in words

    patch.setattr(bare, "run", run)
    return ran


def test_a_bare_machine_is_made_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """What is missing comes from the collected wheels, without a network, and the extension is built."""
    ran = missing(monkeypatch, "msgspec", "tyro")
    monkeypatch.setattr(bare, "WHEELS", tmp_path)
    assert bare.main(collects=False) == 0
    install = ("-m", "pip", "install", "-q", "--no-index", "--find-links", str(tmp_path))
    assert ran[:2] == [(*install, "msgspec"), (*install, "tyro")]
    assert ran[3] == bare.BUILD and ran[4] == ("-c", "import benchmarks.gpu_check")
    assert capsys.readouterr().out.splitlines() == ["msgspec: installed", "tyro: installed", "extension: built"]
    ran.clear()
    assert bare.main(collects=True) == 0
    download = ("-m", "pip", "download", "-q", "-d", str(tmp_path))
    assert ran == [(*download, *bare.WITHOUT_TORCH), (*download, "--no-deps", "accelerate")]
    assert {*bare.NEEDED} <= {"torch", "triton", "accelerate", *bare.WITHOUT_TORCH}


def test_no_section_begins_after_the_time_is_up(tmp_path: Path) -> None:
    report = Report(tmp_path / "out.json", minutes=0.0, only=())
    assert report.run("late", lambda: {"ran": True}) is None
    assert "skipped" in report.sections["late"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_in_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_check"], cwd=ROOT, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "no CUDA device" in done.stderr
