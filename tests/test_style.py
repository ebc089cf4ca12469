"""The rules that tools can check: formatting, lint, types, and which layer may import which."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import lpr

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    "command",
    [
        ["ruff", "check", "."],
        ["ruff", "format", "--check", "."],
        ["mypy"],
        ["importlinter.cli"],
    ],
    ids=" ".join,
)
def test_tool(command: list[str]) -> None:
    if command == ["importlinter.cli"]:
        program = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"]
    else:
        program = [sys.executable, "-m", *command]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr


def test_public_names() -> None:
    assert set(lpr.__all__) == {
        "Chunk",
        "Completion",
        "DecodeConfig",
        "Engine",
        "EngineOptions",
        "InputError",
        "Lookahead",
        "Request",
        "SamplingParams",
        "bundled_model",
        "lookahead",
    }
    for name in lpr.__all__:
        assert getattr(lpr, name).__doc__, name


def test_core_loads_without_torch() -> None:
    code = "import sys, lpr.core.drafting, lpr.core.state; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
