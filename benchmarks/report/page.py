"""The report as one HTML page that needs nothing but a browser."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template

from benchmarks.report import predicted, steps, times, under_load
from benchmarks.report.parts import Part, Result
from benchmarks.report.plots import DARK, LIGHT, png
from benchmarks.result_tables import tables_of
from benchmarks.result_tables.parts import FEWEST, failures

NUMBER = re.compile(r"[-\d]|failed$|nan$")
PAPER = "lookahead decoding (Fu, Bailis, Stoica, Zhang, ICML 2024, arXiv 2402.02057)"


@dataclass(frozen=True)
class Section:
    """What is shown of one benchmark's results."""

    title: str
    text: str
    """What the pictures show, and how to read them."""
    benchmark: str
    build: Callable[[Result], list[Part]]
    options: str = ""
    """Of the command that makes the result."""
    command: str = ""
    """That command, where it is not `python -m benchmarks.NAME --output benchmarks/results/NAME.json`."""

    @property
    def anchor(self) -> str:
        """Its name in links."""
        return self.build.__name__

    @property
    def how(self) -> str:
        """The command that makes the missing result."""
        made = f"python -m benchmarks.{self.benchmark} {self.options}".strip()
        return self.command or f"{made} --output benchmarks/results/{self.benchmark}.json"


def without_pictures(result: Result) -> list[Part]:
    """The tables of a result that has no section."""
    return [Part(result.stem, None, table) for table in tables_of(result.facts)]


DATA = "--data classeval.jsonl"
SECTIONS = (
    Section(
        "Tokens per step against ranks",
        "Every rank adds its own nodes to the tree, so more ranks guess more. Counted, not timed. The two panels have "
        f"different scales. The diamond is the result of {PAPER} on one GPU, with another model and other prompts.",
        "strong_scaling", steps.scaling, DATA,
    ),
    Section(
        "Speed-up in steps against ranks",
        f"The same runs, each against its own result on one rank. The ideal is one more time per rank. Of {PAPER} the "
        "results of 1 and 8 GPUs are known to us, so the band between them only joins the two. In wall clock that "
        "paper reports up to 4x of plain decoding on one GPU (8 A100, ClassEval, CodeLlama 7B and 13B), of which one "
        "GPU brings 2.3x and more (7B, HumanEval and ClassEval); steps and wall clock are not the same, so that is not "
        "drawn here.",
        "strong_scaling", steps.speedup, DATA,
    ),
    Section(
        "Acceptance by source and depth",
        "Which source's guesses are right, and how far ahead. The trie continues text that has been seen; the window "
        "and its n-gram pool are lookahead decoding's; recycled candidates are the model's own second choices. A node "
        "counts for the source that named it first, so sources that come later look worse than they are alone. Shares "
        f"of fewer than {FEWEST} nodes are not drawn.",
        "ablation", steps.depths, DATA,
    ),
    Section(
        "Tokens per step by source and node budget",
        "One rank, with the window only, the trie only, or both at half of the budget each.",
        "ablation", steps.ablation, DATA,
    ),
    Section(
        "Time of a step",
        "Medians of each part's processor time. The model's part runs on the accelerator where there is one; all else "
        "is the host's. Host alone: the same steps with the model's results read from a recording, as on a host "
        "whose accelerator computes. Medians of parts do not add up exactly to the median of the step.",
        "step", times.breakdown, f"{DATA} --threads 1",
    ),
    Section(
        "Wall clock against transformers",
        "Whole completions, greedy. All contestants must emit the same tokens; the table counts prompts where one did "
        "not. auto: sizes that lpr chose itself; trie N, both N: N nodes per step.",
        "decode", times.decode, DATA,
    ),
    Section(
        "Automatic sizes against a fixed grid",
        "lpr chooses the size of every tree from measured step times and from what was accepted so far. Its aims are "
        "to match the best fixed size without knowing it, and never to be slower than plain decoding.",
        "adaptive", times.adaptive, "--data classeval.jsonl humaneval.jsonl",
    ),
    Section(
        "Automatic sizes without a clock",
        "Recorded completions of other models, replayed under given step times: a node costs so many percent of a "
        "plain step. The best fixed size differs from price to price and from text to text; automatic sizes are told "
        "neither. Warm: the completions of other tasks are known.",
        "sizes", times.sizes,
        command="python -m benchmarks.sizes --traces FILE.jsonl --last 50 --warm-first 50 --output "
        "benchmarks/results/sizes.json",
    ),
    Section(
        "Drafting alone",
        "Recorded completions of other models, replayed: how many tokens per step the trie would have earned, and how "
        "long drafting takes. Cold: nothing known but the prompt; warm: outputs of other tasks known. The limit copies "
        "the longest phrase of the text so far in every step. Runs with a long history only time queries.",
        "replay", steps.replay,
        command="python -m benchmarks.replay --traces FILE.jsonl [--warm FILE.jsonl] --budget 64 (prints one run)",
    ),
    Section(
        "Drafting on four data sets",
        "SmolLM2-135M-Instruct has completed prompts of four data sets in its chat template; its recorded texts are "
        "replayed, each by itself. An output that repeats itself flatters whoever copies, so the second table leaves "
        "such outputs out. The limit copies the longest phrase of the text so far in every step.",
        "data_sets", steps.data_sets,
        command="python -m benchmarks.data_sets --steps FILE.npz [...] --output benchmarks/results/data_sets.json",
    ),
    Section(
        "Time of a step against its nodes, t(n)",
        "While t(n) is flat, further nodes cost nothing; where it rises, they must earn their time.",
        "gpu_check", times.step_costs,
    ),
    Section(
        "Predicted speed on GPUs",
        "No run, but a model of one: predictions with their range, from published hardware figures and the acceptance "
        f"measured here. lp x tp: replicas times the GPUs of each. The diamond is what {PAPER} reports, up to 4x of "
        "plain decoding on one GPU, from the predicted speed of one.",
        "simulate", predicted.simulate,
        command="python -m benchmarks.strong_scaling --simulate --output benchmarks/results/simulate.json",
    ),
    Section(
        "Idle replicas under load, predicted",
        "No run: the engine's own scheduler over made-up requests, with step times of an H100 that are estimates "
        "themselves. Eight GPUs serve a 7B model in four ways. Goodput counts the requests that got their first token "
        "and their tokens within the targets.",
        "serve_simulated", under_load.served,
        command="python -m benchmarks.serve --simulate --output benchmarks/results/serve_simulated.json",
    ),
)  # fmt: skip
OTHER = Section("Further results", "Numbers without a picture, as they are in the files.", "", without_pictures)


