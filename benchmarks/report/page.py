"""The report as one HTML page that needs nothing but a browser."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template

from benchmarks.report.parts import Json, Part, every_value, failures
from benchmarks.report.plots import DARK, LIGHT, png
from benchmarks.report.sections import SECTIONS, Section

NUMBER = re.compile(r"[-\d]|failed$|nan$")
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Result:
    """A result file: its name and its content. Entries that failed have a key `failed` with the reason."""

    file: str
    facts: Json

    @property
    def benchmark(self) -> str:
        """The benchmark that wrote it; empty if unknown."""
        return str(self.facts.get("benchmark", ""))


class Report:
    """The sections as HTML, their pictures, and notes about what cannot be shown."""

    def __init__(self, results: Sequence[Result]) -> None:
        """Build everything."""
        self.pictures: dict[str, bytes] = {}
        """File name to PNG."""
        self.notes: list[str] = []
        """Results that are missing, failed or cannot be read, a line each."""
        self._overview: list[str] = []
        self._sections = [
            self._section(name, section, [each for each in results if each.benchmark == name])
            for name, section in SECTIONS.items()
        ]
        others = [each for each in results if each.benchmark not in SECTIONS]
        if others:
            more = Section("Further results", "Every value of results without a section.", every_value)
            self._sections.append(self._section("others", more, others))
        columns = ("file", "date", "commit", "hardware", "software", "command")
        self._files = grid(columns, [file_row(each) for each in results], "text")

    def html(self, folder: str) -> str:
        """The page; `folder` is where the results were."""
        template = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
        return Template(template).substitute(
            folder=escape(folder),
            overview="\n".join(self._overview),
            sections="\n".join(self._sections),
            files=self._files,
        )

    def _section(self, name: str, section: Section, results: Sequence[Result]) -> str:
        body: list[str] = []
        headlines: list[str] = []
        if not results:
            body.append(self._note(f"{name}.json is missing", "", section.command(name), headlines))
        for result in results:
            failed = list(dict.fromkeys(failures(result.facts)))
            for what, why in failed:
                body.append(self._note(f"failed: {result.file}{what and ', '}{what}", why, "", headlines))
            try:
                parts = [] if is_failed(result.facts) else section.build(result.facts)
                body += [self._part(part, f"{result.file.rsplit('.', 1)[0]}_{at}") for at, part in enumerate(parts)]
                headlines += [escape(part.headline) for part in parts if part.headline]
            except (KeyError, ValueError, TypeError, IndexError, StopIteration) as error:
                if not failed:  # else there may be nothing left to show
                    lack = f"it lacks {error}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
                    how = str(result.facts.get("command") or section.command(name))
                    body.append(self._note(f"{result.file} cannot be shown", lack, how, headlines))
            body.append(source_line(result))
        self._overview.append(f'<p><a href="#{name}">{section.title}</a>: {" ".join(headlines)}</p>')
        head = f'<section id="{name}"><h2>{section.title}</h2>\n<p>{escape(section.text)}</p>\n'
        return head + "\n".join(body) + "\n</section>"

    def _note(self, what: str, why: str, how: str, headlines: list[str]) -> str:
        """Record what cannot be shown, why, and the command that makes it."""
        self.notes.append(what + (f": {why}" if why else "") + (f"; it is made by: {how}" if how else ""))
        headlines.append(f"<b>{escape(what)}.</b>")
        because = f": {why}" if why else ""
        made = f" It is made by <code>{escape(how)}</code>" if how else ""
        return f'<p class="no"><b>{escape(what)}</b>{escape(because)}.{made}</p>'

    def _part(self, part: Part, name: str) -> str:
        picture = ""
        if part.panels:
            light, dark = (png(part.panels, theme) for theme in (LIGHT, DARK))
            self.pictures |= {f"{name}.png": light, f"{name}-dark.png": dark}
            picture = (
                f'<picture><source media="(prefers-color-scheme: dark)" srcset="{data_uri(dark)}">'
                f'<img src="{data_uri(light)}" alt="{escape(part.headline)}"></picture>'
            )
        table = part.table
        title = f"<h3>{escape(table.title)}</h3>" if table.title else ""
        return f'{title}\n<div class="part">{picture}<div class="scroll">{grid(table.columns, table.rows)}</div></div>'


def is_failed(facts: Json) -> bool:
    """True if the whole result failed: `failed` is a reason, not a count."""
    return isinstance(facts.get("failed"), str)


def file_row(result: Result) -> list[str]:
    """The circumstances of a result file."""
    facts = result.facts
    software = ", ".join(f"{name} {facts[name]}" for name in ("python", "torch", "transformers") if name in facts)
    threads = f", threads: {facts['threads']}" if "threads" in facts else ""
    hardware = f"{facts.get('gpu') or 'no GPU'}; {facts['cpu']}{threads}" if "cpu" in facts else UNKNOWN
    cells = [facts.get("date", UNKNOWN), facts.get("commit", UNKNOWN), hardware, software or UNKNOWN]
    return [result.file, *cells, facts.get("command", UNKNOWN)]


def source_line(result: Result) -> str:
    """The origin of figures, below them."""
    file, date, commit, machine, _, command = (escape(each) for each in file_row(result))
    note = f" Note: {escape(str(result.facts['note']))}." if "note" in result.facts else ""
    return f'<p class="from">{file}: {date}, commit {commit}, {machine}. <code>{command}</code>{note}</p>'


def grid(columns: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    """An HTML table of text cells; columns of numbers are aligned to the right."""
    right = [all(not row[at] or NUMBER.match(row[at]) for row in rows) for at in range(len(columns))]

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=n' * is_right}>{escape(cell)}</{tag}>" for cell, is_right in zip(row, right, strict=True)
        )

    body = "\n".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<table class="{kind}"><thead><tr>{cells("th", columns)}</tr></thead>\n<tbody>{body}</tbody></table>'


def data_uri(picture: bytes) -> str:
    """A PNG inside the page."""
    return "data:image/png;base64," + base64.b64encode(picture).decode()
