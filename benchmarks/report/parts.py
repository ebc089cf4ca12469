"""What a section of the report is made of: a result file, and a part that shows something of it."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.report.plots import Draw
from benchmarks.result_tables.parts import Json, Table


@dataclass(frozen=True)
class Result:
    """A result file: its name, and what it holds. Entries that failed have a key `failed` with the reason."""

    file: str
    facts: Json

    @property
    def benchmark(self) -> str:
        """Which benchmark wrote it; empty if it does not say."""
        return str(self.facts.get("benchmark", ""))

    @property
    def stem(self) -> str:
        """The file's name without its ending."""
        return self.file.rsplit(".", 1)[0]


@dataclass(frozen=True)
class Part:
    """One picture with the table of its numbers."""

    name: str
    """Of the picture's file, without its ending."""
    draw: Draw | None
    """None: the table says it all."""
    table: Table
    headline: str = ""
    """The result in one sentence: the picture in words, and for the top of the page."""

    @property
    def numbers(self) -> set[tuple[str, ...]]:
        """What it says; a part that says nothing new, such as a check that two results share, is not shown again."""
        return {(self.headline, *row) for row in self.table.rows} if self.headline else set()