class Report:
    """The sections as HTML, their pictures, and what could not be shown."""

    def __init__(self, results: Sequence[Result]) -> None:
        """Build everything."""
        self.pictures: dict[str, bytes] = {}
        """File name to PNG."""
        self.notes: list[str] = []
        """What is missing, failed or cannot be read, a line each."""
        self._overview: list[str] = []
        shown = {section.benchmark for section in SECTIONS}
        self._sections = [
            self._section(section, [each for each in results if each.benchmark == section.benchmark])
            for section in SECTIONS
        ]
        others = [each for each in results if each.benchmark not in shown]
        if others:
            self._sections.append(self._section(OTHER, others))
        self._files = grid(FILE_COLUMNS, [file_row(each) for each in results], "text")

    def html(self, folder: str) -> str:
        """The page; `folder` is where the results were."""
        template = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
        return Template(template).substitute(
            folder=escape(folder),
            overview="\n".join(self._overview),
            sections="\n".join(self._sections),
            files=self._files,
        )

    def _section(self, section: Section, results: Sequence[Result]) -> str:
        body: list[str] = []
        headlines: list[str] = []
        seen: set[tuple[str, ...]] = set()
        if not results:
            body.append(self._note(f"{section.benchmark}.json is missing", "", section.how, headlines))
        for result in results:
            failed = list(dict.fromkeys(failures(result.facts)))
            for what, why in failed:
                body.append(self._note(f"failed: {result.file}{what and ', '}{what}", why, "", headlines))
            try:
                built = [] if "failed" in result.facts else section.build(result)
                parts = [part for part in built if not part.numbers or not seen.issuperset(part.numbers)]
                seen.update(*(part.numbers for part in parts))
                body += [self._part(part, result) for part in parts]
                headlines += [escape(part.headline) for part in parts if part.headline]
            except (KeyError, ValueError, TypeError, IndexError) as error:
                if not failed:  # else there may be nothing left to show
                    lack = f"it lacks {error}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
                    how = str(result.facts.get("command") or section.how)
                    body.append(self._note(f"{result.file} cannot be shown", lack, how, headlines))
            body.append(source_line(result))
        if section is not OTHER:
            self._overview.append(f'<p><a href="#{section.anchor}">{section.title}</a>: {" ".join(headlines)}</p>')
        head = f'<section id="{section.anchor}"><h2>{section.title}</h2>\n<p>{escape(section.text)}</p>\n'
        return head + "\n".join(body) + "\n</section>"

    def _note(self, what: str, why: str, how: str, headlines: list[str]) -> str:
        """Take down what cannot be shown, why, and the command that makes it."""
        line = what + (f": {why}" if why else "") + (f"; it is made by: {how}" if how else "")
        if line not in self.notes:
            self.notes.append(line)
        headlines.append(f"<b>{escape(what)}.</b>")
        because = f": {why}" if why else ""
        made = f" It is made by <code>{escape(how)}</code>" if how else ""
        return f'<p class="no"><b>{escape(what)}</b>{escape(because)}.{made}</p>'

    def _part(self, part: Part, result: Result) -> str:
        picture = ""
        if part.draw is not None:
            light, dark = (png(part.draw, theme) for theme in (LIGHT, DARK))
            name = f"{part.name}_{result.stem}" if f"{part.name}.png" in self.pictures else part.name
            self.pictures |= {f"{name}.png": light, f"{name}-dark.png": dark}
            picture = (
                f'<picture><source media="(prefers-color-scheme: dark)" srcset="{data_uri(dark)}">'
                f'<img src="{data_uri(light)}" alt="{escape(part.headline)}"></picture>'
            )
        table = part.table
        title = f"<h3>{escape(table.title)}</h3>" if table.title else ""
        return f'{title}\n<div class="part">{picture}<div class="scroll">{grid(table.columns, table.rows)}</div></div>'


