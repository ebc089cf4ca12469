"""The fleet benchmark and the data sets of the hub: with fake fleets, and one real one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.fleet import PLAIN, Case, attempt, budget, mesh, plan
from benchmarks.processes.launch import ROOT, last_line

import lpr
from benchmarks import data as hub
from benchmarks import fleet
from benchmarks.data import load_prompts
from lpr import DecodeConfig, Engine, InputError, SamplingParams
from tests.fakes.prompts import PROMPTS

FAKE = """
import json, sys, time
words = sys.argv[1:]
def value(flag): return words[words.index(flag) + 1]
num_ranks = int(words[0].removeprefix("--nproc_per_node="))
tp = int(value("--tp"))
plain = "--window-size" in words and value("--window-size") == value("--trie-nodes") == "0"
prompts = [json.loads(line)["prompt"] for line in open(value("--prompts"))]
num_tokens, num_steps = 8 * len(prompts), 8 * len(prompts) if plain else 2 * len(prompts)
rows = [{"token_ids": [tp, len(prompt)]} for prompt in prompts]
mesh, seconds = {"lp": num_ranks // tp, "tp": tp}, 2.0 if plain else 1.0
CHANGE
with open(value("--output"), "w") as file:
    file.writelines(json.dumps(row) + "\\n" for row in rows)
print("a line before")
print(json.dumps({"seconds": seconds, "num_tokens": num_tokens, "num_steps": num_steps, "mesh": mesh,
                  "payload_bytes_per_step": 1024}))
"""
"""A launcher that takes the arguments of torchrun and lpr.generate and answers at once."""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS[:3]))
    return path


@pytest.fixture
def run(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs the benchmark on fakes with some lines of their own; returns exit code, record and stderr."""

    def benchmark(change: str, *arguments: str) -> tuple[int, dict, str]:
        script = tmp_path / "fake.py"
        script.write_text(FAKE.replace("CHANGE", change))
        monkeypatch.setattr(fleet, "LAUNCHER", [sys.executable, str(script)])
        target = tmp_path / "result.json"
        command = ["fleet", "--data", str(data), "--temperatures", "0", "--budgets", "32", "--output", str(target)]
        monkeypatch.setattr(sys, "argv", [*command, *arguments])
        code = fleet.main()
        out, err = capsys.readouterr()
        assert json.loads(out.splitlines()[-1]) == json.loads(target.read_text())
        return code, json.loads(target.read_text()), err

    return benchmark


def by_name(record: dict) -> dict[str, dict]:
    return {f"{run['mesh']} {run['budget_per_rank']}": run for run in record["runs"]}


def test_figures_of_every_mesh(run) -> None:
    code, record, err = run("seconds *= 1.5 if tp == 2 and plain else 1.0", "--meshes", "1x1", "2x1", "1x2", "2x2")
    assert code == 0 and record["num_failed"] == 0
    runs = by_name(record)
    assert list(runs) == ["1x1 autoregressive", "1x2 autoregressive", "1x1 32", "2x1 32", "1x2 32", "2x2 32"]
    assert all(each["equal_to_autoregressive"] is True for each in runs.values())
    two = runs["2x2 32"]
    assert (two["num_ranks"], two["tokens_per_step"], two["tokens_per_second"]) == (4, 4.0, 24.0)
    assert two["speedup_over_autoregressive"] == 2.0, "over one process"
    assert two["part_of_ceiling"] == 0.75, "of plain decoding on two ranks, 8 tokens/s, times 4 tokens a step"
    assert runs["1x2 autoregressive"]["speedup_over_autoregressive"] == 0.667
    assert err.splitlines()[0].startswith("ceiling: ")
    assert record["num_prompts"] == {"data.jsonl": 3} and record["commit"]


def test_a_failing_run_is_recorded_and_the_rest_goes_on(run) -> None:
    code, record, err = run(
        "if num_ranks == 2: sys.exit('Traceback\\nlpr.generate: rank 1: lost\\n[rank1]: more')",
        "--meshes",
        "2x1",
        "1x1",
    )
    assert code == 1 and record["num_failed"] == 1
    failed = by_name(record)["2x1 32"]
    assert failed["error"] == "exit code 1: lpr.generate: rank 1: lost"
    assert "tokens_per_second" not in failed and failed["equal_to_autoregressive"] is None
    assert by_name(record)["1x1 32"]["speedup_over_autoregressive"] == 2.0
    assert "failed: 2x1 32: exit code 1: lpr.generate: rank 1: lost" in err.splitlines()


def test_one_failure_of_several_repeats_is_a_failure(run, tmp_path: Path) -> None:
    change = f"""if not plain:
    from pathlib import Path
    marker = Path({str(tmp_path / "marker")!r})
    if marker.exists(): sys.exit("late")
    marker.touch()"""
    code, record, _ = run(change, "--repeats", "2", "--meshes", "1x1")
    assert code == 1 and by_name(record)["1x1 32"]["error"] == "exit code 1: late"
    assert by_name(record)["1x1 autoregressive"]["seconds_of_each"] == [2.0, 2.0]


def test_other_tokens_are_a_failure_without_a_speedup(run) -> None:
    code, record, err = run("if num_ranks == 2 and tp == 1: rows[1]['token_ids'][1] += 1", "--meshes", "2x1", "1x2")
    runs = by_name(record)
    assert code == 1 and record["num_failed"] == 1
    assert runs["2x1 32"]["equal_to_autoregressive"] is False
    assert runs["2x1 32"]["error"] == "1 of 3 prompts got other tokens than 1x1 AR"
    assert "speedup_over_autoregressive" not in runs["2x1 32"] and "part_of_ceiling" not in runs["2x1 32"]
    assert runs["1x2 32"]["equal_to_autoregressive"] is True, "compared with its own tp, whose tokens are others"
    assert "failed: 2x1 32: 1 of 3 prompts got other tokens than 1x1 AR" in err.splitlines()


def test_without_a_baseline_nothing_is_called_equal(run) -> None:
    _, record, _ = run("if plain and tp == 2: sys.exit('no plan')", "--meshes", "1x2")
    runs = by_name(record)
    assert runs["1x2 autoregressive"]["error"] == "exit code 1: no plan"
    assert runs["1x2 32"]["equal_to_autoregressive"] is None and "part_of_ceiling" not in runs["1x2 32"]
    assert runs["1x2 32"]["speedup_over_autoregressive"] == 2.0


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ("if not plain: time.sleep(60)", "did not end within 3 s"),
        ("if not plain: rows.pop()", "2 of 3 completions came, from a mesh of {'lp': 1, 'tp': 1}"),
        ("if not plain: mesh = {'lp': 2, 'tp': 1}", "3 of 3 completions came, from a mesh of {'lp': 2, 'tp': 1}"),
        ("if not plain: rows[0] = {'error': 'x'}", "the output cannot be read: KeyError: 'token_ids'"),
    ],
)
def test_incomplete_runs_are_failures(run, change: str, error: str) -> None:
    code, record, _ = run(change, "--meshes", "1x1", "--timeout", "3")
    assert code == 1 and by_name(record)["1x1 32"]["error"] == error


