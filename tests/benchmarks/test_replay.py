"""The replay program on small files, and what it says about bad ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import replay

REPEATED = "def area(width, height):\n    return width * height\n" * 3


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("replay") / "traces.jsonl"
    rows = [
        {"prompt": REPEATED, "completion": REPEATED, "task_id": "a"},
        {"prompt": "Count.", "completion": "one two three four five six seven eight nine ten"},
        {"prompt": "Again.", "completion": "one two three four five six seven eight nine ten"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "\n", encoding="utf-8")
    return path


def facts(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict:
    assert replay.main([str(a) for a in arguments]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_a_copied_completion_takes_few_steps(traces, capsys):
    result = facts(capsys, "--traces", traces, "--first", 1)
    assert result["num_tasks"] == 1 and result["setting"] == "cold"
    assert result["tokens_per_step"] > 8
    assert result["tokens_per_step"] == pytest.approx(result["num_tokens"] / result["num_steps"], abs=1e-3)
    assert 0 < result["drafted_per_step"] <= 64
    assert 0 < result["expected_per_step"] <= 64 and 0 < result["accepted_per_step"] <= 64
    assert 0 < result["draft_ms_per_step"] <= result["draft_ms_p99"]


def test_no_budget_is_one_token_a_step(traces, capsys):
    result = facts(capsys, "--traces", traces, "--budget", 0)
    assert result["tokens_per_step"] == 1.0 and result["drafted_per_step"] == 0.0


def test_known_outputs_and_learning_save_steps(traces, capsys):
    cold = facts(capsys, "--traces", traces, "--last", 2)
    warm = facts(capsys, "--traces", traces, "--last", 1, "--warm", traces, "--warm-first", 2)
    learned = facts(capsys, "--traces", traces, "--last", 2, "--learn")
    assert warm["setting"] == "warm" and warm["num_warm_tasks"] == 2 and warm["num_warm_tokens"] > 10
    assert warm["tokens_per_step"] > learned["tokens_per_step"] > cold["tokens_per_step"]


def test_selection():
    pairs = [(str(i), "") for i in range(4)]
    assert replay.select(pairs, 2, None) == pairs[:2]
    assert replay.select(pairs, None, 3) == pairs[1:]
    assert replay.select(pairs, None, 0) == [] and replay.select(pairs, None, 9) == pairs
    assert replay.select(pairs, None, None) == pairs


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{\n", "line 1: not JSON"),
        ('{"prompt": "a", "completion": "b"}\n{"prompt": "a"}\n', "line 2: needs"),
        ("[1]\n", "line 1: needs"),
        ("\n", "holds no traces"),
        ('{"prompt": "", "completion": "b"}\n', "empty"),
    ],
)
def test_a_malformed_file_is_one_line(tmp_path, capsys, text, says):
    path = tmp_path / "bad.jsonl"
    path.write_text(text, encoding="utf-8")
    assert replay.main(["--traces", str(path)]) == 2
    captured = capsys.readouterr()
    assert says in captured.err and captured.err.count("\n") == 1 and captured.out == ""


@pytest.mark.parametrize(
    "arguments",
    [[], ["--traces", "no/such.jsonl"], ["--budget", "-1"], ["--first", "1", "--last", "1"], ["--budget", "many"]],
)
def test_bad_arguments_are_one_line_and_exit_code_2(arguments, traces, capsys):
    if arguments and "--traces" not in arguments:
        arguments = ["--traces", str(traces), *arguments]
    code = replay.main(arguments)
    captured = capsys.readouterr()
    assert code == 2 and captured.err.count("\n") == 1 and captured.out == ""
