"""Makes the table of peers in docs/results.md from the result file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.report.parts import Table
from benchmarks.report.steps import peers_table
from lpr.config import InputError

DOCS = Path(__file__).parents[2] / "docs" / "results.md"
BEGIN, END = "<!-- made by python -m benchmarks.peers table -->", "<!-- end -->"


def renew(page: Path, result: dict[str, Any]) -> None:
    """Put the result's table between the page's marks; raises InputError."""
    text = page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise InputError(f"{page} has no place for the table: {BEGIN} and {END}")
    page.write_text(f"{before}{BEGIN}\n\n{markdown(peers_table(result))}\n\n{END}{after}", encoding="utf-8")


def markdown(table: Table) -> str:
    """A table for a page."""
    lines = [table.columns, ["---"] * len(table.columns), *table.rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
