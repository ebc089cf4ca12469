"""Output for people: text with one colour per step, and the table that compares runs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

# Readable on dark and on light terminals; neighbouring steps never share one.
STEP_STYLES = ("cyan", "magenta", "green", "yellow", "blue", "red")


@dataclass
class Run:
    """One decoding of the prompt, a row of the table."""

    name: str
    num_steps: int
    num_tokens: int
    seconds: float
    equal: bool | None  # True if the tokens are those of plain decoding; None for plain decoding itself

    @property
    def tokens_per_step(self) -> float:
        return self.num_tokens / max(1, self.num_steps)


def show_stream(console: Console, prompt: str, pieces: Iterable[tuple[str, int]]) -> None:
    """Print `prompt` and, as they come, `pieces` (text, number of tokens), one colour per step.

    On a terminal a line below counts steps and tokens; elsewhere only the text is printed.
    """
    if not console.is_terminal:
        text = prompt + "".join(piece for piece, _ in pieces)
        if not console.quiet:
            console.file.write(text + "\n")  # not by rich, which would change tabs, control characters and :names:
        return
    shown = Text(prompt, style="dim")
    num_steps = num_tokens = 0
    with Live(console=console, transient=True, refresh_per_second=12) as live:
        for piece, count in pieces:
            shown.append(piece, style=STEP_STYLES[num_steps % len(STEP_STYLES)])
            num_steps += 1
            num_tokens += count
            rate = f"{num_tokens / num_steps:.2f} tokens/step", "bold"
            status = Text.assemble(rate, f"   {num_tokens} tokens in {num_steps} steps")
            lines = shown.wrap(console, console.width)[-max(4, console.height - 3) :]
            live.update(Group(*lines, Text(), status))
    console.print(shown)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table with a left-aligned first column and numeric other columns."""
    found = Table(title=title, title_justify="left")
    for number, name in enumerate(columns):
        found.add_column(name, justify="right" if number else "left")
    for row in rows:
        found.add_row(*row)
    return found


def comparison_table(title: str, runs: Sequence[Run]) -> Table:
    """Steps, tokens per step, seconds and equality of several runs."""
    equal = {None: "", True: "[green]yes[/green]", False: "[bold red]NO[/bold red]"}
    rows = [
        (run.name, str(run.num_steps), str(run.num_tokens), f"{run.tokens_per_step:.2f}", f"{run.seconds:.2f}",
         equal[run.equal])
        for run in runs
    ]  # fmt: skip
    return table(title, ("", "steps", "tokens", "tokens/step", "seconds", "same tokens"), rows)
