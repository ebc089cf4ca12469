"""Output for people: the text as it is without a terminal, colours by step on one, and the table of runs."""

from __future__ import annotations

import io

from rich.console import Console

from lpr.cli.display import STEP_STYLES, Run, comparison_table, show_stream

PIECES = [("a\tb", 2), (" :smile:", 3), ("[bold]c", 1)]


def test_without_a_terminal_the_text_is_not_changed() -> None:
    """rich would change tabs, names between colons and what looks like its markup."""
    out = io.StringIO()
    show_stream(Console(file=out), "def f():", PIECES)
    assert out.getvalue() == "def f():a\tb :smile:[bold]c\n"
    out = io.StringIO()
    show_stream(Console(file=out, quiet=True), "def f():", PIECES)
    assert out.getvalue() == ""


def test_on_a_terminal_neighbouring_steps_have_other_colours() -> None:
    console = Console(
        file=io.StringIO(), force_terminal=True, width=80, height=24, color_system="standard", _environ={}
    )
    with console.capture() as shown:
        show_stream(console, "", [(letter, 1) for letter in "abcdefgh"])
    codes = {letter: shown.get().rpartition(f"m{letter}\x1b[0m")[0].rpartition("\x1b[")[2] for letter in "abcdefgh"}
    assert len({codes[letter] for letter in "abcdef"}) == len(STEP_STYLES) == 6
    assert (codes["g"], codes["h"]) == (codes["a"], codes["b"])
    assert "tokens in" not in shown.get().rpartition("\x1b[2K")[2], "the count goes when the text has ended"


def test_the_table_says_where_tokens_differ() -> None:
    runs = [Run("plain", 8, 8, 2.0, None), Run("lookahead", 2, 8, 0.5, True), Run("broken", 0, 0, 0.5, False)]
    console = Console(file=io.StringIO(), width=100)
    console.print(comparison_table("runs", runs))
    rows = [line.split("│")[1:-1] for line in console.file.getvalue().splitlines() if line.startswith("│")]  # type: ignore[attr-defined]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["plain", "8", "8", "1.00", "2.00", ""],
        ["lookahead", "2", "8", "4.00", "0.50", "yes"],
        ["broken", "0", "0", "0.00", "0.50", "NO"],
    ]
