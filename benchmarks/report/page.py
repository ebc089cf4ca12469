"""The report as one HTML page that needs nothing but a browser."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template

from benchmarks.report.parts import Json, Part, failures
from benchmarks.report.plots import png
from benchmarks.report.tables import SECTIONS, Section

NUMBER = re.compile(r"[-\d]|failed$|nan$")
UNKNOWN = "unknown"


class Report:
    """The sections as HTML, their pictures, and notes about what cannot be shown."""

    def __init__(self, results: dict[str, Json]) -> None:
        self.pictures: dict[str, bytes] = {}
        """File name to PNG."""
        self.notes: list[str] = []
        """Results that are missing, failed or cannot be read, a line each."""
        self._overview: list[str] = []
        sections = {name: (section, dict[str, Json]()) for name, section in SECTIONS.items()}
        others = Section("Further results", "Every value of results without a section."), dict[str, Json]()
        for file, facts in results.items():
            sections.get(str(facts.get("benchmark")), others)[1][file] = facts
        if others[1]:
            sections["others"] = others
        self._sections = [self._section(name, *each) for name, each in sections.items()]
        columns = ("file", "date", "commit", "hardware", "software", "command")
        self._files = grid(columns, [file_row(*each) for each in results.items()], "text")

    def html(self, folder: str) -> str:
        """The page; `folder` is where the results were."""
        template = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
        return Template(template).substitute(
            folder=escape(folder), overview="\n".join(self._overview), sections="\n".join(self._sections),
            files=self._files,
        )  # fmt: skip

    def _section(self, name: str, section: Section, results: dict[str, Json]) -> str:
        body: list[str] = []
        headlines: list[str] = []
        if not results:
            body.append(self._note(f"{name}.json is missing", "", section.command(name), headlines))
        for file, facts in results.items():
            failed = list(dict.fromkeys(failures(facts)))
            body += [self._note(f"failed: {file}{what and ', '}{what}", why, "", headlines) for what, why in failed]
            try:
                parts = [] if isinstance(facts.get("failed"), str) else section.build(facts)
                body += [self._part(part, f"{file.rsplit('.', 1)[0]}_{at}") for at, part in enumerate(parts)]
                headlines += [escape(part.headline) for part in parts if part.headline]
            except (KeyError, ValueError, TypeError, IndexError) as error:
                if not failed:  # else there may be nothing left to show
                    lack = f"it lacks {error}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
                    how = str(facts.get("command") or section.command(name))
                    body.append(self._note(f"{file} cannot be shown", lack, how, headlines))
            body.append(source_line(file, facts))
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
        picture, table = "", part.table
        if part.panels:
            self.pictures[f"{name}.png"] = drawn = png(part.panels)
            inside = "data:image/png;base64," + base64.b64encode(drawn).decode()
            picture = f'<img src="{inside}" alt="{escape(part.headline)}">'
        title = f"<h3>{escape(table.title)}</h3>" if table.title else ""
        return f'{title}\n{picture}<div class="scroll">{grid(table.columns, table.rows)}</div>'


def file_row(file: str, facts: Json) -> list[str]:
    """The circumstances of a result file."""
    software = ", ".join(f"{name} {facts[name]}" for name in ("python", "torch", "transformers") if name in facts)
    threads = f", threads: {facts['threads']}" if "threads" in facts else ""
    hardware = f"{facts.get('gpu') or 'no GPU'}; {facts['cpu']}{threads}" if "cpu" in facts else UNKNOWN
    cells = [facts.get("date", UNKNOWN), facts.get("commit", UNKNOWN), hardware, software or UNKNOWN]
    return [file, *cells, facts.get("command", UNKNOWN)]


def source_line(file: str, facts: Json) -> str:
    """The origin of figures, below them."""
    file, date, commit, machine, _, command = (escape(each) for each in file_row(file, facts))
    note = f" Note: {escape(str(facts['note']))}." if "note" in facts else ""
    return f'<p class="from">{file}: {date}, commit {commit}, {machine}. <code>{command}</code>{note}</p>'


def grid(columns: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    """An HTML table of text cells; columns of numbers are aligned to the right."""
    right = [all(not row[at] or NUMBER.match(row[at]) for row in rows) for at in range(len(columns))]

    def cells(tag: str, row: Sequence[str]) -> str:
        pairs = zip(row, right, strict=True)
        return "".join(f"<{tag}{' class=n' * is_right}>{escape(cell)}</{tag}>" for cell, is_right in pairs)

    body = "\n".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<table class="{kind}"><thead><tr>{cells("th", columns)}</tr></thead>\n<tbody>{body}</tbody></table>'
