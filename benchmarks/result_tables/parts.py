"""What tables of results are made of, and the values of a result that nobody knows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

FEWEST = 30
"""Drafted nodes below which a share says nothing."""

CIRCUMSTANCES = {
    "benchmark", "date", "command", "commit", "cpu", "gpu", "threads", "python", "torch", "transformers", "note",
}  # fmt: skip


@dataclass(frozen=True)
class Table:
    """A title, and cells of text in columns."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def failures(value: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """Every entry of a result that is marked as failed: what it is, and why it failed."""
    if isinstance(value, dict):
        name = " ".join(str(value[key]) for key in ("name", "case", "heads", "kind", "num_ranks") if key in value)
        where = f"{where} {name}".strip()
        if value.get("failed"):  # a reason; or a count, which may be 0
            yield where, str(value["failed"])
        for key, each in value.items():
            # Words that only say that a list follows are left out.
            yield from failures(each, where if isinstance(each, list) else f"{where} {key}".strip())
    elif isinstance(value, list):
        for each in value:
            yield from failures(each, where)


def sound(entries: Sequence[Json]) -> list[Json]:
    """Those that did not fail."""
    return [each for each in entries if "failed" not in each]


def mode(temperature: float | None) -> str:
    """How tokens are chosen, in words."""
    if temperature is None:
        return "plain decoding"
    return "greedy" if temperature == 0 else f"temperature {temperature:g}"


def workload(facts: Json) -> str:
    """The prompts of a result, in words."""
    length = f" x {facts['max_new_tokens']} tokens" if "max_new_tokens" in facts else ""
    return f"{facts['num_prompts']} prompts of {facts['data'].rsplit('.', 1)[0]}{length}"


def distinct(entries: Sequence[Json], key: str) -> list[Any]:
    """The different values of `key`, in order of appearance."""
    return list(dict.fromkeys(each[key] for each in entries))


def every_value(facts: Json) -> list[Table]:
    """The single values of a result, and every list of records as a table."""
    values = [(key, value) for key, value in facts.items() if key not in CIRCUMSTANCES]
    name = str(facts.get("benchmark", ""))
    single = [[key, _cell(value)] for key, value in values if isinstance(value, str | int | float)]
    made = [Table(name, ["", ""], single)] if single else []
    for key, value in values:
        records = [value] if isinstance(value, dict) else value
        if isinstance(records, list) and records and all(isinstance(each, dict) for each in records):
            columns = list(dict.fromkeys(name for each in records for name in each))
            rows = [[_cell(each.get(name, "")) for name in columns] for each in records]
            made.append(Table(f"{name}: {key}", columns, rows))
    return made


def _cell(value: Any) -> str:
    if isinstance(value, dict | list) and any(isinstance(each, dict | list) for each in _values(value)):
        return f"{len(value)} entries, see the file"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_cell(each)}" for key, each in value.items())
    if isinstance(value, list):
        return ", ".join(map(_cell, value))
    return f"{value:,.6g}" if isinstance(value, float) else str(value)


def _values(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value
