"""The page about security says what the code does."""

from __future__ import annotations

from lpr.serve.limits import Limit, table
from tests.fakes.paths import ROOT

PAGE = ROOT / "docs" / "security.md"
HEAD = "| what | at most | beyond | flag |\n|---|---|---|---|\n"


def row(limit: Limit) -> str:
    """A limit's row in the page."""
    return f"| {limit.what} | {limit.most:,} | {limit.answer} | {f'`{limit.flag}`' if limit.flag else ''} |"


def test_the_page_has_every_limit() -> None:
    """All of them, in their order, and no others: after a change, replace the table by what this asserts."""
    shown = PAGE.read_text(encoding="utf-8").partition(HEAD)[2].partition("\n\n")[0]
    assert shown.split("\n") == [row(limit) for limit in table().values()]


def test_problems_can_be_reported() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    assert "docs/security.md" in text and all(part in text for part in ("## Report", "## Versions", "## Threat model"))
