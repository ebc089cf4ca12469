"""The long tests of tests/project/test_docs.py."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

import lpr
from dev.step_picture import TRACE
from tests.fakes.adapters import write_adapter
from tests.fakes.paths import ROOT
from tests.fakes.torchrun import FORKED
from tests.project.test_docs import DOCS, PROGRAMS, SITE, blocks_of

FEW_MEASUREMENTS = """
from lpr.engine import sizing
sizing.ENOUGH = sizing.PATIENCE = sizing.LONGER = sizing.AGREE = 0.0
"""
"""The start measures step times in two rounds, as in the other tests."""


def test_the_program_for_several_ranks_runs(tmp_path: Path) -> None:
    (program,) = blocks_of(DOCS / "engine.md", "py")
    (tmp_path / "program.py").write_text(FEW_MEASUREMENTS + program, encoding="utf-8")
    command = [*FORKED, "2", "program.py"]
    threads = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | threads, capture_output=True, text=True, timeout=300
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout) > 20


def test_the_site_builds(tmp_path: Path) -> None:
    if lacking := [name for name in SITE if importlib.util.find_spec(name) is None]:
        pytest.skip(f"the documentation needs pip install '.[docs]': no {', '.join(lacking)}")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    for page in DOCS.glob("*.md"):
        assert (tmp_path / f"{page.stem}.html").exists()
    assert (tmp_path / "trace.html").read_bytes() == TRACE.read_bytes()
    api = (tmp_path / "api.html").read_text(encoding="utf-8")
    for name in lpr.__all__:
        assert f'id="lpr.{name}"' in api, f"docs/api.md leaves out lpr.{name}"


@pytest.mark.parametrize("page", PROGRAMS, ids=lambda page: page.name)
def test_blocks_run(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each Python block is a program; it may use what the blocks before it define."""
    namespace: dict[str, Any] = {}
    for number, block in enumerate(blocks_of(page, "python"), 1):
        exec(compile(block, f"{page.name}, python block {number}", "exec"), namespace)
    assert len(capsys.readouterr().out) > 20


def test_the_block_with_adapters_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder with the model and the adapters that it names."""
    model = AutoModelForCausalLM.from_pretrained(lpr.bundled_model())
    for seed, name in enumerate(("sql", "java", "late")):
        write_adapter(tmp_path / "adapters" / name, model, ["q_proj", "down_proj"], seed)
    (tmp_path / "base").symlink_to(lpr.bundled_model())
    monkeypatch.chdir(tmp_path)
    (block,) = blocks_of(DOCS / "adapters.md", "python")
    namespace: dict[str, Any] = {}
    exec(compile(block, "adapters.md", "exec"), namespace)
    with pytest.raises(lpr.InputError, match="sql"):
        namespace["engine"].generate(["SELECT "], adapter=["sql"])
