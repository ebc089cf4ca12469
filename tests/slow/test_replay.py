"""The long tests of tests/benchmarks/test_replay.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks import replay
from tests.benchmarks.test_replay import traces


def test_an_unknown_tokenizer_is_one_line_from_the_command_line(traces):
    command = [sys.executable, "-m", "benchmarks.replay", "--traces", str(traces), "--tokenizer", "/no/such/tokenizer"]
    root = Path(replay.__file__).parents[1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and done.stdout == ""
    assert "cannot load tokenizer" in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