def test_the_line_that_says_most() -> None:
    page = "E1121 failed (exitcode: 1)\nTraceback\n  raise ChildFailedError(\ntorch.ChildFailedError: \n=====\n"
    assert last_line(f"[rank1]: x\n[rank1]: torch.AcceleratorError: out of memory\n{page}") == (
        "[rank1]: torch.AcceleratorError: out of memory"
    )
    assert last_line(f"lpr.generate: rank 0: lost\n[rank1]: ValueError: 1\n{page}") == "lpr.generate: rank 0: lost"
    assert last_line("  only this  \n----\n\n") == "only this"
    assert last_line("") == "nothing on stderr"


def test_meshes_and_budgets_are_parsed() -> None:
    assert mesh("4x2") == (4, 2) and budget("auto") == "auto" and budget("64") == 64
    for text in ("4", "4x", "0x2", "4x-1", "4 x 2", "4x2x1"):
        with pytest.raises(InputError):
            mesh(text)
    for text in ("15", "many", "6.5"):
        with pytest.raises(InputError):
            budget(text)


def test_every_case_comes_once_and_after_its_baselines() -> None:
    cases = plan(["a", "b"], [0.0, 0.8], [(1, 1), (2, 2), (2, 2), (1, 4)], [32, "auto"])
    assert len(cases) == len(set(cases)) == 2 * 2 * (3 + 3 * 2)
    for index, case in enumerate(cases):
        assert {case.baseline, case.reference} <= set(cases[: index + 1])
    assert Case("a", 0.0, 1, 2, PLAIN).flags == ["--window-size", "0", "--trie-nodes", "0"]
    assert Case("a", 0.0, 2, 2, 64).flags == ["--window-size", "4", "--guess-set-size", "4", "--trie-nodes", "32"]
    assert Case("a", 0.0, 2, 2, "auto").flags == []


