"""The long tests of tests/engine/test_commands.py."""

from __future__ import annotations

import importlib.util
import inspect
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
from transformers import GenerationMixin

import lpr
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


def code_of(method: Any) -> CodeType | None:
    """The code of a method without its decorators."""
    return getattr(inspect.unwrap(getattr(method, "__func__", method)), "__code__", None)


def changed() -> set[str]:
    """Names of the class for generation whose values are not those of its file."""
    found = importlib.util.find_spec("transformers.generation.utils")
    assert found is not None and found.loader is not None
    fresh = importlib.util.module_from_spec(found)
    found.loader.exec_module(fresh)
    mine, theirs = vars(GenerationMixin), vars(fresh.GenerationMixin)
    differ = {name for name in mine.keys() & theirs.keys() if code_of(mine[name]) != code_of(theirs[name])}
    return (mine.keys() ^ theirs.keys()) | differ


def test_transformers_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the drop-in nor an engine has changed a class of transformers."""
    assert lpr.lookahead and not changed()
    monkeypatch.setattr(GenerationMixin, "generate", lpr.lookahead)
    monkeypatch.setattr(GenerationMixin, "more", None, raising=False)
    assert changed() == {"generate", "more"}


def test_interrupt_leaves_what_is_finished(tmp_path: Path) -> None:
    """A real process, interrupted when its first lines are written."""
    source, target = write_prompts(tmp_path / "in.jsonl", PROMPTS * 60), tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "lpr.generate", "--prompts", str(source), "--output", str(target)]
    # At this temperature no draft helps; equal prompts decoded greedily would all be done before the signal comes.
    command += ["--max-new-tokens", "100", "--temperature", "1.5", "--max-batch-size", "2"]
    # Whoever runs the tests in the background may have told their processes to ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    signal.signal(signal.SIGINT, before)
    try:
        for _ in range(1200):
            if target.exists() and target.read_bytes().count(b"\n") > 2:
                break
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "lpr.generate: interrupted; what was finished is written" in err.splitlines()
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert 2 < len(rows) < len(PROMPTS) * 20
    assert all(len(row["token_ids"]) == 100 or row["finish_reason"] == "stop" for row in rows)
