"""What a section of the report is made of: a result file, and a part that shows something of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.report.plots import Draw

Json = dict[str, Any]


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
    title: str
    draw: Draw | None
    """None: the table says it all."""
    alt: str
    """The picture in words."""
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    headline: str = ""
    """The result in one sentence, for the top of the page."""

    @property
    def numbers(self) -> set[tuple[str, ...]]:
        """What it says; a part that says nothing new, such as a check that two results share, is not shown again."""
        return {(self.headline, *row) for row in self.rows} if self.headline else set()


def failures(value: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """Every entry of a result that is marked as failed: what it is, and why it failed."""
    if isinstance(value, dict):
        name = " ".join(str(value[key]) for key in ("name", "case", "heads", "kind", "num_ranks") if key in value)
        where = f"{where} {name}".strip()
        if "failed" in value:
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
