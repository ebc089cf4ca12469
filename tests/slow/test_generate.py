"""The long tests of tests/engine/test_commands.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.paths import ROOT


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
