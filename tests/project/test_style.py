"""The rules that tools can check: formatting, lint, types, and which layer may import which."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lpr
from tests.fakes.paths import ROOT


@pytest.mark.parametrize(
    "command",
    [
        ["ruff", "check", "."],
        ["ruff", "format", "--check", "."],
        ["importlinter.cli"],
    ],
    ids=" ".join,
)
def test_tool(command: list[str]) -> None:
    if command == ["importlinter.cli"]:
        program = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"]
    else:
        program = [sys.executable, "-m", *command]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=600)
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
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=300)


def question_docstrings(path: Path) -> list[str]:
    """Line and text of each docstring of a file, attributes' included, whose first sentence is a question."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            first = re.match(r".*?[.?!](?=\s|$)", node.value.value.strip(), re.DOTALL)
            if first and first[0].endswith("?"):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {' '.join(first[0].split())}")
    return found


def test_docstrings_state_facts() -> None:
    """No docstring begins with a question; the failure lists every one that does."""
    files = [path for folder in ("lpr", "benchmarks", "dev") for path in sorted((ROOT / folder).rglob("*.py"))]
    offenders = [each for path in files for each in question_docstrings(path)]
    assert not offenders, f"{len(offenders)} docstrings are questions:\n" + "\n".join(offenders)


def test_question_docstrings_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    text = 'def f():\n    """Is there none?"""\n\n\nx = 1\n"""None: is it so? No."""\ny = 2\n"""A fact. Why?"""\n'
    (tmp_path / "wrong.py").write_text(text, encoding="utf-8")
    found = question_docstrings(tmp_path / "wrong.py")
    assert sorted(found) == ["wrong.py:2: Is there none?", "wrong.py:6: None: is it so?"]


SHARED = re.compile(r"^\| `([\w/]+\.py)` \| (`.*`) \|$", re.MULTILINE)
"""A row of the table in CONTRIBUTING.md: a test file, and modules as a shell would expand them."""


def untold(table: str, modules: set[str], tests: set[str]) -> set[str]:
    """What is wrong with the table: modules that nobody finds, rows that say what a name says, and what is no more."""
    told = list[str]()
    for test, cells in SHARED.findall(table):
        for folder, several, name in re.findall(r"`([\w/]*/)?(?:\{([\w,]+)\}|(\w+))`", cells):
            told += [f"{folder}{each}" for each in (several or name).split(",")]
        if test not in tests:
            told.append(test)
    named = {
        name for name in modules if f"{name.rpartition('/')[0]}/test_{name.rpartition('/')[2]}.py".lstrip("/") in tests
    }
    twice = {name for name in told if told.count(name) > 1}
    return (modules - named - set(told)) | (set(told) - (modules - named)) | twice


def test_every_module_has_a_test_that_is_found() -> None:
    """By its name, or in the table of CONTRIBUTING.md."""
    lpr_, tests = ROOT / "lpr", ROOT / "tests"
    modules = {str(each.relative_to(lpr_))[:-3] for each in lpr_.rglob("*.py") if not each.stem.startswith("__")}
    found = {str(each.relative_to(tests)) for each in tests.rglob("test_*.py")}
    table = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert not untold(table, modules, found)
    assert untold(table, {*modules, "core/none"}, found) == {"core/none"}, "a new module"
    assert untold(table, modules - {"core/pool"}, found) == {"core/pool"}, "one that is no more"
    assert untold(table, modules, {*found, "core/test_pool.py"}) == {"core/pool"}, "one that has a file by now"
    assert "core/test_drafting.py" in untold(table, modules, found - {"core/test_drafting.py"}), (
        "a file that is no more"
    )