FILE_COLUMNS = ("file", "date", "commit", "hardware", "software", "command")


def file_row(result: Result) -> list[str]:
    """The circumstances of a result file."""
    facts = result.facts
    software = ", ".join(f"{name} {facts[name]}" for name in ("python", "torch", "transformers") if name in facts)
    unknown = "not said"
    cells = [facts.get("date", unknown), facts.get("commit", unknown), hardware(facts), software or unknown]
    return [result.file, *cells, facts.get("command", unknown)]


def hardware(facts: Mapping[str, object]) -> str:
    """GPU or none, CPU and its threads."""
    if "cpu" not in facts:
        return "not said"
    threads = f", threads: {facts['threads']}" if "threads" in facts else ""
    return f"{facts.get('gpu') or 'no GPU'}; {facts['cpu']}{threads}"


def source_line(result: Result) -> str:
    """Where numbers come from, below them."""
    file, date, commit, machine, _, command = (escape(each) for each in file_row(result))
    note = f" Note: {escape(str(result.facts['note']))}." if "note" in result.facts else ""
    return f'<p class="from">{file}: {date}, commit {commit}, {machine}. <code>{command}</code>{note}</p>'


def grid(columns: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    """An HTML table of text cells; columns of numbers are set to the right."""
    places = range(len(columns))
    right = [all(not row[at] or NUMBER.match(row[at]) for row in rows) for at in places]

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(f"<{tag}{' class=n' * right[at]}>{escape(row[at])}</{tag}>" for at in places)

    body = "\n".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<table class="{kind}"><thead><tr>{cells("th", columns)}</tr></thead>\n<tbody>{body}</tbody></table>'


def data_uri(picture: bytes) -> str:
    """A PNG inside the page."""
    return "data:image/png;base64," + base64.b64encode(picture).decode()
