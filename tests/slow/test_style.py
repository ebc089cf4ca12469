"""The long tests of tests/project/test_style.py."""

from __future__ import annotations

import pytest

from tests.project.test_style import test_tool as check_tool


@pytest.mark.timeout(900)
def test_types() -> None:
    check_tool(["mypy"])
