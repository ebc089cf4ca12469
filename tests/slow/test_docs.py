"""The long tests of tests/project/test_docs.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.paths import ROOT
from tests.project.test_docs import DOCS, blocks_of


def test_the_program_for_several_ranks_runs(tmp_path: Path) -> None:
    (program,) = blocks_of(DOCS / "engine.md", "py")
    (tmp_path / "program.py").write_text(program, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "program.py"]
    threads = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | threads, capture_output=True, text=True, timeout=300
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout) > 20
