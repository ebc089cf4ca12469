"""Tables and charts as data, and the helpers that the builders of benchmarks.report.tables share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lpr.config import InputError

Json = dict[str, Any]
CIRCUMSTANCES = {
    "benchmark", "date", "command", "commit", "cpu", "gpu", "threads", "python", "torch", "transformers", "note",
}  # fmt: skip


@dataclass(frozen=True)
class Table:
    """A title, and text cells in columns."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Lines:
    """A panel with a line per series over a logarithmic x axis; a series is its points (x, y) by ascending x."""

    title: str
    x: str
    y: str
    series: Mapping[str, Sequence[tuple[float, float]]]


@dataclass(frozen=True)
class Bars:
    """A panel of horizontal bars: name, value and the text at the bar's end."""

    title: str
    x: str
    bars: Sequence[tuple[str, float, str]]


@dataclass(frozen=True)
class Part:
    """A table, and the picture of its figures if there is one."""

    table: Table
    panels: Sequence[Lines | Bars] = ()
    headline: str = ""
    """The result in one sentence: the alternative text of the picture, and a line at the top of the page."""


def markdown(table: Table) -> str:
    """A table for a page."""
    lines = [table.columns, ["---"] * len(table.columns), *table.rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def renew(page: Path, marks: tuple[str, str], tables: Sequence[Table]) -> None:
    """Put tables between two marks of a page, each below its title if there are several; raises InputError."""
    begin, end = marks
    before, found, rest = page.read_text(encoding="utf-8").partition(begin)
    _, ended, after = rest.partition(end)
    if not found or not ended:
        raise InputError(f"{page} has no place for the table: {begin} and {end}")
    titles = [f"{table.title}:\n\n" if len(tables) > 1 else "" for table in tables]
    middle = "\n\n".join(title + markdown(table) for title, table in zip(titles, tables, strict=True))
    page.write_text(f"{before}{begin}\n\n{middle}\n\n{end}{after}", encoding="utf-8")


Column = str | Callable[[Json], str]
"""How a record becomes a cell: a format string such as "{seconds:.2f}", or a function."""


def tabulate(title: str, records: Sequence[Json], columns: Mapping[str, Column]) -> Table:
    """A table with a row per record that did not fail; a cell is empty where a record lacks its value."""

    def cell(how: Column, record: Json) -> str:
        if not isinstance(how, str):
            return how(record)
        try:
            return how.format_map(record)
        except TypeError:  # the value is None
            return ""

    return Table(title, list(columns), [[cell(how, each) for how in columns.values()] for each in sound(records)])


def failures(value: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """Every entry of a result that is marked as failed: its name and the reason."""
    if isinstance(value, dict):
        name = " ".join(str(value[key]) for key in ("name", "case", "heads", "kind", "num_ranks") if key in value)
        where = f"{where} {name}".strip()
        if value.get("failed"):  # a reason; or a count, which may be 0
            yield where, str(value["failed"])
        for key, each in value.items():
            yield from failures(each, where if isinstance(each, list) else f"{where} {key}".strip())
    elif isinstance(value, list):
        for each in value:
            yield from failures(each, where)


def sound(entries: Sequence[Json]) -> list[Json]:
    """The entries that did not fail."""
    return [each for each in entries if "failed" not in each]


def mode(temperature: float) -> str:
    """How tokens are chosen, in words."""
    return "greedy" if temperature == 0 else f"temperature {temperature:g}"


def how_sampled(record: Json) -> str:
    """The cell of a record's temperature."""
    return mode(record["temperature"])


def workload(facts: Json) -> str:
    """The prompts of a result, in words."""
    return f"{facts['num_prompts']} prompts of {facts['data'].rsplit('.', 1)[0]} x {facts['max_new_tokens']} tokens"


def distinct(entries: Sequence[Json], key: str) -> list[Any]:
    """The distinct values of `key`, in order of appearance."""
    return list(dict.fromkeys(each[key] for each in entries))


def every_value(facts: Json) -> list[Part]:
    """The single values of a result, and every list of records as a table."""
    values = [(key, value) for key, value in facts.items() if key not in CIRCUMSTANCES]
    name = str(facts.get("benchmark", ""))
    single = [[key, _cell(value)] for key, value in values if isinstance(value, str | int | float)]
    made = [Part(Table(name, ["", ""], single))] if single else []
    for key, value in values:
        records = [value] if isinstance(value, dict) else value
        if isinstance(records, list) and records and all(isinstance(each, dict) for each in records):
            columns = list(dict.fromkeys(name for each in records for name in each))
            rows = [[_cell(each.get(name, "")) for name in columns] for each in records]
            made.append(Part(Table(f"{name}: {key}", columns, rows)))
    return made


def _cell(value: Any) -> str:
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    if any(isinstance(each, dict | list) for each in inner):
        return f"{len(value)} entries, see the file"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_cell(each)}" for key, each in value.items())
    if isinstance(value, list):
        return ", ".join(map(_cell, value))
    return f"{value:,.6g}" if isinstance(value, float) else str(value)
