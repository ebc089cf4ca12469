"""The long tests of tests/benchmarks/test_report.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.common import RESULTS
from benchmarks.report import plots
from benchmarks.report.__main__ import main
from tests.benchmarks.test_report import text_of


def test_the_repositorys_own_results_can_be_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plots, "DPI", 40)
    one_theme = lambda panels, theme: plots.png(panels, theme) if theme is plots.LIGHT else b""  # noqa: E731
    monkeypatch.setattr("benchmarks.report.page.png", one_theme)
    assert main(["--results", str(RESULTS), "--output", str(tmp_path)]) == 0
    text = text_of((tmp_path / "index.html").read_text())
    for path in RESULTS.glob("*.json"):
        assert path.name in text
    for note in capsys.readouterr().err.splitlines():
        assert "is missing" in note, note
