"""The long tests of tests/cli/test_trace.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.test_trace import Page
from tests.fakes.prompts import PROMPTS
from tests.fakes.torchrun import FORKED, JOB, rows, run


def test_rank_0_of_real_processes_writes_the_trace_and_the_trie(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": PROMPTS[0]}) + "\n")
    command = [*FORKED, "2", "lpr.generate", "--prompts", str(tmp_path / "in.jsonl"), *JOB,
               "--trie", str(tmp_path / "trie"), "--trace", str(tmp_path / "trace.html")]  # fmt: skip
    steps = []
    for attempt in range(2):
        done = run([*command, "--output", str(tmp_path / f"{attempt}.jsonl")])
        assert done.returncode == 0, done.stderr
        shown = Page((tmp_path / "trace.html").read_text()).data
        (row,) = rows(tmp_path / f"{attempt}.jsonl")
        (request,) = shown["requests"]
        assert shown["ranks"] == 2 and [token for token, _ in request["output"]] == row["token_ids"]
        assert {owner for step in request["steps"] for owner in step["owners"]} == {0, 1}
        steps.append(len(request["steps"]))
    assert steps[1] < steps[0], "the second run drafts from the first one's output, on both ranks"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["0.jsonl", "1.jsonl", "in.jsonl", "trace.html", "trie"]
