"""The long tests of tests/engine/test_commands.py."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.cli.test_generate import write_prompts
from tests.fakes.paths import ROOT
from tests.fakes.prompts import PROMPTS


def test_no_leak_report_at_the_end(tmp_path: Path) -> None:
    """Triton's bindings report what outlives the interpreter, after which nobody finds the one clear line."""
    pytest.importorskip("triton")
    for arguments, code in ((["--prompt", "a", "--max-new-tokens", "2", "--window-size", "0", "--trie-nodes", "4"], 0),
                            (["--prompt", "a", "--model", str(tmp_path)], 2)):  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", "lpr.generate", *arguments],
            capture_output=True, text=True, timeout=200, cwd=ROOT,
        )  # fmt: skip
        assert done.returncode == code and "nanobind" not in done.stderr
        assert len(done.stderr.splitlines()) == (code == 2), done.stderr


def test_transformers_is_left_alone() -> None:
    code = (
        "from transformers import GenerationMixin as g; before = dict(vars(g)); import lpr.drop_in.lookahead, lpr;"
        "lpr.lookahead; assert dict(vars(g)) == before"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, cwd=ROOT)


def test_interrupt_leaves_what_is_finished(tmp_path: Path) -> None:
    """A real process, interrupted when its first lines are written."""
    source, target = write_prompts(tmp_path / "in.jsonl", PROMPTS * 60), tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "lpr.generate", "--prompts", str(source), "--output", str(target)]
    # At this temperature no draft helps; equal prompts decoded greedily would all be done before the signal comes.
    command += ["--max-new-tokens", "100", "--temperature", "1.5", "--max-batch-size", "2"]
    # Whoever runs the tests in the background may have told their processes to ignore the signal.
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=heed)
    try:
        for _ in range(1200):
            if target.exists() and target.read_bytes().count(b"\n") > 2:
                break
            assert process.poll() is None
            subprocess.run(["sleep", "0.05"], check=True)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "lpr.generate: interrupted; what was finished is written" in err.splitlines()
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert 2 < len(rows) < len(PROMPTS) * 20
    assert all(len(row["token_ids"]) == 100 or row["finish_reason"] == "stop" for row in rows)