@pytest.mark.long
def test_a_real_fleet_emits_plain_decodings_tokens(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS[:2]))
    options = fleet.FleetOptions(data=("x",), max_new_tokens=12, timeout=200, dtype="float32")
    done = attempt(Case("x", 0.8, 2, 1, 32), options, 2, tmp_path, prompts)
    assert done.error is None
    engine = Engine.from_pretrained(lpr.bundled_model(), DecodeConfig.autoregressive())
    params = SamplingParams(max_new_tokens=12, temperature=0.8)
    assert done.token_ids == [each.token_ids for each in engine.generate(PROMPTS[:2], params)]
    assert done.summary["seconds"] > 0 and done.summary["payload_bytes_per_step"] > 0


@pytest.mark.parametrize(
    ("num_ranks", "meshes"), [("1", "1x1"), ("2", "1x1 2x1 1x2"), ("8", "1x1 2x1 1x2 4x1 1x4 2x2 8x1 1x8 4x2")]
)
def test_the_launch_script_fills_the_machine(num_ranks: str, meshes: str, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "NPROC": num_ranks}
    command = ["launch/strong_scaling.sh", "--data", "x y.jsonl"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=True)
    expected = f"-m benchmarks.fleet --meshes {meshes} --output benchmarks/results/fleet.json --data x y.jsonl\n"
    assert done.stdout == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "DATA", "--meshes", "2"], "--meshes 2 is not like 4x2"),
        (["--data", "DATA", "--budgets", "8"], "--budgets 8 is neither auto nor at least 16"),
        (["--data", "/none.jsonl"], "cannot read /none.jsonl"),
        (["--data", "DATA", "hub:mbpp"], "no data set hub:mbpp; there are hub:classeval, hub:humaneval,"),
        (["--data", "DATA", "--prompts", "0"], "holds no prompts"),
        (["--data", "DATA", "--repeats", "0"], "--repeats 0 must be at least 1"),
        ([], "Missing from benchmarks.fleet: --data"),
    ],
)
def test_bad_input_is_one_line_and_code_2(
    arguments: list[str],
    message: str,
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["fleet", *(str(data) if word == "DATA" else word for word in arguments)])
    code = fleet.main()
    out, err = capsys.readouterr()
    assert code == 2 and out == ""
    assert message in err and len(err.splitlines()) == 1


RECORDS = {
    "classeval": ("a.json", [{"task_id": "ClassEval_0", "skeleton": "class A:"}, {"skeleton": "class B:"}]),
    "mt_bench": ("question.jsonl", [{"question_id": 81, "turns": ["Compose", "Rewrite"]}, {"turns": ["Draft"]}]),
    "gsm8k": ("test.parquet", [{"question": "How many?", "answer": "1"}, {"question": "How much?", "answer": "2"}]),
    "humaneval": ("test.parquet", [{"task_id": "HumanEval/0", "prompt": "def f():"}, {"prompt": "def g():"}]),
}


@pytest.mark.parametrize("name", RECORDS)
def test_data_sets_come_from_the_hub(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, records = RECORDS[name]
    path = tmp_path / file
    if path.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(records), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(records, indent=1))
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    asked = []

    def download(repository: str, file: str, *, repo_type: str, revision: str) -> str:
        asked.append((repository, file, repo_type, revision))
        return str(path)

    monkeypatch.setattr(hub, "hf_hub_download", download)
    expected = {"classeval": "class A:", "mt_bench": "Compose", "gsm8k": "How many?", "humaneval": "def f():"}
    assert load_prompts(f"hub:{name}", 1) == [expected[name]]
    wanted = hub.FILES[name]
    assert asked == [(wanted.repository, wanted.file, "dataset", wanted.commit)]
    assert len(wanted.commit) == 40 and wanted.repository.count("/") == 1


def test_without_a_network_the_line_says_what_would_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*args: str, **more: str) -> str:
        raise ConnectionError("Please check your connection.\nAnd more.")

    monkeypatch.setattr(hub, "hf_hub_download", download)
    with pytest.raises(InputError, match=r"^cannot fetch hub:gsm8k \(openai/gsm8k.*connection\. Without .*a file\.$"):
        load_prompts("hub:gsm8k", 1)


def test_parquet_without_pyarrow_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InputError, match="x.parquet is parquet, which needs pyarrow: pip install pyarrow"):
        load_prompts(str(tmp_path / "x.parquet"), 1)


@pytest.mark.parametrize("text", ["[1, 2]", '"skeleton"', '{"other": 1}'])
def test_records_without_a_prompt_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match="a record has none of the fields skeleton, prompt"):
        load_prompts(str(path), 1)
