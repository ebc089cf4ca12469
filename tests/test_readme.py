"""The README's Python blocks are programs: each runs, with what the blocks before it have made."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def test_every_block_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(BLOCKS) >= 2
    namespace: dict[str, Any] = {}
    for number, block in enumerate(BLOCKS, 1):
        exec(compile(block, f"README.md, python block {number}", "exec"), namespace)
    assert len(capsys.readouterr().out) > 100
