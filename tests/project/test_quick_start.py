"""Processes of tests that are forked behind the imports are what a start would have made."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.fakes.paths import ROOT

PROGRAM = str(ROOT / "tests" / "fakes" / "told.py")


def told(*words: str, **how: Any) -> tuple[dict[str, Any], subprocess.CompletedProcess[str]]:
    done = subprocess.run([sys.executable, PROGRAM, *words], stdout=subprocess.PIPE, text=True, timeout=300, **how)
    return json.loads(done.stdout), done


def test_a_child_is_what_was_asked_for(tmp_path: Path) -> None:
    environment = {**os.environ, "NAME": "value", "TORCHINDUCTOR_CACHE_DIR": "set by a compilation of another test"}
    reading, writing = os.pipe()
    how: dict[str, Any] = {"env": environment, "cwd": tmp_path, "input": "given", "pass_fds": [writing]}
    facts, done = told("a", "again", start_new_session=True, **how)
    os.close(reading)
    os.close(writing)
    assert facts["forked"] and done.returncode == 7
    assert facts["parent"] == os.getpid() and facts["session"] == facts["pid"] != os.getsid(0)
    assert facts["folder"] == str(tmp_path) and facts["arguments"] == ["a", "again"]
    assert facts["command"] == [sys.executable, PROGRAM, "a", "again"]
    assert facts["told"] and facts["name"] == "value" and facts["input"] == "given"
    assert writing in facts["descriptors"] and reading not in facts["descriptors"]
    assert facts["child"] == [True, True, True, 7], "children of children too"


def test_a_child_that_is_killed_is_its_callers() -> None:
    with subprocess.Popen(
        [sys.executable, PROGRAM, "wait"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        facts = json.loads(process.stdout.readline())
        assert facts["forked"] and facts["pid"] == process.pid
        process.send_signal(signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL
    assert not Path(f"/proc/{process.pid}").exists()


def test_what_imports_read_has_a_process_started() -> None:
    facts, _ = told("last", env={**os.environ, "OMP_NUM_THREADS": "2"}, stdin=subprocess.DEVNULL)
    assert not facts["forked"] and facts["parent"] == os.getpid()
